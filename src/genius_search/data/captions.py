"""Captions of pictures, and the records from which captions are read.

A caption comes from one of three sources, each in a file of this package:

- the picture file itself: EXIF, XMP and IPTC (``photo_metadata.py``)
- a side-car, a file for one picture such as ``photo.jpg.json`` (``sidecars.py``)
- a table, a file for many pictures such as ``captions.csv`` (``tables.py``)

Side-cars in JSON and rows of tables are records, mappings from names to values. This file turns a
record into a :class:`Caption`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from genius_search.data.images import VIDEO_SUFFIXES, is_image_file
from genius_search.errors import BadImage, BadRecord
from genius_search.records import composed

FILE_COLUMNS: Final = (
    "file_name",
    "image",
    "filename",
    "image_name",
    "file",
    "path",
    "sourcefile",
)
"""Columns with the name of a picture's file, in order of priority (see :func:`find_columns`)."""
TEXT_COLUMNS: Final = ("caption", "text", "title", "description", "captions", "comment")
"""Columns with a caption, in order of priority (see :func:`find_columns`)."""
_NUMBERED_COLUMN: Final = re.compile(
    r"(caption|text|description|comment|sentence)[ _.]?\d+", re.IGNORECASE
)
"""One of several caption columns: ``caption_2``, ``sentence 5``."""
Problem: TypeAlias = BadImage | BadRecord


class Caption(NamedTuple):
    """The texts and the fields of an image."""

    texts: tuple[str, ...] = ()
    fields: Mapping[str, Any] = {}

    @property
    def text(self) -> str | None:
        """All texts, one per line, so that a query can match any of them; None without texts."""
        return "\n".join(dict.fromkeys(self.texts)) or None


def normalize_path(path: Path) -> str:
    """Return a path in a single spelling: macOS decomposes accents, and ``a/../b`` is ``b``."""
    return composed(os.path.normpath(path))


def find_columns(columns: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the columns that match a list of names, in the order of the names.

    Case and the prefixes that exiftool writes are ignored::

        find_columns(["XMP:Title", "Caption", "id"], ["caption", "title"])
            -> ["Caption", "XMP:Title"]
    """
    columns_by_name = {column.rpartition(":")[2].strip().lower(): column for column in columns}
    return [columns_by_name[name] for name in names if name in columns_by_name]


def caption_from_record(record: Mapping[str, Any]) -> Caption:
    """Split a record into the texts of a caption and other fields.

    The first column of :data:`TEXT_COLUMNS` with a text is the caption. ::

        {"file_name": "kite.jpg", "caption": "a red kite", "price": 12}
            -> texts ("a red kite",), fields {"price": 12}
    """
    file_columns = find_columns(record, FILE_COLUMNS)
    fields = {name: value for name, value in record.items() if name not in file_columns}
    _join_numbered_captions(fields)
    _rename_takeout_fields(fields)
    for column in find_columns(fields, TEXT_COLUMNS):
        values = _as_list(fields[column])
        texts = _texts_in(values)
        if texts:
            # A list that also holds ids or boxes, as COCO's do, remains a field.
            if all(value is None or isinstance(value, str) for value in values):
                del fields[column]
            return Caption(texts, fields)
    return Caption((), fields)


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _texts_in(values: Iterable[object]) -> tuple[str, ...]:
    """Return the non-empty texts in a list of texts or records.

    COCO's annotations are a list of records::

        [{"id": 7, "caption": "a red kite"}, {"id": 8, "caption": "a kite"}]
            -> ("a red kite", "a kite")
    """
    texts: list[object] = []
    for value in values:
        if isinstance(value, dict):
            texts += caption_from_record(value).texts
        else:
            texts.append(value)
    return tuple(text.strip() for text in texts if isinstance(text, str) and text.strip())


def _join_numbered_captions(fields: dict[str, Any]) -> None:
    """Replace columns with one caption each by a list of all captions.

    ::

        {"caption": "a kite", "caption_2": "a red kite", "id": 7}
            -> {"id": 7, "captions": ["a kite", "a red kite"]}
    """
    numbered = [name for name in fields if _NUMBERED_COLUMN.fullmatch(name)]
    if not numbered:
        return
    captions: list[Any] = []
    for name in (*find_columns(fields, TEXT_COLUMNS)[:1], *numbered):
        captions += _as_list(fields.pop(name))
    fields["captions"] = captions


def _rename_takeout_fields(fields: dict[str, Any]) -> None:
    """Give the fields of Google Takeout the names and forms of our fields.

    ::

        {"title": "IMG_1.jpg", "photoTakenTime": {"timestamp": "1714566600"},
         "geoData": {"latitude": 48.1, "longitude": 11.5}, "people": [{"name": "Ada"}]}
            -> {"taken": "2024-05-01T12:30:00+00:00", "latitude": 48.1, "longitude": 11.5,
                "people": ["Ada"]}
    """
    match fields:
        case {"photoTakenTime": {"timestamp": str() | int() as seconds}}:
            with contextlib.suppress(ValueError, OverflowError, OSError):
                fields["taken"] = datetime.fromtimestamp(int(seconds), UTC).isoformat()
                del fields["photoTakenTime"]
            fields.pop("title", None)  # in Takeout's files, the name of the picture
        case {"title": str() as title} if is_image_file(Path(title)) or _is_video(title):
            del fields["title"]
    match fields:
        case {
            "geoData": {"latitude": float() | int() as north, "longitude": float() | int() as east}
        }:
            if north or east:  # zeros mean that the place is unknown
                fields |= {"latitude": north, "longitude": east}
            del fields["geoData"]
    people = fields.get("people")
    if isinstance(people, list) and all(_is_person(person) for person in people):
        fields["people"] = [person["name"] for person in people]


def _is_video(name: str) -> bool:
    return Path(name).suffix.lower() in VIDEO_SUFFIXES


def _is_person(value: object) -> bool:
    return isinstance(value, dict) and [*value] == ["name"]
