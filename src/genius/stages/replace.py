"""Put a saved model in the place of an older copy of itself, and never in that of anything else.

The new copy is filled beside its place, under a name that nothing else has. Killed between the two renames,
the older one is found again by the next save.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from genius.errors import UsageError
from genius.hub.card import LIBRARY
from genius.stages.model_file import MODEL_FILE

__all__ = ["CONFIG", "filling", "may_replace", "put"]

CONFIG: Final = "config.json"
_SAVED: Final = frozenset({MODEL_FILE, CONFIG, "README.md", "encoder", "quantizer", "generator"})
"""All that a saved model's folder may hold."""


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A new folder beside the place, gone if it is not put there."""
    partial = _beside(folder)
    partial.mkdir(parents=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def may_replace(folder: Path, source: Path, fingerprint: str) -> None:
    """Refuse a place that holds anything but a saved copy of this very model; recover one first.

    Raises
    ------
    UsageError
        it holds something else, or a folder of another origin has the name that we would need.
    """
    if folder == source.resolve():
        raise UsageError(f"{folder} is the model itself; save it to another folder")
    old = _old_name(folder)
    if not folder.exists() and _saved_fingerprint(old) is not None:
        old.rename(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return
    found = _saved_fingerprint(folder)
    if found is None:
        others = sorted(entry.name for entry in folder.iterdir() if entry.name not in _SAVED)
        named = ", ".join(others[:3]) or f"no {CONFIG} of ours"
        raise UsageError(f"{folder} holds something else than a saved model ({named}); choose another place")
    if found != fingerprint:
        raise UsageError(
            f"{folder} holds another model (fingerprint {found[:12]}, not {fingerprint[:12]}); move it away, "
            "or choose another place"
        )
    if old.exists() and _saved_fingerprint(old) != fingerprint:
        raise UsageError(f"{old} is in the way, and is no copy of this model; move it away")


def put(partial: Path, folder: Path) -> None:
    """Put a finished folder in its place; what was there goes last."""
    old = _old_name(folder)
    if folder.exists() and any(folder.iterdir()):
        _discard(old)  # a copy of this model, or may_replace had refused
        folder.rename(old)
        partial.rename(folder)
        _discard(old)
        return
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)


def _saved_fingerprint(folder: Path) -> str | None:
    """The model that a folder is a saved copy of; None where it is not one, or holds more."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        ours = config["model_type"] == "genius" and config["library_name"] == LIBRARY
        fingerprint = config["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = (folder / MODEL_FILE).is_file() and all(entry.name in _SAVED for entry in folder.iterdir())
    return fingerprint if ours and whole and isinstance(fingerprint, str) else None


def _discard(folder: Path) -> None:
    """Remove a folder; killed on the way, what is left has a name that is in nobody's way."""
    if folder.exists():
        going = _beside(folder)
        folder.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def _beside(folder: Path) -> Path:
    return folder.parent / f".{folder.name.removeprefix('.')}.{uuid.uuid4().hex[:8]}.partial"


def _old_name(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.old"
