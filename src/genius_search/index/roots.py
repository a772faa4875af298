"""The roots of an index: the folders and single files that it follows, and the ids of their files.

Ids of different roots never collide::

    root 0  ~/Pictures             name ""        trips/kite.jpg   -> trips/kite.jpg
    root 1  /mnt/disk/Scans        name "Scans"   1998/a.png       -> Scans/1998/a.png
    root 2  ~/notes.txt            name "notes.txt"  (a file)      -> notes.txt
    later, a folder ~/Pictures/Scans in root 0: b.png      -> ./Scans/b.png

In the first folder, an id is the path below it. In every other root, it begins with the root's
name, which no other id begins with. A file belongs to the innermost root that contains it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from genius_search.data.folder import read_file
from genius_search.data.video import video_type
from genius_search.errors import UsageError
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import MAX_ROOTS, Root
from genius_search.records import Modality, composed

MAX_PICTURE_BYTES: Final = 1 << 30
"""Larger files are not read as pictures: an untrusted index may name a file of any size."""
MAX_HASHED_VIDEO_BYTES: Final = 64 << 20
"""Of larger videos, only parts are hashed."""
NUM_HASHED_PARTS: Final = 17
HASHED_PART_BYTES: Final = 1 << 20
MAX_COMPARED_FILES: Final = 32
"""Approximate number of files that are compared to decide whether a folder is a moved root."""
MAX_SIZE_DIGITS: Final = 20
"""Maximum length of the size in a stored content hash, which an untrusted index may contain."""
DIGEST_BYTES: Final = 12
"""Length of the hashes of pictures and texts."""


class ContentHash(NamedTuple):
    """Size and hashes of an item's picture and text; items with equal hashes have equal features.

    Stored with each item as ``size-words-picture``; for a picture of 20,481 bytes without a
    caption::

        20481-c0f04bbc9c7dcd9f33e0ff32-5b2c9a3f0e77d1c85a40be19

    The parts allow comparisons without reading a file: of the size alone, and of the picture alone.
    """

    size: int
    """Bytes of the picture, or characters of the text of an item without a picture."""
    words: str
    """Hash of the modality and the text."""
    picture: str
    """Hash of the picture file; empty for a text."""

    @staticmethod
    def of(
        item: Item, folder: Path, digest_of: Callable[[Path], str | None] | None = None
    ) -> ContentHash | None:
        """Return the content hash of an item; None if its picture cannot be read.

        Parameters
        ----------
        folder
            Folder of the index, which the paths of stored pictures are relative to.
        digest_of
            Returns the hash of a picture; by default its file is read (:func:`hash_picture`).
        """
        size = content_size(item, folder)
        picture = "" if item.image is None else (digest_of or hash_picture)(folder / item.image)
        if size is None or picture is None:
            return None
        return ContentHash(size, _hash_words(item.modality, item.text), picture)

    @staticmethod
    def parse(text: str | None) -> ContentHash | None:
        """Return the content hash that an item is stored with; None if it has none."""
        size, *hashes = (text or "").split("-")
        if len(hashes) != 2 or not size.isdecimal() or len(size) > MAX_SIZE_DIGITS:
            return None
        return ContentHash(int(size), *hashes)

    def without_text(self) -> ContentHash:
        """Return the content hash of the same picture without a text."""
        return self._replace(words=_hash_words(Modality.IMAGE, None))

    def __str__(self) -> str:
        return f"{self.size}-{self.words}-{self.picture}"


def _hash_words(modality: Modality, text: str | None) -> str:
    """Return the hash of a text. The modality is part of it, because it decides what is encoded."""
    words = repr((modality.mbeir, text)).encode()
    return hashlib.blake2b(words, digest_size=DIGEST_BYTES).hexdigest()


def hash_bytes(data: bytes) -> str:
    """Return the hash of the bytes of a picture, as :func:`hash_picture` does."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def hash_picture(file: Path) -> str | None:
    """Return the hash of a picture file.

    None for a file that is missing, cannot be read or is too large, and for a pipe, which may never
    end. Of a large video, only some parts count, since it may take minutes to read.
    """
    try:
        if not file.is_file():
            return None
        size = file.stat().st_size
        if size > MAX_HASHED_VIDEO_BYTES and video_type(file):
            return _hash_parts(file, size)
        if size > MAX_PICTURE_BYTES:
            return None
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
    except OSError:
        return None
    return digest.hexdigest()


