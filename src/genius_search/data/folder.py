"""Reading a folder of images and texts as candidates, and reporting unusable files.

The text of an image is from the first of these that has one: the files beside it, a list of captions (both
:mod:`genius_search.data.captions`), the image itself when it is encoded.
Several captions are one text, a line each. All other fields of these are kept in ``source``. A ``.txt`` or
``.md`` file that belongs to no picture is a text candidate, and so is a PDF file, whose text is kept in the
user's cache.
"""

from __future__ import annotations

import contextlib
import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from pathspec import GitIgnoreSpec

from genius_search.data.captions import (
    Caption,
    Problem,
    decode_text,
    is_list,
    read_lists,
    read_side_cars,
    read_text,
    side_cars,
)
from genius_search.data.images import HEIF_SUFFIXES, NEEDS_PHOTOS, is_image_file, require_file
from genius_search.data.pdf import has_pypdf, read_pdf
from genius_search.data.values import fields_to_json
from genius_search.errors import BadImage, UsageError
from genius_search.records import Candidate, Modality, composed

IGNORE_FILE: Final = ".geniusignore"
"""Patterns, as in ``.gitignore``, of what is left out of its folder."""
NEVER_READ: Final = (
    r".* @eaDir @Recycle @Recently-Snapshot @tmp \#recycle \#snapshot $RECYCLE.BIN $Recycle.Bin RECYCLER "
    r"System?Volume?Information lost+found __MACOSX __pycache__ node_modules *.lrdata "
    r"*.photoslibrary/database/ *.photoslibrary/resources/ [Tt]humbs.db ehthumbs*.db [Dd]esktop.ini"
)
"""Patterns of thumbnails, bins and files of programs; a later pattern with ``!`` undoes one."""
OTHER_KIND: Final = "files with the ending"
"""What the reasons of files that are not known as pictures or texts begin with."""
_HINTS: Final = {
    (".json", ".xmp"): "belong to pictures, and no picture beside it has its name",
    (*HEIF_SUFFIXES,): NEEDS_PHOTOS,
    (".csv", ".tsv", ".jsonl", ".parquet"): "are read if they are named metadata or captions",
    (
        ".tar",
        ".zip",
        ".gz",
    ): "are archives; unpack them into a folder (tar -xf FILE -C FOLDER) and give that",
    (".pdf",): "need the extra pdf: pip install 'genius-search[pdf]'",
    (): "are not known as pictures or texts; convert a picture to JPEG",
}
"""What to do with them."""
_Ignored: TypeAlias = tuple[tuple[Path, GitIgnoreSpec], ...]


@dataclass(frozen=True, slots=True)
class FolderScan:
    """Candidates of a folder. Images are not decoded before they are embedded."""

    root: Path
    candidates: tuple[Candidate, ...]
    """Sorted by name. The id is the file's path relative to the folder, with forward slashes."""
    problems: tuple[Problem, ...]
    """Unusable files and lines of lists, each with the reason."""
    unsure: frozenset[Path] = frozenset()
    """Pictures whose captions are in a file that cannot be read."""


def read_folder(
    root: Path,
    *,
    captions: bool = True,
    exclude: Sequence[str] = (),
    skip: Callable[[Path], bool] = lambda _: False,
) -> FolderScan:
    """Find all images and texts in a folder and its subfolders, each folder once.

    Parameters
    ----------
    captions
        read the texts of images, which makes them image-text candidates; otherwise images have no text.
    exclude
        patterns of what is left out, as in ``.gitignore``, besides :data:`NEVER_READ` and those in a file
        ``.geniusignore`` in any folder.
    skip
        returns whether a folder is not to be read.

    Raises
    ------
    UsageError
        A pattern is invalid.
    """
    try:
        ignored = GitIgnoreSpec.from_lines([*NEVER_READ.split(), *map(composed, exclude)])
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
    """Yield the files of a folder; linked folders come last, so that others keep their names."""
    waiting: list[tuple[Path, _Ignored]] = [(root, ((root, ignored),))]
    links: list[tuple[Path, _Ignored]] = []
    visited: set[tuple[int, int]] = set()
    while waiting or links:
        folder, specs = waiting.pop() if waiting else links.pop(0)
        try:
            status = folder.stat()
            is_known = (status.st_dev, status.st_ino) in visited or skip(folder)
            entries = [] if is_known else sorted(folder.iterdir())
            visited.add((status.st_dev, status.st_ino))
        except OSError as error:
            problems.append(BadImage(folder, f"is a folder that cannot be read: {error.strerror}"))
            continue
        if {"index.json", "segments"} <= {path.name for path in entries}:
            continue  # an index of ours
        if (own := folder / IGNORE_FILE) in entries:
            try:
                specs = (
                    *specs,
                    (folder, GitIgnoreSpec.from_lines(composed(decode_text(own)).splitlines())),
                )
            except ValueError as error:
                problems.append(BadImage(own, f"cannot be used: {getattr(error, 'reason', error)}"))
        for path in entries:
            is_folder = os.path.isdir(path)  # noqa: PTH112  False whatever the error
            if not _is_ignored(path, specs, is_folder=is_folder):
                if is_folder:
                    (links if path.is_symlink() else waiting).append((path, specs))
                else:
                    yield path


