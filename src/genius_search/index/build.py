"""How an index is filled: items become features, then IDs and embeddings, then a segment.

There is one way into an index, whether it is created or added to, from pictures, texts or vectors::

    pool --find_changes------> PoolChanges: the new and changed items
         --compute_features--> features, of the encoder or given as vectors
         --batches_with_ids--> batches of items with IDs and embeddings, or those of stored items
         --Writer.add--------> a segment; a new index gets its first one by Writer.rewrite

An index that is created with an encoder alone has no model yet: :func:`create_index` fits codebooks
to the features before it computes IDs. Batches are computed while the writer asks for them.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice, repeat
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float32, Int8, Shaped

from genius_search.artifact import fingerprint_of
from genius_search.config import CodebookConfig, validate_settings
from genius_search.data.features import FeatureBatch, Features, LeftOut
from genius_search.data.values import fields_to_json
from genius_search.encoders.base import Encoder, VectorEncoder, is_cut, reads_images
from genius_search.encoders.open import absolute_spec, load_encoder
from genius_search.encoders.passages import divide
from genius_search.encoders.precomputed import PrecomputedEncoder
from genius_search.errors import BadData, BadImage, GeniusError, UsageError
from genius_search.index.items import Item
from genius_search.index.measure import (
    choose_embedding_bits,
    measure_bits,
    measure_least_scores,
    measure_recall,
)
from genius_search.index.pictures import is_video
from genius_search.index.pool import (
    Pool,
    nothing_to_index,
    pool_from_items,
    stamp_of,
)
from genius_search.index.roots import ContentHash, content_size, is_gone
from genius_search.index.snapshot import ItemState, Location, Snapshot
from genius_search.index.source import (
    ItemEncoder,
    draw_embeddings,
    item_encoder,
    vector_features,
)
from genius_search.index.store import (
    CURRENT,
    LOCK,
    OWN_MODEL,
    PICTURES,
    SEGMENTS,
    TEMPORARY,
    WORK,
    IndexManifest,
    StoredEmbeddings,
    has_lost_manifest,
    new_identity,
)
from genius_search.index.videos import find_moments
from genius_search.index.writer import (
    Batch,
    Entry,
    ItemArrays,
    Passage,
    Writer,
    check_bits,
    open_writer,
    remove_work,
    stored_batches,
)
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.nn.fine import pack_fine_codes
from genius_search.progress import Progress
from genius_search.records import Modality, format_text
from genius_search.search.vectors import (
    EmbeddingBits,
    is_residual,
    quantize,
    quantize_with_lengths,
)
from genius_search.training.codebooks import LEVELS, fit_codebooks, query_metric

MAX_BATCH_ITEMS: Final = 4096
"""Maximum number of items that are looked up together."""
MAX_ENCODED_ITEMS: Final = 16_384
"""Maximum number of items whose IDs and densities are computed together."""
FEW_ITEMS: Final = 16_384
"""Number of items up to which embeddings have eight bits per number by default: few items take
little memory, and the vector of each item then finds it."""
MANY_ITEMS: Final = 1_000_000
"""Number of items from which on embeddings have two bits per number by default."""
MIN_GROWTH: Final = 1.5
"""Growth since the last measurement, as a factor, from which on recall is measured again."""
LEFTOVERS: Final = frozenset(
    {LOCK, WORK, TEMPORARY, PICTURES, SEGMENTS, f"{CURRENT}.tmp", Path(OWN_MODEL).name}
)
"""Names that an interrupted writer may leave in the folder of an index."""
NAME_FIELDS: Final = ("folder", "name")
"""Fields that follow from the path of a file, and change when it is moved."""


Fuse: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function from image and text features, 0 where absent, to unit embeddings."""


class PlannedChange(NamedTuple):
    """A change that a dry run lists."""

    kind: Literal["add", "update", "move", "delete"]
    id: str
    before: str | None = None
    """The present id of an item that would be moved."""


@dataclass(slots=True)
class ChangeSummary:
    """The result of adding items, or of synchronising an index with its folders."""

    added: int = 0
    """Number of items that were written, replaced ones included."""
    replaced: int = 0
    """Number of added items that replaced an item with the same id."""
    unchanged: int = 0
    """Number of items that the index already contained, unchanged."""
    left_out: list[LeftOut] = field(default_factory=list)
    """Unusable files with their reasons."""
    reused: int = 0
    """Number of added items that were not encoded, because the index had the same content."""
    moved: int = 0
    """Number of added items that replaced another item, because its file was moved or renamed."""
    deleted: int = 0
    missing: int = 0
    """Number of items that stay in the index although their files are missing
    (:meth:`genius_search.Index.sync`)."""
    changes: list[PlannedChange] = field(default_factory=list)
    """The changes that a dry run would make."""
    shortened: list[str] = field(default_factory=list)
    """Ids of items whose texts are longer than the encoder reads. The remainder is found by
    its words only. An index that was created with an encoder divides long texts into passages
    instead, except the captions of pictures that the encoder reads."""


