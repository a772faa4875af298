"""Snapshots: one state of an index, open for reading, with its segments and caches.

A snapshot never changes. When a writer commits a change, readers of the old snapshot finish with
its files, which the operating system keeps until they are closed, and the next search opens a new
one, which shares the segments that both have.
"""

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
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer

from genius_search.artifact import FileFact, file_fingerprint
from genius_search.border import as_id
from genius_search.errors import ArtifactError, ArtifactMismatch, GeniusError, UsageError
from genius_search.forks import free_in_children
from genius_search.index.items import ITEM_COLUMNS, Item
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
from genius_search.nn.spread import fade_width, limit_densities
from genius_search.records import Modality
from genius_search.search.rank import CodeRanker, Evidence
from genius_search.search.table import Restriction, SearchSegment
from genius_search.search.vectors import stored_width

if TYPE_CHECKING:
    from genius_search.index.filters import Filter

MAX_CACHED_FILTERS: Final = 16
"""Maximum number of filters whose results are cached, at about 1.2 bytes per item each."""
MAX_CACHED_LOCATIONS: Final = 1_000_000
"""Maximum number of cached words and locations of items that contain them, at 8 bytes each."""
MAX_BYTES_CHECKED_FIRST: Final = 2.0**28
"""Maximum number of bytes that are compared with their checksums before a state is first read,
which takes about 0.15 seconds. A server checks the other files in the background
(:mod:`genius_search.serve.watch`), and so does ``--check``."""


class UnknownItem(UsageError, LookupError):
    """A requested item is not in the index."""


class Location(NamedTuple):
    """Where an item is stored: its segment and row."""

    segment: int
    """Number of the segment in its snapshot."""
    row: int


class ItemState(NamedTuple):
    """State of a stored item, to compare with that of its file; see :class:`Item`."""

    stamp: str | None
    content: str | None
    root: int | None
    location: Location