def _is_ignored(path: Path, specs: _Ignored, *, is_folder: bool) -> bool:
    """Return what the last pattern says that fits; those of deeper folders come last."""
    for folder, spec in reversed(specs):
        name = composed(path.relative_to(folder).as_posix()) + "/" * is_folder
        fits = spec.check_file(name).include
        if fits is not None:
            return fits
    return False


def read_file(path: Path, *, captions: bool = True) -> FolderScan:
    """Read one image or text like :func:`read_folder` does; the id is the file's name."""
    near = [path]
    if is_image_file(path):
        with contextlib.suppress(OSError):
            near = sorted({*path.parent.iterdir(), path})
    beside = side_cars(near).get(path, [])
    lists = [one for one in near if is_list(one) and one not in beside]
    scan = _scan(path.parent, [path, *beside, *lists], [], captions=captions)
    # What is wrong with other lines of a list is reported when the folder is read.
    problems = tuple(problem for problem in scan.problems if problem.file in (path, *beside))
    return FolderScan(scan.root, scan.candidates, problems, scan.unsure)


def _scan(
    root: Path, files: Sequence[Path], problems: list[Problem], *, captions: bool
) -> FolderScan:
    pictures = side_cars(files)
    listed, lists = read_lists(files, pictures, problems if captions else [])
    skipped = lists.union(*pictures.values())
    candidates: list[Candidate] = []
    for path in files:
        if path in skipped:
            continue
        try:
            did, kind = _id(root, path), path.suffix.lower()
            require_file(path)
            if is_image_file(path):
                known: list[Caption] = []
                if captions:
                    known = [*read_side_cars(pictures[path], problems), listed.get(path, Caption())]
                text = next(filter(None, (one.text for one in known)), None)
                modality = Modality.of(has_image=True, has_text=text is not None)
                # The first value of a field counts.
                fields = {
                    name: value for one in reversed(known) for name, value in one.fields.items()
                }
                source, lost = fields_to_json(fields)
                candidates.append(Candidate(did, modality, text, did, source))
                problems += [BadImage(path, problem) for problem in lost]
            elif kind in (".txt", ".md") or (kind == ".pdf" and has_pypdf()):
                is_pdf, cache = kind == ".pdf", user_cache() / "pdf"
                text = read_pdf(path, cache, problems) if is_pdf else read_text(path)
                candidates.append(Candidate(did, Modality.TEXT, text))
            else:
                hint = next(hint for kinds, hint in _HINTS.items() if kind in kinds or not kinds)
                problems.append(BadImage(path, f"{OTHER_KIND} {path.suffix!r} {hint}"))
        except BadImage as error:
            problems.append(error)
    broken = {problem.file for problem in problems if isinstance(problem, BadImage)}
    places = {one.parent for one in broken & lists}
    unsure = {one for one in pictures if broken & {*pictures[one]} or places & {*one.parents}}
    return FolderScan(root, tuple(candidates), tuple(problems), frozenset(unsure))


def _id(root: Path, path: Path) -> str:
    name = path.relative_to(root).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadImage(path, "its name is not valid UTF-8; rename it") from None
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise BadImage(path, f"its name {name!r} contains a control character; rename it")
    return name


def user_cache() -> Path:
    """Return the folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "genius-search"
