"""A person's folder of pictures and texts becomes candidates, and what cannot is named with its reason.

Where a picture's text is looked for, the first that is not empty wins:

1. ``photo.txt`` beside ``photo.jpg``: the whole file;
2. ``photo.json``: ``caption``, else ``text``, ``title``, ``description``;
3. a list in the same folder or one above it: ``metadata.jsonl`` or ``metadata.csv`` with the columns
   ``file_name`` and ``text`` or ``caption`` (as in Hugging Face's image folders), or ``captions.jsonl``
   with ``image`` and ``captions`` (the first one is the text, since an encoder reads one sentence better
   than five).

What else the side-car or the list says is kept in ``source``. A ``.txt`` or ``.md`` file that belongs to no
picture is a text candidate.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from genius_search.data.images import is_image_file
from genius_search.errors import BadData, BadImage, BadRecord
from genius_search.records import Candidate, Modality

MAX_TEXT_BYTES: Final = 1_000_000
"""Text files beyond this are refused: one candidate is a paragraph or a page, not a log."""

_TEXT_SUFFIXES: Final = frozenset({".txt", ".md"})
_SIDE_CARS: Final = (".txt", ".json")
_LISTS: Final = ("metadata.jsonl", "metadata.csv", "captions.jsonl")
_FILE_KEYS: Final = ("file_name", "image")
_TEXT_KEYS: Final = ("caption", "text", "title", "description", "captions")
_CONVERT: Final = frozenset({".heic", ".heif", ".jxl", ".jp2", ".psd", ".svg", ".ico", ".avif"}) | frozenset(
    {".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2"}
)
"""Pictures to a person that no decoder here reads."""


@dataclass(frozen=True, slots=True)
class FolderScan:
    """What a folder holds. Pictures are not decoded yet: that is the work of whoever embeds them."""

    root: Path
    candidates: tuple[Candidate, ...]
    """By name; an id is the file's path relative to the folder, with forward slashes."""
    problems: tuple[BadImage | BadRecord, ...]
    """Files (or lines of lists) that cannot be used, each with its reason."""


class _Words(NamedTuple):
    text: str | None
    source: str | None


_NO_WORDS: Final = _Words(None, None)


def read_folder(root: Path, *, captions: bool = True) -> FolderScan:
    """Everything in a folder and its subfolders that can be searched; hidden files are left out.

    Parameters
    ----------
    captions
        read the texts that belong to pictures, which makes them image-text candidates; without, pictures
        are found by what they show only.

    Raises
    ------
    BadData
        there is no such folder.
    """
    if not root.is_dir():
        raise BadData(f"{root}: there is no such folder")
    files = sorted(_walk(root), key=lambda path: path.relative_to(root).as_posix())
    images = {path for path in files if is_image_file(path)}
    pictured = {path.with_suffix("") for path in images}
    side_cars = {
        (path.with_suffix(""), path.suffix.lower()): path
        for path in files
        if path.suffix.lower() in _SIDE_CARS and path.with_suffix("") in pictured
    }
    taken = set(side_cars.values())
    problems: list[BadImage | BadRecord] = []
    listed: dict[Path, _Words] = {}
    if captions:
        for path in files:
            if path.name in _LISTS:
                _read_list(path, images, listed, problems)
    candidates: list[Candidate] = []
    for path in files:
        if path.name in _LISTS or path in taken:
            continue
        suffix = path.suffix.lower()
        try:
            did = _name(root, path)
            if path in images:
                _refuse_unusable(path)
                words = _words_beside(path, side_cars, problems) if captions else _NO_WORDS
                words = words if words.text is not None else listed.get(path, words)
                modality = Modality.of(has_image=True, has_text=words.text is not None)
                candidates.append(Candidate(did, modality, words.text, did, words.source))
            elif suffix in _TEXT_SUFFIXES:
                candidates.append(Candidate(did, Modality.TEXT, _text_of(path)))
            else:
                problems.append(BadImage(path, _unknown(suffix)))
        except BadImage as error:
            problems.append(error)
    return FolderScan(root, tuple(candidates), tuple(problems))


