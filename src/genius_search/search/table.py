"""The IDs of a pool as a sorted table, which replaces the paper's trie (section 4.4).

All IDs with a common prefix are a range of rows, so no nodes or pointers are needed: the codes that continue
a prefix are found by binary search among the rows where the code at that level changes. A table takes one or
two bytes per code plus four bytes per ID, and can be memory-mapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int32, Int64, Integer

LARGEST_BYTE_CODE: Final = int(np.iinfo(np.uint8).max)
"""Tables with a larger code store two bytes per code, others one."""


class Children(NamedTuple):
    """Prefixes one code longer than their parents, sorted by parent, then code."""

    parent: Int64[np.ndarray, " children"]
    """Position of the parent among the given prefixes."""
    code: Int64[np.ndarray, " children"]
    low: Int64[np.ndarray, "children ..."]
    """First table row with the prefix; with several segments, one column per segment."""
    high: Int64[np.ndarray, "children ..."]
    """One past the last row; equal to ``low`` in a segment without the prefix."""

    def take(self, chosen: np.ndarray) -> Children:
        """Return the chosen children."""
        return Children(*(values[chosen] for values in self))


class Rows(NamedTuple):
    """Rows of several owners, one owner's after the other's."""

    owner: Int64[np.ndarray, " rows"]
    row: Int64[np.ndarray, " rows"]


def expand_ranges(low: Int64[np.ndarray, " ranges"], high: Int64[np.ndarray, " ranges"]) -> Rows:
    """List all rows of the ranges [low, high); their owners are the ranges."""
    counts = high - low
    owner = np.arange(len(counts)).repeat(counts)
    row = np.arange(len(owner))
    row += (low - counts.cumsum() + counts).take(owner)
    return Rows(owner, row)


class IdTable:
    """Distinct IDs of a pool in lexicographic order, and the items of each. Arrays may be memory-mapped.

    Parameters
    ----------
    ids
        distinct IDs, sorted.
    starts
        all rows but the first, grouped by the first level at which a row differs from the row before it, and
        ascending within each group.
    level_bounds
        bounds of each level's group in ``starts``; one more entry than levels.
    bucket_starts
        start of each ID's items in ``items``; one more entry than IDs.
    items
        item rows, ID after ID; within an ID in descending order of ``code_cosine``.
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
        self.num_items = len(items)
        self._starts_of_level = [starts[low:high] for low, high in pairwise(level_bounds.tolist())]

    @staticmethod
    def build(
        codes: Integer[np.ndarray, "items levels"], code_cosine: Float[np.ndarray, " items"]
    ) -> IdTable:
        """Sort items into a table. Items that share an ID are sorted by descending ``code_cosine``, then row.

        An unknown cosine (NaN) sorts last. Building takes about three times the memory of the codes plus 20
        bytes per item.

        Deviation 18: the released code lists the items of an ID in the pool's order.
        """
        num_items, num_levels = codes.shape
        codes = codes.astype(np.uint8 if codes.max(initial=0) <= LARGEST_BYTE_CODE else np.int16)
        order = np.lexsort((-code_cosine, *codes.T[::-1]))  # lexsort's primary key is the last
        codes = codes[order]
        differs = codes[1:] != codes[:-1]
        begins = np.flatnonzero(differs.any(axis=1)) + 1  # first row of every ID but the first
        levels = differs[begins - 1].argmax(axis=1)
        first = [0] if num_items else []
        return IdTable(
            ids=codes[np.concatenate([first, begins]).astype(np.int64)],
            starts=(levels.argsort(kind="stable") + 1).astype(np.int32),
            level_bounds=np.concatenate([[0], np.bincount(levels, minlength=num_levels).cumsum()]),
            bucket_starts=np.concatenate([first, begins, [num_items]]).astype(np.int32),
            items=order.astype(np.int32),
        )

    def is_whole(self) -> bool:
        """Return whether arrays of such lengths and numbers list each item once, and branches in order."""
        starts, bounds, fences = self.starts, self.level_bounds, self.bucket_starts
        is_there = np.zeros(len(self.items), dtype=bool)
        is_there[self.items] = True
        falls = np.flatnonzero(starts[1:] <= starts[:-1]) + 1  # only where a level begins
        ends = (bounds[0], bounds[-1], fences[0], fences[-1])
        is_in_order = ends == (0, len(starts), 0, len(self.items)) and np.isin(falls, bounds).all()
        return bool(is_in_order and is_there.all())

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Size of the IDs in bytes, without their items."""
        return int(self.ids.nbytes + self.starts.nbytes)

    def children(
        self, level: int, low: Int64[np.ndarray, " prefixes"], high: Int64[np.ndarray, " prefixes"]
    ) -> Children:
        """Return the codes that continue prefixes (ranges of rows) at ``level``.

        The first child of a prefix starts at the prefix's first row; the others start at the rows in its
        range that first differ from their predecessor at this level. Empty ranges have no children.
        """
        starts = self._starts_of_level[level]
        first = starts.searchsorted(
            low.astype(starts.dtype), "right"
        )  # another dtype would copy starts
        last = starts.searchsorted(high.astype(starts.dtype))
        filled = np.flatnonzero(high > low)
        others = expand_ranges(first, np.maximum(first, last))
        parent = np.concatenate([filled, others.owner])
        order = parent.argsort(kind="stable")  # a prefix's first child comes first
        parent = parent[order]
        child_low = np.concatenate([low[filled], starts[others.row]])[order].astype(np.int64)
        is_last = np.diff(parent, append=-1) != 0
        child_high = np.append(child_low[1:], 0)[: len(parent)]
        child_high[is_last] = high[parent[is_last]]
        return Children(parent, self.ids[child_low, level].astype(np.int64), child_low, child_high)

    def buckets(self, rows: Int64[np.ndarray, " rows"]) -> Rows:
        """Return the items of several IDs, in descending order of ``code_cosine`` for each."""
        begins = self.bucket_starts.take(rows).astype(np.int64)
        owner, position = expand_ranges(begins, self.bucket_starts.take(rows + 1).astype(np.int64))
        return Rows(owner, self.items.take(position).astype(np.int64))

    @cached_property
    def rows_of_items(self) -> Int32[np.ndarray, " items"]:
        """The table row of each item's ID. Reads the whole table when it is first used."""
        rows = np.empty(self.num_items, dtype=np.int32)
        rows[self.items] = np.arange(len(self), dtype=np.int32).repeat(np.diff(self.bucket_starts))
        return rows


