"""Reading of folders: their pictures and documents become candidates.

The caption of a picture is the first text in this list:

1. its side-cars (``sidecars.py``)
2. tables of captions (``tables.py``)
3. the metadata inside its file (``photo_metadata.py``), which is read when the picture is encoded

Several captions become one text, one per line. Other values of the same files become ``source``,
the candidate's fields. Texts that do not describe pictures are candidates, too (``documents.py``);
those of slow readers are cached in the user's cache directory.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from pathspec import GitIgnoreSpec

from genius_search.data.captions import Caption, Problem
from genius_search.data.documents import read_document
from genius_search.data.images import is_image_file, is_raw_photo, is_video_file, require_file
from genius_search.data.sidecars import match_side_cars, read_side_cars
from genius_search.data.source_code import GENERATED_FILES
from genius_search.data.subtitles import match_subtitles, read_cues
from genius_search.data.tables import is_caption_table, read_caption_tables
from genius_search.data.text_files import decode_text
from genius_search.data.values import fields_to_json
from genius_search.data.video import cue_text
from genius_search.errors import BadImage, UsageError
from genius_search.records import Candidate, Modality, composed

IGNORE_FILE: Final = ".geniusignore"
"""A file with patterns, as in ``.gitignore``, of files to leave out of its folder."""
NEVER_READ: Final = (
    r".* @eaDir @Recycle @Recently-Snapshot @tmp \#recycle \#snapshot $RECYCLE.BIN $Recycle.Bin "
    r"RECYCLER System?Volume?Information lost+found __MACOSX __pycache__ node_modules *.lrdata "
    r"*.photoslibrary/database/ *.photoslibrary/resources/ [Tt]humbs.db ehthumbs*.db "
    "[Dd]esktop.ini " + GENERATED_FILES
)
"""Patterns of thumbnails, bins and program files, which later patterns with ``!`` can override."""
MAX_PATTERN_CHARACTERS: Final = 1_000
MAX_WILDCARDS: Final = 3
"""Maximum number of asterisks between two slashes of a pattern, and of ``**`` in it. The time that
matching a name takes grows by the length of the name with each."""
PROGRAM_FOLDER_MARKERS: Final = frozenset({"pyvenv.cfg", "CACHEDIR.TAG"})
"""Files in folders that programs fill and can fill again, such as caches; these are not read."""
CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_IgnoreSpecs: TypeAlias = tuple[tuple[Path, GitIgnoreSpec], ...]
"""Folders and their patterns, from the root down."""


@dataclass(frozen=True, slots=True)
class FolderScan:
    """The candidates of a folder. Images are decoded later, when they are embedded."""

    root: Path
    candidates: tuple[Candidate, ...]
    """Sorted by id, the file's path relative to the folder, with forward slashes."""
    problems: tuple[Problem, ...]
    """Unusable files and rows of tables, each with the reason."""
    unsure: frozenset[Path] = frozenset()
    """Pictures that may have a caption in a file that cannot be read."""


def read_folder(
    root: Path,
    *,
    captions: bool = True,
    exclude: Sequence[str] = (),
    skip: Callable[[Path], bool] = lambda _: False,
) -> FolderScan:
    """Read all images and texts in a folder and its subfolders, and each folder only once.

    Parameters
    ----------
    root
        The folder.
    captions
        Read the captions of images, which become image-text candidates. Otherwise, images have no
        text.
    exclude
        Patterns of files to leave out, as in ``.gitignore``, in addition to :data:`NEVER_READ` and
        the patterns in the files ``.geniusignore`` of the folders.
    skip
        A function that returns whether to leave out a folder.

    Raises
    ------
    UsageError
        A pattern is invalid.
    """
    try:
        ignored = _parse_patterns([*NEVER_READ.split(), *map(composed, exclude)])
    except ValueError as error:
        raise UsageError(
            f"{error}; expected patterns as in .gitignore, such as drafts/ or *.png"
        ) from None
    problems: list[Problem] = []
    files = sorted(
        _walk(root, ignored, problems, skip), key=lambda path: path.relative_to(root).as_posix()
    )
    return _scan(root, files, problems, captions=captions)