class ReusedItem(NamedTuple):
    """A stored item with the same content as a changed one, whose ID and embedding are copied."""

    content: str
    """Text of its :class:`~genius_search.index.roots.ContentHash`."""
    location: Location
    relation: Literal["copied", "moved", "touched"] = "copied"
    """``touched``: it is the changed item, and only the time of its file differs. ``moved``: its
    file is gone, and the changed item's file took its place. ``copied``: it keeps another file."""


@dataclass(slots=True)
class Change:
    """A new or changed item of a pool.

    The item itself is not kept, since the items of a pool may not fit into memory:
    :meth:`PoolChanges.items` reads it again.
    """

    number: int
    """Position of the item in its pool."""
    stamp: str
    stored: ItemState | None
    """The item with the same id in the index; None if the id is new."""
    source: ReusedItem | None = None
    """The stored item to copy the ID and embedding from; None if the item has to be encoded."""
    passages: Sequence[Passage] = ()
    """Passages of a text that is longer than the encoder reads, without the first."""

    @property
    def action(self) -> Literal["add", "update", "touch"]:
        """How the index changes; a touched item only gets a new stamp."""
        if self.source is not None and self.source.relation == "touched":
            return "touch"
        return "add" if self.stored is None else "update"


class NewVectors(Collection[Change]):
    """The changes that add every item of a pool of vectors to a new index.

    They are made whenever they are read: a list of a million would take 200 MB.
    """

    def __init__(self, stamps: Shaped[np.ndarray, " items"]) -> None:
        self._stamps = stamps

    def __iter__(self) -> Iterator[Change]:
        return map(Change, range(len(self)), map(bytes.decode, self._stamps), repeat(None))

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, change: object) -> bool:
        return any(change == other for other in self)


