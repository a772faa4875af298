"""Pools: the items that an index is created from, or that are added to it.

========================== ===================== =======================================
Source                     Opened by             Ids
========================== ===================== =======================================
a folder, or a file        :func:`open_roots`    paths below the folder
a ``.jsonl`` of candidates :func:`open_pool`     as in the list
items in memory            :func:`pool_from_items`   as given, or numbers from 0
vectors with texts, fields :func:`pool_from_vectors` as given, or numbers from 0
========================== ===================== =======================================
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import PIL.Image
from jaxtyping import Shaped

from genius_search.border import as_column, as_id, as_ids, as_matrix, as_path, as_text, is_missing
from genius_search.data.captions import Caption, Problem
from genius_search.data.features import LeftOut
from genius_search.data.folder import read_file, read_folder
from genius_search.data.images import (
    as_image,
    encode_jpeg,
    image_type,
    is_raw_photo,
    read_raw_preview,
)
from genius_search.data.mbeir import read_pool
from genius_search.data.values import fields_to_json
from genius_search.errors import BadData, BadImage, UsageError, plural
from genius_search.index.items import Item
from genius_search.index.pictures import PictureFiles, read_picture
from genius_search.index.roots import id_of_path, innermost_root, new_root
from genius_search.index.store import Root
from genius_search.index.writer import Writer
from genius_search.picture_words import describe_picture, find_place
from genius_search.records import Candidate, Modality, composed
from genius_search.text import clean

MAX_SHOWN_REASONS: Final = 5
"""Maximum number of different reasons that an error shows, each with a file."""
SAME_ID: Final = "a later item of the list has the same id"
"""The reason for which an item of a list is left out if another one takes its place."""
MAX_ID_LENGTH: Final = 500
MAX_JPEG_SIDE: Final = 65_500
"""Maximum width and height of a JPEG file, in pixels."""
JPEG_QUALITY: Final = 95
"""Quality of the JPEG files that pictures in memory are stored as."""
STAMP_LENGTH: Final = 16
"""Number of hexadecimal digits in each part of a stamp."""
_CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class NewItem(NamedTuple):
    """An item to add from memory: a text, an image's bytes, or both."""

    id: str | int
    """A text, or an integer, which is converted to one."""
    text: str | None = None
    image: Path | bytes | PIL.Image.Image | np.ndarray | None = None
    """A file, its bytes, a Pillow image, or an array of uint8 of shape (height, width, 3). Pillow
    images and arrays are stored as JPEG."""
    fields: Mapping[str, object] | None = None
    """Values to filter by."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The items of a pool, which can be read several times."""

    items: Callable[[], Iterator[Item]]
    left_out: list[LeftOut] = field(default_factory=list)
    """Files that cannot be used as items."""
    has_files: bool = False
    """Whether each item is a file, so that :func:`with_file_fields` applies."""
    vectors: Shaped[np.ndarray, "items dim"] | None = None
    """Vectors of the items, in their order, in place of encoded features; may be memory-mapped."""
    stamps: Shaped[np.ndarray, " items"] | None = None
    """Stamps of the items of vectors, as ASCII, which take less memory than a list of texts."""
    roots: tuple[Root, ...] = ()
    """The roots that ``Item.root`` numbers."""
    unsure: Collection[str] = ()
    """Pictures whose captions cannot be read now; they keep the captions that the index has."""
    pictures: PictureFiles = field(default_factory=PictureFiles)
    """The files of the items' pictures, as far as they have been read."""

    def with_caption(self, item: Item) -> Item:
        """Return an item with the words that an encoder reads: those of a text are complete."""
        return item if item.image is None else self.with_fields(item)

    def with_fields(self, item: Item) -> Item:
        """Return an item with the caption and fields of its file.

        This reads the picture, so it is called only for items that are written.
        """
        if not self.has_files:
            return item
        captions = self.roots[item.root].captions if self.roots and item.root is not None else True
        photo = Caption() if item.image is None else self.pictures.get(Path(item.image)).caption
        return with_file_fields(item, photo, captions=captions)


PoolSource: TypeAlias = str | Path | Iterable[object] | Pool
"""A pool on disk, items in memory, or an open pool."""


