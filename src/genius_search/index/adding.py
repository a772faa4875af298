"""Adding items to an index: from a pool on disk or from memory, encoded chunk by chunk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import PIL.Image
import torch
from jaxtyping import Int8
from torch.nn import functional as F

from genius_search.artifact import fingerprint_of
from genius_search.data.features import FeatureBatch, Features, LeftOut
from genius_search.data.folder import FolderScan, is_file, read_file, read_folder
from genius_search.data.images import as_image, encode_jpeg, image_type, read_photo_fields
from genius_search.data.mbeir import read_pool
from genius_search.encoders.base import ItemKey
from genius_search.errors import BadData, BadImage, UsageError, plural
from genius_search.index.items import Item
from genius_search.index.store import WORK, IndexManifest, ItemArrays, StoredEmbeddings
from genius_search.index.writer import Writer, keep_pictures, picture_name, remove_work, store_picture
from genius_search.model import Genius
from genius_search.nn.spread import DENSITY_STEPS, HALF_NORM_STEPS
from genius_search.progress import Progress, Silent
from genius_search.records import Candidate, Modality, format_text
from genius_search.search.vectors import EmbeddingBits, is_residual
from genius_search.training.features import FeatureRow, encode_shard
from genius_search.writing import make_folder, write_atomically

CHUNK: Final = 4096
"""Maximum number of items that are encoded together."""
MIN_SAVED: Final = 256
"""Encoded chunks of at least this size are saved in ``.work/``, so that an interrupted run can resume."""
STEPS: Final = 64
"""Chunks of a pool: an interrupted run loses at most one of them."""
VERSION: Final = f"half norm / {HALF_NORM_STEPS}, density / {DENSITY_STEPS}"
"""Version of the encoding; saved chunks of another version are encoded again."""
MAX_REASONS: Final = 5
"""Number of files that an error names."""
MAX_ID_LENGTH: Final = 500
MAX_JPEG_SIDE: Final = 65_500
JPEG_QUALITY: Final = 95
"""Quality at which pictures from memory are stored."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
SAMPLE_BYTES: Final = 1 << 16


class NewItem(NamedTuple):
    """An item to add from memory: a text, an image's bytes, or both."""

    id: str
    text: str | None = None
    image: Path | bytes | PIL.Image.Image | np.ndarray | None = None
    """A file, its bytes, a Pillow image, or an array of uint8 of shape (height, width, 3). The last two are
    stored as JPEG."""
    fields: Mapping[str, object] | None = None
    """Values to filter by."""


class ItemOutcome(NamedTuple):
    """The result of adding one item."""

    id: str
    status: Literal["added", "replaced", "unchanged", "left out"]
    reason: str | None = None
    """Why it was left out."""


@dataclass(slots=True)
class Added:
    """The result of adding items."""

    added: int = 0
    replaced: int = 0
    """Number of these that replaced an item with the same id."""
    unchanged: int = 0
    """Number of items that were already in the index, unchanged."""
    left_out: list[LeftOut] = field(default_factory=list)
    """Unusable files with their reasons."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Items of a pool, which can be read several times."""

    items: Callable[[], Iterator[Item]]
    expected: int
    """Approximate number of items."""
    left_out: list[LeftOut] = field(default_factory=list)
    """Files that cannot be used as items."""
    has_files: bool = False
    """Whether each item is a file, so that :func:`with_file_fields` applies."""

    def with_fields(self, item: Item) -> Item:
        """Return an item with all its fields; those of a file are read only for what is encoded."""
        return with_file_fields(item) if self.has_files else item


def with_file_fields(item: Item) -> Item:
    """Add to an item's fields its folder, the words of its name, and a photo's date, camera and place.

    Fields that it has already are kept.
    """
    path = PurePosixPath(item.id)
    name = {"name": " ".join(re.findall(r"[^\W_]+", path.stem))}
    folder = {} if path.parent == PurePosixPath() else {"folder": str(path.parent)}
    photo = {} if item.image is None else read_photo_fields(Path(item.image))
    return item._replace(source=json.dumps({**folder, **name, **photo, **item.fields}, ensure_ascii=False))


