"""What came from the hub was written by strangers: what it may not say, and whether it came whole.

Nothing in it is executed, no path in it may leave its folder, and every file is held against our own
manifests, after the hub's hashes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

from genius.artifact import MANIFEST, fingerprint_of, open_artifact
from genius.encoders.checkpoint import check_files
from genius.errors import ArtifactMismatch, ArtifactMissing
from genius.hub.listing import NAME, stays_inside
from genius.search.manifest import CURRENT, SEGMENTS, IndexManifest, read_manifest
from genius.search.segment import check_segment
from genius.search.state import read_deleted
from genius.search.verify import verify as read_through
from genius.stages.model_file import MODEL_FILE, read_model_file

__all__ = [
    "Damaged",
    "What",
    "check_pulled",
    "encoder_folder",
    "is_whole",
    "manifest_files",
    "strangers_index",
]

What = Literal["model", "index", "encoder", "original"]

_INSIDE: Final = ("small", "uniir", "clip", "text")
"""Encoders that a pulled model may carry with it."""
_IMPORTED: Final = "uniir.json"
"""What `genius import` writes into an encoder's folder; its module would import PyTorch."""
_ENTRIES: Final = {
    "format": int,
    "kind": str,
    "fingerprint": str,
    "config": dict,
    "inputs": dict,
    "facts": dict,
}
"""What a manifest holds besides its files."""


class Damaged(ArtifactMismatch):
    """A file is not as it came; pulling again repairs it."""


def check_pulled(folder: Path, what: What, *, verify: bool = True) -> None:
    """Refuse what a stranger's file may not say; with ``verify`` reread everything that was pulled.

    Raises
    ------
    ArtifactMismatch
        a file is damaged, parts do not belong together, or a path leads out of the folder.
    ArtifactMissing
        a file that is named is not there.
    """
    if what in ("encoder", "original"):
        return
    if what == "index":
        _check_index(folder, verify=verify)
    else:
        _check_model(folder, verify=verify)


def is_whole(folder: Path, what: What) -> bool:
    """Whether all files are there, as large as they were; their contents were checked when they came.

    Raises
    ------
    ArtifactMismatch
        it is whole, and says what a stranger's file may not say.
    """
    try:
        check_pulled(folder, what, verify=False)
    except (ArtifactMissing, Damaged):
        return False
    return True


def manifest_files(path: Path) -> tuple[str, ...]:
    """The files that a stranger's manifest names, relative to its folder.

    Raises
    ------
    ArtifactMismatch
        it is no manifest, or names files outside its folder.
    """
    body = _read(path)
    files = body.get("files")
    if not isinstance(files, dict) or not all(stays_inside(name) for name in files):
        raise ArtifactMismatch(f"{path} names files outside its folder; do not use what came from there")
    odd = [name for name, form in _ENTRIES.items() if type(body.get(name)) is not form]
    odd += [name for name, fact in files.items() if not _is_fact(fact)]
    if odd:
        raise ArtifactMismatch(f"{path} is not a manifest as genius writes them ({odd[0]}); do not use it")
    return tuple(files)


def encoder_folder(folder: Path) -> str | None:
    """Where inside a stranger's model its encoder is; None for a name on the hub.

    Raises
    ------
    ArtifactMismatch
        it would be elsewhere on this machine.
    """
    kind, _, place = str(read_model_file(folder)["encoder"]["spec"]).partition(":")
    if place.startswith("./") and stays_inside(place[2:]) and kind in _INSIDE:
        return place[2:]
    if kind == "clip" and NAME.fullmatch(place):
        return None
    raise ArtifactMismatch(
        f"{folder}: its encoder is {kind}:{place}, expected a folder inside the model or "
        "clip:owner/name; a model that points elsewhere on this machine is not opened"
    )


def strangers_index(folder: Path) -> IndexManifest:
    """What a stranger's index consists of; its names are ours, so none leads out of its folder.

    Raises
    ------
    ArtifactMismatch
        its list is damaged, or its model would be a folder on this machine.
    """
    try:
        manifest = read_manifest(folder)
    except ArtifactMismatch as error:
        raise Damaged(str(error)) from None
    model = manifest.facts.model
    if model and not NAME.fullmatch(model):
        raise ArtifactMismatch(
            f"{folder}: {CURRENT} says that its model is {model!r}, expected owner/name or nothing; an "
            "index that points elsewhere on this machine is not opened"
        )
    return manifest


def _check_part(path: Path, *, verify: bool) -> str:
    """The fingerprint of a part."""
    manifest_files(path)
    kind = str(_read(path)["kind"])
    try:
        part = open_artifact(path.parent, kind=kind)
    except ArtifactMismatch as error:
        raise Damaged(str(error)) from None
    return open_artifact(path.parent, kind=kind, verify=True).fingerprint if verify else part.fingerprint


def _check_index(folder: Path, *, verify: bool) -> None:
    for entry in strangers_index(folder).segments:
        place = folder / SEGMENTS / entry.name
        manifest_files(place / MANIFEST)
        try:
            check_segment(place, manifest=entry.manifest, verify=False)
            read_deleted(folder, entry)
        except ArtifactMismatch as error:
            raise Damaged(str(error)) from None
    if verify:
        read_through(folder)


def _check_model(folder: Path, *, verify: bool) -> None:
    fingerprints = {
        path.parent.name: _check_part(path, verify=verify) for path in sorted(folder.glob(f"*/{MANIFEST}"))
    }
    _read(folder / MODEL_FILE)
    body = read_model_file(folder)
    place = encoder_folder(folder)
    if place is not None:
        _check_encoder(folder / place, str(body["encoder"]["spec"]), verify=verify)
    for part in ("quantizer", "generator"):
        if part not in fingerprints:
            raise ArtifactMissing(f"{folder} is not a complete model: it lacks {part}/{MANIFEST}")
        if fingerprints[part] != body[part]["fingerprint"]:
            raise ArtifactMismatch(f"{folder}: its {part} is not the one that it was finished with")
    parts = {part: body[part]["fingerprint"] for part in ("encoder", "quantizer", "generator")}
    if body["fingerprint"] != fingerprint_of(parts):
        raise ArtifactMismatch(f"{folder}: the fingerprint in {MODEL_FILE} is not that of its parts")


def _check_encoder(folder: Path, spec: str, *, verify: bool) -> None:
    """Say here, and not when the model is opened, that its encoder did not come with it."""
    kind = spec.partition(":")[0]
    manifest = folder / MANIFEST
    problem = None
    if kind == "uniir":
        lacking = [name for name in (MANIFEST, _IMPORTED) if not (folder / name).is_file()]
        problem = f"{folder} lacks {', '.join(lacking)}" if lacking else None
    else:
        try:
            check_files(folder, image_processor=kind == "clip")
        except ArtifactMissing as error:
            problem = str(error)
        else:
            if kind != "small" and "model_type" not in _read(folder / "config.json"):
                problem = f"{folder / 'config.json'} names no model_type"
    if problem is not None:
        raise ArtifactMissing(
            f"the model's encoder is {spec}, and it did not come with it: {problem}; ask whoever published it"
        )
    if manifest.is_file():
        _check_part(manifest, verify=verify)


def _is_fact(fact: object) -> bool:
    return isinstance(fact, dict) and type(fact.get("bytes")) is int and isinstance(fact.get("sha256"), str)


def _read(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read ({error})") from None
    if not isinstance(body, dict):
        raise ArtifactMismatch(f"{path} is not what it should be")
    return body