def _hash_parts(file: Path, size: int) -> str:
    """Return the hash of parts of a file, evenly spaced, the first and the last one included."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with file.open("rb") as stream:
        for number in range(NUM_HASHED_PARTS):
            stream.seek(number * (size - HASHED_PART_BYTES) // (NUM_HASHED_PARTS - 1))
            digest.update(stream.read(HASHED_PART_BYTES))
    return digest.hexdigest()


def content_size(item: Item, folder: Path) -> int | None:
    """Return :attr:`ContentHash.size` of an item; None if its picture does not exist."""
    if item.image is None:
        return len(item.text or "")
    path = folder / item.image
    exists = os.path.isfile(path)  # noqa: PTH113  False whatever the error
    return path.stat().st_size if exists else None


def is_same_picture(item: Item, file: Path) -> bool:
    """Return whether a file is the picture that an item was encoded from.

    A file of another size is not read.
    """
    content = ContentHash.parse(item.content)
    try:
        return (
            content is not None
            and file.stat().st_size == content.size
            and hash_picture(file) == content.picture
        )
    except OSError:
        return False


def id_of_path(root: Root, names: Collection[str], path: str) -> str:
    """Return the id of the file at a path below a root.

    Parameters
    ----------
    names
        The names of all roots.
    path
        Path below the root's folder; ``.`` if the root is a single file.
    """
    if root.name:
        return root.name if path == "." else f"{root.name}/{path}"
    return f"./{path}" if path.partition("/")[0] in names else path


def file_of_item(roots: Sequence[Root], item: Item) -> str:
    """Return the path of the file of a root's item; the inverse of :func:`id_of_path`."""
    root = roots[item.root or 0]
    path = item.id[len(root.name) + 1 :] if root.name else item.id
    return os.path.normpath(Path(root.folder, path))


def innermost_root(roots: Sequence[Root], path: Path) -> int | None:
    """Return the number of the innermost root that contains a path, or is that path."""
    numbers = {root.folder: number for number, root in enumerate(roots)}
    for folder in (path, *path.parents):
        if str(folder) in numbers:
            return numbers[str(folder)]
    return None


def new_root(
    folder: Path,
    roots: Sequence[Root],
    prefixes: Collection[str],
    *,
    captions: bool,
    exclude: Sequence[str],
) -> Root:
    """Return a new root, named like its folder or file, with a number if that name is taken.

    Parameters
    ----------
    roots
        The other roots. A folder that is the first root has no name: its ids are plain paths.
    prefixes
        The beginnings of the ids of the index, up to the first slash.

    Raises
    ------
    UsageError
        The index follows too many folders.
    """
    if len(roots) >= MAX_ROOTS:
        raise UsageError(
            f"an index follows at most {MAX_ROOTS:,} folders; add one that contains them"
        )
    is_file = folder.is_file()
    if not roots and not is_file:
        return Root(folder=str(folder), name="", captions=captions, exclude=(*exclude,))
    letters = [letter if letter.isprintable() else "_" for letter in composed(folder.name)]
    plain_name = "".join(letters) or "root"
    stem, suffix = plain_name, ""
    if is_file:
        stem, suffix = os.path.splitext(plain_name)  # noqa: PTH122  of a name
    used_names = {*prefixes, *(root.name for root in roots)}
    name = plain_name
    number = 1
    while name in used_names:  # photos, photos-2, photos-3
        number += 1
        name = f"{stem}-{number}{suffix}"
    return Root(folder=str(folder), name=name, captions=captions, exclude=(*exclude,))


def is_gone(roots: Sequence[Root], item: Item) -> bool:
    """Return whether the file of a root's item does not exist, although the root does.

    A file that cannot be reached, for example on a disk that is not mounted, is not gone.
    """
    file = file_of_item(roots, item)
    try:
        os.lstat(item.image or file)
    except (FileNotFoundError, NotADirectoryError):
        root = roots[item.root or 0].folder
        folder = root if file != root else os.path.dirname(root)  # noqa: PTH120
        return os.path.isdir(folder)  # noqa: PTH112  False whatever the error
    except OSError:
        return False
    return False


def find_moved(roots: Sequence[Root], folder: Path, snapshot: Snapshot) -> int | None:
    """Return the number of the root that was moved to a folder; None if none was.

    A root has moved if none of its files exists any more, and the folder contains more than half of
    them, most with the same contents (:data:`MAX_COMPARED_FILES` are compared).
    """
    items_by_root: list[list[Item]] = [[] for _ in roots]
    for item, _ in snapshot.alive():
        if item.root is not None:
            items_by_root[item.root].append(item)
    for number, (root, items) in enumerate(zip(roots, items_by_root, strict=True)):
        if any(os.path.lexists(item.image or file_of_item(roots, item)) for item in items):
            continue
        present = []
        for item in items:
            file = folder / os.path.relpath(file_of_item(roots, item), root.folder)
            if os.path.isfile(file):  # noqa: PTH113  False whatever the error
                present.append((item, file))
        sample = present[:: max(1, len(present) // MAX_COMPARED_FILES)]
        num_same = sum(_has_same_content(item, file) for item, file in sample)
        if 2 * len(present) > len(items) and 2 * num_same > len(sample):
            return number
    return None


def _has_same_content(item: Item, file: Path) -> bool:
    """Return whether a file has the picture of an item, or its text."""
    if item.image is not None:
        return is_same_picture(item, file)
    return item.text in [candidate.text for candidate in read_file(file).candidates]
