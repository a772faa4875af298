"""What came from the hub was written by strangers: what it may not say, and whether it came whole.

Nothing in it is executed, no path in it may leave its folder, and every file is held against our own
manifests, after the hub's hashes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

from genius.artifact import MANIFEST, fingerprint_of, open_artifact
from genius.errors import ArtifactMismatch
from genius.hub.listing import NAME, stays_inside
from genius.stages.model_file import MODEL_FILE, read_model_file
from genius.stages.save import INDEX_FILE

__all__ = ["What", "check_pulled"]

What = Literal["model", "index", "encoder", "original"]

_INSIDE: Final = ("small", "uniir", "clip", "text")
"""Encoders that a pulled model may carry with it."""


def check_pulled(folder: Path, what: What, *, verify: bool = True) -> None:
    """Refuse what a stranger's file may not say; with ``verify`` reread everything that was pulled.

    Raises
    ------
    ArtifactMismatch
        a file is damaged, parts do not belong together, or a path leads out of the folder.
    """
    if what in ("encoder", "original"):
        return
    manifests = sorted(folder.glob(f"*/{MANIFEST}"))
    fingerprints = {}
    for path in manifests:
        body = _read(path)
        names = body.get("files")
        if not isinstance(names, dict) or not all(stays_inside(name) for name in names):
            raise ArtifactMismatch(f"{path} names files outside its folder; do not use what came from there")
        opened = open_artifact(path.parent, kind=str(body.get("kind")), verify=verify)
        fingerprints[path.parent.name] = opened.fingerprint
    if what == "index":
        _check_index(folder, fingerprints)
    else:
        _check_model(folder, fingerprints)


def _check_index(folder: Path, fingerprints: dict[str, str]) -> None:
    snapshot = _read(folder / INDEX_FILE).get("snapshot")
    if snapshot not in fingerprints:
        raise ArtifactMismatch(f"{folder}: {INDEX_FILE} names {snapshot!r}, which is no part of it")


def _check_model(folder: Path, fingerprints: dict[str, str]) -> None:
    body = read_model_file(folder)
    kind, _, place = str(body["encoder"]["spec"]).partition(":")
    inside = place.startswith("./") and stays_inside(place[2:]) and kind in _INSIDE
    if not inside and not (kind == "clip" and NAME.fullmatch(place)):
        raise ArtifactMismatch(
            f"{folder}: its encoder is {kind}:{place}, expected a folder inside the model or "
            "clip:owner/name; a model that points elsewhere on this machine is not opened"
        )
    for part in ("quantizer", "generator"):
        if fingerprints.get(part) != body[part]["fingerprint"]:
            raise ArtifactMismatch(f"{folder}: its {part} is not the one that it was finished with")
    parts = {part: body[part]["fingerprint"] for part in ("encoder", "quantizer", "generator")}
    if body["fingerprint"] != fingerprint_of(parts):
        raise ArtifactMismatch(f"{folder}: the fingerprint in {MODEL_FILE} is not that of its parts")


def _read(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ArtifactMismatch(f"{path} cannot be read ({error})") from None
    if not isinstance(body, dict):
        raise ArtifactMismatch(f"{path} is not what it should be")
    return body
