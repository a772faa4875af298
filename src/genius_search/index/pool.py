"""What an index is made of: pools on disk, items in memory, and vectors with what belongs to them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import PIL.Image
from jaxtyping import Shaped

from genius_search.border import as_column, as_id, as_ids, as_matrix, as_path, as_text, is_missing
from genius_search.data.captions import Caption, Problem
from genius_search.data.features import LeftOut
from genius_search.data.folder import read_file, read_folder
from genius_search.data.images import as_image, encode_jpeg, image_type
from genius_search.data.mbeir import read_pool
from genius_search.data.photo_metadata import read_photo
from genius_search.data.values import fields_to_json
from genius_search.errors import BadData, BadImage, UsageError, plural
from genius_search.index.items import Item
from genius_search.index.roots import id_of_path, innermost_root, new_root
from genius_search.index.store import Root
from genius_search.index.writer import Writer
from genius_search.records import Candidate, Modality, composed
from genius_search.text import clean

MAX_REASONS: Final = 5
"""Number of files that an error names."""
MAX_ID_LENGTH: Final = 500
MAX_JPEG_SIDE: Final = 65_500
JPEG_QUALITY: Final = 95
"""Quality at which pictures from memory are stored."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class NewItem(NamedTuple):
    """An item to add from memory: a text, an image's bytes, or both."""

    id: str | int
    """A text; a whole number becomes one."""
    text: str | None = None
    image: Path | bytes | PIL.Image.Image | np.ndarray | None = None
    """A file, its bytes, a Pillow image, or an array of uint8 of shape (height, width, 3). The last two are
    stored as JPEG."""
    fields: Mapping[str, object] | None = None
    """Values to filter by."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Items of a pool, which can be read several times."""

    items: Callable[[], Iterator[Item]]
    left_out: list[LeftOut] = field(default_factory=list)
    """Files that cannot be used as items."""
    has_files: bool = False
    """Whether each item is a file, so that :func:`with_file_fields` applies."""
    vectors: Shaped[np.ndarray, "items dim"] | None = None
    """Given vectors of the items, in their order, instead of features; may be memory-mapped."""
    roots: tuple[Root, ...] = ()
    """The roots that the items' numbers refer to."""
    unsure: Collection[str] = ()
    """Pictures whose captions cannot be read now; they keep those that they had."""

    def with_fields(self, item: Item) -> Item:
        """Return an item with all that is known of it; a picture is read only if it is to be encoded."""
        captions = self.roots[item.root].captions if self.roots and item.root is not None else True
        return with_file_fields(item, captions=captions) if self.has_files else item


PoolSource: TypeAlias = str | Path | Iterable[object] | Pool
"""A pool on disk, items in memory, or an open pool."""


def with_file_fields(item: Item, *, captions: bool = True) -> Item:
    """Add to an item the words of its name, its folder, and what its picture says of itself.

    A text and fields that it has already are kept.
    """
    path = PurePosixPath(item.id)
    name = {"name": " ".join(re.findall(r"[^\W_]+", path.stem))}
    folder = {} if path.parent == PurePosixPath() else {"folder": str(path.parent)}
    photo = Caption() if item.image is None else read_photo(Path(item.image))
    text = item.text or (clean(composed(photo.text)) if captions and photo.text else None)
    source, _ = fields_to_json({**folder, **name, **photo.fields, **item.fields})
    modality = Modality.of(has_image=item.image is not None, has_text=text is not None)
    return item._replace(modality=modality, text=text, source=source)


def is_candidate_list(pool: Path) -> bool:
    """Return whether a pool is a list of candidates, which has their ids, rather than files.

    Raises
    ------
    BadData
        It is neither.
    """
    if (pool / "cand_pool").is_dir() and (pool / "query").is_dir():
        raise BadData(
            f"{pool} is a data set in M-BEIR's layout; give one of its pools, a file in "
            f"{pool / 'cand_pool' / 'local'} or {pool / 'cand_pool' / 'global'}"
        )
    return pool.suffix == ".jsonl"


