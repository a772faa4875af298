"""Items that are in memory, on their way into an index: texts, pictures as bytes, fields."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
from jaxtyping import UInt64

from genius_search.data.features import LEFT_OUT, FeatureBatch, LeftOut
from genius_search.data.folder import read_folder
from genius_search.data.mbeir import read_pool
from genius_search.embed import FeatureRow, chunks, count_lines, embed, encode_shard
from genius_search.encoders.base import ItemKey
from genius_search.errors import BadData
from genius_search.index.encode import encode_batch, encode_features
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import ItemArrays, StoredEmbeddings
from genius_search.index.writer import WORK, Writer, keep_pictures, picture_name, remove_work
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.records import Candidate, Modality, format_text

REASONS_SHOWN: Final = 5
"""Files that an error names."""
BATCH: Final = 4096
"""Items looked at together."""


class NothingReadable(BadData):
    """No picture among the items can be read, and nothing else is there; names the first of them."""

    def __init__(self, left_out: Sequence[LeftOut]) -> None:
        super().__init__(f"there is nothing to index: none of the pictures can be read{_reasons(left_out)}")
        self.left_out = left_out


@dataclass(frozen=True, slots=True)
class PoolItems:
    """A pool as items, to be gone through as often as needed."""

    count: int
    left_out: Sequence[LeftOut]
    """Files that cannot be items, each with its reason."""
    read: Callable[[], Iterator[Item]]
    file: Path | None = None
    """Where they are read from each time, if it is a file."""
    state: tuple[int, int] | None = None
    """Of that file, when the items were counted: size, and time of the last change."""

    def __iter__(self) -> Iterator[Item]:
        yield from self.read()
        # Every reading gives the same rows, or their IDs would be those of other items.
        if self.file is not None and _state_of_file(self.file) != self.state:
            raise BadData(f"{self.file} changed while it was being indexed; run the same again")


@dataclass(frozen=True, slots=True)
class EncodedItems:
    """Items and what the model says of them, row by row."""

    pool: PoolItems
    arrays: ItemArrays
    left_out: Sequence[LeftOut]
    """Pictures that could not be read; their items are not among these."""
    stamps: UInt64[np.ndarray, " pool"]
    """Of the pool's items as they were before they were embedded: a picture that changed since is noticed
    the next time."""

    def __len__(self) -> int:
        return len(self.arrays.codes)

    def __iter__(self) -> Iterator[Item]:
        unreadable = {entry.id for entry in self.left_out}
        return (
            item._replace(stamp=f"{self.stamps[number]:016x}")
            for number, item in enumerate(self.pool)
            if number not in unreadable and number < len(self.stamps)  # one that grew says so at its end
        )


def read_items(pool: Path, *, captions: bool) -> PoolItems:
    """The items of a pool: a folder of pictures and texts, or a ``.jsonl`` file of M-BEIR candidates.

    Raises
    ------
    BadData
        it is no pool, or nothing in it can be an item.
    """
    found = _scan(pool, captions=captions)
    if not found.count:
        reasons = _reasons(found.left_out)
        raise BadData(f"there is nothing to index in {pool}: no picture or text that can be used{reasons}")
    return found


def without_unchanged(
    pool: PoolItems, stamps: Callable[[Sequence[str]], Mapping[str, str | None]]
) -> tuple[PoolItems, int]:
    """The items that are new or changed, and how many are neither.

    ``stamps`` gives those of the items that are there already, as they were when they were added.
    """
    is_changed = np.ones(pool.count, dtype=bool)
    start = 0
    items = iter(pool)
    while part := list(islice(items, BATCH)):
        known = stamps([item.id for item in part])
        for number, item in enumerate(part, start):
            is_changed[number] = known.get(item.id) != stamp_of(item)
        start += len(part)
    changed = dataclasses.replace(
        pool,
        count=int(is_changed.sum()),
        read=lambda: (item for number, item in enumerate(pool.read()) if is_changed[number]),
    )
    return changed, pool.count - changed.count


def encode_items(
    model: Genius, pool: PoolItems, folder: Path, *, embeddings: StoredEmbeddings, progress: Progress
) -> EncodedItems:
    """Embed and encode items; those without a readable picture are left out.

    Features and codes wait in ``.work/`` inside ``folder``, so that a killed run goes on where it stopped.
    :func:`genius_search.index.writer.remove_work` takes them away.

    Raises
    ------
    NothingReadable
        no item is left; there is nothing to go on with then, and ``.work/`` is gone.
    """
    stamps, state = stamps_of(pool)
    try:
        features = embed(
            feature_rows(pool, folder),
            model.encoder,
            folder / WORK / "features",
            inputs={"items": state},
            expected=pool.count,
            progress=progress,
            skip_bad_images=True,
        )
    except BadData:
        left_out = _left_out(folder / WORK)
        remove_work(folder)
        if len(left_out) == pool.count:
            raise NothingReadable(left_out) from None
        raise
    arrays = encode_features(
        model, features, folder / WORK / "codes", embeddings=embeddings, progress=progress
    )
    return EncodedItems(pool, arrays, features.left_out, stamps)


def feature_rows(items: Iterable[Item], folder: Path) -> Iterator[FeatureRow]:
    """What to embed of each item; pictures that an index keeps are named from its folder."""
    for number, item in enumerate(items):
        yield FeatureRow(
            id=number,
            key=ItemKey("candidate", item.id),
            modality=item.modality,
            image=None if item.image is None else folder / item.image,
            text=format_text(item.text),
        )


def _left_out(work: Path) -> list[LeftOut]:
    """What features that could not be finished say of pictures that cannot be read."""
    return [
        LeftOut(*fields)
        for path in sorted(work.glob(f"*/shard-*/{LEFT_OUT}"))
        for fields in json.loads(path.read_text())
    ]


def _reasons(left_out: Sequence[LeftOut]) -> str:
    """The first files that were left out, each with its reason, for the end of a message."""
    reasons = "; ".join(f"{entry.file}: {entry.reason}" for entry in left_out[:REASONS_SHOWN])
    return f" ({len(left_out)} files were left out: {reasons})" if left_out else ""


def _scan(pool: Path, *, captions: bool) -> PoolItems:
    if (pool / "cand_pool").is_dir() and (pool / "query").is_dir():
        raise BadData(
            f"{pool} is a data set in M-BEIR's layout; give one of its pools, a file in "
            f"{pool / 'cand_pool' / 'local'} or {pool / 'cand_pool' / 'global'}"
        )
    if pool.is_dir():
        scan = read_folder(pool, captions=captions)
        return PoolItems(
            len(scan.candidates),
            [
                LeftOut(-1, str(problem.file), getattr(problem, "reason", str(problem)))
                for problem in scan.problems
            ],
            lambda: _items(scan.candidates, pool.resolve()),
        )
    if pool.suffix != ".jsonl" or not pool.exists():
        raise BadData(
            f"{pool} is not a pool: give a folder of pictures and texts, or a .jsonl file of candidates in "
            "M-BEIR's layout"
        )
    root = _data_root(pool)
    state = _state_of_file(pool)
    return PoolItems(count_lines([pool]), [], lambda: _items(read_pool([pool]), root), pool, state)


def _items(candidates: Iterator[Candidate] | Sequence[Candidate], root: Path) -> Iterator[Item]:
    for candidate in candidates:
        image = None if candidate.image is None else os.path.normpath(root / candidate.image)
        item = Item(candidate.did, candidate.modality, candidate.text, image, candidate.source)
        check_characters(item)
        yield item


def check_characters(item: Item) -> None:
    """Refuse what cannot be stored, before anything is embedded."""
    for part in (item.id, item.text, item.image, item.source):
        try:
            (part or "").encode()
        except UnicodeEncodeError:
            raise BadData(
                f"item {item.id!r} holds half a character (a lone surrogate) in {str(part)[:80]!r}; "
                "write it as UTF-8"
            ) from None


def _data_root(pool: Path) -> Path:
    """M-BEIR's paths start at the folder that holds ``cand_pool``; other pools' at their own folder."""
    for folder in pool.resolve().parents:
        if folder.name == "cand_pool":
            return folder.parent
    return pool.resolve().parent


def stamps_of(pool: PoolItems) -> tuple[UInt64[np.ndarray, " pool"], str]:
    """The stamp of each item, and what changes whenever one does: left-over work is only reused if it fits.

    Eight bytes an item: 45 MB for 5.6 million.
    """
    digest = hashlib.sha256()
    stamps = [np.empty(0, dtype=np.uint64)]
    items = iter(pool)
    while part := list(islice(items, BATCH)):
        here = [(item.id, stamp_of(item)) for item in part]
        digest.update(repr(here).encode())
        stamps.append(np.array([int(stamp, 16) for _, stamp in here], dtype=np.uint64))
    return np.concatenate(stamps), digest.hexdigest()


def stamp_of(item: Item) -> str:
    """Changes whenever the item does: its text, its fields, its picture's file."""
    contents = (item.modality.mbeir, item.text, item.source, item.image, _picture_stamp(item))
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:16]