@dataclass(slots=True)
class PoolChanges:
    """The new and changed items of a pool, and their features."""

    pool: Pool
    left_out: list[LeftOut]
    encoder: Encoder
    divides: bool
    """Whether long texts get passages. With a trained model an item has one ID, as in the paper."""
    changes: Collection[Change] = ()
    """In the order of the pool."""
    num_unchanged: int = 0
    """Number of items whose contents are already in the index; their files may have other times."""
    features: Features = field(default_factory=lambda: Features(()))
    """Features of the items to encode; row i belongs to entry ``ids[i]`` of :meth:`entries`."""
    contents: list[str | None] = field(default_factory=list)
    """Content hash for each row of the features."""
    shortened: list[str] = field(default_factory=list)
    """Ids of items whose long texts have no passages."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the changed items."""
        return fingerprint_of([change.stamp for change in self.changes])

    def items(self) -> Iterator[tuple[Change, Item]]:
        """Read the changed items from the pool, and yield each with its change."""
        items = enumerate(self.pool.items())
        for change in self.changes:
            for number, item in items:
                if number == change.number:
                    has_stamp = item.stamp == change.stamp
                    yield change, item if has_stamp else item._replace(stamp=change.stamp)
                    break

    def entries(self) -> Iterator[Entry]:
        """Yield the items to encode, each followed by its passages."""
        for change, item in self.items():
            if change.source is None:
                yield item
                yield from change.passages

    def compute_features(
        self, work: ItemEncoder, progress: Progress, *, share: tuple[int, int] = (0, 1)
    ) -> None:
        """Encode the items whose features cannot be reused, or take the pool's vectors.

        With the ``share`` (i, n), only every n-th item is encoded, from number i on.
        """
        if self.pool.vectors is not None:
            count = len(self.changes)
            rows = np.fromiter((change.number for change in self.changes), np.int64, count)
            modality = np.fromiter((item.modality.code for _, item in self.items()), np.int8, count)
            self.features = vector_features(self.pool.vectors, rows, modality)
            self.contents = [None] * len(rows)
            return
        self._find_moments(progress)
        if self.divides:
            self._divide_texts()
        count = self._count_entries()
        if count:
            self.features = work.features_of(
                self.entries(), count // share[1], progress, pool=self.pool, share=share
            )
            self.contents = self.features.contents
            self.left_out += self.features.left_out

    def keep_contents(self) -> None:
        """Keep the content hashes of stored items that are encoded again.

        Those of files were computed before the captions inside files were added to their texts.
        """
        has_features = np.isin(np.arange(self._count_entries()), self.features.ids)
        self.contents = [
            entry.content if isinstance(entry, Item) else None
            for entry in compress(self.entries(), has_features)
        ]

    def require_any(self) -> None:
        """Raise :class:`BadData` if the encoder can read no item of the pool."""
        is_any_reused = any(change.source is not None for change in self.changes)
        if not len(self.features) and not is_any_reused and not self.num_unchanged:
            raise nothing_to_index(": the encoder can read none of the items", self.left_out)

    def batches(self, model: Genius, snapshot: Snapshot, progress: Progress) -> Iterator[Batch]:
        """Yield the batches to write: reused items first, then encoded ones."""
        yield from self._reused_batches(snapshot)
        if len(self.features):
            entries = self._encoded_entries()
            yield from batches_with_ids(model, entries, self.features, snapshot.manifest, progress)

    def summary(self, num_written: int, num_replaced: int) -> ChangeSummary:
        """Return the summary after the batches were written: touched items count as unchanged."""
        sources = [change.source for change in self.changes if change.source is not None]
        num_touched = sum(source.relation == "touched" for source in sources)
        return ChangeSummary(
            num_written - num_touched,
            num_replaced - num_touched,
            self.num_unchanged,
            self.left_out,
            reused=len(sources) - num_touched,
            shortened=self.shortened,
        )

    def _find_moments(self, progress: Progress) -> None:
        """Decode the videos to encode, and make their moments passages, unless items have one ID.

        Videos that cannot be decoded are left out.
        """
        videos = [
            (change, item)
            for change, item in self.items()
            if change.source is None and is_video(item)
        ]
        if not videos:
            return
        progress.begin("videos", len(videos))
        unreadable: set[int] = set()
        for number, (change, item) in enumerate(videos, start=1):
            try:
                passages = find_moments(
                    self.pool.with_fields(item), reads_images=reads_images(self.encoder)
                )
                change.passages = passages if self.divides else ()
            except BadImage as error:
                unreadable.add(change.number)
                self.left_out.append(LeftOut(change.number, str(error.file), error.reason))
            progress.advance(number, {})
        self.changes = [change for change in self.changes if change.number not in unreadable]

    def _divide_texts(self) -> None:
        """Divide the texts to encode into passages, but not those of pictures that are encoded."""
        for change, item in self.items():
            is_text = item.modality is Modality.TEXT or not reads_images(self.encoder)
            if change.source is None and is_text and not change.passages:
                text = self.pool.with_caption(item).description
                change.passages = find_passages(self.encoder, text) or ()

    def _count_entries(self) -> int:
        """Return the number of items and passages to encode."""
        count = 0
        for change in self.changes:
            if change.source is None:
                count += 1 + len(change.passages)
        return count

    def _reused_batches(self, snapshot: Snapshot) -> Iterator[Batch]:
        """Yield the changed items with the IDs and embeddings of stored items."""
        if all(change.source is None for change in self.changes):
            return
        sources: list[ReusedItem] = []
        items: list[Item] = []
        for change, item in self.items():
            if change.source is not None:
                sources.append(change.source)
                items.append(item)
        locations = [source.location for source in sources]
        stored_items = snapshot.items_at(*map(np.array, zip(*locations, strict=True)))
        updated = [
            self._updated_item(item, source, stored)
            for item, source, stored in zip(items, sources, stored_items, strict=True)
        ]
        yield from stored_batches(snapshot.segments, updated, locations)

    def _updated_item(self, item: Item, source: ReusedItem, stored: Item) -> Item:
        """Return a reused item as it is written, with the text that was encoded.

        A moved or touched file also keeps its fields, because the list or side-car file that gave
        them may have the old name; only those of its path are new.
        """
        updated = self.pool.with_fields(item)
        if source.relation != "copied" and self.pool.has_files:
            fields = {
                name: value for name, value in stored.fields.items() if name not in NAME_FIELDS
            }
            updated = updated._replace(source=fields_to_json({**fields, **updated.fields})[0])
        return updated._replace(
            text=stored.text,
            content=stored.content,
            modality=stored.modality,
            picture_words=stored.picture_words,
            boxes=stored.boxes,
        )

    def _encoded_entries(self) -> Iterator[Entry]:
        """Yield the entries that have features, in their order, as they are written."""
        # Entry n has features if n is one of their ids; the encoder could not read the others.
        has_features = np.isin(np.arange(self._count_entries()), self.features.ids)
        modalities = list(Modality)
        has_images = reads_images(self.encoder)
        rows = zip(
            compress(self._entries_with_changes(), has_features),
            self.contents,
            self.features.modality.tolist(),
            strict=False,
        )
        for (entry, change), content, code in rows:
            if isinstance(entry, Passage):
                yield entry
                continue
            item = self.pool.with_fields(entry)
            modality = modalities[code] if has_images else item.modality
            if (content, modality) != (item.content, item.modality):
                item = item._replace(content=content, modality=modality)
            words = item.text if has_images else item.description
            if not change.passages and is_cut(self.encoder, format_text(words)):
                self.shortened.append(item.id)
            yield item

    def _entries_with_changes(self) -> Iterator[tuple[Entry, Change]]:
        """Yield :meth:`entries`, each with the change that it belongs to."""
        for change, item in self.items():
            if change.source is None:
                yield item, change
                for passage in change.passages:
                    yield passage, change