class Snapshot:
    """One state of an index.

    Its files stay readable while the object exists, even if writers remove them.
    """

    def __init__(self, manifest: IndexManifest, segments: tuple[Segment, ...]) -> None:
        self.manifest = manifest
        """Compare with :func:`read_manifest` to see whether the index has changed."""
        self.segments = segments
        self.damage: str | None = None
        """Message about a damaged file, with advice; searches then raise it as an error."""
        self.needs_check = True
        """Whether files remain to be checked, or one is known to be damaged."""
        self._locations_of_words: dict[str, Int64[np.ndarray, " items"] | None] = {}
        """Locations of the items that contain a word, each packed into one number
        (:mod:`genius_search.index.words`); None if they are too many to matter."""
        self._num_cached_locations = 0
        self._unchecked = [segment.unchecked for segment in segments]
        self._checking = free_in_children(threading.Lock())
        self._restrictions: dict[Filter, Restriction] = {}
        self._caching = free_in_children(threading.Lock())
        self._evidence: Evidence | None = None

    @staticmethod
    def open(folder: Path, before: Snapshot | None = None) -> Snapshot:
        """Open the current state of an index, even while writers change it.

        Parameters
        ----------
        before
            An earlier state, whose segments are not opened again unless it is known to be damaged.

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
        open_segments: dict[str, tuple[SegmentEntry, Segment]] = {}
        if before is not None and before.damage is None:
            for entry, segment in zip(before.manifest.segments, before.segments, strict=True):
                open_segments[entry.name] = (entry, segment)
        segments = []
        for entry in manifest.segments:
            old_entry, old_segment = open_segments.get(entry.name, (None, None))
            if old_entry is None or old_segment is None or old_entry.files != entry.files:
                segments.append(load_segment(folder, entry, manifest))
            else:
                old_segment.items.open()
                segments.append(old_segment._replace(dead=entry.dead_rows()))
        return Snapshot(manifest, tuple(segments))

    def check_arrays(self, codebooks: Codebooks, unchecked: dict[Path, FileFact]) -> None:
        """Check that the codes and embeddings of all items fit the model.

        Parameters
        ----------
        unchecked
            Files of the model, which :meth:`check_files` compares with their checksums from now on.

        Raises
        ------
        ArtifactMismatch
            The model does not have such codes, levels or dimensions.
        """
        # The columns are the codes of all levels, then, unless fine codes follow the IDs, half norm
        # and density, of one byte each. The last two may be missing.
        fine_codes = 0 if codebooks.fine is None else codebooks.fine.num_codes
        sizes = [*codebooks.sizes, *([] if fine_codes else [256, 256])]
        num_columns = {len(codebooks.sizes), len(sizes)}
        if fine_codes != self.manifest.fine_codes:
            raise ArtifactMismatch(
                f"the index has {self.manifest.fine_codes} fine codes an item, its model "
                f"{fine_codes}; {REMEDY}"
            )
        width = stored_width(codebooks.dim, self.manifest.embedding_bits)
        for segment in self.segments:
            embeddings = segment.embeddings
            has_width = embeddings is None or embeddings.values.shape[1] == width
            ids = segment.table.ids
            has_codes = ids.shape[1] in num_columns and _has_codes_below(ids, sizes)
            if not has_width or not has_codes:
                raise ArtifactMismatch(
                    f"{segment.folder} has other codes or embeddings than the model: expected "
                    f"{len(sizes)} columns of codes below {sizes}, and embeddings of {width} "
                    f"numbers; {REMEDY}"
                )
        self._unchecked.append(unchecked)

    def check_files(self, *, max_bytes: float = math.inf) -> None:
        """Compare files with their checksums, each once, the smallest first, up to ``max_bytes``.

        Raises
        ------
        ArtifactMismatch
            A file is damaged. Every later search of this state raises this error, too.
        """
        with self._checking:
            # Another state that shares a segment may check its files at the same time.
            files = [
                (path, fact, unchecked)
                for unchecked in self._unchecked
                for path, fact in list(unchecked.items())
            ]
            for path, fact, unchecked in sorted(files, key=lambda file: file[1].bytes):
                max_bytes -= fact.bytes
                if self.damage is not None or max_bytes < 0:
                    break
                # A file that a writer has removed is still mapped, and can be read.
                with contextlib.suppress(FileNotFoundError):
                    if file_fingerprint(path) != fact.sha256:
                        self.damage = f"{path} is damaged: its contents have changed; {REMEDY}"
                        break
                unchecked.pop(path, None)
            self.needs_check = self.damage is not None
            if self.damage is not None:
                raise ArtifactMismatch(self.damage)

    @property
    def folder(self) -> Path:
        """Folder of the index, which must have a segment."""
        return self.segments[0].folder.parents[1]

    @cached_property
    def _folder_text(self) -> str:
        return str(self.folder)

    @cached_property
    def num_alive(self) -> int:
        """Number of items that are not deleted."""
        return sum(segment.num_alive for segment in self.segments)

    @cached_property
    def num_rows(self) -> int:
        """Number of alive items and all passages."""
        return self.num_alive + sum(len(segment.passages) for segment in self.segments)

    @cached_property
    def max_passages(self) -> int:
        """Maximum number of passages of an item, not counting its beginning."""
        counts = [np.bincount(segment.passages[:, 0]) for segment in self.segments]
        return max((int(count.max(initial=0)) for count in counts), default=0)

    @cached_property
    def has_moments(self) -> bool:
        """Whether there are videos, whose passages have times."""
        return any(segment.moments is not None for segment in self.segments)

    def owner_rows(
        self, segments: Int64[np.ndarray, " rows"], rows: Int64[np.ndarray, " rows"]
    ) -> Int64[np.ndarray, " rows"]:
        """Return the row of the item that each row belongs to: of a passage, that of its item."""
        if not self.max_passages:
            return rows
        owners = rows.copy()
        for number, segment in enumerate(self.segments):
            of_passages = np.flatnonzero((segments == number) & (rows >= segment.num_items))
            owners[of_passages] = segment.passages[rows[of_passages] - segment.num_items, 0]
        return owners

    def alive(self) -> Iterator[tuple[Item, Location]]:
        """Yield every item that is not deleted, with its location.

        Paths of stored pictures are relative to the folder of the index.
        """
        for number, segment in enumerate(self.segments):
            dead = set(segment.dead.tolist())
            for row, item in enumerate(segment.items.all()):
                if row not in dead:
                    yield item, Location(number, row)

    def ids(self) -> Iterator[str]:
        """Yield the id of every item that is not deleted."""
        return (item.id for item, _ in self.alive())

    @cached_property
    def searched_segments(self) -> list[SearchSegment]:
        """The ID tables of the segments, with the items that are not deleted."""
        searched_segments = []
        for segment in self.segments:
            mask = segment.alive_mask()
            allowed = None if mask is None else segment.allow(mask)
            searched_segments.append(SearchSegment(segment.table, allowed, segment.fine))
        return searched_segments

    def evidence(self, ranker: CodeRanker) -> Evidence:
        """Return the arrays that hits are re-ranked with.

        Parameters
        ----------
        ranker
            The ranker of the index's model.
        """
        if self._evidence is None:
            stored = self.manifest.embeddings
            vectors = None
            if stored != "none":
                vectors = [segment.vectors(ranker) for segment in self.segments]
            densities = None
            if stored == "fused":
                arrays = [segment.densities for segment in self.segments]
                densities = [
                    limit_densities(array, self.num_rows) for array in arrays if array is not None
                ]
            self._evidence = Evidence(
                ranker,
                vectors,
                stored == "raw",
                densities,
                fade_width=fade_width(self.num_rows),
            )
        return self._evidence

    @cached_property
    def modalities(self) -> list[Modality]:
        """The modalities of the items, most frequent first.

        Deleted items count until the index is compacted.
        """
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

    def restriction(self, conditions: Filter, *, deadline: float = math.inf) -> Restriction:
        """Return the items that a filter allows; the results of the last filters are cached.

        Raises like :func:`genius_search.index.filters.matching_items_of_stores`.
        """
        restriction = self._restrictions.get(conditions)
        if restriction is None:
            from genius_search.index.filters import (  # noqa: PLC0415  needed only here
                matching_items_of_stores,
            )

            stores = [segment.items for segment in self.segments]
            restriction = self.restrict(
                matching_items_of_stores(stores, conditions, deadline=deadline)
            )
            with self._caching:
                while len(self._restrictions) >= MAX_CACHED_FILTERS:
                    self._restrictions.pop(next(iter(self._restrictions)))
                self._restrictions[conditions] = restriction
        return restriction

    def cached_words(self, words: Sequence[str]) -> dict[str, Int64[np.ndarray, " items"] | None]:
        """Return the cached locations of items that contain words, without other words."""
        with self._caching:
            cache = self._locations_of_words
            return {word: cache[word] for word in words if word in cache}

    def cache_words(
        self, locations_of_words: Mapping[str, Int64[np.ndarray, " items"] | None]
    ) -> None:
        """Cache the locations of items that contain words; the oldest words are removed."""
        with self._caching:
            cache = self._locations_of_words
            for word, locations in locations_of_words.items():
                if word not in cache:
                    cache[word] = locations
                    self._num_cached_locations += 1 if locations is None else 1 + len(locations)
            while self._num_cached_locations > MAX_CACHED_LOCATIONS:
                locations = cache.pop(next(iter(cache)))
                self._num_cached_locations -= 1 if locations is None else 1 + len(locations)

    def restrict(self, masks: Sequence[Bool[np.ndarray, " _"]]) -> Restriction:
        """Return the items of each segment's mask that are not deleted; the masks are changed."""
        for segment, mask in zip(self.segments, masks, strict=True):
            mask[segment.dead] = False
        return tuple(
            segment.allow(mask) for segment, mask in zip(self.segments, masks, strict=True)
        )

    def items_at(
        self,
        segments: Int64[np.ndarray, " hits"],
        rows: Int64[np.ndarray, " hits"],
        *,
        columns: str = ITEM_COLUMNS,
    ) -> list[Item]:
        """Return the items at locations, in the same order, with absolute image paths.

        ``columns`` are those of :meth:`ItemStore.get`.
        """
        numbers = segments.tolist()
        rows_of: dict[int, list[int]] = {}
        for number, row in zip(numbers, rows.tolist(), strict=True):
            rows_of.setdefault(number, []).append(row)
        items_of = {
            number: iter(self.segments[number].items.get(segment_rows, columns))
            for number, segment_rows in rows_of.items()
        }
        items = [next(items_of[number]) for number in numbers]
        return [
            item
            if item.image is None
            # os.path.join takes a tenth of the time of a Path.
            else item._replace(image=os.path.join(self._folder_text, item.image))  # noqa: PTH118
            for item in items
        ]

    def ids_at(self, segments: Sequence[int], rows: Sequence[int]) -> list[str]:
        """Return the ids of the items at locations, in the same order."""
        return [
            self.segments[number].item_ids.at(row)
            for number, row in zip(segments, rows, strict=True)
        ]

    def locate(self, item_id: str | int) -> Location:
        """Return where an item is stored.

        Raises
        ------
        UnknownItem
            The item is not in the index.
        UsageError
            ``item_id`` is not an id.
        """
        name = as_id(item_id)
        for state in self.item_states([name]).values():
            return state.location
        raise UnknownItem(f"there is no item {name!r} in this index")

    def item_at(self, location: Location) -> Item:
        """Return the item at a location."""
        return self.items_at(np.array([location.segment]), np.array([location.row]))[0]

    def id_at(self, location: Location) -> Integer[np.ndarray, " columns"]:
        """Return the ID of the item at a location: its codes, then its norm and density."""
        table = self.segments[location.segment].table
        # The table lists rows of items by bucket, and each bucket has one row of ids.
        (position,) = np.flatnonzero(table.items == location.row)
        bucket = np.searchsorted(table.bucket_starts, position, side="right") - 1
        return np.asarray(table.ids[bucket])

    def item_states(self, item_ids: Sequence[str]) -> dict[str, ItemState]:
        """Return the states of items by their ids, without ids that are not in the index."""
        states: dict[str, ItemState] = {}
        for number, segment in enumerate(self.segments):
            stored = segment.items.find_ids(item_ids)
            is_dead = np.isin([row for _, row, *_ in stored], segment.dead)
            for (item_id, row, stamp, content, root), dead in zip(stored, is_dead, strict=True):
                if not dead:
                    states[item_id] = ItemState(stamp, content, root, Location(number, row))
        return states