def with_file_fields(item: Item, photo: Caption, *, captions: bool = True) -> Item:
    """Add to an item the words of its name, its folder, and the metadata of its photo.

    A text and fields that the item already has are not overwritten. For example, the item
    ``trips/red_kite.jpg`` gets the fields ``{"folder": "trips", "name": "red kite"}``, and is about
    ``trips, red kite``.
    """
    path = PurePosixPath(item.id)
    name = {"name": " ".join(re.findall(r"[^\W_]+", path.stem))}
    folder = {} if path.parent == PurePosixPath() else {"folder": str(path.parent)}
    text = item.text or (clean(composed(photo.text)) if captions and photo.text else None)
    fields = {**folder, **name, **photo.fields, **item.fields}
    about = None
    if item.image is not None:
        fields = {**find_place(fields), **fields}
        about = describe_picture(item.id, fields)
    source, _ = fields_to_json(fields)
    modality = Modality.of(has_image=item.image is not None, has_text=text is not None)
    return item._replace(modality=modality, text=text, source=source, about=about)


def is_candidate_list(pool: Path) -> bool:
    """Return whether a path is a ``.jsonl`` list of candidates, which have ids.

    Raises
    ------
    BadData
        The path is a whole data set in M-BEIR's layout.
    """
    if (pool / "cand_pool").is_dir() and (pool / "query").is_dir():
        raise BadData(
            f"{pool} is a data set in M-BEIR's layout; give one of its pools, a file in "
            f"{pool / 'cand_pool' / 'local'} or {pool / 'cand_pool' / 'global'}"
        )
    return pool.suffix == ".jsonl"


def open_pool(pool: Path, *, captions: bool, exclude: Sequence[str] = ()) -> Pool:
    """Open a pool on disk: a folder of images and texts, one such file, or a list of candidates.

    A list is a ``.jsonl`` file in the format of M-BEIR.

    Raises
    ------
    BadData
        The path is not a pool, or has no items.
    """
    if not os.path.exists(pool):  # noqa: PTH110  False whatever the error
        raise BadData(f"{pool}: there is no such file or folder")
    if is_candidate_list(pool):
        folder = _folder_of_list(pool.resolve())
        opened_pool = Pool(partial(_read_list, pool, folder, set()))
    else:
        root = new_root(pool.resolve(), (), (), captions=captions, exclude=exclude)
        opened_pool = open_roots((root,), [0])
    if next(opened_pool.items(), None) is None:
        raise nothing_to_index(
            f" in {pool}: no picture or text that can be used", opened_pool.left_out
        )
    return opened_pool


def _read_list(file: Path, folder: Path, checked: set[tuple[int, int]]) -> Iterator[Item]:
    """Yield the items of a list of candidates, whose ids are checked when it is first read.

    Parameters
    ----------
    folder
        The folder that the paths of pictures are relative to.
    checked
        Size and time of the file, if it has been read to its end.
    """
    status = file.stat()
    state = (status.st_size, status.st_mtime_ns)
    for candidate in read_pool([file], is_checked=state in checked):
        yield to_item(candidate, folder)
    checked.add(state)


def _folder_of_list(file: Path) -> Path:
    """Return the folder that the image paths in a list of candidates are relative to.

    In M-BEIR's layout it is the folder that contains ``cand_pool``, otherwise that of the list.
    """
    for folder in file.parents:
        if folder.name == "cand_pool":
            return folder.parent
    return file.parent


def open_roots(roots: tuple[Root, ...], numbers: Iterable[int], within: Path | None = None) -> Pool:
    """Read some of the roots as they are now; the pool may be empty.

    Parameters
    ----------
    numbers
        The roots to read. Whole roots are always read, since their lists and rules apply to all
        folders in them.
    within
        Return only the files at and below this path.
    """
    reader = _RootReader(roots, within)
    for number in numbers:
        reader.read(number)
    return Pool(
        partial(iter, reader.items),
        reader.left_out,
        has_files=True,
        roots=roots,
        unsure=reader.unsure,
    )