def find_passages(encoder: Encoder, text: str) -> list[Passage]:
    """Return the passages of a text after the first, none longer than the encoder reads.

    The list is empty if the encoder reads all of the text.
    """
    return [Passage(*span) for span in divide(encoder, text, format_text)[1:]]


def find_changes(
    folder: Path, pool: Pool, encoder: Encoder, snapshot: Snapshot | None, *, divides: bool
) -> PoolChanges:
    """Compare a pool with an index, and return the new and changed items; nothing is encoded.

    Raises
    ------
    UsageError
        The pool's vectors have another width than the features of the encoder.
    """
    if pool.vectors is not None and pool.vectors.shape[1] != encoder.dim:
        raise UsageError(
            f"the vectors have {pool.vectors.shape[1]} numbers, those of this index {encoder.dim}; "
            "give vectors of its encoder"
        )
    pool_changes = PoolChanges(pool, [*pool.left_out], encoder, divides)
    if snapshot is None and pool.stamps is not None:
        pool_changes.changes = NewVectors(pool.stamps)
        return pool_changes
    changes: list[Change] = []
    items = enumerate(pool.items())
    while batch := list(islice(items, MAX_BATCH_ITEMS)):
        ids = [item.id for _, item in batch]
        states = {} if snapshot is None else snapshot.item_states(ids)
        for number, item in batch:
            change = _compare_item(pool_changes, number, item, states.get(item.id))
            if change is not None:
                changes.append(change)
    pool_changes.changes = changes
    if snapshot is not None and snapshot.segments and pool.vectors is None:
        _find_reusable(pool_changes, folder, snapshot)
    return pool_changes


def all_changes(pool: Pool, encoder: Encoder) -> PoolChanges:
    """Return all items of a pool as new ones, to encode them whatever an index has."""
    pool_changes = PoolChanges(pool, [*pool.left_out], encoder, divides=True)
    pool_changes.changes = [
        Change(number, stamp_of(item), None) for number, item in enumerate(pool.items())
    ]
    return pool_changes


def _compare_item(
    pool_changes: PoolChanges, number: int, item: Item, stored: ItemState | None
) -> Change | None:
    """Return the change of a new or changed item; count an unchanged one.

    An item whose id belongs to an item of another root is left out.
    """
    stamp = stamp_of(item)
    if stored is None:
        return Change(number, stamp, None)
    if stored.root != item.root:
        reason = (
            f"an item from elsewhere has the id {item.id!r}; delete that item, or rename this file"
        )
        pool_changes.left_out.append(LeftOut(number, item.image or item.id, reason))
    elif stored.stamp == stamp:
        pool_changes.num_unchanged += 1
    else:
        return Change(number, stamp, stored)
    return None


def _find_reusable(pool_changes: PoolChanges, folder: Path, snapshot: Snapshot) -> None:
    """Find the changed items whose contents the index has, of touched, moved and copied files.

    A file is read only if the index has content of the same size.
    """
    sizes = {
        change.number: content_size(item, folder)
        for change, item in pool_changes.items()
        if change.stored is not None or pool_changes.pool.has_files
    }
    sources = _stored_contents(pool_changes, snapshot, {*sizes.values()})
    stored_sizes = {content.size for content in sources}
    for change, item in pool_changes.items():
        if sizes.get(change.number) not in stored_sizes:
            continue
        content = ContentHash.of(item, folder, pool_changes.pool.pictures.digest)
        if content is None:
            continue
        touched = _touched_item(change, item, content, pool_changes.pool)
        change.source = touched or sources.get(content)
        pool_changes.num_unchanged += touched is not None


