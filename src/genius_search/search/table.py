"""The IDs that exist in a pool, as sorted rows (the paper's trie, section 4.4).

A prefix of an ID is a range of rows, so the table needs no nodes and no pointers: the codes that continue a
prefix are found by bisection among the rows where one code differs from the row before. That takes a byte or
two for each code and four bytes for each ID, and everything can stay on disk, mapped into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int64, Integer

from genius_search.errors import ArtifactMismatch, BadData
from genius_search.search.arrays import open_array, save_array

LARGEST_CODE: Final = int(np.iinfo(np.int16).max)
LARGEST_BYTE_CODE: Final = int(np.iinfo(np.uint8).max)
"""Tables with a larger code anywhere keep two bytes for each code, others one."""
MAX_INT32_ROWS: Final = int(np.iinfo(np.int32).max)
"""Tables of more items than this number their rows with eight bytes instead of four."""


class Children(NamedTuple):
    """Prefixes that are one code longer than their parents, in order of parent, then code."""

    parent: Int64[np.ndarray, " children"]
    """Position of the parent among the given prefixes."""
    code: Int64[np.ndarray, " children"]
    low: Int64[np.ndarray, "children ..."]
    """First row of the table that begins with it; in several parts, a column for each."""
    high: Int64[np.ndarray, "children ..."]
    """One past the last row; equal to ``low`` in a part that does not have it."""

    def take(self, chosen: np.ndarray) -> Children:
        """Return some of them."""
        return Children(*(values[chosen] for values in self))


class Buckets(NamedTuple):
    """Items of several IDs, one bucket after the other, the most typical item of an ID first."""

    items: Int64[np.ndarray, " items"]
    owner: Int64[np.ndarray, " items"]
    """Position of each item's ID among the given rows."""