class _RootReader:
    """Reads roots, and collects their items.

    A file belongs to the innermost root that contains it.
    """

    def __init__(self, roots: tuple[Root, ...], within: Path | None) -> None:
        self.items: list[Item] = []
        self.left_out: list[LeftOut] = []
        self.unsure: set[str] = set()
        self._roots = roots
        self._names = {root.name for root in roots}
        self._within = within
        self._ids: set[str] = set()

    def read(self, number: int) -> None:
        """Read a root: a folder or a single file."""
        root = self._roots[number]
        path = Path(root.folder)
        if path.is_dir():
            skip = partial(self._is_link_to_other_root, number)
            scan = read_folder(path, exclude=root.exclude, skip=skip, captions=root.captions)
        else:
            scan = read_file(path, captions=root.captions)
        self.left_out += [
            _left_out(problem)
            for problem in scan.problems
            if self._is_included(number, problem.file)
        ]
        self.unsure.update(map(os.path.normpath, scan.unsure))
        for candidate in scan.candidates:
            file = scan.root / candidate.did
            if self._is_included(number, file):
                path_in_root = candidate.did if scan.root == path else "."
                item_id = id_of_path(root, self._names, composed(path_in_root))
                item = to_item(candidate, scan.root)._replace(id=item_id, root=number)
                self._add(item, file)

    def _add(self, item: Item, file: Path) -> None:
        """Collect an item, unless another file has the same id."""
        if item.id in self._ids:
            reason = "another file has this name in another form of Unicode; rename one of them"
            self.left_out.append(LeftOut(-1, str(file), reason))
            return
        self._ids.add(item.id)
        self.items.append(item)

    def _is_included(self, number: int, file: Path) -> bool:
        """Return whether a file belongs to a root, and is within the requested path."""
        if self._within is not None and self._within not in (file, *file.parents):
            return False
        return innermost_root(self._roots, file) in (number, None)

    def _is_link_to_other_root(self, number: int, folder: Path) -> bool:
        """Return whether a folder is outside a root, reached by a link, and inside another root."""
        target = folder.resolve()
        if target.is_relative_to(self._roots[number].folder):
            return False
        return innermost_root(self._roots, target) not in (None, number)


def _left_out(problem: Problem) -> LeftOut:
    """Return the record of a file that cannot be used; it has no position in a list of items."""
    return LeftOut(-1, str(problem.file), problem.reason)


def nothing_to_index(why: str, left_out: Sequence[LeftOut]) -> BadData:
    """Return the error for a pool without usable items.

    Parameters
    ----------
    why
        Continuation of "there is nothing to index".
    left_out
        Files that cannot be used; the message names the first file of each reason.
    """
    files: dict[str, str] = {}
    for entry in left_out:
        files.setdefault(entry.reason, entry.file)
    shown = [f"{file}: {reason}" for reason, file in files.items()][:MAX_SHOWN_REASONS]
    reasons = "; ".join(shown)
    count = plural(len({entry.file for entry in left_out}), "file")
    more = f" (left out {count}, such as {reasons})" if files else ""
    return BadData(f"there is nothing to index{why}{more}")


def to_item(candidate: Candidate, root: Path) -> Item:
    """Return a candidate as an item, with the full path of its picture.

    Parameters
    ----------
    root
        The folder that the path of the picture is relative to.

    Raises
    ------
    BadData
        The picture is outside ``root``, or the item cannot be stored.
    """
    image = None if candidate.image is None else os.path.normpath(root / candidate.image)
    if image is not None and not Path(image).is_relative_to(root):
        raise BadData(
            f"the image of {candidate.did} is {candidate.image!r}, which leads out of {root}; "
            "paths in a pool must stay inside its folder"
        )
    return check_item(
        Item(candidate.did, candidate.modality, candidate.text, image, candidate.source)
    )


def check_item(item: Item) -> Item:
    """Return an item with its texts cleaned and in composed Unicode, as it is stored.

    Raises
    ------
    BadData
        The id or a text contains characters that cannot be stored.
    """
    if _CONTROL_CHARACTER.search(item.id):
        raise BadData(f"the id {item.id!r} contains a control character; rename the item")
    for part in (item.id, item.text, item.image, item.source):
        if part is None or part.isascii():
            continue
        try:
            part.encode()
        except UnicodeEncodeError:
            raise BadData(
                f"item {item.id!r} contains a lone surrogate (half a character) in "
                f"{part[:80]!r}; write it as UTF-8"
            ) from None
    item_id = composed(item.id)
    text = None if item.text is None else clean(composed(item.text))
    source = None if item.source is None else composed(item.source)
    if (item_id, text, source) == (item.id, item.text, item.source):
        return item
    return item._replace(id=item_id, text=text, source=source)