def _touched_item(
    change: Change, item: Item, content: ContentHash, pool: Pool
) -> ReusedItem | None:
    """Return the stored state of a changed item if nothing but the time of its file has changed.

    Stamps have the form ``contents.file``, and the part after the dot depends on the file's times
    (:func:`~genius_search.index.pool.stamp_of`). A picture whose captions cannot be read now
    keeps its captions.
    """
    stored = change.stored
    old = None if stored is None else ContentHash.parse(stored.content)
    if stored is None or stored.content is None or old is None:
        return None
    if old.without_text() != content.without_text():
        return None
    has_same_metadata = str(stored.stamp).partition(".")[0] == change.stamp.partition(".")[0]
    if not has_same_metadata and item.image not in pool.unsure:
        return None
    return ReusedItem(stored.content, stored.location, "touched")


def _stored_contents(
    pool_changes: PoolChanges, snapshot: Snapshot, sizes: Collection[int | None]
) -> dict[ContentHash, ReusedItem]:
    """Return stored items by their contents: those to be replaced, and all of the given sizes.

    A picture whose file is gone may have moved. It is also listed without its text, because the new
    file of a moved picture may have lost its caption: the list or side-car file has the old name.
    """
    sources: dict[ContentHash, ReusedItem] = {}
    for change in pool_changes.changes:
        if change.stored is not None and change.stored.content:
            content = ContentHash.parse(change.stored.content)
            if content is not None:
                sources[content] = ReusedItem(change.stored.content, change.stored.location)
    if not pool_changes.pool.has_files or not sizes:
        return sources
    for item, location in snapshot.alive():
        content = ContentHash.parse(item.content)
        if item.content is None or content is None or content.size not in sizes:
            continue
        sources[content] = ReusedItem(item.content, location)
        if item.root is not None and is_gone(snapshot.manifest.roots, item):
            sources[content] = ReusedItem(item.content, location, "moved")
            sources.setdefault(content.without_text(), sources[content])
    return sources


def write_changes(
    writer: Writer,
    model: Genius,
    pool_changes: PoolChanges,
    progress: Progress,
    *,
    delete: Collection[str] = (),
) -> ChangeSummary:
    """Add encoded changes to an index, and delete items in the same commit."""
    batches = pool_changes.batches(model, writer.snapshot, progress)
    num_written, num_replaced = writer.add(batches, delete=delete)
    remove_work(writer.folder)
    return pool_changes.summary(num_written, num_replaced)


def add_pool(
    writer: Writer,
    model: Genius,
    pool: Pool,
    *,
    may_be_empty: bool = False,
    progress: Progress,
) -> ChangeSummary:
    """Add the items of a pool to an index; unchanged items are skipped.

    Raises
    ------
    BadData
        Nothing in the pool can be used, and it must not be empty; the index is unchanged.
    """
    snapshot = writer.snapshot
    divides = snapshot.manifest.has_own_model
    pool_changes = find_changes(writer.folder, pool, model.encoder, snapshot, divides=divides)
    with item_encoder(writer.folder, model.encoder) as work:
        pool_changes.compute_features(work, progress)
        if not may_be_empty:
            pool_changes.require_any()
        summary = write_changes(writer, model, pool_changes, progress)
    _measure_again(writer, model)
    return summary


def _measure_again(writer: Writer, model: Genius) -> None:
    """Measure the recall of an index again if it has grown by half since it was measured."""
    snapshot = writer.snapshot
    measured = snapshot.manifest.measured
    if measured is not None and snapshot.num_rows > MIN_GROWTH * measured.items:
        unmeasured = Snapshot(snapshot.manifest.replace(measured=None), snapshot.segments)
        writer.update_manifest(measured=measure_recall(model, unmeasured))