class IdTable:
    """The distinct IDs of a pool in lexicographic order, and the items that have each of them.

    Every array may be memory-mapped.

    Parameters
    ----------
    ids
        distinct IDs, sorted.
    starts
        all rows but the first, grouped by the level at which a row first differs from the row before it,
        ascending inside a group.
    level_bounds
        bounds of each level's group in ``starts``; one more entry than levels.
    bucket_starts
        begin of each ID's items in ``items``; one more entry than IDs.
    items
        item rows, ID after ID, the most typical item of an ID first.
    """

    def __init__(
        self,
        ids: Integer[np.ndarray, "ids levels"],
        starts: Integer[np.ndarray, " branches"],
        level_bounds: Int64[np.ndarray, " bounds"],
        bucket_starts: Integer[np.ndarray, " fences"],
        items: Integer[np.ndarray, " items"],
    ) -> None:
        self.ids = ids
        self.starts = starts
        self.level_bounds = level_bounds
        self.bucket_starts = bucket_starts
        self.items = items
        self._starts_of_level = [starts[low:high] for low, high in pairwise(level_bounds.tolist())]
        self._flat_codes = ids.reshape(-1)  # a view: one look-up finds a row's code

    @staticmethod
    def build(codes: Integer[np.ndarray, "items levels"], typicality: Float[np.ndarray, " items"]) -> IdTable:
        """Sort items into a table; inside an ID the larger ``typicality`` comes first, then the lower row.

        An unknown typicality (NaN) counts as the smallest. Building takes about
        three times the memory of the codes, and 20 bytes an item.

        Deviation 18: the released code lists the items of an ID in the pool's order.

        Raises
        ------
        BadData
            A code is negative or too large; names the item and the level.
        """
        if codes.min(initial=0) < 0 or codes.max(initial=0) > LARGEST_CODE:
            row, level = np.argwhere((codes < 0) | (codes > LARGEST_CODE))[0].tolist()
            raise BadData(
                f"item row {row} has code {codes[row, level]} at level {level}; codes must lie in "
                f"0 … {LARGEST_CODE}: make its ID again, with the model of the index"
            )
        num_items, num_levels = codes.shape
        codes = codes.astype(np.uint8 if codes.max(initial=0) <= LARGEST_BYTE_CODE else np.int16)
        order = np.lexsort((-typicality, *codes.T[::-1]))  # the last key is the first that counts
        codes = codes[order]
        differs = codes[1:] != codes[:-1]
        begins = np.flatnonzero(differs.any(axis=1)) + 1  # of every ID but the first
        levels = differs[begins - 1].argmax(axis=1)
        row_type = np.int32 if num_items <= MAX_INT32_ROWS else np.int64
        first = [0] if num_items else []
        return IdTable(
            ids=codes[np.concatenate([first, begins]).astype(np.int64)],
            starts=(levels.argsort(kind="stable") + 1).astype(row_type),
            level_bounds=np.concatenate([[0], np.bincount(levels, minlength=num_levels).cumsum()]),
            bucket_starts=np.concatenate([first, begins, [num_items]]).astype(row_type),
            items=order.astype(row_type),
        )

    def save(self, folder: Path) -> None:
        """Write the arrays into a folder, a file for each."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("ids", "starts", "level_bounds", "bucket_starts", "items"):
            save_array(folder / f"{name}.npy", getattr(self, name))

    @staticmethod
    def open(folder: Path) -> IdTable:
        """Map a saved table into memory; only headers are read, so it takes the same time for any size.

        Raises
        ------
        ArtifactMissing
            A file is not there.
        ArtifactMismatch
            A file is truncated, of another type, or does not fit the others; names it.
        """
        rows = (np.int32, np.int64)
        ids = open_array(folder / "ids.npy", np.uint8, np.int16, dimensions=2)
        bounds = np.array(open_array(folder / "level_bounds.npy", np.int64))
        starts = open_array(folder / "starts.npy", *rows)
        bucket_starts = open_array(folder / "bucket_starts.npy", *rows)
        items = open_array(folder / "items.npy", *rows)
        for name, given, expected in (
            ("level_bounds", len(bounds), ids.shape[1] + 1),
            ("starts", len(starts), max(0, len(ids) - 1)),
            ("bucket_starts", len(bucket_starts), len(ids) + 1),
            ("items", len(items), int(bucket_starts[-1]) if len(bucket_starts) else 0),
        ):
            if given != expected:
                raise ArtifactMismatch(
                    f"{folder / name}.npy has {given} entries, the table beside it needs {expected}: "
                    "they belong to different tables; make the folder again"
                )
        if bounds[0] != 0 or bounds[-1] != len(starts) or (np.diff(bounds) < 0).any():
            raise ArtifactMismatch(f"{folder / 'level_bounds.npy'} is damaged; make the folder again")
        return IdTable(ids, starts, bounds, bucket_starts, items)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_levels(self) -> int:
        """Codes in an ID."""
        return int(self.ids.shape[1])

    @property
    def num_items(self) -> int:
        """Items under all IDs."""
        return len(self.items)

    @property
    def nbytes(self) -> int:
        """Bytes that the IDs take, on disk and in memory, without their items."""
        return int(self.ids.nbytes + self.starts.nbytes)

    def children(
        self, level: int, low: Int64[np.ndarray, " prefixes"], high: Int64[np.ndarray, " prefixes"]
    ) -> Children:
        """Return all codes that continue these prefixes (ranges of rows) at ``level``.

        A prefix's first child begins where the prefix does; the others begin at the rows inside it that
        first differ at this level from the row before. Empty ranges have no children.
        """
        starts = self._starts_of_level[level]
        first = starts.searchsorted(low.astype(starts.dtype), "right")  # of another type it would copy all
        counts = starts.searchsorted(high.astype(starts.dtype)) - first
        counts += 1
        counts *= high > low
        ends = counts.cumsum()
        parent = np.arange(len(low)).repeat(counts)
        child_high = np.empty(len(parent), dtype=np.int64)
        if not len(parent):
            return Children(parent, child_high, child_high, child_high)
        begins = ends - counts
        place = np.arange(-1, len(parent) - 1)
        place += (first - begins).take(parent)
        child_low = starts.take(place, mode="clip").astype(np.int64) if len(starts) else np.empty_like(parent)
        filled = counts.nonzero()[0]
        child_low[begins[filled]] = low[filled]
        child_high[:-1] = child_low[1:]
        child_high[ends[filled] - 1] = high[filled]
        code = self._flat_codes.take(child_low * self.ids.shape[1] + level).astype(np.int64)
        return Children(parent, code, child_low, child_high)

    def bucket(self, row: int) -> Int64[np.ndarray, " items"]:
        """Return the items that have one ID."""
        return self.buckets(np.array([row])).items

    def buckets(self, rows: Int64[np.ndarray, " rows"]) -> Buckets:
        """Return the items that have these IDs."""
        begins = self.bucket_starts.take(rows).astype(np.int64)
        owner, place = expand_ranges(begins, self.bucket_starts.take(rows + 1).astype(np.int64))
        return Buckets(self.items.take(place).astype(np.int64), owner)

    def rows(self) -> Int64[np.ndarray, " items"]:
        """Return the row of each item's ID; reads the whole table."""
        found = np.empty(self.num_items, dtype=np.int64)
        found[self.items] = np.arange(len(self)).repeat(np.diff(self.bucket_starts))
        return found


