"""How an index is filled: items become features, then IDs and embeddings, then a segment.

Creating an index with a model or with an encoder, adding, and adding vectors take this one way. They differ
in where features come from (an encoder, or given vectors) and in where the model comes from: with an encoder
alone, its codebooks are fitted to the features (:func:`create_index`).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import compress, islice
from pathlib import Path
from typing import Final, Literal, NamedTuple

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
from genius_search.errors import BadData, GeniusError, UsageError
from genius_search.index.items import Item
from genius_search.index.measure import (
    choose_embedding_bits,
    measure_least_scores,
    measure_recall,
)
from genius_search.index.pool import (
    Pool,
    nothing_to_index,
    pool_from_items,
    stamp_of,
)
from genius_search.index.roots import content_of, is_gone, size_of, without_text
from genius_search.index.snapshot import ItemState, Location, Snapshot
from genius_search.index.source import (
    SavedFeatures,
    draw_embeddings,
    saved_features,
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
from genius_search.index.writer import (
    Batch,
    Entry,
    ItemArrays,
    Passage,
    Writer,
    check_bits,
    items_to_encode,
    open_writer,
    remove_work,
    stored_batches,
)
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.progress import Progress
from genius_search.records import Modality, format_text
from genius_search.search.vectors import EmbeddingBits, is_residual, quantize
from genius_search.training.codebooks import LEVELS, fit_codebooks, query_metric

MAX_BATCH_ITEMS: Final = 4096
"""Items whose IDs are computed together."""
MANY_ITEMS: Final = 1_000_000
"""Number of items from which embeddings have two bits a number by default."""
LEFTOVERS: Final = frozenset(
    {LOCK, WORK, TEMPORARY, PICTURES, SEGMENTS, f"{CURRENT}.tmp", Path(OWN_MODEL).name}
)
"""Names that an interrupted writer may leave in the folder of an index."""


class PlannedChange(NamedTuple):
    """A change of an index."""

    kind: Literal["add", "update", "move", "delete"]
    id: str
    before: str | None = None
    """The id that a moved item has until then."""


@dataclass(slots=True)
class ChangeSummary:
    """The result of adding items, or of following folders."""

    added: int = 0
    replaced: int = 0
    """Number of these that replaced an item with the same id."""
    unchanged: int = 0
    """Number of items that were already in the index, unchanged."""
    left_out: list[LeftOut] = field(default_factory=list)
    """Unusable files with their reasons."""
    reused: int = 0
    """Number of the added that were not encoded, because the index knew their contents."""
    moved: int = 0
    """Number of these whose file was moved or renamed, so that they took the place of another item."""
    deleted: int = 0
    missing: int = 0
    """Number of items that stay, though their files are not found (:meth:`genius_search.Index.sync`)."""
    changes: list[PlannedChange] = field(default_factory=list)
    """What a dry run would change."""
    shortened: list[str] = field(default_factory=list)
    """Ids of items whose texts are longer than the encoder reads; what follows is only found by its words.
    An index of an encoder has passages instead, except of captions beside pictures that the encoder reads."""


class Reused(NamedTuple):
    """Contents that an index knows, so that a changed item with them is not encoded."""

    content: str
    location: Location
    """Of an item with these contents."""
    how: Literal["copied", "moved", "touched"] = "copied"
    """Whether it is that item, with another file or another time."""


@dataclass(slots=True)
class Changes:
    """The items of a pool that are new or have changed."""

    pool: Pool
    left_out: list[LeftOut]
    encoder: Encoder
    divides: bool
    """Whether long texts get passages. With a trained model an item has one ID, as in the paper."""
    stamps: list[str | None] = field(default_factory=list)
    """Of all items of the pool; None for those that have not changed, or are left out."""
    known: dict[int, ItemState] = field(default_factory=dict)
    """Changed items whose id the index has, by number."""
    reused: dict[int, Reused] = field(default_factory=dict)
    """Items that need not be encoded, by number."""
    num_unchanged: int = 0
    """Number of items that the index has as they are; their files may have other times."""
    features: Features = field(default_factory=lambda: Features(()))
    """Of the other changed items, their ids the numbers among these."""
    contents: list[str | None] = field(default_factory=list)
    """Of the items with features."""
    passages: dict[str, list[Passage]] = field(default_factory=dict)
    """Of items whose texts are longer than the encoder reads, by their ids."""
    shortened: list[str] = field(default_factory=list)
    """Ids of other such items."""

    def changed(self) -> Iterator[tuple[int, Item]]:
        """Yield the changed items by their numbers."""
        for number, (item, stamp) in enumerate(zip(self.pool.items(), self.stamps, strict=False)):
            if stamp is not None:
                yield number, item._replace(stamp=stamp)

    def new_items(self) -> Iterator[Item]:
        """Yield the changed items that are not reused."""
        return (item for number, item in self.changed() if number not in self.reused)

    def entries(self) -> Iterator[Entry]:
        """Yield the items that have features, or are left out, each followed by its passages."""
        for item in self.new_items():
            yield item
            yield from self.passages.get(item.id, ())

    def is_touched(self, number: int) -> bool:
        """Return whether nothing but the time of the item's file has changed."""
        return number in self.reused and self.reused[number].how == "touched"

    def encode(self, work: SavedFeatures, progress: Progress) -> None:
        """Find the features of what is not reused."""
        if self.pool.vectors is not None:
            rows = np.flatnonzero([stamp is not None for stamp in self.stamps])
            modality = np.array([item.modality.code for item in self.new_items()], dtype=np.int8)
            self.features = vector_features(self.pool.vectors, rows, modality)
            self.contents = [None] * len(rows)
        elif count := len(self.stamps) - self.stamps.count(None) - len(self.reused):
            if self.divides:
                for item in self.new_items():
                    if item.modality is Modality.TEXT or not reads_images(self.encoder):
                        text = self.pool.with_fields(item).text or ""
                        if found := find_passages(self.encoder, text):
                            self.passages[item.id] = found
                            count += len(found)
            entries = items_to_encode(self.entries(), self.pool.with_fields)
            self.features, self.contents = work.encode(
                entries, self.pool.with_fields, count, progress
            )
            self.left_out += self.features.left_out

    def require_any(self) -> None:
        """Raise :class:`BadData` if nothing in the pool can be used."""
        if not len(self.features) and not self.reused and not self.num_unchanged:
            raise nothing_to_index(": the encoder can read none of the items", self.left_out)

    def batches(self, model: Genius, snapshot: Snapshot, progress: Progress) -> Iterator[Batch]:
        """Yield what is to be written: reused items first, then those with features."""
        if self.reused:
            reused = [one for _, one in sorted(self.reused.items())]
            places = [one.location for one in reused]
            old = snapshot.items_at(*map(np.array, zip(*places, strict=True)))
            chosen = (item for number, item in self.changed() if number in self.reused)
            items = []
            for item, was, one in zip(chosen, old, reused, strict=True):
                whole = self.pool.with_fields(item)
                if one.how != "copied" and self.pool.has_files:
                    fields = {
                        name: was.fields[name]
                        for name in was.fields
                        if name not in ("folder", "name")
                    }
                    whole = whole._replace(source=fields_to_json({**fields, **whole.fields})[0])
                items.append(
                    whole._replace(text=was.text, content=was.content, modality=was.modality)
                )
            yield from stored_batches(snapshot.segments, items, places)
        if len(self.features):
            encoded = self._encoded_entries()
            yield from encode_items(model, encoded, self.features, snapshot.manifest, progress)

    def added(self, added: int, replaced: int) -> ChangeSummary:
        """Return the result of writing the batches, which added and replaced this many items."""
        num_touched = sum(map(self.is_touched, self.reused))
        return ChangeSummary(
            added - num_touched,
            replaced - num_touched,
            self.num_unchanged,
            self.left_out,
            reused=len(self.reused) - num_touched,
            shortened=self.shortened,
        )

    def _encoded_entries(self) -> Iterator[Entry]:
        count = len(self.stamps) + sum(map(len, self.passages.values()))
        has_features = np.isin(np.arange(count), self.features.ids)
        kinds = list(Modality)  # a picture is a text to an encoder of texts
        codes = self.features.modality.tolist()
        found = zip(compress(self.entries(), has_features), self.contents, codes, strict=False)
        for entry, content, code in found:
            if isinstance(entry, Passage):
                yield entry
                continue
            whole = self.pool.with_fields(entry)._replace(content=content, modality=kinds[code])
            if whole.id not in self.passages and is_cut(self.encoder, format_text(whole.text)):
                self.shortened.append(whole.id)
            yield whole