def create_index(
    folder: Path,
    *,
    pool: Pool | Iterable[object],
    model: str | Path | Genius | None,
    encoder: str | None,
    embeddings: StoredEmbeddings | None,
    embedding_bits: EmbeddingBits | None,
    levels: int | None,
    recall: float | None,
    query_vectors: Shaped[np.ndarray, ...] | None,
    captions: bool,
    device: str,
    download: bool,
    progress: Progress,
    wait_seconds: float,
) -> tuple[Genius, ChangeSummary]:
    """Create an index, and return its model; see :meth:`genius_search.index.index.Index.create`."""
    check_bits(embedding_bits, embeddings)
    check_recall(recall, embeddings, has_model=model is not None)
    levels = _check_levels(levels, query_vectors, embeddings, has_model=model is not None)
    trained, used_encoder = _open_model(pool, model, encoder, device=device, download=download)
    require_free_folder(folder)
    is_new_folder = not folder.exists()
    with (
        open_writer(folder, wait_seconds=wait_seconds) as writer,
        item_encoder(folder, used_encoder) as work,
    ):
        require_free_folder(folder)  # again, now that no other process can create an index in it
        try:
            if not isinstance(pool, Pool):
                pool = pool_from_items(pool, writer, captions=captions, has_ids=False)
            pool_changes = find_changes(folder, pool, used_encoder, None, divides=trained is None)
            pool_changes.compute_features(work, progress)
            pool_changes.require_any()
            if trained is not None:
                new_model = trained
                manifest = new_manifest(trained, embeddings, embedding_bits)
            else:
                new_model = fit_pool_model(
                    folder / OWN_MODEL, pool_changes, levels, query_vectors, progress
                )
                manifest = _own_manifest(
                    new_model, pool_changes, embeddings, embedding_bits, recall
                )
            num_written = _write_first_state(
                writer,
                new_model,
                pool_changes,
                manifest.replace(roots=pool.roots),
                query_vectors,
                progress,
            )
        except BaseException:
            _clean_up(writer, is_new_folder=is_new_folder)
            raise
        remove_work(folder)
        return new_model, pool_changes.summary(num_written, 0)


def encode_share(
    folder: Path,
    pool: Pool,
    share: tuple[int, int],
    *,
    model: str | Path | None,
    encoder: str | None,
    device: str,
    download: bool,
    progress: Progress,
) -> PoolChanges:
    """Encode a share of the items of a new index, whose features :func:`create_index` then finds.

    Several processes and machines may encode their shares at the same time, if they see the pool
    and the folder under the same paths. Return the items, of which those of the share have
    features.

    Parameters
    ----------
    share
        With (i, n), every n-th item is encoded, from number i on.

    Raises
    ------
    UsageError
        The folder holds an index or other files, or the encoder cannot be opened.
    BadData
        Features are not finite.
    """
    trained, used_encoder = _open_model(pool, model, encoder, device=device, download=download)
    require_free_folder(folder)
    pool_changes = find_changes(folder, pool, used_encoder, None, divides=trained is None)
    with item_encoder(folder, used_encoder) as work:
        pool_changes.compute_features(work, progress, share=share)
        work.save()
    return pool_changes


def check_recall(
    recall: float | None, embeddings: StoredEmbeddings | None = None, *, has_model: bool = False
) -> None:
    """Raise :class:`UsageError` unless a target of recall is a share, and can be reached."""
    if recall is None:
        return
    if not 0 < recall < 1:
        raise UsageError(f"recall: {recall} is no share between 0 and 1; 0.95 is usual")
    if has_model or embeddings not in (None, "fused"):
        raise UsageError(
            "recall: only an index that is created with an encoder, and stores fused embeddings, "
            "is measured; leave out recall, or the model and embeddings"
        )


def _check_levels(
    levels: int | None,
    query_vectors: Shaped[np.ndarray, ...] | None,
    embeddings: StoredEmbeddings | None,
    *,
    has_model: bool,
) -> int | None:
    """Return the number of levels of a new index; None stands for cells with fine codes.

    Cells need fused embeddings to compare. A trained model already has its codebooks.
    """
    if has_model and not (levels is None and query_vectors is None):
        raise UsageError(
            "a trained model has its codebooks; give levels or query vectors without one"
        )
    if levels is None:
        return default_levels(embeddings)
    return validate_settings(CodebookConfig(levels=levels)).levels


def default_levels(embeddings: StoredEmbeddings | None) -> int | None:
    """Return the number of levels of an index without a trained model; None stands for cells."""
    return None if embeddings in (None, "fused") else LEVELS


def _open_model(
    pool: Pool | Iterable[object],
    model: str | Path | Genius | None,
    encoder: str | None,
    *,
    device: str,
    download: bool,
) -> tuple[Genius | None, Encoder]:
    """Return the trained model of a new index, if it has one, and the encoder."""
    if model is not None and encoder is None:
        if not isinstance(model, Genius):
            model = Genius.open(model, device=device, download=download)
        return model, model.encoder
    if encoder is not None and model is None:
        return None, load_encoder(absolute_spec(encoder), download=download, device=device)
    if model is None and isinstance(pool, Pool) and pool.vectors is not None:
        return None, VectorEncoder(str(pool.vectors.shape[1]))
    raise UsageError("give either a model, or the encoder of an index that needs no training")