def _has_codes_below(ids: Integer[np.ndarray, "ids columns"], sizes: Sequence[int]) -> bool:
    """Return whether the codes in the columns of an array of IDs are smaller than the sizes."""
    # Codes of one byte are always below 256: such columns need not be read.
    largest = np.iinfo(ids.dtype).max
    return all(
        sizes[column] > largest or ids[:, column].max(initial=0) < sizes[column]
        for column in range(ids.shape[1])
    )


class check_files_on_error:  # noqa: N801  used like a function
    """A block that reads the index; if it fails, files are checked for damage.

    Known damage raises an error at once. When a state is first read, up to
    :data:`MAX_BYTES_CHECKED_FIRST` bytes of its files are compared with their checksums. Wrap only
    code that reads the index, never an encoder or the parsing of a request.

    Raises
    ------
    ArtifactMismatch
        A file is damaged; the message names it. Or no file has changed, but GENIUS did not write
        it.
    """

    __slots__ = ("_snapshot",)

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __enter__(self) -> None:
        if self._snapshot.needs_check:
            self._snapshot.check_files(max_bytes=MAX_BYTES_CHECKED_FIRST)

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if error is None:
            return
        is_damage = isinstance(error, ArtifactError) or (
            isinstance(error, sqlite3.Error | LookupError | ValueError)
            and not isinstance(error, GeniusError)  # an error in the request
        )
        if not is_damage:
            return
        snapshot = self._snapshot
        snapshot.check_files()
        raise ArtifactMismatch(f"{snapshot.folder} cannot be read ({error}); {REMEDY}") from error