def pool_from_items(
    sources: Iterable[object], writer: Writer, *, captions: bool, has_ids: bool
) -> Pool:
    """Return a pool of items in memory and of single files; pictures are stored in the index.

    Of several items with the same id, the last one counts.

    Parameters
    ----------
    sources
        Items as :func:`read_new_item` accepts them, and paths of files.
    has_ids
        Whether each item must have an id; otherwise an item without one gets its position.
    """
    # Iterating over a mapping or a data frame would yield only its keys or columns.
    is_iterable = isinstance(sources, Iterable)
    if not is_iterable or isinstance(sources, Mapping) or hasattr(sources, "columns"):
        raise UsageError(
            "items are no list; give [item], or of a data frame frame.to_dict('records')"
        )
    items: dict[str, Item] = {}
    left_out: list[LeftOut] = []
    for number, source in enumerate(sources):
        if isinstance(source, Path):
            file_items, file_problems = _read_file_items(source, captions=captions)
            items.update((item.id, item) for item in file_items)
            left_out += file_problems
            continue
        new = read_new_item(source, number, default_id=None if has_ids else str(number))
        try:
            item, problems = to_stored_item(new, writer)
            if item.id in items:
                left_out.append(LeftOut(number, item.id, SAME_ID))
            items[item.id] = item
            left_out += [LeftOut(number, item.id, problem) for problem in problems]
        except (BadData, BadImage) as error:
            reason = getattr(error, "reason", str(error))
            left_out.append(LeftOut(number, str(new.id), reason))
    return Pool(lambda: iter(items.values()), left_out)


def _read_file_items(source: Path, *, captions: bool) -> tuple[list[Item], list[LeftOut]]:
    """Return the items of a single file, whose id is its path, and problems."""
    file = as_path(source)
    scan = read_file(file, captions=captions)
    items = []
    for candidate in scan.candidates:
        item = to_item(candidate, scan.root.resolve())
        # The fields come from the name of the file, the id from the path as it was given.
        photo = read_picture(Path(item.image), decodes=False).caption if item.image else Caption()
        item = with_file_fields(item, photo, captions=captions)
        items.append(item._replace(id=composed(file.as_posix())))
    return items, [*map(_left_out, scan.problems)]


def to_stored_item(new: NewItem, writer: Writer) -> tuple[Item, list[str]]:
    """Store the picture of a new item; return the item to write, and problems with its fields.

    Raises
    ------
    BadData, BadImage
        The item cannot be stored; the message says why.
    """
    item_id = as_id(new.id)
    if not 1 <= len(item_id) <= MAX_ID_LENGTH:
        raise BadData(f"an id has 1 to {MAX_ID_LENGTH} characters; this one has {len(item_id)}")
    words = clean(new.text or "")
    text = words if words.strip() else None
    if text is None and new.image is None:
        raise BadData("an item needs a text, an image, or both")
    modality = Modality.of(has_image=new.image is not None, has_text=text is not None)
    source, problems = fields_to_json(new.fields)
    item = check_item(Item(item_id, modality, text, None, source))
    if new.image is not None:
        image = writer.store_picture(picture_bytes(new.image))
        item = item._replace(image=image, about=describe_picture(item_id, item.fields))
    return item, problems


