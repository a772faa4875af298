"""Snapshots: one state of an index, open for reading, with its segments and filters."""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer

from genius_search.artifact import check_files
from genius_search.errors import ArtifactMismatch, GeniusError, UsageError
from genius_search.index.items import Item
from genius_search.index.store import (
    CURRENT,
    REMEDY,
    SEGMENTS,
    IndexManifest,
    Segment,
    load_segment,
    read_deleted,
    read_state,
    with_hint,
)
from genius_search.records import Modality
from genius_search.search.rank import CodeRanker, Evidence
from genius_search.search.table import Allowed, Restriction, SearchSegment

if TYPE_CHECKING:
    from genius_search.index.filters import Filter

MAX_FILTERS: Final = 16
"""Number of filters whose results are cached, at about 1.2 bytes an item each."""


class UnknownItem(UsageError, LookupError):
    """A requested item is not in the index."""


class Location(NamedTuple):
    """Position of an item: its segment and row."""

    segment: int
    """Number of the segment."""
    row: int


class Known(NamedTuple):
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
        self.is_verified = False
        """True once every file of this state was compared with its checksum."""
        self.frequent_words: set[str] = set()
        """Some words that are not rare (:func:`genius_search.index.query.find_rare_words`)."""
        self._restrictions: dict[Filter, Restriction] = {}
        self._caching = threading.Lock()
        self._evidence: Evidence | None = None

    @staticmethod
    def open(folder: Path) -> Snapshot:
        """Open the current state of an index, even while it is being changed. Only headers are read.

        Raises
        ------
        ArtifactMissing, ArtifactMismatch
            There is no index, it is damaged, or it has an unsupported format.
        """
        return read_state(folder, partial(Snapshot.load, folder))

    @staticmethod
    def load(folder: Path, manifest: IndexManifest) -> Snapshot:
        """Open the state described by a manifest; its files must still exist."""
        segments = []
        for entry in manifest.segments:
            place = folder / SEGMENTS / entry.name
            with with_hint():
                check_files(place, entry.files, verify=False)
            segment = load_segment(place, entry.name, read_deleted(folder, entry), manifest.embedding_bits)
            if segment.table.num_items != entry.items:
                raise ArtifactMismatch(
                    f"{segment.folder} has {segment.table.num_items} items, not the {entry.items} of "
                    f"{CURRENT}; {REMEDY}"
                )
            if (segment.embeddings is None) is not (manifest.embeddings == "none"):
                raise ArtifactMismatch(
                    f"{segment.folder} does not store the embeddings ({manifest.embeddings}) that {CURRENT} "
                    f"lists; {REMEDY}"
                )
            segments.append(segment)
        return Snapshot(manifest, tuple(segments))

    @property
    def folder(self) -> Path:
        """Folder of the index; only for an index with segments."""
        return self.segments[0].folder.parents[1]

    @cached_property
    def num_alive(self) -> int:
        """Number of items that are not deleted."""
        return sum(segment.num_alive for segment in self.segments)

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
                segment.table, None if (mask := segment.alive()) is None else Allowed.of(segment.table, mask)
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
            vectors = None if kind == "none" else [segment.vectors(ranker) for segment in self.segments]
            densities = [one.densities for one in self.segments if one.densities is not None]
            self._evidence = Evidence(ranker, vectors, kind == "raw", densities if kind == "fused" else None)
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
            counts.subtract(Counter(item.modality for item in segment.items.get(segment.dead.tolist())))
        return {modality: count for modality, count in counts.items() if count}

    def restriction(self, wanted: Filter, *, deadline: float = math.inf) -> Restriction:
        """Return the items that a filter allows; the results of the last filters are cached.

        Raises like :func:`genius_search.index.filters.matching_all`.
        """
        known = self._restrictions.get(wanted)
        if known is None:
            from genius_search.index.filters import matching_all  # noqa: PLC0415  needed only here

            stores = [segment.items for segment in self.segments]
            known = self.restrict(matching_all(stores, wanted, deadline=deadline))
            with self._caching:
                while len(self._restrictions) >= MAX_FILTERS:
                    self._restrictions.pop(next(iter(self._restrictions)))
                self._restrictions[wanted] = known
        return known

    def restrict(self, masks: Sequence[Bool[np.ndarray, " _"]]) -> Restriction:
        """Return the items of each segment's mask that are not deleted, which are taken out of it."""
        for segment, mask in zip(self.segments, masks, strict=True):
            mask[segment.dead] = False
        return tuple(
            Allowed.of(segment.table, mask) for segment, mask in zip(self.segments, masks, strict=True)
        )

    def items(self, segments: Int64[np.ndarray, " hits"], rows: Int64[np.ndarray, " hits"]) -> list[Item]:
        """Return items by segment and row, in this order, with absolute image paths."""
        found: dict[int, Item] = {}
        for number in sorted(set(segments.tolist())):
            segment, places = self.segments[number], np.flatnonzero(segments == number)
            home = str(segment.folder.parents[1])
            for place, item in zip(places.tolist(), segment.items.get(rows[places].tolist()), strict=True):
                if item.image is not None:  # a tenth of the time of a Path
                    item = item._replace(image=os.path.join(home, item.image))  # noqa: PTH118, PLW2901
                found[place] = item
        return [found[place] for place in range(len(rows))]

    def locate(self, item_id: str) -> Location:
        """Return where an item is stored.

        Raises
        ------
        UnknownItem
            It is not in the index.
        """
        if found := self.known([item_id]):
            return found[item_id].location
        raise UnknownItem(f"there is no item {item_id!r} in this index")

    def item_at(self, location: Location) -> Item:
        """Return the item at a location."""
        return self.items(np.array([location.segment]), np.array([location.row]))[0]

    def id_at(self, location: Location) -> Integer[np.ndarray, " columns"]:
        """Return the ID of the item at a location: its codes, then its norm and density."""
        table = self.segments[location.segment].table
        (listed,) = np.flatnonzero(table.items == location.row)
        return np.asarray(table.ids[np.searchsorted(table.bucket_starts, listed, side="right") - 1])

    def known(self, item_ids: Sequence[str]) -> dict[str, Known]:
        """Return what is known of the given items, without those that are not in the index."""
        known: dict[str, Known] = {}
        for number, segment in enumerate(self.segments):
            found = segment.items.find(item_ids)
            is_dead = segment.is_dead(np.array([row for _, row, *_ in found], dtype=np.int64))
            for (name, row, stamp, content, root), dead in zip(found, is_dead, strict=True):
                if not dead:
                    known[name] = Known(stamp, content, root, Location(number, row))
        return known


@contextlib.contextmanager
def diagnose_corruption(snapshot: Snapshot) -> Iterator[None]:
    """Verify the index if reading it fails with an error that damaged files can cause.

    Wrap only code that reads the index, never an encoder or the parsing of a request. A state is verified at
    most once: if it is intact, the error is a bug and is raised unchanged.

    Raises
    ------
    ArtifactMismatch, ArtifactMissing
        A file is damaged or gone; the message names it.
    """
    try:
        yield
    except GeniusError:
        raise
    except (LookupError, ValueError, sqlite3.Error):
        if snapshot.segments and not snapshot.is_verified:
            from genius_search.index.info import verify  # noqa: PLC0415  needed only here

            verify(snapshot.folder)
            snapshot.is_verified = True
        raise