def _walk(
    root: Path, ignored: GitIgnoreSpec, problems: list[Problem], skip: Callable[[Path], bool]
) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders.

    Linked folders come last: a folder that is reachable directly and by a link is read under its
    direct name.
    """
    folders: list[tuple[Path, _IgnoreSpecs]] = [(root, ((root, ignored),))]
    linked_folders: list[tuple[Path, _IgnoreSpecs]] = []
    visited: set[tuple[int, int]] = set()
    while folders or linked_folders:
        folder, specs = folders.pop() if folders else linked_folders.pop(0)
        try:
            status = folder.stat()
            is_visited = (status.st_dev, status.st_ino) in visited
            entries = [] if is_visited or skip(folder) else sorted(folder.iterdir())
            visited.add((status.st_dev, status.st_ino))
        except OSError as error:
            problems.append(BadImage(folder, f"is a folder that cannot be read: {error.strerror}"))
            continue
        if {"index.json", "segments"} <= {path.name for path in entries}:
            continue  # an index of GENIUS
        if folder != root and not PROGRAM_FOLDER_MARKERS.isdisjoint(path.name for path in entries):
            continue
        if folder / IGNORE_FILE in entries:
            specs = (*specs, *_read_ignore_file(folder / IGNORE_FILE, problems))
        for path in entries:
            is_folder = os.path.isdir(path)  # noqa: PTH112  False whatever the error
            if _is_ignored(path, specs, is_folder=is_folder):
                continue
            if not is_folder:
                yield path
            elif path.is_symlink():
                linked_folders.append((path, specs))
            else:
                folders.append((path, specs))


def _read_ignore_file(file: Path, problems: list[Problem]) -> _IgnoreSpecs:
    try:
        patterns = composed(decode_text(file)).splitlines()
        return ((file.parent, _parse_patterns(patterns)),)
    except ValueError as error:
        problems.append(BadImage(file, f"cannot be used: {getattr(error, 'reason', error)}"))
        return ()


def _parse_patterns(lines: Sequence[str]) -> GitIgnoreSpec:
    """Parse patterns; raise ValueError if one is invalid, or could take long to match."""
    for line in lines:
        parts = line.split("/")
        wildcards = max(parts.count("**"), *(part.count("*") for part in parts if part != "**"), 0)
        if not line.startswith("#") and (
            wildcards > MAX_WILDCARDS or len(line) > MAX_PATTERN_CHARACTERS
        ):
            raise ValueError(
                f"the pattern {line[:60]!r} has more than {MAX_WILDCARDS} asterisks between two "
                f"slashes, more than {MAX_WILDCARDS} '**', or {MAX_PATTERN_CHARACTERS:,} characters"
            )
    return GitIgnoreSpec.from_lines(lines)


def _is_ignored(path: Path, specs: _IgnoreSpecs, *, is_folder: bool) -> bool:
    """Return whether patterns exclude a path; the last match decides, in the deepest folder."""
    for folder, spec in reversed(specs):
        name = composed(path.relative_to(folder).as_posix()) + "/" * is_folder
        is_excluded = spec.check_file(name).include  # None without a match, False after a "!"
        if is_excluded is not None:
            return is_excluded
    return False


def read_file(path: Path, *, captions: bool = True) -> FolderScan:
    """Read a single image or text as :func:`read_folder` does; the id is the file's name."""
    neighbours = [path]
    if is_image_file(path) or is_video_file(path):
        with contextlib.suppress(OSError):
            neighbours = sorted({*path.parent.iterdir(), path})
    side_cars = match_side_cars(neighbours).get(path, [])
    tables = [
        neighbour
        for neighbour in neighbours
        if is_caption_table(neighbour) and neighbour not in side_cars
    ]
    side_cars += match_subtitles(filter(is_video_file, [path]), neighbours).get(path, [])
    scan = _scan(path.parent, [path, *side_cars, *tables], [], captions=captions)
    # Problems with a table's rows for other pictures are reported when the folder is read.
    problems = tuple(problem for problem in scan.problems if problem.file in (path, *side_cars))
    return FolderScan(scan.root, scan.candidates, problems, scan.unsure)