def find_passages(encoder: Encoder, text: str) -> list[Passage]:
    """Return the passages of a text but the first, none longer than the encoder reads.

    There are none if it reads all of the text.
    """
    return [Passage(*span) for span in divide(encoder, text, format_text)[1:]]


def find_changes(
    folder: Path, pool: Pool, encoder: Encoder, snapshot: Snapshot | None, *, divides: bool
) -> Changes:
    """Find the items of a pool that an index does not have as they are; nothing is encoded.

    Raises
    ------
    UsageError
        The encoder has features of another width than the vectors.
    """
    if pool.vectors is not None and pool.vectors.shape[1] != encoder.dim:
        raise UsageError(
            f"the vectors have {pool.vectors.shape[1]} numbers, those of this index {encoder.dim}; "
            "give vectors of its encoder"
        )
    changes = Changes(pool, [*pool.left_out], encoder, divides)
    items = pool.items()
    while chunk := list(islice(items, MAX_BATCH_ITEMS)):
        known = {} if snapshot is None else snapshot.item_states([item.id for item in chunk])
        for item in chunk:
            number, stamp, old = len(changes.stamps), stamp_of(item), known.get(item.id)
            changes.stamps.append(stamp)
            if old is None:
                continue
            if old.root != item.root:
                reason = f"an item that is not from there has the id {item.id!r}; delete that, or rename this"
                changes.left_out.append(LeftOut(number, item.image or item.id, reason))
                changes.stamps[-1] = None
            elif old.stamp == stamp:
                changes.num_unchanged += 1
                changes.stamps[-1] = None
            else:
                changes.known[number] = old
    if snapshot is not None and snapshot.segments and pool.vectors is None:
        _reuse(changes, folder, snapshot)
    return changes