def chunk_size(expected: int, most: int) -> int:
    """Return how many items to encode before they are saved."""
    return min(most, max(MIN_SAVED, expected // STEPS))


GivenPool: TypeAlias = str | Path | Iterable[object]
"""A pool on disk, or items in memory."""


def open_pool(pool: Path, *, captions: bool) -> Pool:
    """Open a pool: a folder of images and texts, one such file, or a ``.jsonl`` file of M-BEIR candidates.

    Raises
    ------
    BadData
        The path is not a pool, or a folder without items. A file without items raises when it is read.
    """
    if (pool / "cand_pool").is_dir() and (pool / "query").is_dir():
        raise BadData(
            f"{pool} is a data set in M-BEIR's layout; give one of its pools, a file in "
            f"{pool / 'cand_pool' / 'local'} or {pool / 'cand_pool' / 'global'}"
        )
    if not pool.exists():
        raise BadData(f"{pool}: there is no such file or folder")
    if pool.suffix != ".jsonl":
        scan = (read_folder if pool.is_dir() else read_file)(pool.absolute(), captions=captions)
        problems = _left_out(scan)
        items = list(_some(_items(scan.candidates, scan.root.resolve()), pool, problems))
        return Pool(partial(iter, items), len(items), problems, has_files=True)
    if not pool.is_file():
        raise BadData(
            f"{pool} is not a pool: give a folder of pictures and texts, one such file, or a .jsonl file of "
            "candidates in M-BEIR's layout"
        )
    with pool.open("rb") as file:
        lines = file.read(SAMPLE_BYTES).count(b"\n") + 1
    expected = max(lines, lines * pool.stat().st_size // SAMPLE_BYTES)
    root = pictures_root(pool)
    return Pool(lambda: _some(_items(read_pool([pool]), root), pool, []), expected)


def pictures_root(pool: Path) -> Path:
    """Return the folder that the pictures' paths in a file of candidates start at.

    M-BEIR's paths start at the folder that holds ``cand_pool``, those of other files at their own folder.
    """
    above = next((one.parent for one in pool.resolve().parents if one.name == "cand_pool"), None)
    return above or pool.resolve().parent


def _some(items: Iterator[Item], pool: Path | None, left_out: Sequence[LeftOut]) -> Iterator[Item]:
    first = next(items, None)
    if first is None:
        raise BadData(
            f"there is nothing to index{f' in {pool}' if pool else ''}: no picture or text that can be used"
            f"{_reasons(left_out)}"
        )
    yield first
    yield from items


def _items(candidates: Iterable[Candidate], root: Path) -> Iterator[Item]:
    return (to_item(candidate, root) for candidate in candidates)


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
    item = Item(candidate.did, candidate.modality, candidate.text, image, candidate.source)
    check_item(item)
    return item


def check_item(item: Item) -> None:
    """Raise :class:`BadData` if the id has a control character, or any text is invalid Unicode."""
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


def _reasons(left_out: Sequence[LeftOut]) -> str:
    reasons = "; ".join(f"{entry.file}: {entry.reason}" for entry in left_out[:MAX_REASONS])
    return f" (left out {plural(len(left_out), 'file')}: {reasons})" if left_out else ""


def add_pool(
    writer: Writer, model: Genius, pool: Pool, *, create: IndexManifest | None = None, progress: Progress
) -> Added:
    """Add the items of a pool to an index, or create the index with them.

    Raises
    ------
    BadData
        Nothing in the pool can be used; the index is unchanged.
    """
    result = Added(left_out=list(pool.left_out))
    batches = encode_items(writer, model, pool, result, manifest=create, progress=progress)
    first = next(batches, None)
    if first is None and not result.unchanged:
        remove_work(writer.folder)
        raise BadData(
            f"there is nothing to index: none of the pictures can be read{_reasons(result.left_out)}"
        )
    if first is not None:
        batches = chain([first], batches)
        changed = writer.add_batches(batches) if create is None else writer.create_batches(create, batches)
        result.added, result.replaced = changed
    remove_work(writer.folder)
    return result


def add_new_items(writer: Writer, model: Genius, items: Sequence[NewItem]) -> list[ItemOutcome]:
    """Add items from memory; return the outcome of each, in order, as if they were added one by one.

    Images are on disk before the index refers to them.
    """
    given: list[Item | str] = []
    last: dict[str, Item] = {}
    pictures: dict[str, bytes] = {}
    for new in items:
        try:
            data = None if new.image is None else picture_bytes(new.image)
            item = _to_item(new, data)
        except (BadData, BadImage) as error:
            given.append(getattr(error, "reason", str(error)))
            continue
        given.append(item)
        last[item.id] = item
        if data is not None and item.image is not None:
            pictures[item.image] = data
    known = writer.snapshot.stamps(list(last))
    changed = [item for item in last.values() if known.get(item.id) != stamp_of(item)]
    result = Added()
    given_pictures = {item.image: pictures[item.image] for item in changed if item.image}
    with keep_pictures(writer, given_pictures) as unusable:
        pool = Pool(partial(iter, changed), len(changed))
        writer.add_batches(encode_items(writer, model, pool, result, save=False))
        unusable |= {changed[entry.id].image or "" for entry in result.left_out}
    unreadable = {changed[entry.id].id: entry.reason for entry in result.left_out}
    outcomes = []
    for new, read in zip(items, given, strict=True):
        if isinstance(read, str) or new.id in unreadable:
            reason = read if isinstance(read, str) else unreadable[new.id]
            outcomes.append(ItemOutcome(new.id, "left out", reason))
            continue
        stamp = stamp_of(read)
        is_same = known.get(new.id) == stamp
        outcomes.append(
            ItemOutcome(new.id, "unchanged" if is_same else "replaced" if new.id in known else "added")
        )
        known[new.id] = stamp
    return outcomes


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
        image_type(image)
        return image.read_bytes()
    picture = as_image(image)
    if max(picture.size) > MAX_JPEG_SIDE:
        longer = f"is {max(picture.size):,} pixels long; at most {MAX_JPEG_SIDE:,} can be stored"
        raise BadImage(Path("the image"), f"{longer}. Make it smaller, or give its file")
    return encode_jpeg(picture, quality=JPEG_QUALITY)


def read_new_item(given: object, *, default_id: str | None = None) -> NewItem:
    """Return an item that was given as a :class:`NewItem`, a mapping, a text or a picture.

    Parameters
    ----------
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
    if not isinstance(item["id"], str):
        raise UsageError(f"an item has the id {item['id']!r}; give each one a text as its id")
    new = NewItem(**item)
    parts: tuple[tuple[str, object, type], ...] = (("text", new.text, str), ("fields", new.fields, Mapping))
    for part, value, wanted in parts:
        if value is not None and not isinstance(value, wanted):
            found = type(value).__qualname__
            raise UsageError(f"item {new.id!r}: {part} is of type {found}, expected {wanted.__name__}")
    return new


def _check_is_text(text: str) -> None:
    """Refuse what is probably meant as an address or a file."""
    if re.fullmatch(r"[a-z][a-z0-9+.-]+://\S+", text, re.IGNORECASE):
        raise UsageError(
            f"{text[:80]} is a URL, and nothing is fetched: give the picture's bytes, or {{'text': ...}} to "
            "index the address itself"
        )
    if is_file(Path(text)):
        raise UsageError(f"{text} is a file; give Path({text!r}), or {{'text': {text!r}}} for the words")


def open_memory(given: Iterable[object], folder: Path, *, captions: bool) -> Pool:
    """Return a pool of items in memory and of single files; pictures are stored in the folder of the index.

    Items without an id are numbered from 0.
    """
    items: list[Item] = []
    left_out: list[LeftOut] = []
    for number, one in enumerate(given):
        if isinstance(one, Path):
            scan = read_file(one, captions=captions)
            left_out += _left_out(scan)
            items += [
                with_file_fields(item)._replace(id=one.as_posix())
                for item in _items(scan.candidates, scan.root.resolve())
            ]
            continue
        new = read_new_item(one, default_id=str(number))
        try:
            data = None if new.image is None else picture_bytes(new.image)
            items.append(_to_item(new, data))
        except (BadData, BadImage) as error:
            left_out.append(LeftOut(number, new.id, getattr(error, "reason", str(error))))
            continue
        if data is not None:
            store_picture(folder, data)
    list(_some(iter(items), None, left_out))
    return Pool(partial(iter, items), len(items), left_out)


def _left_out(scan: FolderScan) -> list[LeftOut]:
    return [
        LeftOut(-1, str(problem.file), getattr(problem, "reason", str(problem))) for problem in scan.problems
    ]


def _to_item(new: NewItem, data: bytes | None) -> Item:
    """Convert an item to its stored form, with its image named by a hash of the contents.

    Raises
    ------
    BadData
        The item cannot be stored. The message has the reason.
    """
    if not new.id or len(new.id) > MAX_ID_LENGTH:
        raise BadData(f"an id has 1 to {MAX_ID_LENGTH} characters; this one has {len(new.id)}")
    text = new.text if new.text and new.text.strip() else None
    if text is None and new.image is None:
        raise BadData("an item needs a text, an image, or both")
    try:
        source = None if not new.fields else json.dumps(new.fields, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadData(f"its fields are not JSON: {error}") from None
    modality = Modality.of(has_image=new.image is not None, has_text=text is not None)
    image = None if data is None else picture_name(data)
    item = Item(new.id, modality, text, image, source)
    check_item(item)
    return item


Batch = tuple[Sequence[Item], ItemArrays]


def encode_items(
    writer: Writer,
    model: Genius,
    pool: Pool,
    result: Added,
    *,
    manifest: IndexManifest | None = None,
    progress: Progress | None = None,
    save: bool = True,
) -> Iterator[Batch]:
    """Encode the readable items that are new or changed, chunk by chunk.

    With ``manifest``, that of an index to be created, all items are new. Unchanged items are counted in
    ``result``; unreadable ones are listed there by position. With ``save`` chunks are saved, so that an
    interrupted run can resume.
    """
    progress = progress or Silent()
    snapshot = writer.snapshot if manifest is None else None
    kept = manifest or writer.snapshot.manifest
    expected, items = pool.expected, pool.items()
    progress.begin("index", expected)
    done = 0
    while chunk := list(islice(items, chunk_size(expected, CHUNK))):
        known = {} if snapshot is None else snapshot.stamps([item.id for item in chunk])
        stamped = [item._replace(stamp=stamp_of(item)) for item in chunk]
        numbers = [place for place, item in enumerate(stamped) if known.get(item.id) != item.stamp]
        result.unchanged += len(chunk) - len(numbers)
        if numbers:
            changed = [pool.with_fields(stamped[place]) for place in numbers]
            encode = _encode_or_load if save and len(changed) >= MIN_SAVED else _encode_chunk
            encoded = encode(model, changed, writer.folder, kept)
            unreadable = {entry.id: entry for entry in encoded.left_out}
            result.left_out += [entry._replace(id=done + numbers[entry.id]) for entry in encoded.left_out]
            readable = [item for place, item in enumerate(changed) if place not in unreadable]
            if encoded.arrays is not None:
                yield readable, encoded.arrays
        done += len(chunk)
        progress.advance(min(done, expected), {})
    progress.advance(expected, {})


class _Encoded(NamedTuple):
    arrays: ItemArrays | None
    """None if no item of the chunk can be read."""
    left_out: list[LeftOut]


def _encode_or_load(model: Genius, items: Sequence[Item], folder: Path, manifest: IndexManifest) -> _Encoded:
    """Encode a chunk and save it, or load it if an interrupted run saved it."""
    kept = (manifest.embeddings, manifest.embedding_bits)
    key = [VERSION, model.fingerprint, kept, [(item.id, item.stamp) for item in items]]
    path = folder / WORK / f"{fingerprint_of(key)[:32]}.npz"
    with contextlib.suppress(Exception):  # ignore a damaged file
        with np.load(path, allow_pickle=False) as file:
            saved = {name: file[name] for name in file.files}
        left_out = [LeftOut(*entry) for entry in json.loads(str(saved.pop("left_out")))]
        return _Encoded(ItemArrays(**saved, stored=manifest.embeddings) if saved else None, left_out)
    encoded = _encode_chunk(model, items, folder, manifest)
    make_folder(path.parent)
    arrays: dict[str, Any] = {
        name: value
        for name, value in (encoded.arrays._asdict() if encoded.arrays else {}).items()
        if isinstance(value, np.ndarray)
    }
    with write_atomically(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays, left_out=np.array(json.dumps(encoded.left_out)))
    return encoded


def _encode_chunk(model: Genius, items: Sequence[Item], folder: Path, manifest: IndexManifest) -> _Encoded:
    rows = list(feature_rows(items, folder))
    encoded = encode_shard(rows, model.encoder, skip_bad_images=True)
    if not len(encoded.shard.ids):
        return _Encoded(None, encoded.left_out)
    features = FeatureBatch.of_shard(encoded.shard)
    arrays = encode_batch(
        model,
        features,
        encoded.shard.modality,
        embeddings=manifest.embeddings,
        bits=manifest.embedding_bits,
    )
    return _Encoded(arrays, encoded.left_out)


def encode_batch(
    model: Genius,
    features: FeatureBatch,
    modality: Int8[np.ndarray, " items"],
    *,
    embeddings: StoredEmbeddings,
    bits: EmbeddingBits = 16,
) -> ItemArrays:
    """Return the IDs of some items, and their embeddings if they are to be stored.

    Parameters
    ----------
    bits
        of a number, as the embeddings will be stored; with fewer than 16, their residuals are returned.
    """
    encoded = model.encode(features, modality.astype(np.int64))
    vectors = densities = None
    if embeddings == "fused":
        of_items = model.quantizer.norm_and_density
        densities = of_items.item_density(encoded.embeddings, encoded.codes).numpy()
    if embeddings != "none":
        kept = F.normalize(features.total(), dim=-1) if embeddings == "raw" else encoded.embeddings
        if is_residual(bits):
            kept = kept - torch.from_numpy(model.ranker.vectors(encoded.codes.numpy()))
        vectors = kept.numpy().astype(np.float16)
    return ItemArrays(
        encoded.columns.numpy().astype(np.int16),
        encoded.code_cosine.numpy().astype(np.float16),
        vectors,
        embeddings,
        densities,
    )


def encode_features(
    model: Genius, items: Iterable[Item], features: Features, manifest: IndexManifest, progress: Progress
) -> Iterator[Batch]:
    """Yield items with their IDs, from features of the same items in the same order.

    Raises
    ------
    BadData
        There are fewer items than features.
    """
    progress.begin("index", len(features))
    remaining = iter(items)
    for start in range(0, len(features), CHUNK):
        rows = np.arange(start, min(start + CHUNK, len(features)))
        chunk = list(islice(remaining, len(rows)))
        if len(chunk) < len(rows):
            raise BadData("the pool changed while it was indexed; run the command again")
        arrays = encode_batch(
            model,
            features.gather(rows),
            features.modality[rows],
            embeddings=manifest.embeddings,
            bits=manifest.embedding_bits,
        )
        yield chunk, arrays
        progress.advance(start + len(rows), {})


def feature_rows(items: Iterable[Item], folder: Path) -> Iterator[FeatureRow]:
    """Yield the feature row of each item; paths of stored images are relative to the index's folder."""
    for number, item in enumerate(items):
        yield FeatureRow(
            id=number,
            key=ItemKey("candidate", item.id),
            modality=item.modality,
            image=None if item.image is None else folder / item.image,
            text=format_text(item.text),
        )


def stamp_of(item: Item) -> str:
    """Return a stamp that changes whenever the item's text, fields or image file change."""
    file = None
    if item.image is not None:
        with contextlib.suppress(OSError):  # a missing picture is reported when it is opened
            status = Path(item.image).stat()
            file = (status.st_size, status.st_mtime_ns)
    contents = (item.modality.mbeir, item.text, item.source, item.image, file)
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:16]