def picture_bytes(image: object) -> bytes:
    """Return the bytes that an index stores of a picture: those of a file, or else a JPEG.

    Raises
    ------
    BadImage
        The image is not a picture, or its file cannot be read.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, Path):
        file = as_path(image)
        if is_raw_photo(file):
            return read_raw_preview(file)
        image_type(file)
        return file.read_bytes()
    picture = as_image(image)
    if max(picture.size) > MAX_JPEG_SIDE:
        problem = f"is {max(picture.size):,} pixels long; at most {MAX_JPEG_SIDE:,} can be stored"
        raise BadImage(Path("the image"), f"{problem}. Make it smaller, or give its file")
    return encode_jpeg(picture, quality=JPEG_QUALITY)


def read_new_item(source: object, number: int, *, default_id: str | None = None) -> NewItem:
    """Return an item that is given as a :class:`NewItem`, a mapping, a text or a picture.

    Parameters
    ----------
    number
        The position of the item, which errors name.
    default_id
        The id of an item without one.

    Raises
    ------
    UsageError
        The item has another type, unknown keys or no id; its text is no text, or its fields are no
        mapping; or a text could be the name of a file, or a URL.
    """
    values = {"id": default_id, **_item_values(source)}
    values["id"] = as_id(values["id"], f"the id of item {number} of the list")
    new = NewItem(**{name: value for name, value in values.items() if not is_missing(value)})
    parts: tuple[tuple[str, object, type], ...] = (
        ("text", new.text, str),
        ("fields", new.fields, Mapping),
    )
    for name, value, expected in parts:
        if value is not None and not isinstance(value, expected):
            raise UsageError(
                f"item {new.id!r}: {name} is of type {type(value).__qualname__}, "
                f"expected {expected.__name__}"
            )
    return new


def _item_values(source: object) -> dict[str, Any]:
    """Return the values of a new item by their names, as far as they are given."""
    match source:
        case NewItem():
            return source._asdict()
        case Mapping():
            if unknown := [str(key) for key in source if key not in NewItem._fields]:
                raise UsageError(
                    f"an item has no {', '.join(unknown)}; its keys are id, text, image and "
                    "fields; put all other values into fields"
                )
            return {**source}
        case str():
            _check_is_text(source)
            return {"text": source}
        case bytes() | PIL.Image.Image() | np.ndarray():
            return {"image": source}
    type_name = f"{type(source).__module__}.{type(source).__qualname__}"
    raise UsageError(
        f"an item is of type {type_name}; expected a NewItem, a dict with id, text, image and "
        "fields, a text, a picture (Pillow image, NumPy array of uint8, or bytes), or the Path of "
        "a file"
    )


def _check_is_text(text: str) -> None:
    """Raise :class:`UsageError` for a text that is probably meant as a URL or a file."""
    if re.fullmatch(r"[a-z][a-z0-9+.-]+://\S+", text, re.IGNORECASE):
        raise UsageError(
            f"{text[:80]} is a URL, and nothing is fetched: give the picture's bytes, or "
            "{'text': ...} to index the address itself"
        )
    if os.path.isfile(as_path(text)):  # noqa: PTH113  False whatever the error
        raise UsageError(
            f"{text} is a file; give Path({text!r}), or {{'text': {text!r}}} for the words"
        )


def pool_from_vectors(
    vectors: object,
    ids: Iterable[str | int] | None,
    *,
    modalities: str | Modality | Iterable[str | Modality],
    texts: Iterable[str | None] | None,
    fields: Iterable[Mapping[str, object] | None] | None,
) -> Pool:
    """Return a pool of items that are given as vectors; without ``ids`` they are numbered from 0.

    Raises
    ------
    BadData
        A vector has no direction, an id is invalid or occurs twice, or a text is not a text; the
        message names the row.
    UsageError
        The vectors are not a matrix of numbers, or the number of ids, texts or fields is another.
    """
    matrix = as_matrix(vectors, "the vectors")
    count = len(matrix)
    item_ids = None if ids is None else as_ids(ids)
    if isinstance(modalities, str):
        modalities = [modalities] * count
    columns: dict[str, Sequence[Any]] = {
        "ids": range(count) if item_ids is None else item_ids,
        "texts": [None] * count if texts is None else as_column(texts, "texts"),
        "fields": [None] * count if fields is None else as_column(fields, "fields"),
        "modalities": as_column(modalities, "modalities"),
    }
    for name, values in columns.items():
        if len(values) != count:
            raise UsageError(
                f"there are {count} vectors and {len(values)} {name}; give one for each vector"
            )
    if item_ids is not None:
        _check_ids(item_ids)
    item_modalities = [*map(Modality.parse, columns["modalities"])]
    item_texts = [_text_of_row(text, row) for row, text in enumerate(columns["texts"])]
    sources: list[str | None] = []
    left_out: list[LeftOut] = []
    for row, row_fields in enumerate(columns["fields"]):
        source, problems = _fields_of_row(row_fields, row)
        sources.append(source)
        item_id = str(row) if item_ids is None else item_ids[row]
        left_out += [LeftOut(row, item_id, problem) for problem in problems]
    # An index reads the items three times. Lists of their parts take a third of their memory, and
    # numbers as ids take none.
    stamps = bytearray()
    for row, vector in enumerate(matrix):
        item_id = str(row) if item_ids is None else item_ids[row]
        parts = item_id, item_modalities[row], item_texts[row], None, sources[row]
        try:
            item = check_item(Item(*parts))
        except BadData as error:
            raise BadData(f"row {row}: {error}") from None
        stamps += _stamp_of_vector(item.modality, item_texts[row], sources[row], vector)
        if item_ids is not None:
            item_ids[row] = item.id
        item_texts[row] = item.text
        sources[row] = item.source

    stamps_of_rows = np.frombuffer(stamps, f"S{STAMP_LENGTH}")

    def items() -> Iterator[Item]:
        ids_of_rows = map(str, range(count)) if item_ids is None else item_ids
        texts_of_stamps = map(bytes.decode, stamps_of_rows)
        parts = (ids_of_rows, item_modalities, item_texts, repeat(None), sources, texts_of_stamps)
        return map(Item, *parts)

    return Pool(items, left_out, vectors=matrix, stamps=stamps_of_rows)


def _stamp_of_vector(
    modality: Modality, text: str | None, source: str | None, vector: Shaped[np.ndarray, " dim"]
) -> bytes:
    """Return a stamp that changes whenever an item's vector, text or fields change, as ASCII."""
    contents = repr((modality, text, source)).encode()
    digest = hashlib.sha256(contents + np.ascontiguousarray(vector).tobytes())
    return digest.hexdigest()[:STAMP_LENGTH].encode()