def open_pool(pool: Path, *, captions: bool, exclude: Sequence[str] = ()) -> Pool:
    """Open a pool: a folder of images and texts, one such file, or a ``.jsonl`` file of M-BEIR candidates.

    Raises
    ------
    BadData
        The path is not a pool, or has no items.
    """
    if not os.path.exists(pool):  # noqa: PTH110  False whatever the error
        raise BadData(f"{pool}: there is no such file or folder")
    if not is_candidate_list(pool):
        root = new_root(pool.resolve(), (), (), captions=captions, exclude=exclude)
        opened = open_roots((root,), [0])
    else:
        # M-BEIR's paths start at the folder that holds cand_pool, those of other files at their own folder.
        above = next(
            (one.parent for one in pool.resolve().parents if one.name == "cand_pool"), None
        )
        place = above or pool.resolve().parent
        opened = Pool(lambda: (to_item(one, place) for one in read_pool([pool])))
    if next(opened.items(), None) is None:
        raise nothing_to_index(f" in {pool}: no picture or text that can be used", opened.left_out)
    return opened


def open_roots(roots: tuple[Root, ...], numbers: Iterable[int], within: Path | None = None) -> Pool:
    """Read some of the roots as they are now, or what lies within a path; it may be nothing.

    A whole root is read in any case, since its lists and rules apply below it.
    """
    names = {root.name for root in roots}
    items: list[Item] = []
    left_out: list[LeftOut] = []
    seen: set[str] = set()
    unsure: set[str] = set()
    for number in numbers:
        root = roots[number]
        place = Path(root.folder)

        def is_own(file: Path, number: int = number) -> bool:
            is_within = within is None or within in (file, *file.parents)
            return is_within and innermost_root(roots, file) in (number, None)

        def is_elsewhere(folder: Path, number: int = number, place: Path = place) -> bool:
            """Return whether a folder, reached by a link, lies in another root."""
            target = folder.resolve()
            return not target.is_relative_to(place) and innermost_root(roots, target) not in (
                None,
                number,
            )

        read = (
            partial(read_folder, exclude=root.exclude, skip=is_elsewhere)
            if place.is_dir()
            else read_file
        )
        scan = read(place, captions=root.captions)
        left_out += [_left_out(one) for one in scan.problems if is_own(one.file)]
        unsure.update(map(os.path.normpath, scan.unsure))
        for candidate in scan.candidates:
            if is_own(scan.root / candidate.did):
                path = candidate.did if scan.root == place else "."
                item_id = id_of_path(root, names, composed(path))
                if item_id in seen:
                    why = (
                        "another file has this name in another form of Unicode; rename one of them"
                    )
                    left_out.append(LeftOut(-1, str(scan.root / candidate.did), why))
                    continue
                seen.add(item_id)
                items.append(to_item(candidate, scan.root)._replace(id=item_id, root=number))
    return Pool(partial(iter, items), left_out, has_files=True, roots=roots, unsure=unsure)


def _left_out(problem: Problem) -> LeftOut:
    return LeftOut(-1, str(problem.file), problem.reason)


def nothing_to_index(why: str, left_out: Sequence[LeftOut]) -> BadData:
    """Return the error of a pool in which nothing can be used, with the first file of each reason."""
    files = {entry.reason: entry.file for entry in reversed(left_out)}
    reasons = "; ".join(f"{files[reason]}: {reason}" for reason in [*reversed(files)][:MAX_REASONS])
    count = plural(len({entry.file for entry in left_out}), "file")
    more = f" (left out {count}, such as {reasons})" if files else ""
    return BadData(f"there is nothing to index{why}{more}")


def to_item(candidate: Candidate, root: Path) -> Item:
    """Return a candidate as an item, its picture's path below ``root``.

    Raises
    ------
    BadData
        The picture lies elsewhere, or the item cannot be stored.
    """
    image = None if candidate.image is None else os.path.normpath(root / candidate.image)
    if image is not None and not Path(image).is_relative_to(root):
        raise BadData(
            f"the image of {candidate.did} is {candidate.image!r}, which leads out of {root}; paths in a "
            "pool must stay inside its folder"
        )
    return check_item(
        Item(candidate.did, candidate.modality, candidate.text, image, candidate.source)
    )


def check_item(item: Item) -> Item:
    """Return an item as it is stored, composed; raise :class:`BadData` if its id or a text cannot be."""
    if _CONTROL.search(item.id):
        raise BadData(f"the id {item.id!r} contains a control character; rename the item")
    for part in (item.id, item.text, item.image, item.source):
        try:
            (part or "").encode()
        except UnicodeEncodeError:
            raise BadData(
                f"item {item.id!r} contains a lone surrogate (half a character) in {str(part)[:80]!r}; "
                "write it as UTF-8"
            ) from None
    text = None if item.text is None else clean(composed(item.text))
    source = None if item.source is None else composed(item.source)
    return item._replace(id=composed(item.id), text=text, source=source)


