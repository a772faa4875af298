"""What an index's folder does not need any more, and what must have reached the disk."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from genius.artifact import MANIFEST
from genius.search.manifest import CURRENT, DELETED, DELETED_NAME, NAME, SEGMENTS, SegmentEntry
from genius.search.segment import KIND

_UNFINISHED: Final = re.compile(r"\.[0-9]{6,}\.(partial|old|lock|gone)")
"""Names of what a killed writer may leave beside segments."""


def remove_leftovers(folder: Path, entries: Iterable[SegmentEntry]) -> None:
    """Remove what no entry names: old segments, what a killed writer began; nothing of anybody else's."""
    entries = tuple(entries)
    segments = {entry.name for entry in entries}
    for path in _entries_of(folder / SEGMENTS):
        if _UNFINISHED.fullmatch(path.name):
            _remove(path)
        elif NAME.fullmatch(path.name) and path.name not in segments and _is_segment(path):
            # First out of sight: what is half removed must not look like somebody else's folder.
            _remove(path.rename(path.with_name(f".{path.name}.gone")))
    lists = {entry.deleted for entry in entries}
    for path in _entries_of(folder / DELETED):
        if DELETED_NAME.fullmatch(path.name) and path.name not in lists:
            _remove(path)
    _remove(folder / f"{CURRENT}.tmp")


def _entries_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_segment(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / MANIFEST).read_bytes())["kind"] == KIND)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, if it is not there; its name has reached the disk then."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        with contextlib.suppress(PermissionError):  # one may be allowed to write names and not to list them
            sync(path.parent)


def sync(*paths: Path) -> None:
    """Wait until files, or the lists of names that folders are, have reached the disk."""
    for path in paths:
        if not path.exists():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
