"""Reading a folder of images and texts as candidates, and reporting unusable files.

The text of an image is the first of these that is not empty:

1. ``photo.txt`` beside ``photo.jpg``: the whole file;
2. ``photo.json``: ``caption``, else ``text``, ``title``, ``description``;
3. a list in the same folder or one above it: ``metadata.jsonl`` or ``metadata.csv`` with the columns
   ``file_name`` and ``text`` or ``caption`` (as in Hugging Face's image folders), or ``captions.jsonl``
   with ``image`` and ``captions`` (the first one is the text, since an encoder reads one sentence better
   than five).

Other fields of the side-car or the list are kept in ``source``. A ``.txt`` or ``.md`` file that belongs to no
picture is a text candidate.
"""

from __future__ import annotations

import csv
import json
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from genius_search.data.images import HEIF_SUFFIXES, NEEDS_PHOTOS, is_image_file, require_file
from genius_search.data.mbeir import read_json_lines
from genius_search.errors import BadData, BadImage, BadRecord
from genius_search.records import Candidate, Modality

MAX_TEXT_BYTES: Final = 1_000_000
"""Larger text files are refused, because a candidate should be a paragraph or a page."""
CAPTION_LISTS: Final = ("metadata.jsonl", "metadata.csv", "captions.jsonl")
_FILE_KEYS: Final = ("file_name", "image")
_TEXT_KEYS: Final = ("caption", "text", "title", "description", "captions")

Problem = BadImage | BadRecord


@dataclass(frozen=True, slots=True)
class FolderScan:
    """Candidates of a folder. Images are not decoded before they are embedded."""

    root: Path
    candidates: tuple[Candidate, ...]
    """Sorted by name. The id is the file's path relative to the folder, with forward slashes."""
    problems: tuple[Problem, ...]
    """Unusable files and lines of lists, each with the reason."""


class _Caption(NamedTuple):
    text: str | None = None
    source: str | None = None


def read_folder(root: Path, *, captions: bool = True) -> FolderScan:
    """Find all images and texts in a folder and its subfolders, except hidden files.

    Parameters
    ----------
    captions
        read the texts of images, which makes them image-text candidates; otherwise images have no text.

    Raises
    ------
    BadData
        The folder does not exist.
    """
    if not root.is_dir():
        raise BadData(f"{root}: there is no such folder")
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):  # links to folders may form a cycle: not followed
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    return _scan(root, files, captions=captions)


def read_file(path: Path, *, captions: bool = True) -> FolderScan:
    """Read one image or text like :func:`read_folder` does; the id is the file's name."""
    side_cars = {path.with_suffix(suffix) for suffix in (".txt", ".json")} if is_image_file(path) else set()
    files = [path, *sorted(filter(is_file, side_cars))]
    lists = [path.with_name(name) for name in CAPTION_LISTS if captions and is_file(path.with_name(name))]
    scan = _scan(path.parent, [*files, *lists], captions=captions)
    # What is wrong with other lines of a list is reported when the folder is read.
    problems = tuple(problem for problem in scan.problems if problem.file in files)
    return FolderScan(scan.root, scan.candidates, problems)


def is_file(path: Path) -> bool:
    """Return whether there is a file, also for a path that is too long or contains NUL."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _scan(root: Path, files: Sequence[Path], *, captions: bool) -> FolderScan:
    images = {path for path in files if is_image_file(path)}
    stems = {path.with_suffix("") for path in images}
    side_cars = {
        (path.with_suffix(""), path.suffix.lower()): path
        for path in files
        if path.suffix.lower() in (".txt", ".json") and path.with_suffix("") in stems
    }
    problems: list[Problem] = []
    listed: dict[Path, _Caption] = {}
    if captions:
        for path in files:
            if path.name in CAPTION_LISTS:
                _read_list(path, images, listed, problems)
    candidates: list[Candidate] = []
    skipped = {*side_cars.values(), *(path for path in files if path.name in CAPTION_LISTS)}
    for path in files:
        if path in skipped:
            continue
        try:
            did = _id(root, path)
            if path in images:
                require_file(path)
                text_file, json_file = (
                    side_cars.get((path.with_suffix(""), suffix)) for suffix in (".txt", ".json")
                )
                caption = _read_side_cars(text_file, json_file, problems) if captions else _Caption()
                caption = caption if caption.text is not None else listed.get(path, caption)
                modality = Modality.of(has_image=True, has_text=caption.text is not None)
                candidates.append(Candidate(did, modality, caption.text, did, caption.source))
            elif path.suffix.lower() in (".txt", ".md"):
                candidates.append(Candidate(did, Modality.TEXT, _read_text(path)))
            elif path.suffix.lower() in HEIF_SUFFIXES:
                problems.append(BadImage(path, f"reading {path.suffix} {NEEDS_PHOTOS}"))
            else:
                kinds = f"files with the ending {path.suffix!r} are not known as pictures or texts"
                problems.append(BadImage(path, f"{kinds}; convert a picture to JPEG or PNG"))
        except BadImage as error:
            problems.append(error)
    return FolderScan(root, tuple(candidates), tuple(problems))


def _id(root: Path, path: Path) -> str:
    name = path.relative_to(root).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadImage(path, "its name is not valid UTF-8; rename it") from None
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise BadImage(path, f"its name {name!r} contains a control character; rename it")
    return name


def _read_text(path: Path) -> str:
    require_file(path)
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


def _read_side_cars(text_file: Path | None, json_file: Path | None, problems: list[Problem]) -> _Caption:
    """Read what lies beside an image; if it cannot be read, report a problem and return no text."""
    for file in filter(None, (text_file, json_file)):
        try:
            text = _read_text(file)
            if file == text_file:
                return _Caption(text)
            row = json.loads(text)
            if isinstance(row, dict):
                return _caption_of(row)
            problem = f"is a JSON {type(row).__name__}, expected an object with a caption"
            problems.append(BadRecord(file, 1, problem))
        except BadImage as error:
            problems.append(error)
        except (ValueError, RecursionError) as error:
            problems.append(BadRecord(file, getattr(error, "lineno", 1), f"cannot be used: {error}"))
    return _Caption()


def _caption_of(row: Mapping[str, Any]) -> _Caption:
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
    return _Caption(text, json.dumps(rest, ensure_ascii=False) if rest else None)


def _read_list(path: Path, images: set[Path], listed: dict[Path, _Caption], problems: list[Problem]) -> None:
    """Read the captions in a list."""
    try:
        require_file(path)
        rows = _csv_rows(path) if path.suffix == ".csv" else read_json_lines(path, dict, problems.append)
        for line, row in rows:
            name = next((row[key] for key in _FILE_KEYS if isinstance(row.get(key), str)), None)
            image = path if name is None else Path(os.path.normpath(path.parent / name))
            if name is None:
                problems.append(BadRecord(path, line, f"has none of {', '.join(_FILE_KEYS)}"))
            elif image not in images:
                problems.append(BadRecord(path, line, f"there is no picture {name!r} in this folder"))
            else:
                listed[image] = _caption_of(row)
    except BadImage as error:
        problems.append(error)
    except (OSError, ValueError, csv.Error) as error:
        problems.append(BadRecord(path, 1, f"cannot be read: {error}"))


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            yield reader.line_num, {key: value for key, value in row.items() if key and value}