def pool_from_items(
    given: Iterable[object], writer: Writer, *, captions: bool, has_ids: bool
) -> Pool:
    """Return a pool of items in memory and of single files; pictures are stored in the index.

    Items without an id are numbered from 0, unless each ``has_ids``. Of several with one, the last counts.
    """
    if isinstance(given, Mapping) or hasattr(given, "columns"):  # only its names would be read
        raise UsageError(
            "items are no list; give [item], or of a data frame frame.to_dict('records')"
        )
    items: dict[str, Item] = {}
    left_out: list[LeftOut] = []
    for number, one in enumerate(given):
        if isinstance(one, Path):
            file = as_path(one)
            scan = read_file(file, captions=captions)
            for candidate in scan.candidates:
                item = to_item(candidate, scan.root.resolve())
                item = with_file_fields(item, captions=captions)._replace(
                    id=composed(file.as_posix())
                )
                items[item.id] = item
            left_out += map(_left_out, scan.problems)
            continue
        new = read_new_item(one, number, default_id=None if has_ids else str(number))
        try:
            item, problems = to_stored_item(new, writer)
            if item.id in items:
                left_out.append(
                    LeftOut(number, item.id, "a later item of the list has the same id")
                )
            items[item.id] = item
            left_out += [LeftOut(number, item.id, problem) for problem in problems]
        except (BadData, BadImage) as error:
            left_out.append(LeftOut(number, str(new.id), getattr(error, "reason", str(error))))
    return Pool(lambda: iter(items.values()), left_out)


def to_stored_item(new: NewItem, writer: Writer) -> tuple[Item, list[str]]:
    """Return an item in its stored form, and what is wrong with fields that are left out; store its picture.

    Raises
    ------
    BadData, BadImage
        The item cannot be stored. The message has the reason.
    """
    name = as_id(new.id)
    if not 1 <= len(name) <= MAX_ID_LENGTH:
        raise BadData(f"an id has 1 to {MAX_ID_LENGTH} characters; this one has {len(name)}")
    words = clean(new.text or "")
    text = words if words.strip() else None
    if text is None and new.image is None:
        raise BadData("an item needs a text, an image, or both")
    modality = Modality.of(has_image=new.image is not None, has_text=text is not None)
    source, problems = fields_to_json(new.fields)
    item = check_item(Item(name, modality, text, None, source))
    if new.image is not None:
        item = item._replace(image=writer.store_picture(picture_bytes(new.image)))
    return item, problems


