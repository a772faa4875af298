"""Snapshots: one state of an index, open for reading, with its segments and filters."""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer

from genius_search.artifact import FileFact, file_fingerprint
from genius_search.border import as_id
from genius_search.errors import ArtifactError, ArtifactMismatch, GeniusError, UsageError
from genius_search.forks import free_in_children
from genius_search.index.items import Item
from genius_search.index.store import (
    REMEDY,
    IndexManifest,
    Segment,
    SegmentEntry,
    load_segment,
    read_state,
    refuse_links,
)
from genius_search.nn.codebooks import Codebooks
from genius_search.nn.spread import fade_width
from genius_search.records import Modality
from genius_search.search.rank import CodeRanker, Evidence
from genius_search.search.table import Restriction, SearchSegment
from genius_search.search.vectors import stored_width

if TYPE_CHECKING:
    from genius_search.index.filters import Filter

MAX_CACHED_FILTERS: Final = 16
"""Number of filters whose results are cached, at about 1.2 bytes an item each."""
MAX_CACHED_LOCATIONS: Final = 1_000_000
"""Number of places of items with words that are cached, at 8 bytes each, and of such words."""
MAX_BYTES_CHECKED_FIRST: Final = 2.0**28
"""Bytes that are compared with their checksums before a state is first read, in about 0.15 seconds. What is
more a server compares in the background (:mod:`genius_search.serve.watch`), and ``--check`` does."""


class UnknownItem(UsageError, LookupError):
    """A requested item is not in the index."""


class Location(NamedTuple):
    """Position of an item: its segment and row."""

    segment: int
    """Number of the segment."""
    row: int


class ItemState(NamedTuple):
    """What tells whether an item is as it was; see :class:`Item`."""

    stamp: str | None
    content: str | None
    root: int | None
    location: Location