def _check_ids(ids: Sequence[str]) -> None:
    """Raise :class:`BadData` for an id that is empty, too long, or occurs twice."""
    first_rows: dict[str, int] = {}
    for row, item_id in enumerate(ids):
        if not 1 <= len(item_id) <= MAX_ID_LENGTH:
            raise BadData(
                f"the id of row {row} has {len(item_id)} characters; ids have 1 to {MAX_ID_LENGTH}"
            )
        first_row = first_rows.setdefault(item_id, row)
        if first_row != row:
            raise BadData(f"rows {first_row} and {row} have the id {item_id!r}; ids must be unique")


def _text_of_row(text: object, row: int) -> str | None:
    """Return the text of a row, or None if it has none; errors name the row."""
    if is_missing(text):
        return None
    try:
        return as_text(text, "the text")
    except UsageError as error:
        raise BadData(f"row {row}: {error}") from None


def _fields_of_row(fields: object, row: int) -> tuple[str | None, Sequence[str]]:
    """Return fields as an item stores them, and the problems of fields that are left out."""
    if is_missing(fields):
        return None, ()
    if not isinstance(fields, Mapping):
        type_name = type(fields).__qualname__
        raise BadData(f"row {row}: the fields are of type {type_name}, expected a mapping")
    return fields_to_json(fields)


def stamp_of(item: Item) -> str:
    """Return a stamp that changes whenever the item's text, fields, image file or vector change.

    It has the form ``contents.file``. The first part is a hash of the texts and the path of the
    image, the second one of the size and the times of the image file.
    """
    if item.stamp is not None:
        return item.stamp
    file = None
    if item.image is not None:
        with contextlib.suppress(OSError):  # a missing picture is reported when it is opened
            status = Path(item.image).stat()
            file = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    contents = (item.modality.mbeir, item.text, item.source, item.image)
    digests = [hashlib.sha256(repr(part).encode()).hexdigest() for part in (contents, file)]
    return f"{digests[0][:STAMP_LENGTH]}.{digests[1][:STAMP_LENGTH]}"