def picture_bytes(image: object) -> bytes:
    """Return a picture as an index stores it: a file or its bytes as they are, anything else as JPEG.

    Raises
    ------
    BadImage
        It is no picture, or the file cannot be read.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, Path):
        file = as_path(image)
        image_type(file)
        return file.read_bytes()
    picture = as_image(image)
    if max(picture.size) > MAX_JPEG_SIDE:
        longer = f"is {max(picture.size):,} pixels long; at most {MAX_JPEG_SIDE:,} can be stored"
        raise BadImage(Path("the image"), f"{longer}. Make it smaller, or give its file")
    return encode_jpeg(picture, quality=JPEG_QUALITY)


def read_new_item(given: object, number: int, *, default_id: str | None = None) -> NewItem:
    """Return an item that was given as a :class:`NewItem`, a mapping, a text or a picture.

    Parameters
    ----------
    number
        the position of the item, which errors name.
    default_id
        the id of an item that has none.

    Raises
    ------
    UsageError
        It is of another kind, has no id or unknown keys, its text is no text or its fields are no mapping, or
        it may be a file's name or a URL instead of a text.
    """
    item: dict[str, Any]
    match given:
        case NewItem():
            item = given._asdict()
        case Mapping():
            if unknown := [str(key) for key in given if key not in NewItem._fields]:
                raise UsageError(
                    f"an item has no {', '.join(unknown)}; its keys are id, text, image and fields, and "
                    "whatever else is known of it belongs into fields"
                )
            item = {"id": default_id, **given}
        case str():
            _check_is_text(given)
            item = {"id": default_id, "text": given}
        case bytes() | PIL.Image.Image() | np.ndarray():
            item = {"id": default_id, "image": given}
        case _:
            kind = f"{type(given).__module__}.{type(given).__qualname__}"
            raise UsageError(
                f"an item is of type {kind}; expected a NewItem, a dict with id, text, image and fields, a "
                "text, a picture (Pillow image, NumPy array of uint8, or bytes), or the Path of a file"
            )
    item["id"] = as_id(item["id"], f"the id of item {number} of the list")
    present = {name: value for name, value in item.items() if not is_missing(value)}
    new = NewItem(**present)
    parts: tuple[tuple[str, object, type], ...] = (
        ("text", new.text, str),
        ("fields", new.fields, Mapping),
    )
    for part, value, wanted in parts:
        if value is not None and not isinstance(value, wanted):
            found = type(value).__qualname__
            raise UsageError(
                f"item {new.id!r}: {part} is of type {found}, expected {wanted.__name__}"
            )
    return new


def _check_is_text(text: str) -> None:
    """Refuse what is probably meant as an address or a file."""
    if re.fullmatch(r"[a-z][a-z0-9+.-]+://\S+", text, re.IGNORECASE):
        raise UsageError(
            f"{text[:80]} is a URL, and nothing is fetched: give the picture's bytes, or {{'text': ...}} to "
            "index the address itself"
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
        A vector has no direction, an id is not one or occurs twice, or a text is not one; the
        message names the row.
    UsageError
        What is given is not a matrix of numbers, or there are not as many ids, texts or fields.
    """
    array = as_matrix(vectors, "the vectors")
    count = len(array)
    names = [*map(str, range(count))] if ids is None else as_ids(ids)
    of_each = [modalities] * count if isinstance(modalities, str) else modalities
    kinds = as_column(of_each, "modalities")
    said = [None] * count if texts is None else as_column(texts, "texts")
    given_fields = [None] * count if fields is None else as_column(fields, "fields")
    columns = {"ids": names, "texts": said, "fields": given_fields, "modalities": kinds}
    for name, values in columns.items():
        if len(values) != count:
            raise UsageError(
                f"there are {count} vectors and {len(values)} {name}; give one for each vector"
            )
    first: dict[str, int] = {}
    for row, name in enumerate(names):
        if not 1 <= len(name) <= MAX_ID_LENGTH:
            raise BadData(
                f"the id of row {row} has {len(name)} characters; ids have 1 to {MAX_ID_LENGTH}"
            )
        if first.setdefault(name, row) != row:
            raise BadData(f"rows {first[name]} and {row} have the id {name!r}; ids must be unique")
    parsed = [Modality(Modality.parse(kind)) for kind in kinds]
    said = [None if is_missing(one) else _text_of_row(one, row) for row, one in enumerate(said)]
    stored = [_fields_of_row(one, row) for row, one in enumerate(given_fields)]
    left_out = [
        LeftOut(row, names[row], why)
        for row, (_, problems) in enumerate(stored)
        for why in problems
    ]

    @cache  # an index reads them three times
    def item(row: int) -> Item:
        try:
            source = stored[row][0]
            known = repr((parsed[row], said[row], source)).encode()
            stamp = hashlib.sha256(known + np.ascontiguousarray(array[row]).tobytes()).hexdigest()[
                :16
            ]
            return check_item(Item(names[row], parsed[row], said[row], None, source, stamp))
        except BadData as error:
            raise BadData(f"row {row}: {error}") from None

    return Pool(lambda: map(item, range(count)), left_out, vectors=array)


def _text_of_row(text: object, row: int) -> str:
    try:
        return as_text(text, "the text")
    except UsageError as error:
        raise BadData(f"row {row}: {error}") from None


def _fields_of_row(fields: object, row: int) -> tuple[str | None, Sequence[str]]:
    """Return fields as an item stores them, and what is wrong with those that are left out."""
    if is_missing(fields):
        return None, ()
    if not isinstance(fields, Mapping):
        kind = type(fields).__qualname__
        raise BadData(f"row {row}: the fields are of type {kind}, expected a mapping")
    return fields_to_json(fields)


def stamp_of(item: Item) -> str:
    """Return a stamp that changes whenever the item's text, fields, image file or given vector change.

    What follows the dot changes when the size or the times of the image file do.
    """
    if item.stamp is not None:
        return item.stamp
    file = None
    if item.image is not None:
        with contextlib.suppress(OSError):  # a missing picture is reported when it is opened
            status = Path(item.image).stat()
            file = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    known = (item.modality.mbeir, item.text, item.source, item.image)
    return ".".join(hashlib.sha256(repr(part).encode()).hexdigest()[:16] for part in (known, file))