class Snapshot:
    """One state of an index. Its files stay readable while the object exists, even if writers remove them."""

    def __init__(self, manifest: IndexManifest, segments: tuple[Segment, ...]) -> None:
        self.manifest = manifest
        """Compare with :func:`read_manifest` to see whether the index has changed."""
        self.segments = segments
        self.damage: str | None = None
        """Which file is known to be damaged, and what to do; searches then raise an error."""
        self.needs_check = True
        """Whether :meth:`check_files` has something to do or to say."""
        self.places_of_words: dict[str, Int64[np.ndarray, " items"] | None] = {}
        """Items that contain a word, or None if they are many (:mod:`genius_search.index.words`)."""
        self._num_cached = 0
        self._unchecked = [segment.unchecked for segment in segments]
        self._checking = free_in_children(threading.Lock())
        self._restrictions: dict[Filter, Restriction] = {}
        self._caching = free_in_children(threading.Lock())
        self._evidence: Evidence | None = None

    @staticmethod
    def open(folder: Path, before: Snapshot | None = None) -> Snapshot:
        """Open the current state of an index, even while it is being changed.

        Segments of an earlier state ``before`` are not opened again, unless that is known to be damaged.

        Raises
        ------
        ArtifactMissing, ArtifactMismatch
            There is no index, it is damaged, or it has an unsupported format.
        """
        if before is None:
            refuse_links(folder, with_pictures=True)
        return read_state(folder, partial(Snapshot.load, folder, before=before))

    @staticmethod
    def load(folder: Path, manifest: IndexManifest, before: Snapshot | None = None) -> Snapshot:
        """Open the state described by a manifest; its files must still exist."""
        known: dict[str, tuple[SegmentEntry, Segment]] = {}
        if before is not None and before.damage is None:
            known = {
                one[0].name: one
                for one in zip(before.manifest.segments, before.segments, strict=True)
            }
        segments = []
        for entry in manifest.segments:
            old, segment = known.get(entry.name, (None, None))
            if old is None or segment is None or old.files != entry.files:
                segments.append(load_segment(folder, entry, manifest))
            else:
                segment.items.open()
                segments.append(segment._replace(dead=entry.dead_rows()))
        return Snapshot(manifest, tuple(segments))

    def check_arrays(self, codebooks: Codebooks, unchecked: dict[Path, FileFact]) -> None:
        """Raise :class:`ArtifactMismatch` for codes, levels or dimensions that the model does not have.

        From then on :meth:`check_files` compares the model's ``unchecked`` files with their checksums, too.
        """
        sizes = [
            *codebooks.sizes,
            256,
            256,
        ]  # half norm and density have a byte each, or are missing
        width = stored_width(codebooks.dim, self.manifest.embedding_bits)
        for segment in self.segments:
            ids, stored = segment.table.ids, segment.embeddings
            columns, most = ids.shape[1], np.iinfo(ids.dtype).max
            if (
                columns not in (len(sizes), len(sizes) - 2)
                or (stored is not None and stored.values.shape[1] != width)
                or any(
                    ids[:, n].max(initial=0) >= sizes[n] for n in range(columns) if sizes[n] <= most
                )
            ):
                raise ArtifactMismatch(
                    f"{segment.folder} has other codes or embeddings than the model: expected {len(sizes)} "
                    f"columns of codes below {sizes}, and embeddings of {width} numbers; {REMEDY}"
                )
        self._unchecked.append(unchecked)

    def check_files(self, *, max_bytes: float = math.inf) -> None:
        """Compare the files with their checksums, each once, the smallest first, up to so many bytes.

        Raises
        ------
        ArtifactMismatch
            A file is damaged. Every later search of this state raises this, too.
        """
        with self._checking:
            # Another state that shares a segment may compare its files at the same time.
            files = [
                (path, fact, own) for own in self._unchecked for path, fact in list(own.items())
            ]
            for path, fact, own in sorted(files, key=lambda file: file[1].bytes):
                max_bytes -= fact.bytes
                if self.damage is not None or max_bytes < 0:
                    break
                with contextlib.suppress(
                    FileNotFoundError
                ):  # removed by a writer, and still mapped
                    if file_fingerprint(path) != fact.sha256:
                        self.damage = f"{path} is damaged: its contents have changed; {REMEDY}"
                        break
                own.pop(path, None)
            self.needs_check = self.damage is not None
            if self.damage is not None:
                raise ArtifactMismatch(self.damage)

    @property
    def folder(self) -> Path:
        """Folder of the index; only for an index with segments."""
        return self.segments[0].folder.parents[1]

    @cached_property
    def num_alive(self) -> int:
        """Number of items that are not deleted."""
        return sum(segment.num_alive for segment in self.segments)

    @cached_property
    def num_rows(self) -> int:
        """Number of items that are not deleted, and of passages."""
        return self.num_alive + sum(len(segment.passages) for segment in self.segments)

    @cached_property
    def max_passages(self) -> int:
        """The largest number of passages that an item has beside its beginning."""
        return max(
            (int(np.bincount(one.passages[:, 0]).max(initial=0)) for one in self.segments),
            default=0,
        )

    def owner_rows(
        self, segments: Int64[np.ndarray, " rows"], rows: Int64[np.ndarray, " rows"]
    ) -> Int64[np.ndarray, " rows"]:
        """Return the rows of the items that rows of segments belong to, which may be passages'."""
        if not self.max_passages:
            return rows
        owners = rows.copy()
        for number, segment in enumerate(self.segments):
            late = np.flatnonzero((segments == number) & (rows >= segment.num_items))
            owners[late] = segment.passages[rows[late] - segment.num_items, 0]
        return owners

    def alive(self) -> Iterator[tuple[Item, Location]]:
        """Yield every item that is not deleted, with its place; paths of stored pictures stay relative."""
        for number, segment in enumerate(self.segments):
            dead = set(segment.dead.tolist())
            for row, item in enumerate(segment.items.all()):
                if row not in dead:
                    yield item, Location(number, row)

    def ids(self) -> Iterator[str]:
        """Yield the id of every item that is not deleted."""
        return (item.id for item, _ in self.alive())

    @cached_property
    def search_segments(self) -> list[SearchSegment]:
        """The segments' ID tables, with the items that are not deleted."""
        return [
            SearchSegment(
                segment.table,
                None if (mask := segment.alive_mask()) is None else segment.allow(mask),
            )
            for segment in self.segments
        ]

    def evidence(self, ranker: CodeRanker) -> Evidence:
        """Return what the hits of this index can be re-ranked by.

        Parameters
        ----------
        ranker
            That of the index's model.
        """
        if self._evidence is None:
            kind = self.manifest.embeddings
            vectors = (
                None if kind == "none" else [segment.vectors(ranker) for segment in self.segments]
            )
            densities = [one.densities for one in self.segments if one.densities is not None]
            self._evidence = Evidence(
                ranker,
                vectors,
                kind == "raw",
                densities if kind == "fused" else None,
                fade_width=fade_width(self.num_rows),
            )
        return self._evidence

    @cached_property
    def modalities(self) -> list[Modality]:
        """The modalities of the items, most frequent first. Deleted items count until they are compacted."""
        counts: Counter[Modality] = Counter()
        for segment in self.segments:
            counts.update(segment.items.count_by_modality())
        return [modality for modality, count in counts.most_common() if count]

    def count_by_modality(self) -> dict[Modality, int]:
        """Return the number of items of each modality that occurs."""
        counts: Counter[Modality] = Counter()
        for segment in self.segments:
            counts.update(segment.items.count_by_modality())
            counts.subtract(item.modality for item in segment.items.get(segment.dead.tolist()))
        return {modality: count for modality, count in counts.items() if count}

    def restriction(self, wanted: Filter, *, deadline: float = math.inf) -> Restriction:
        """Return the items that a filter allows; the results of the last filters are cached.

        Raises like :func:`genius_search.index.filters.matching_items_of_stores`.
        """
        known = self._restrictions.get(wanted)
        if known is None:
            from genius_search.index.filters import matching_items_of_stores  # noqa: PLC0415  needed only here

            stores = [segment.items for segment in self.segments]
            known = self.restrict(matching_items_of_stores(stores, wanted, deadline=deadline))
            with self._caching:
                while len(self._restrictions) >= MAX_CACHED_FILTERS:
                    self._restrictions.pop(next(iter(self._restrictions)))
                self._restrictions[wanted] = known
        return known

    def cached_words(self, words: Sequence[str]) -> dict[str, Int64[np.ndarray, " items"] | None]:
        """Return what is remembered of words."""
        with self._caching:
            cache = self.places_of_words
            return {word: cache[word] for word in words if word in cache}

    def cache_words(
        self, places_of_words: Mapping[str, Int64[np.ndarray, " items"] | None]
    ) -> None:
        """Remember the items that contain words; the first words make room for later ones."""
        with self._caching:
            cache = self.places_of_words
            for word, places in places_of_words.items():
                if word not in cache:
                    cache[word] = places
                    self._num_cached += 1 if places is None else 1 + len(places)
            while self._num_cached > MAX_CACHED_LOCATIONS:
                places = cache.pop(next(iter(cache)))
                self._num_cached -= 1 if places is None else 1 + len(places)

    def restrict(self, masks: Sequence[Bool[np.ndarray, " _"]]) -> Restriction:
        """Return the items of each segment's mask that are not deleted, which are taken out of it."""
        for segment, mask in zip(self.segments, masks, strict=True):
            mask[segment.dead] = False
        return tuple(
            segment.allow(mask) for segment, mask in zip(self.segments, masks, strict=True)
        )

    def items_at(
        self, segments: Int64[np.ndarray, " hits"], rows: Int64[np.ndarray, " hits"]
    ) -> list[Item]:
        """Return items by segment and row, in this order, with absolute image paths."""
        found: dict[int, Item] = {}
        for number in sorted(set(segments.tolist())):
            segment, places = self.segments[number], np.flatnonzero(segments == number)
            home = str(segment.folder.parents[1])
            for place, item in zip(
                places.tolist(), segment.items.get(rows[places].tolist()), strict=True
            ):
                if item.image is not None:  # a tenth of the time of a Path
                    item = item._replace(image=os.path.join(home, item.image))  # noqa: PTH118, PLW2901
                found[place] = item
        return [found[place] for place in range(len(rows))]

    def locate(self, item_id: str | int) -> Location:
        """Return where an item is stored.

        Raises
        ------
        UnknownItem
            It is not in the index.
        UsageError
            It is not an id.
        """
        name = as_id(item_id)
        for found in self.item_states([name]).values():
            return found.location
        raise UnknownItem(f"there is no item {name!r} in this index")

    def item_at(self, location: Location) -> Item:
        """Return the item at a location."""
        return self.items_at(np.array([location.segment]), np.array([location.row]))[0]

    def id_at(self, location: Location) -> Integer[np.ndarray, " columns"]:
        """Return the ID of the item at a location: its codes, then its norm and density."""
        table = self.segments[location.segment].table
        (listed,) = np.flatnonzero(table.items == location.row)
        return np.asarray(table.ids[np.searchsorted(table.bucket_starts, listed, side="right") - 1])

    def item_states(self, item_ids: Sequence[str]) -> dict[str, ItemState]:
        """Return what is known of the given items, without those that are not in the index."""
        known: dict[str, ItemState] = {}
        for number, segment in enumerate(self.segments):
            found = segment.items.find_ids(item_ids)
            is_dead = np.isin([row for _, row, *_ in found], segment.dead)
            for (name, row, stamp, content, root), dead in zip(found, is_dead, strict=True):
                if not dead:
                    known[name] = ItemState(stamp, content, root, Location(number, row))
        return known


@contextlib.contextmanager
def check_on_error(snapshot: Snapshot) -> Iterator[None]:
    """Read an index only if none of its files is known to be damaged, and look for damage if reading fails.

    When a state is first read, up to :data:`MAX_BYTES_CHECKED_FIRST` bytes of its files are compared with their
    checksums. Wrap only code that reads the index, never an encoder or the parsing of a request.

    Raises
    ------
    ArtifactMismatch
        A file is damaged; the message names it. Or it is as it was written, and not by GENIUS.
    """
    if snapshot.needs_check:
        snapshot.check_files(max_bytes=MAX_BYTES_CHECKED_FIRST)
    try:
        yield
    except (ArtifactError, sqlite3.Error, LookupError, ValueError) as error:
        if isinstance(error, GeniusError) and not isinstance(error, ArtifactError):
            raise  # of the request
        snapshot.check_files()
        raise ArtifactMismatch(f"{snapshot.folder} cannot be read ({error}); {REMEDY}") from error