def _picture_stamp(item: Item) -> tuple[int, int] | None:
    """When its picture was last changed, and how large it is; a missing one is named when it is opened."""
    if item.image is None:
        return None
    with contextlib.suppress(OSError):
        return _state_of_file(Path(item.image))
    return None


def _state_of_file(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


LONGEST_ID: Final = 500
"""Characters of an id that is given and not found."""


class NewItem(NamedTuple):
    """An item to be added that is no file: a text, a picture as it was sent, or both."""

    id: str
    text: str | None = None
    image: bytes | None = None
    fields: Mapping[str, object] | None = None
    """What to filter by."""


class ItemOutcome(NamedTuple):
    """What became of an item that was to be added."""

    id: str
    status: Literal["added", "replaced", "unchanged", "left out"]
    reason: str | None = None
    """Why it was left out."""


def add_new_items(
    writer: Writer, model: Genius, snapshot: Snapshot, items: Sequence[NewItem]
) -> list[ItemOutcome]:
    """Write items into an index that is held for writing and was opened since; what became of each, in order.

    The pictures are on the disk before the index names them.
    """
    stored: dict[str, Item] = {}
    pictures: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    for new in items:  # of two with one id the last is meant
        stored.pop(new.id, None)
        left_out.pop(new.id, None)
        try:
            item = stored[new.id] = _item_of(new)
        except BadData as error:
            left_out[new.id] = str(error)
            continue
        if new.image is not None and item.image is not None:
            pictures[item.image] = new.image
    known = snapshot.stamps(list(stored))
    changed = [item for name, item in stored.items() if known.get(name) != stamp_of(item)]
    if changed:
        keep_pictures(writer.folder, [pictures[item.image] for item in changed if item.image])
        left_out |= _write(writer, model, snapshot, changed)
    is_new = {item.id for item in changed}

    def outcome(name: str) -> ItemOutcome:
        if name in left_out:
            return ItemOutcome(name, "left out", left_out[name])
        if name not in is_new:
            return ItemOutcome(name, "unchanged")
        return ItemOutcome(name, "replaced" if name in known else "added")

    return [outcome(new.id) for new in items]


def _item_of(new: NewItem) -> Item:
    """An item as it will be stored; its picture is named by its contents.

    Raises
    ------
    BadData
        it cannot be stored; says why.
    """
    if not new.id or len(new.id) > LONGEST_ID or "\0" in new.id:
        raise BadData(f"an id has 1 to {LONGEST_ID} characters, none of them NUL")
    text = new.text if new.text and new.text.strip() else None
    if text is None and new.image is None:
        raise BadData("an item needs a text, an image, or both")
    try:
        source = None if not new.fields else json.dumps(new.fields, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadData(f"its fields are not JSON: {error}") from None
    modality = Modality.of(has_image=new.image is not None, has_text=text is not None)
    image = None if new.image is None else picture_name(new.image)
    item = Item(new.id, modality, text, image, source)
    check_characters(item)
    return item


def _write(writer: Writer, model: Genius, snapshot: Snapshot, items: Sequence[Item]) -> dict[str, str]:
    """Encode items and add them; returns those whose picture cannot be read, with the reason.

    They are in memory already, so that nothing is kept to go on from.
    """
    stamps = [stamp_of(item) for item in items]
    parts: list[ItemArrays] = []
    left_out: dict[int, str] = {}
    for rows in chunks(feature_rows(items, writer.folder), BATCH):
        encoded = encode_shard(rows, model.encoder, skip_bad_images=True)
        left_out.update((entry.id, entry.reason) for entry in encoded.left_out)
        features, modality = FeatureBatch.of_shard(encoded.shard), encoded.shard.modality
        if len(modality):
            parts.append(encode_batch(model, features, modality, embeddings=snapshot.manifest.embeddings))
    if parts:
        readable = (
            item._replace(stamp=stamps[number]) for number, item in enumerate(items) if number not in left_out
        )
        writer.add(readable, _joined(parts))
    return {items[number].id: reason for number, reason in left_out.items()}


def _joined(parts: Sequence[ItemArrays]) -> ItemArrays:
    vectors = [part.embeddings for part in parts if part.embeddings is not None]
    densities = [part.densities for part in parts if part.densities is not None]
    return ItemArrays(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.typicality for part in parts]),
        np.concatenate(vectors) if vectors else None,
        parts[0].stored,
        np.concatenate(densities) if densities else None,
    )
