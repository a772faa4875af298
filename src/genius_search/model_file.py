"""``model.json``: which encoder, quantizer and generator are one model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from genius_search.errors import ArtifactMismatch, ArtifactMissing
from genius_search.hub.files import is_name

__all__ = ["FORMAT", "MODEL_FILE", "encoder_spec", "read_model_file", "relative_spec"]

MODEL_FILE: Final = "model.json"
FORMAT: Final = 1
_PARTS: Final = ("encoder", "quantizer", "generator")


def read_model_file(folder: Path) -> dict[str, Any]:
    """What a finished model's folder says of its parts.

    Raises
    ------
    ArtifactMissing
        there is no finished model in the folder.
    ArtifactMismatch
        the file is damaged, or was made by a newer version.
    """
    path = folder / MODEL_FILE
    if (folder / "index.json").exists():
        raise ArtifactMissing(f"{folder} is an index, not a model; give the model's folder")
    if not path.exists():
        named = (
            f"; or, if this is a name on the hub, `genius pull {folder}` first"
            if is_name(str(folder)) and not folder.exists()
            else ""
        )
        raise ArtifactMissing(
            f"no finished model at {folder}: it has no {MODEL_FILE}. `genius fit` makes one, and goes on "
            f"where it stopped when run again{named}"
        )
    try:
        body: dict[str, Any] = json.loads(path.read_text())
        version = body["format"]
        problem = _problem(body) if version <= FORMAT else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = repr(error)
        version = FORMAT
    if problem is not None:
        raise ArtifactMismatch(
            f"{path} is damaged ({problem}); run `genius fit` again, or `genius pull` where it was pulled"
        )
    if version > FORMAT:
        raise ArtifactMismatch(f"{path.parent} was made by a newer version: upgrade genius")
    return body


def _problem(body: Mapping[str, Any]) -> str | None:
    """What has another form than we write, if anything has; KeyError or TypeError where it is absent."""
    strings = {
        "fingerprint": body["fingerprint"],
        "encoder.spec": body["encoder"]["spec"],
        **{f"{part}.fingerprint": body[part]["fingerprint"] for part in _PARTS},
    }
    for name, value in strings.items():
        if not isinstance(value, str):
            return f"{name} is {value!r}, expected a text"
    known = body["instructions"]
    if not isinstance(known, list) or not all(_is_instruction(entry) for entry in known):
        return "instructions are not a list of query, candidate and text"
    return None


def _is_instruction(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"query", "candidate", "text"}
        and all(isinstance(value, str) for value in entry.values())
    )


def relative_spec(folder: Path, spec: str) -> str:
    """An encoder inside the model's folder is named relative to it, so that the folder can move."""
    kind, _, place = spec.partition(":")
    inside = kind in ("small", "uniir") and Path(place).resolve().is_relative_to(folder.resolve())
    return f"{kind}:./{Path(place).resolve().relative_to(folder.resolve())}" if inside else spec


def encoder_spec(folder: Path, spec: str) -> str:
    """The encoder of a model's folder, such that it can be opened from anywhere."""
    kind, _, place = spec.partition(":")
    return f"{kind}:{folder / place}" if place.startswith("./") else spec