def fit_pool_model(
    folder: Path,
    pool_changes: PoolChanges,
    levels: int | None,
    query_vectors: Shaped[np.ndarray, ...] | None,
    progress: Progress,
) -> Genius:
    """Fit codebooks to the features of a pool; the model is stored in the folder."""
    encoder = pool_changes.encoder
    return fit_model(
        folder,
        encoder,
        pool_changes.features,
        items=len(pool_changes.features),
        fingerprint=pool_changes.fingerprint,
        levels=levels,
        metric=None if query_vectors is None else query_metric(query_vectors, encoder.dim),
        progress=progress,
    )


def _own_manifest(
    model: Genius,
    pool_changes: PoolChanges,
    embeddings: StoredEmbeddings | None,
    bits: EmbeddingBits | None,
    recall: float | None,
) -> IndexManifest:
    """Return the first manifest of an index whose model was fitted to its items.

    The bits of fused embeddings are measured on the features and, unless the caller chose them,
    chosen.
    """
    num_fitted = len(pool_changes.features)
    kept_by_bits = 1.0
    if embeddings in (None, "fused"):
        sample = draw_embeddings(pool_changes.features)
        if bits is None:
            measured = choose_embedding_bits(model, *sample, default_bits(num_fitted), recall)
        else:
            measured = measure_bits(model, *sample, bits)
        bits, kept_by_bits, _ = measured
    manifest = new_manifest(model, embeddings, bits, fitted_to=num_fitted)
    return manifest.replace(model=OWN_MODEL, recall=recall, kept_by_bits=kept_by_bits)


def _clean_up(writer: Writer, *, is_new_folder: bool) -> None:
    """Remove the remains of a failed creation, but not the work that the next run can continue."""
    folder = writer.folder
    with contextlib.suppress(OSError, GeniusError):
        writer.remove_pending_pictures()
        if is_new_folder and [path.name for path in folder.iterdir()] == [LOCK]:
            shutil.rmtree(folder)


def _write_first_state(
    writer: Writer,
    model: Genius,
    pool_changes: PoolChanges,
    manifest: IndexManifest,
    query_vectors: Shaped[np.ndarray, ...] | None,
    progress: Progress,
) -> int:
    """Write all items, measure the index, and commit it; return the number of items."""
    batches = pool_changes.batches(model, Snapshot(manifest, ()), progress)
    written = with_recall(model, writer.rewrite(manifest, batches))
    has_vectors = pool_changes.pool.vectors is not None
    can_encode_words = not has_vectors and not isinstance(pool_changes.encoder, PrecomputedEncoder)
    least = {}
    if manifest.has_own_model and (can_encode_words or query_vectors is not None):
        least = measure_least_scores(model, written, query_vectors)
    writer.commit(written.manifest.replace(least=least))
    return written.num_alive


def with_recall(model: Genius, written: Snapshot) -> Snapshot:
    """Measure the recall of a new state, unless its model was trained; return the state with it."""
    if not written.manifest.has_own_model:
        return written
    measured = measure_recall(model, written)
    return Snapshot(written.manifest.replace(measured=measured), written.segments)


def new_manifest(
    model: Genius,
    embeddings: StoredEmbeddings | None,
    bits: EmbeddingBits | None,
    *,
    fitted_to: int | None = None,
) -> IndexManifest:
    """Return the manifest of a new index.

    Parameters
    ----------
    embeddings
        The embeddings to store. By default none with a trained model, whose generator ranks, and
        fused ones otherwise.
    bits
        Bits per number of the embeddings; by default :func:`default_bits` for fused embeddings of
        an index without a trained model, else 16.
    fitted_to
        The number of items that the model's codebooks were fitted to; None for a trained model.
    """
    needs_embeddings = fitted_to is not None or model.codebooks.fine is not None
    stored = embeddings or ("fused" if needs_embeddings else "none")
    if bits is None:
        bits = 16 if fitted_to is None or stored == "raw" else default_bits(fitted_to)
    return IndexManifest(
        identity=new_identity(),
        model=str(model.folder.resolve()),
        model_fingerprint=model.fingerprint,
        embeddings=stored,
        embedding_bits=bits,
        reads_images=reads_images(model.encoder),
        fine_codes=num_fine_codes_of(model),
    )


def num_fine_codes_of(model: Genius) -> int:
    """Return the number of fine codes of each item; 0 if IDs are whole."""
    return 0 if model.codebooks.fine is None else model.codebooks.fine.num_codes


