"""The roots of an index: the folders and single files that it follows, and the ids of what lies in them.

Ids of different roots never meet: in the first folder, an id is the path below it; in every other root, it
begins with the root's name, which no other id begins with. Should the first folder get a subfolder with such
a name later, the ids in it begin with ``./``. A file belongs to the innermost root that it lies in.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from genius_search.data.folder import read_file
from genius_search.errors import UsageError
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import MAX_ROOTS, Root
from genius_search.records import Modality, composed

MAX_PICTURE_BYTES: Final = 1 << 30
"""Of a picture. A file that somebody else's index names may be as large as it likes."""
MAX_COMPARED_FILES: Final = 32
"""Files that are compared to see whether a folder is one that was moved."""


def id_of_path(root: Root, names: Collection[str], path: str) -> str:
    """Return the id of what lies at a path below a root; ``.`` is the root itself, a single file.

    Parameters
    ----------
    names
        the names of all roots.
    """
    if root.name:
        return root.name if path == "." else f"{root.name}/{path}"
    return f"./{path}" if path.partition("/")[0] in names else path


def file_of_item(roots: Sequence[Root], item: Item) -> str:
    """Return where the file of an item of a root is."""
    root = roots[item.root or 0]
    below = item.id[len(root.name) + 1 :] if root.name else item.id
    return os.path.normpath(Path(root.folder, below))


def innermost_root(roots: Sequence[Root], path: Path) -> int | None:
    """Return the number of the innermost root that a path is, or lies in."""
    numbers = {root.folder: number for number, root in enumerate(roots)}
    return next((numbers[str(one)] for one in (path, *path.parents) if str(one) in numbers), None)


def new_root(
    folder: Path,
    roots: Sequence[Root],
    taken: Collection[str],
    *,
    captions: bool,
    exclude: Sequence[str],
) -> Root:
    """Return a root with a name that no id begins with: that of its folder or file, with a number if needed.

    Parameters
    ----------
    roots
        the other roots; if there are none, the ids of a folder are plain paths.
    taken
        what the ids of the index begin with, up to the first slash.

    Raises
    ------
    UsageError
        There are too many.
    """
    if len(roots) >= MAX_ROOTS:
        raise UsageError(
            f"an index follows at most {MAX_ROOTS:,} folders; add one that contains them"
        )
    is_file = folder.is_file()
    if not roots and not is_file:
        return Root(folder=str(folder), name="", captions=captions, exclude=(*exclude,))
    plain = (
        "".join(letter if letter.isprintable() else "_" for letter in composed(folder.name))
        or "root"
    )
    stem, suffix = os.path.splitext(plain) if is_file else (plain, "")  # noqa: PTH122  of a name
    name, count, taken = plain, 1, {*taken, *(root.name for root in roots)}
    while name in taken:
        count += 1
        name = f"{stem}-{count}{suffix}"
    return Root(folder=str(folder), name=name, captions=captions, exclude=(*exclude,))


def content_of(item: Item, folder: Path) -> str | None:
    """Return the size and hashes of what an encoder reads of an item; None if its picture cannot be read.

    Parameters
    ----------
    folder
        that of the index, which paths of stored pictures begin at.
    """
    size = size_of(item, folder)
    picture = "" if item.image is None else digest_of(folder / item.image)
    words = _digest_of_words(item.modality, item.text)
    return None if size is None or picture is None else f"{size}-{words}-{picture}"


def without_text(content: str) -> str:
    """Return what :func:`content_of` returns for the same picture without a text."""
    size, _, picture = content.split("-")
    return f"{size}-{_digest_of_words(Modality.IMAGE, None)}-{picture}"


def _digest_of_words(modality: Modality, text: str | None) -> str:
    return hashlib.blake2b(repr((modality.mbeir, text)).encode(), digest_size=12).hexdigest()


def is_gone(roots: Sequence[Root], item: Item) -> bool:
    """Return whether the file of an item of a root is not there, though its root is."""
    file, root = file_of_item(roots, item), roots[item.root or 0].folder
    try:
        os.lstat(item.image or file)
    except (FileNotFoundError, NotADirectoryError):
        return os.path.isdir(root if file != root else os.path.dirname(root))  # noqa: PTH112, PTH120
    except OSError:
        pass
    return False


def is_same_picture(item: Item, file: Path) -> bool:
    """Return whether a file is the picture that an item was made of; one of another size is not read."""
    size, _, rest = (item.content or "").partition("-")
    try:
        return str(file.stat().st_size) == size and digest_of(file) == rest.rpartition("-")[2]
    except OSError:
        return False


def digest_of(file: Path) -> str | None:
    """Return a hash of a file; None for what cannot be read, is too large for a picture, or may never end."""
    try:
        if not file.is_file() or file.stat().st_size > MAX_PICTURE_BYTES:
            return None
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=12)).hexdigest()
    except OSError:
        return None


def size_of(item: Item, folder: Path) -> int | None:
    """Return the bytes of an item's picture, or of its text; None if the picture is not there."""
    if item.image is None:
        return len(item.text or "")
    path = folder / item.image
    return path.stat().st_size if os.path.isfile(path) else None  # noqa: PTH113  False whatever the error


def find_moved(roots: Sequence[Root], folder: Path, snapshot: Snapshot) -> int | None:
    """Return the number of the root that was moved to a folder: what it had is gone, and found there."""
    of_roots: list[list[Item]] = [[] for _ in roots]
    for item, _ in snapshot.alive():
        if item.root is not None:
            of_roots[item.root].append(item)
    for number, (root, items) in enumerate(zip(roots, of_roots, strict=True)):
        if any(os.path.lexists(item.image or file_of_item(roots, item)) for item in items):
            continue
        files = (folder / os.path.relpath(file_of_item(roots, item), root.folder) for item in items)
        there = [
            (file, item)
            for file, item in zip(files, items, strict=True)
            if os.path.isfile(file)  # noqa: PTH113
        ]
        sample = there[:: max(1, len(there) // MAX_COMPARED_FILES)]
        same = [
            item.text in [one.text for one in read_file(file).candidates]
            if item.image is None
            else is_same_picture(item, file)
            for file, item in sample
        ]
        if 2 * len(there) > len(items) and 2 * sum(same) > len(same):
            return number
    return None