def _reuse(changes: Changes, folder: Path, snapshot: Snapshot) -> None:
    """Find changed items whose contents the index has: of touched, moved and copied files.

    A picture that was moved keeps its text: what gave it, a list or a file beside it, may have the old name.
    """
    sizes = {
        number: str(size_of(item, folder))
        for number, item in changes.changed()
        if number in changes.known or changes.pool.has_files
    }
    wanted = set(sizes.values())
    known = {
        own.content: Reused(own.content, own.location)
        for own in changes.known.values()
        if own.content
    }
    for item, location in snapshot.alive() if changes.pool.has_files and sizes else ():
        if item.content is not None and item.content.partition("-")[0] in wanted:
            known[item.content] = Reused(item.content, location)
            if item.root is not None and is_gone(snapshot.manifest.roots, item):
                known[item.content] = Reused(item.content, location, "moved")
                known.setdefault(without_text(item.content), known[item.content])
    there = {content.partition("-")[0] for content in known}
    for number, item in changes.changed():  # only contents of the same size are compared
        if sizes.get(number) not in there or (content := content_of(item, folder)) is None:
            continue
        own, found = changes.known.get(number), known.get(content)
        if own and own.content and without_text(own.content) == without_text(content):
            but_for_times = {
                str(stamp).partition(".")[0] for stamp in (own.stamp, changes.stamps[number])
            }
            if len(but_for_times) == 1 or item.image in changes.pool.unsure:
                found = Reused(own.content, own.location, "touched")
        if found is not None:
            changes.reused[number] = found
            changes.num_unchanged += changes.is_touched(number)


def write_changes(
    writer: Writer,
    model: Genius,
    changes: Changes,
    progress: Progress,
    *,
    delete: Collection[str] = (),
) -> ChangeSummary:
    """Add items to an index, and delete some in the same step."""
    added, replaced = writer.add(changes.batches(model, writer.snapshot, progress), delete=delete)
    remove_work(writer.folder)
    return changes.added(added, replaced)