def default_bits(num_items: int) -> EmbeddingBits:
    """Return the bits per number of fused embeddings, for an index created with that many items."""
    if num_items <= FEW_ITEMS:
        return 8
    return 4 if num_items < MANY_ITEMS else 2


def require_free_folder(folder: Path) -> None:
    """Raise :class:`UsageError` unless an index can be created in this folder."""
    if (folder / CURRENT).exists():
        raise UsageError(
            f"{folder} holds an index already; `genius index add` adds to it, and `genius index "
            "sync` brings it up to date"
        )
    if has_lost_manifest(folder):
        raise UsageError(
            f"{folder} holds an index whose {CURRENT} is missing; restore it from a backup, "
            "or choose another folder"
        )
    if folder.is_dir() and not all(entry.name in LEFTOVERS for entry in folder.iterdir()):
        raise UsageError(f"{folder} is not empty; choose a new folder for the index")


def fit_model(
    folder: Path,
    encoder: Encoder,
    features: Features,
    *,
    items: int,
    fingerprint: str,
    levels: int | None = LEVELS,
    metric: Float32[np.ndarray, "dim dim"] | None = None,
    progress: Progress,
) -> Genius:
    """Fit codebooks to the features of a pool or of a sample, and return a model with them.

    Parameters
    ----------
    items
        The number of items in the whole pool.
    fingerprint
        Fingerprint of the items; a run with the same one continues an interrupted one.
    metric
        Matrix in which the errors of codes are measured (:func:`query_metric`); without it, all
        directions count alike.
    """
    quantizer = fit_codebooks(
        *draw_embeddings(features),
        folder / "quantizer",
        items=items,
        inputs={"items": fingerprint},
        metric=metric,
        levels=levels,
        progress=progress,
    )
    return Genius.finish(folder, encoder, quantizer, None, ())


def batches_with_ids(
    model: Genius,
    entries: Iterable[Entry],
    features: Features,
    manifest: IndexManifest,
    progress: Progress,
    *,
    fuse: Fuse | None = None,
) -> Iterator[Batch]:
    """Compute the IDs of items and passages from their features, and yield them in batches.

    Parameters
    ----------
    entries
        Items and passages, one for each row of ``features``.
    fuse
        Function from image and text features to embeddings; by default the fusion of the model.

    Raises
    ------
    BadData
        There are fewer entries than features.
    """
    count = len(features)
    progress.begin("index", count)
    remaining = iter(entries)
    for start in range(0, count, MAX_ENCODED_ITEMS):
        rows = np.arange(start, min(start + MAX_ENCODED_ITEMS, count))
        batch = list(islice(remaining, len(rows)))
        if len(batch) < len(rows):
            raise BadData("the pool changed while it was indexed; run the command again")
        arrays = arrays_of_features(
            model,
            features.gather(rows),
            features.modality[rows],
            embeddings=manifest.embeddings,
            bits=manifest.embedding_bits,
            fuse=fuse,
        )
        yield batch, arrays
        progress.advance(start + len(rows), {})


def arrays_of_features(
    model: Genius,
    features: FeatureBatch,
    modality: Int8[np.ndarray, " items"],
    *,
    embeddings: StoredEmbeddings,
    bits: EmbeddingBits = 16,
    fuse: Fuse | None = None,
) -> ItemArrays:
    """Return the IDs of items, and their embeddings with ``bits`` per number if any are stored."""
    fused = (fuse or model.fuse)(features.image, features.text)
    encoded = model.coder.encode_items(fused, modality)
    arrays = ItemArrays(encoded.columns, encoded.code_cosine.astype(np.float16))
    if model.codebooks.fine is not None:
        arrays = arrays._replace(fine=pack_fine_codes(encoded.fine))
    if embeddings == "fused":
        norm_and_density = model.coder.norm_and_density
        densities = norm_and_density.item_density(encoded.embeddings, encoded.all_codes)
        arrays = arrays._replace(densities=densities)
    if embeddings == "none":
        return arrays
    stored = normalize(features.total()) if embeddings == "raw" else encoded.embeddings
    if not is_residual(bits):
        return arrays._replace(embeddings=quantize(stored, bits).values)
    # Embedding = vector of the codes + residual; only the residual is stored.
    coded = model.codebooks.vectors(encoded.all_codes)
    if model.codebooks.fine is None:
        values, scales = quantize(stored - coded, bits)
        return arrays._replace(embeddings=values, scales=scales)
    residuals = model.ranker.spread.residuals
    (values, scales), lengths = quantize_with_lengths(stored, coded, bits, residuals)
    return arrays._replace(embeddings=values, scales=scales, lengths=lengths)