WORD: Final = 64
"""Rows per machine word."""


class RankedBits:
    """Set of rows as a bit vector with rank: counts and lists the members in a range; about 1.5 bits per row.

    Parameters
    ----------
    rows
        True for the rows in the set.
    """

    def __init__(self, rows: Bool[np.ndarray, " rows"]) -> None:
        self.words = np.zeros(len(rows) // WORD + 1, dtype=np.uint64)
        packed = np.packbits(rows, bitorder="little")
        self.words.view(np.uint8)[: len(packed)] = packed
        counts = np.bitwise_count(self.words)
        self.before = (counts.cumsum(dtype=np.int64) - counts).astype(np.int32)

    def count(
        self, low: Int64[np.ndarray, "*shape"], high: Int64[np.ndarray, "*shape"]
    ) -> Int64[np.ndarray, "*shape"]:
        """Count the members in each range [low, high)."""
        return np.asarray(self._rank(high) - self._rank(low))

    def inside(self, low: Int64[np.ndarray, " ranges"], high: Int64[np.ndarray, " ranges"]) -> Rows:
        """List the members in each range [low, high)."""
        owner, row = expand_ranges(low, high)
        kept = np.flatnonzero(self.words[row >> 6] >> (row & 63).astype(np.uint64) & np.uint64(1))
        return Rows(owner[kept], row[kept])

    def _rank(self, row: np.ndarray) -> np.ndarray:
        """Count the members before each row."""
        word = row >> 6
        below = (np.uint64(1) << (row & 63).astype(np.uint64)) - np.uint64(1)
        return np.asarray(
            self.before[word] + np.bitwise_count(self.words[word] & below).astype(np.int64)
        )


class Allowed(NamedTuple):
    """Items of one table that a search may return."""

    items: Bool[np.ndarray, " items"]
    """Mask over item rows."""
    ids: RankedBits
    """Table rows whose ID has at least one allowed item."""

    @staticmethod
    def of(table: IdTable, items: Bool[np.ndarray, " items"]) -> Allowed:
        """Build from a mask over the items of a table."""
        if not len(items):
            return Allowed(items, RankedBits(items))
        by_id = np.logical_or.reduceat(items[table.items], table.bucket_starts[:-1])
        return Allowed(items, RankedBits(by_id))

    @staticmethod
    def few(table: IdTable, rows: Int64[np.ndarray, " rows"]) -> Allowed:
        """Build from a few items of a table, without reading its other items."""
        items, ids = np.zeros(table.num_items, dtype=bool), np.zeros(len(table), dtype=bool)
        items[rows] = True
        ids[table.rows_of_items[rows]] = True
        return Allowed(items, RankedBits(ids))


class SearchSegment(NamedTuple):
    """One of several tables that are searched together: a segment of an index."""

    table: IdTable
    alive: Allowed | None = None
    """The items that are not deleted; None if none is."""


Restriction = tuple[Allowed | None, ...]
"""The items of each segment that a query may return; None allows all of them."""


def children_in_segments(
    segments: Sequence[SearchSegment],
    level: int,
    low: Int64[np.ndarray, "prefixes segments"],
    high: Int64[np.ndarray, "prefixes segments"],
) -> Children:
    """Return the codes that continue prefixes at ``level`` in any of the segments."""
    by_segment = [
        segment.table.children(level, low[:, number], high[:, number])
        for number, segment in enumerate(segments)
    ]
    if len(by_segment) == 1:
        parent, code, only_low, only_high = by_segment[0]
        return Children(parent, code, only_low[:, None], only_high[:, None])
    span = 1 + max((int(children.code.max(initial=0)) for children in by_segment), default=0)
    keys, position = np.unique(
        np.concatenate([children.parent * span + children.code for children in by_segment]),
        return_inverse=True,
    )
    merged_low = np.zeros((len(keys), len(segments)), dtype=np.int64)
    merged_high = np.zeros_like(merged_low)
    stops = np.cumsum([len(children.parent) for children in by_segment])
    for number, (children, places) in enumerate(
        zip(by_segment, np.split(position, stops[:-1]), strict=True)
    ):
        merged_low[places, number] = children.low
        merged_high[places, number] = children.high
    return Children(keys // span, keys % span, merged_low, merged_high)


def count_ids(
    low: Int64[np.ndarray, "prefixes segments"],
    high: Int64[np.ndarray, "prefixes segments"],
    restrictions: Sequence[Restriction | None],
    owner: Int64[np.ndarray, " prefixes"],
) -> Int64[np.ndarray, " prefixes"]:
    """Count the allowed IDs under each prefix. An ID that occurs in several segments counts once in each.

    ``restrictions[owner]`` is the restriction of a prefix. Queries with the same one are counted together.
    """
    sizes = high - low
    counts: np.ndarray = sizes.sum(axis=1)
    for restriction in {id(one): one for one in restrictions if one is not None}.values():
        chosen = np.flatnonzero(np.array([one is restriction for one in restrictions])[owner])
        counts[chosen] = 0
        for number, allowed in enumerate(restriction):
            counts[chosen] += (
                sizes[chosen, number]
                if allowed is None
                else allowed.ids.count(low[chosen, number], high[chosen, number])
            )
    return counts