def add_pool(
    writer: Writer,
    model: Genius,
    pool: Pool,
    *,
    may_be_none: bool = False,
    progress: Progress,
) -> ChangeSummary:
    """Add the items of a pool to an index; unchanged items are skipped.

    Raises
    ------
    BadData
        Nothing in the pool can be used, and not ``may_be_none``; the index is unchanged.
    """
    snapshot = writer.snapshot
    divides = snapshot.manifest.has_own_model
    changes = find_changes(writer.folder, pool, model.encoder, snapshot, divides=divides)
    with saved_features(writer.folder, model.encoder) as work:
        changes.encode(work, progress)
        if not may_be_none:
            changes.require_any()
        return write_changes(writer, model, changes, progress)


def create_index(
    folder: Path,
    *,
    pool: Pool | Iterable[object],
    model: str | Path | Genius | None,
    encoder: str | None,
    embeddings: StoredEmbeddings | None,
    embedding_bits: EmbeddingBits | None,
    levels: int | None,
    query_vectors: Shaped[np.ndarray, ...] | None,
    captions: bool,
    device: str,
    download: bool,
    progress: Progress,
    wait_seconds: float,
) -> tuple[Genius, ChangeSummary]:
    """Create an index, and return its model; see :meth:`genius_search.index.index.Index.create`."""
    check_bits(embedding_bits, embeddings)
    if model is not None and not (levels is None and query_vectors is None):
        raise UsageError(
            "a trained model has its codebooks; give levels or query vectors without one"
        )
    levels = LEVELS if levels is None else validate_settings(CodebookConfig(levels=levels)).levels
    trained, reads = _open_model(pool, model, encoder, device=device, download=download)
    require_free_folder(folder)
    is_new = not folder.exists()
    with (
        open_writer(folder, wait_seconds=wait_seconds) as writer,
        saved_features(folder, reads) as work,
    ):
        require_free_folder(folder)  # again, since another process may have created it until now
        try:
            if not isinstance(pool, Pool):
                pool = pool_from_items(pool, writer, captions=captions, has_ids=False)
            metric = None if query_vectors is None else query_metric(query_vectors, reads.dim)
            changes = find_changes(folder, pool, reads, None, divides=trained is None)
            changes.encode(work, progress)
            changes.require_any()
            count = len(changes.features)
            opened = trained or fit_model(
                folder / OWN_MODEL,
                reads,
                changes.features,
                items=count,
                fingerprint=fingerprint_of(changes.stamps),
                levels=levels,
                metric=metric,
                progress=progress,
            )
            fitted_to = count if trained is None else None
            if fitted_to is not None and embedding_bits is None and embeddings in (None, "fused"):
                embedding_bits = choose_embedding_bits(
                    opened, *draw_embeddings(changes.features), default=default_bits(fitted_to)
                )
            manifest = new_manifest(opened, embeddings, embedding_bits, fitted_to=fitted_to)
            if trained is None:
                manifest = manifest.replace(model=OWN_MODEL)
            manifest = manifest.replace(roots=pool.roots)
            added = _write_first_state(writer, opened, changes, manifest, query_vectors, progress)
        except BaseException:
            with contextlib.suppress(
                OSError, GeniusError
            ):  # what an interrupted run may continue with stays
                writer.remove_pending_pictures()
                if is_new and [path.name for path in folder.iterdir()] == [LOCK]:
                    shutil.rmtree(folder)
            raise
        remove_work(folder)
        return opened, changes.added(added, 0)


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


def _write_first_state(
    writer: Writer,
    model: Genius,
    changes: Changes,
    manifest: IndexManifest,
    query_vectors: Shaped[np.ndarray, ...] | None,
    progress: Progress,
) -> int:
    """Write all items, measure least scores, and commit both at once; return the number of items."""
    written = writer.rewrite(manifest, changes.batches(model, Snapshot(manifest, ()), progress))
    has_words = changes.pool.vectors is None and not isinstance(changes.encoder, PrecomputedEncoder)
    written = with_measures(model, written)
    least = {}
    if manifest.has_own_model and (has_words or query_vectors is not None):
        least = measure_least_scores(model, written, query_vectors)
    writer.commit(written.manifest.replace(least=least))
    return written.num_alive


