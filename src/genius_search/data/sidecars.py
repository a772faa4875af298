"""Side-cars: text, JSON and XMP files, each of which describes one picture or video.

The name of a side-car is the picture's name plus an ending, or the picture's name with another
ending. Google Takeout has a scheme with a suffix, a maximum length, and numbers in another place:

=====================  =============================================
picture                side-cars
=====================  =============================================
``photo.jpg``          ``photo.jpg.txt``, ``photo.txt``, likewise ``.json`` and ``.xmp``
``photo.jpg``          ``photo.jpg.supplemental-metadata.json`` (Google Takeout)
``photo(1).jpg``       ``photo.jpg.supplemental-metadata(1).json`` (Google Takeout)
``photo-edited.jpg``   the side-cars of ``photo.jpg`` (Google Takeout)
=====================  =============================================
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from genius_search.data.captions import Caption, Problem, caption_from_record, normalize_path
from genius_search.data.images import HEIF_SUFFIXES, is_image_file, is_video_file
from genius_search.data.photo_metadata import read_xmp
from genius_search.data.text_files import read_text
from genius_search.errors import BadData, BadImage, BadRecord
from genius_search.records import composed

_SUFFIXES: Final = (".txt", ".json", ".xmp")
"""Endings of side-cars, in order of priority: the first text is used."""
_EDITED: Final = re.compile(
    r"-(edit\w{2,3}|bearbeitet|modifi(é|cato)|edyt\w+|bewerkt|redigeret|編集済み)"
)
"""The suffix of edited copies in Google Takeout, which share the side-car of the original."""
_TAKEOUT_SUFFIX: Final = "supplemental-metadata"
_TAKEOUT_LENGTH: Final = 46
"""Google Takeout truncates the names of side-cars to this length, without the ending."""


def match_side_cars(files: Sequence[Path]) -> dict[Path, list[Path]]:
    """Return the pictures and videos among files, each with its side-cars, the best first."""
    side_cars: dict[Path, list[Path]] = {}
    pictures_by_name: defaultdict[str, list[Path]] = defaultdict(list)
    for path in files:
        is_picture = is_image_file(path) or path.suffix.lower() in HEIF_SUFFIXES
        if is_picture or is_video_file(path):
            side_cars[path] = []
            for name in _side_car_names(path) | _side_car_names(_original(path)):
                pictures_by_name[name].append(path)
    for path in files:
        if path.suffix.lower() in _SUFFIXES:
            for picture in _pictures_of(path, pictures_by_name):
                side_cars[picture].append(path)
    for paths in side_cars.values():  # photo.jpg.txt comes before photo.txt
        paths.sort(key=lambda path: (_SUFFIXES.index(path.suffix.lower()), -len(path.name)))
    return side_cars


def _side_car_names(picture: Path) -> set[str]:
    """Return the names that a picture's side-car may have, without the last ending.

    For ``photo(1).jpg``: ``photo(1).jpg``, ``photo(1)`` and ``photo.jpg(1)``.
    """
    stem, number = _split_number(picture.stem)
    takeout = picture.with_name((stem + picture.suffix)[:_TAKEOUT_LENGTH] + number)
    return {normalize_path(path).lower() for path in (picture, picture.with_suffix(""), takeout)}


def _pictures_of(side_car: Path, pictures_by_name: Mapping[str, list[Path]]) -> list[Path]:
    """Return the pictures that a side-car describes.

    Names are compared without case. If several pictures match, an exact match wins: ``photo.txt``
    describes ``photo.jpg`` and not ``PHOTO.jpg``.
    """
    name = side_car.with_suffix("")
    pictures = pictures_by_name.get(normalize_path(name).lower(), [])
    if not pictures and side_car.suffix.lower() == ".json":
        # photo.jpg.supplemental-metadata(1) -> photo.jpg(1), if the suffix is whole or truncated
        stem, number = _split_number(name.name)
        photo, _, suffix = stem.rpartition(".")
        if photo and _TAKEOUT_SUFFIX.startswith(suffix):
            takeout = side_car.with_name(photo + number)
            pictures = pictures_by_name.get(normalize_path(takeout).lower(), [])
    same_name = [
        picture for picture in pictures if name.name in (picture.name, _original(picture).name)
    ]
    same_case = [picture for picture in pictures if picture.name.startswith(name.name)]
    return same_name or same_case or pictures


def _original(picture: Path) -> Path:
    """Return ``IMG_1.jpg`` for Google Takeout's ``IMG_1-edited.jpg``; other paths unchanged."""
    return picture.with_name(_EDITED.sub("", composed(picture.name)))


def _split_number(name: str) -> tuple[str, str]:
    """Split ``photo(1)`` into ``photo`` and ``(1)``."""
    stem = re.sub(r"\(\d+\)$", "", name)
    return stem, name[len(stem) :]


def read_side_cars(files: Iterable[Path], problems: list[Problem]) -> Iterator[Caption]:
    """Yield the captions in side-cars, and add unreadable files to ``problems``."""
    for file in files:
        try:
            yield _read_side_car(file)
        except BadImage as error:
            problems.append(error)
        except (ValueError, SyntaxError, LookupError, TypeError, RecursionError) as error:
            line = getattr(error, "lineno", None) or 1
            problems.append(BadRecord(file, line, f"cannot be used: {error}"))


def _read_side_car(file: Path) -> Caption:
    text = read_text(file)
    match file.suffix.lower():
        case ".txt":
            return Caption((text,))
        case ".xmp":
            return read_xmp(text.encode())
    record = json.loads(text)
    if isinstance(record, list) and len(record) == 1:  # exiftool writes a list of one object
        record = record[0]
    if not isinstance(record, dict):
        raise BadData(f"it is a JSON {type(record).__name__}, expected an object with a caption")
    json.dumps(record, ensure_ascii=False).encode()  # raises ValueError for half a surrogate pair
    return caption_from_record(record)