def _walk(root: Path) -> Iterator[Path]:
    """Files that are not hidden; links to folders are not followed, so that there is an end."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield Path(folder) / name


def _name(root: Path, path: Path) -> str:
    name = path.relative_to(root).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadImage(path, "its name is not valid UTF-8; rename it") from None
    return name


def _refuse_unusable(path: Path) -> None:
    """Name what needs no decoding to be known as unusable."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise BadImage(path, f"cannot be read: {error.strerror}") from None
    if not path.is_file():
        raise BadImage(path, "is not a file")
    if size == 0:
        raise BadImage(path, "is empty (0 bytes)")


def _unknown(suffix: str) -> str:
    if suffix in _CONVERT:
        return f"{suffix} pictures are not read here; convert it to JPEG or PNG"
    kind = f"files ending in {suffix}" if suffix else "files without an ending"
    return f"{kind} are not known as pictures or texts"


def _text_of(path: Path) -> str:
    _refuse_unusable(path)
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise BadImage(path, f"is a text of more than {MAX_TEXT_BYTES:,} bytes; split it")
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError:
        raise BadImage(path, "is not a UTF-8 text") from None
    except OSError as error:
        raise BadImage(path, f"cannot be read: {error.strerror}") from None
    if not text:
        raise BadImage(path, "is a text without words")
    return text


def _words_beside(
    image: Path, side_cars: Mapping[tuple[Path, str], Path], problems: list[BadImage | BadRecord]
) -> _Words:
    """The side-car's words; a side-car that cannot be read is named and the picture goes without."""
    text_file, json_file = (side_cars.get((image.with_suffix(""), suffix)) for suffix in _SIDE_CARS)
    if text_file is not None:
        try:
            return _Words(_text_of(text_file), None)
        except BadImage as error:
            problems.append(error)
    if json_file is not None:
        try:
            return _words_in(json.loads(_text_of(json_file)))
        except BadImage as error:
            problems.append(error)
        except (ValueError, RecursionError) as error:
            problems.append(BadRecord(json_file, getattr(error, "lineno", 1), f"cannot be used: {error}"))
    return _NO_WORDS


def _words_in(row: object) -> _Words:
    if not isinstance(row, Mapping):
        raise BadData(f"is a JSON {type(row).__name__}, expected an object with a caption")
    text = None
    rest = {name: row[name] for name in row if name not in _FILE_KEYS}
    for key in _TEXT_KEYS:
        value = row.get(key)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, str) and first.strip():
            text = first.strip()
            if not isinstance(value, list):
                del rest[key]
            break
    return _Words(text, json.dumps(rest, ensure_ascii=False) if rest else None)


def _read_list(
    path: Path, images: set[Path], listed: dict[Path, _Words], problems: list[BadImage | BadRecord]
) -> None:
    try:
        for line, row in _rows(path, problems):
            name = next((row[key] for key in _FILE_KEYS if isinstance(row.get(key), str)), None)
            if name is None:
                problems.append(BadRecord(path, line, f"has none of {', '.join(_FILE_KEYS)}"))
                continue
            image = Path(os.path.normpath(path.parent / name))
            if image not in images:
                problems.append(BadRecord(path, line, f"there is no picture {name!r} in this folder"))
                continue
            listed[image] = _words_in(row)
    except (OSError, ValueError, csv.Error) as error:
        problems.append(BadRecord(path, 1, f"cannot be read: {error}"))


def _rows(path: Path, problems: list[BadImage | BadRecord]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            reader = csv.DictReader(file)
            for row in reader:
                yield reader.line_num, {key: value for key, value in row.items() if key and value}
            return
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                row = json.loads(raw)
            except (ValueError, RecursionError) as error:
                problems.append(BadRecord(path, line, f"is not valid JSON: {error}"))
                continue
            if isinstance(row, Mapping):
                yield line, row
            else:
                problems.append(BadRecord(path, line, "is not a JSON object"))