def with_measures(model: Genius, written: Snapshot) -> Snapshot:
    """Return a state that was just written with what it keeps of exact search."""
    if not written.manifest.has_own_model:
        return written
    return Snapshot(
        written.manifest.replace(measured=measure_recall(model, written)), written.segments
    )


def new_manifest(
    model: Genius,
    embeddings: StoredEmbeddings | None,
    bits: EmbeddingBits | None,
    *,
    fitted_to: int | None = None,
) -> IndexManifest:
    """Return the manifest that an index begins with.

    Parameters
    ----------
    fitted_to
        number of items that the model's codebooks were fitted to; None for a trained model.
    """
    kind = embeddings or ("none" if fitted_to is None else "fused")
    usual: EmbeddingBits = 16
    if fitted_to is not None and kind != "raw":
        usual = default_bits(fitted_to)
    return IndexManifest(
        identity=new_identity(),
        model=str(model.folder.resolve()),
        model_fingerprint=model.fingerprint,
        embeddings=kind,
        embedding_bits=bits or usual,
    )


def default_bits(items: int) -> EmbeddingBits:
    """Return the bits of a number of fused embeddings in an index that was created with so many items."""
    return 4 if items < MANY_ITEMS else 2


def require_free_folder(folder: Path) -> None:
    """Raise :class:`UsageError` unless an index can be created in this folder."""
    if (folder / CURRENT).exists():
        raise UsageError(f"{folder} holds an index already; `genius index add` adds to it")
    if has_lost_manifest(folder):
        raise UsageError(
            f"{folder} holds an index whose {CURRENT} is missing; restore that from a backup, or choose "
            "another folder"
        )
    if folder.is_dir() and not all(entry.name in LEFTOVERS for entry in folder.iterdir()):
        raise UsageError(f"{folder} holds other things; an index needs a folder of its own")


def fit_model(
    folder: Path,
    encoder: Encoder,
    features: Features,
    *,
    items: int,
    fingerprint: str,
    levels: int = LEVELS,
    metric: Float32[np.ndarray, "dim dim"] | None = None,
    progress: Progress,
) -> Genius:
    """Fit codebooks to features of a pool of so many ``items``, or of a sample; return a model with them.

    ``fingerprint`` is that of the items; an interrupted run with the same one goes on.
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


def encode_items(
    model: Genius,
    entries: Iterable[Entry],
    features: Features,
    manifest: IndexManifest,
    progress: Progress,
) -> Iterator[Batch]:
    """Yield items and passages with their IDs, from features of the same in the same order.

    Raises
    ------
    BadData
        There are fewer of them than features.
    """
    count = len(features)
    progress.begin("index", count)
    remaining = iter(entries)
    for start in range(0, count, MAX_BATCH_ITEMS):
        rows = np.arange(start, min(start + MAX_BATCH_ITEMS, count))
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


def encode_batch(
    model: Genius,
    features: FeatureBatch,
    modality: Int8[np.ndarray, " items"],
    *,
    embeddings: StoredEmbeddings,
    bits: EmbeddingBits = 16,
) -> ItemArrays:
    """Return the IDs of some items, and their embeddings if they are to be stored, with ``bits`` a number."""
    encoded = model.encode(features, modality)
    vectors = scales = densities = None
    if embeddings == "fused":
        of_items = model.coder.norm_and_density
        densities = of_items.item_density(encoded.embeddings, encoded.codes)
    if embeddings != "none":
        kept = normalize(features.total()) if embeddings == "raw" else encoded.embeddings
        if is_residual(bits):
            kept = kept - model.ranker.vectors(encoded.codes)
        vectors, scales = quantize(kept, bits)
    return ItemArrays(
        encoded.columns,
        encoded.code_cosine.astype(np.float16),
        vectors,
        densities,
        scales,
    )
