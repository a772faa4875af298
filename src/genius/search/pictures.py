"""Pictures that an index keeps itself: those of items that came as bytes and not as files of their own.

A picture's file is named by its contents, so it is written once and never changed, and whoever sends the same
again writes nothing. The item store names it relative to the index's folder, which may move.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from genius.artifact import file_fingerprint, write_file
from genius.errors import ArtifactMismatch, ArtifactMissing
from genius.search.items import ITEMS_FILE
from genius.search.leftovers import make_folder, sync
from genius.search.segment import REMEDY, Segment

PICTURES: Final = "pictures"


def picture_name(data: bytes) -> str:
    """Where a picture is kept, from the index's folder."""
    digest = hashlib.sha256(data).hexdigest()
    return f"{PICTURES}/{digest[:2]}/{digest}"


def keep_pictures(folder: Path, pictures: Iterable[bytes]) -> None:
    """Write pictures into an index; when this returns they are on the disk."""
    changed = set()
    for data in pictures:
        place = folder / picture_name(data)
        if not place.exists():
            make_folder(place.parent)
            write_file(place, data)
            changed.add(place.parent)
    sync(*changed)


def remove_unused_pictures(folder: Path, segments: Sequence[Segment]) -> None:
    """Remove the pictures that no item names; only for whoever holds the index for writing."""
    if not (folder / PICTURES).is_dir():
        return
    used = {folder / name for segment in segments for name in _names(segment)}
    for path in (folder / PICTURES).glob("*/*"):
        if path not in used:
            path.unlink()


def check_pictures(folder: Path, segments: Sequence[Segment]) -> list[Path]:
    """Compare every picture that an item names with its own name; returns the files.

    An index that was published has none of its pictures.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        one is gone or is not what was written.
    """
    if not (folder / PICTURES).is_dir():
        return []
    paths = sorted({folder / name for segment in segments for name in _names(segment)})
    for path in paths:
        if not path.is_file():
            raise ArtifactMissing(f"{path} is missing; {REMEDY}")
        if file_fingerprint(path) != path.name:
            raise ArtifactMismatch(f"{path} is damaged; {REMEDY}")
    return paths


def _names(segment: Segment) -> Iterator[str]:
    """Pictures kept here of the items of a segment that are alive."""
    uri = f"{(segment.folder / ITEMS_FILE).resolve().as_uri()}?mode=ro&immutable=1"
    dead = set(segment.dead.tolist())
    with closing(sqlite3.connect(uri, uri=True)) as database:
        rows = database.execute("SELECT row, image FROM items WHERE image >= ? AND image < ?", _BETWEEN)
        yield from (name for row, name in rows if row not in dead)


_BETWEEN: Final = (f"{PICTURES}/", f"{PICTURES}{chr(ord('/') + 1)}")
"""All that begins with the folder's name lies between."""