def _scan(
    root: Path, files: Sequence[Path], problems: list[Problem], *, captions: bool
) -> FolderScan:
    """Make candidates of files, and add unusable files to ``problems``."""
    side_cars = match_side_cars(files)  # of each picture
    table_problems = problems if captions else []
    table_captions, tables = read_caption_tables(files, side_cars, table_problems)
    images = {*filter(is_image_file, side_cars)}  # HEIC photos need the extra
    videos = {*filter(is_video_file, side_cars)}
    subtitles = match_subtitles(videos, files)  # of each video
    not_candidates = tables.union(*side_cars.values(), *subtitles.values(), _raw_twins(images))
    candidates: list[Candidate] = []
    for path in files:
        if path in not_candidates:
            continue
        try:
            did = _id(root, path)
            require_file(path)
            if path in images or path in videos:
                sources: list[Caption] = []
                if captions:
                    sources += read_side_cars(side_cars[path], problems)
                    sources.append(table_captions.get(path, Caption()))
                    sources = _with_subtitles(sources, subtitles.get(path, []), problems)
                candidates.append(_image_candidate(path, did, sources, problems))
            else:
                candidates.append(_document_candidate(path, did, problems))
        except BadImage as error:
            problems.append(error)
    unsure = _pictures_with_unread_captions(side_cars, tables, problems)
    return FolderScan(root, tuple(candidates), tuple(problems), unsure)


def _raw_twins(images: Collection[Path]) -> set[Path]:
    """Return the raw photos that have a picture of the same name, such as ``IMG_1.JPG``."""
    raw_photos = {*filter(is_raw_photo, images)}
    names = {path.with_suffix("") for path in {*images} - raw_photos}
    return {path for path in raw_photos if path.with_suffix("") in names}


def _image_candidate(
    path: Path, did: str, captions: Sequence[Caption], problems: list[Problem]
) -> Candidate:
    """Return a candidate with the first text of captions, and the first value of each field."""
    text = next((caption.text for caption in captions if caption.text), None)
    fields: dict[str, Any] = {}
    for caption in reversed(captions):
        fields |= caption.fields
    source, field_problems = fields_to_json(fields)
    problems += [BadImage(path, problem) for problem in field_problems]
    modality = Modality.of(has_image=True, has_text=text is not None)
    return Candidate(did, modality, text, did, source)


def _with_subtitles(
    captions: list[Caption], subtitles: Sequence[Path], problems: list[Problem]
) -> list[Caption]:
    """Return the captions of a video with its subtitles, one line for each cue, at the end."""
    lines: list[str] = []
    for file in subtitles:
        try:
            lines += filter(None, map(cue_text, read_cues(file)))
        except BadImage as error:
            problems.append(error)
    if not lines:
        return captions
    text = next((caption.text for caption in captions if caption.text), None)
    fields = [Caption((), caption.fields) for caption in captions]
    return [Caption(((text,) if text else ()) + ("\n".join(lines),)), *fields]


def _document_candidate(path: Path, did: str, problems: list[Problem]) -> Candidate:
    """Return a candidate with the text and the fields of a file that is not a picture.

    Raises
    ------
    BadImage
        The file has another type or cannot be read.
    """
    document = read_document(path, problems)
    source, field_problems = fields_to_json(document.fields)
    problems += [BadImage(path, problem) for problem in field_problems]
    return Candidate(did, Modality.TEXT, document.text, source=source)


def _pictures_with_unread_captions(
    side_cars: Mapping[Path, Sequence[Path]], tables: set[Path], problems: Sequence[Problem]
) -> frozenset[Path]:
    """Return the pictures that have an unreadable side-car, or an unreadable table above them."""
    unreadable = {problem.file for problem in problems if isinstance(problem, BadImage)}
    folders_of_tables = {table.parent for table in unreadable & tables}
    return frozenset(
        picture
        for picture in side_cars
        if not unreadable.isdisjoint(side_cars[picture])
        or not folders_of_tables.isdisjoint(picture.parents)
    )


def _id(root: Path, path: Path) -> str:
    """Return the id of a file: its path in the folder."""
    name = path.relative_to(root).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadImage(path, "its name is not valid UTF-8; rename it") from None
    if CONTROL_CHARACTER.search(name):
        raise BadImage(path, f"its name {name!r} contains a control character; rename it")
    return name