class Rows(NamedTuple):
    """Rows of several ranges, range after range, ascending in each."""

    owner: Int64[np.ndarray, " rows"]
    """Position of each row's range among those given."""
    row: Int64[np.ndarray, " rows"]


def expand_ranges(low: Int64[np.ndarray, " ranges"], high: Int64[np.ndarray, " ranges"]) -> Rows:
    """Return all rows of the ranges [low, high)."""
    counts = high - low
    owner = np.arange(len(counts)).repeat(counts)
    row = np.arange(len(owner))
    row += (low - counts.cumsum() + counts).take(owner)
    return Rows(owner, row)


WORD: Final = 64
"""Rows in one machine word."""


class RankedBits:
    """A set of rows that counts and lists those in a range; a bit vector with rank, about 1.5 bits a row.

    Parameters
    ----------
    rows
        True for the rows in the set.
    """

    def __init__(self, rows: Bool[np.ndarray, " rows"]) -> None:
        self._words = np.zeros(len(rows) // WORD + 1, dtype=np.uint64)
        packed = np.packbits(rows, bitorder="little")
        self._words.view(np.uint8)[: len(packed)] = packed
        counts = np.bitwise_count(self._words)
        self._before = counts.cumsum(dtype=np.int64) - counts
        if len(rows) <= MAX_INT32_ROWS:
            self._before = self._before.astype(np.int32)

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return int(self._words.nbytes + self._before.nbytes)

    def count(
        self, low: Int64[np.ndarray, "*shape"], high: Int64[np.ndarray, "*shape"]
    ) -> Int64[np.ndarray, "*shape"]:
        """Return how many rows of the set lie in each range [low, high)."""
        return np.asarray(self._rank(high) - self._rank(low))

    def inside(self, low: Int64[np.ndarray, " ranges"], high: Int64[np.ndarray, " ranges"]) -> Rows:
        """Return the rows of the set in each range [low, high); rows outside it are skipped by the word."""
        first = low >> 6
        words = expand_ranges(first, np.where(high > low, ((high - 1) >> 6) + 1, first))
        bits = self._words[words.row]
        filled = bits.nonzero()[0]
        place, bit = np.unpackbits(bits[filled].view(np.uint8), bitorder="little").reshape(-1, WORD).nonzero()
        word = filled[place]
        owner, row = words.owner[word], words.row[word] * WORD + bit
        kept = ((row >= low[owner]) & (row < high[owner])).nonzero()[0]
        return Rows(owner[kept], row[kept])

    def _rank(self, row: np.ndarray) -> np.ndarray:
        """Return how many rows of the set lie before each row."""
        word = row >> 6
        below = (np.uint64(1) << (row & 63).astype(np.uint64)) - np.uint64(1)
        return np.asarray(self._before[word] + np.bitwise_count(self._words[word] & below).astype(np.int64))


class Allowed(NamedTuple):
    """Items of one table that may be found."""

    items: Bool[np.ndarray, " items"]
    """By item row."""
    ids: RankedBits
    """Rows of the table with such an item."""

    @staticmethod
    def of(table: IdTable, items: Bool[np.ndarray, " items"]) -> Allowed:
        """Allow only these items of a table."""
        if not len(items):
            return Allowed(items, RankedBits(items))
        by_id = np.logical_or.reduceat(items[table.items], table.bucket_starts[:-1])
        return Allowed(items, RankedBits(by_id))


class Part(NamedTuple):
    """One of the tables that are searched together: a segment of an index."""

    table: IdTable
    alive: Allowed | None = None
    """The items that were not deleted; None: all of them."""


Restriction = tuple[Allowed | None, ...]
"""What a query may find in each part; None: everything there."""


def children_in_parts(
    parts: Sequence[Part],
    level: int,
    low: Int64[np.ndarray, "prefixes parts"],
    high: Int64[np.ndarray, "prefixes parts"],
) -> Children:
    """Return all codes that continue these prefixes at ``level`` in any of the parts."""
    found = [part.table.children(level, low[:, number], high[:, number]) for number, part in enumerate(parts)]
    if len(found) == 1:
        parent, code, only_low, only_high = found[0]
        return Children(parent, code, only_low[:, None], only_high[:, None])
    span = 1 + max((int(own.code.max(initial=0)) for own in found), default=0)
    keys = np.concatenate([own.parent * span + own.code for own in found])
    order = keys.argsort(kind="stable")  # merges runs that are sorted already: those of the parts
    keys = keys[order]
    is_new = np.diff(keys, prepend=-1) > 0
    place = np.empty_like(order)
    place[order] = is_new.cumsum() - 1
    keys = keys[is_new]
    merged_low = np.zeros((len(keys), len(parts)), dtype=np.int64)
    merged_high = np.zeros_like(merged_low)
    start = 0
    for number, own in enumerate(found):
        stop = start + len(own.parent)
        merged_low[place[start:stop], number] = own.low
        merged_high[place[start:stop], number] = own.high
        start = stop
    return Children(keys // span, keys % span, merged_low, merged_high)


def count_ids(
    low: Int64[np.ndarray, "prefixes parts"],
    high: Int64[np.ndarray, "prefixes parts"],
    restrictions: Sequence[Restriction | None],
    owner: Int64[np.ndarray, " prefixes"],
) -> Int64[np.ndarray, " prefixes"]:
    """Return how many IDs under each prefix may be found; one in several parts counts in each.

    ``restrictions[owner]`` is the restriction of a prefix. Queries that share one are counted together.
    """
    counts: np.ndarray = (high - low).sum(axis=1)
    groups: dict[int, tuple[Restriction, list[int]]] = {}
    for number, restriction in enumerate(restrictions):
        if restriction is not None:
            groups.setdefault(id(restriction), (restriction, []))[1].append(number)
    for restriction, members in groups.values():
        is_member = np.zeros(len(restrictions), dtype=bool)
        is_member[members] = True
        chosen = np.flatnonzero(is_member[owner])
        total = np.zeros(len(chosen), dtype=np.int64)
        for number, allowed in enumerate(restriction):
            first, last = low[chosen, number], high[chosen, number]
            total += last - first if allowed is None else allowed.ids.count(first, last)
        counts[chosen] = total
    return counts
