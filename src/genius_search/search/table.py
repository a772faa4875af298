"""The IDs of a pool as a sorted table, which replaces the paper's trie (section 4.4).

All IDs with a common prefix are a range of rows, so no nodes or pointers are needed: the codes that
continue a prefix are found by binary search among the rows where the code at that level changes. A
table takes one or two bytes per code plus four bytes per ID, and can be memory-mapped.

Six items with the IDs below make a table of five rows; items 1 and 4 share an ID, a *bucket*::

    row   ID      first level that differs   items in the bucket
    0     0 3 1   (first row)                5
    1     0 3 7   2                          1, 4
    2     0 8 2   1                          0
    3     2 3 1   0                          3
    4     2 5 5   1                          2

    starts        = [3 | 2, 4 | 1]     rows grouped by the first level that differs: 0, 1, 2
    level_bounds  = [0, 1, 3, 4]       where each group begins
    bucket_starts = [0, 1, 3, 4, 5, 6]
    items         = [5, 1, 4, 0, 3, 2]

The prefix "0" is the range of rows [0, 3). At level 1 it has two children: "0 3" starts at row 0,
where the prefix itself starts, and "0 8" at row 2, the only entry of level 1's group within [1, 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int32, Int64, Integer

if TYPE_CHECKING:
    from genius_search.search.vectors import StoredFineCodes

LARGEST_BYTE_CODE: Final = int(np.iinfo(np.uint8).max)
"""Tables with a larger code store two bytes per code, others one."""


class Children(NamedTuple):
    """Prefixes one code longer than their parents, sorted by parent, then code."""

    parent: Int64[np.ndarray, " children"]
    """Position of the parent among the prefixes that were extended."""
    code: Int64[np.ndarray, " children"]
    low: Int64[np.ndarray, "children ..."]
    """First table row with the prefix; with several segments, one column per segment."""
    high: Int64[np.ndarray, "children ..."]
    """One past the last row; equal to ``low`` in a segment without the prefix."""

    def take(self, chosen: np.ndarray) -> Children:
        """Return the chosen children."""
        return Children(*(values[chosen] for values in self))


class Rows(NamedTuple):
    """Rows that belong to owners, such as ranges or IDs; the rows of an owner are adjacent."""

    owner: Int64[np.ndarray, " rows"]
    """Position of the owner among the arguments of the function that returns this."""
    row: Int64[np.ndarray, " rows"]


def expand_ranges(low: Int64[np.ndarray, " ranges"], high: Int64[np.ndarray, " ranges"]) -> Rows:
    """List all rows of the ranges [low, high); their owners are the ranges.

    >>> expand_ranges(np.array([3, 7]), np.array([5, 8]))
    Rows(owner=array([0, 0, 1]), row=array([3, 4, 7]))
    """
    counts = high - low
    owner = np.arange(len(counts)).repeat(counts)
    # Row i of the list is row (i - rows of earlier ranges) of its range, which starts at low.
    row = np.arange(len(owner))
    row += (low - counts.cumsum() + counts).take(owner)
    return Rows(owner, row)


class IdTable:
    """Distinct IDs of a pool in lexicographic order, and the items of each.

    Arrays may be memory-mapped. The docstring of the module has an example.

    Parameters
    ----------
    ids
        distinct IDs, sorted.
    starts
        all rows but the first, grouped by the first level at which a row differs from the row
        before it, and ascending within each group.
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
        """Sort items into a table.

        Items that share an ID are sorted by descending ``code_cosine``, then by row. An unknown
        cosine (NaN) sorts last. Building takes about three times the memory of the codes plus 20
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

    def is_consistent(self) -> bool:
        """Return whether the table lists each item once, and the starts of each level in order.

        The lengths of the arrays and the ranges of their numbers must have been checked before.
        """
        starts = self.starts
        is_listed = np.zeros(len(self.items), dtype=bool)
        is_listed[self.items] = True
        # Starts ascend within a level, so they may only fall where the next level's group begins.
        falls = np.flatnonzero(starts[1:] <= starts[:-1]) + 1
        is_ascending = np.isin(falls, self.level_bounds).all()
        levels_cover = (self.level_bounds[0], self.level_bounds[-1]) == (0, len(starts))
        buckets_cover = (self.bucket_starts[0], self.bucket_starts[-1]) == (0, len(self.items))
        return bool(levels_cover and buckets_cover and is_ascending and is_listed.all())

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Size of the IDs in bytes, without their items."""
        return int(self.ids.nbytes + self.starts.nbytes)

    def children(
        self, level: int, low: Int64[np.ndarray, " prefixes"], high: Int64[np.ndarray, " prefixes"]
    ) -> Children:
        """Return the codes that continue prefixes, which are ranges of rows, at ``level``.

        The first child of a prefix starts at the prefix's first row. The later children start at
        the rows in its range that first differ from their predecessor at this level. Empty ranges
        have no children.
        """
        starts = self._starts_of_level[level]
        # With another dtype, searchsorted would copy starts.
        first = starts.searchsorted(low.astype(starts.dtype), "right")
        last = starts.searchsorted(high.astype(starts.dtype))
        nonempty = np.flatnonzero(high > low)
        later = expand_ranges(first, np.maximum(first, last))
        parent = np.concatenate([nonempty, later.owner])
        order = parent.argsort(kind="stable")  # a prefix's first child comes first
        parent = parent[order]
        child_low = np.concatenate([low[nonempty], starts[later.row]])[order].astype(np.int64)
        # A child ends where its parent's next child starts; the last one ends with the parent.
        is_last = np.diff(parent, append=-1) != 0
        child_high = np.append(child_low[1:], 0)[: len(parent)]
        child_high[is_last] = high[parent[is_last]]
        return Children(parent, self.ids[child_low, level].astype(np.int64), child_low, child_high)

    def buckets(self, rows: Int64[np.ndarray, " rows"]) -> Rows:
        """Return the items of the IDs at table rows; within an ID by descending ``code_cosine``."""
        low = self.bucket_starts.take(rows).astype(np.int64)
        high = self.bucket_starts.take(rows + 1).astype(np.int64)
        owner, position = expand_ranges(low, high)
        return Rows(owner, self.items.take(position).astype(np.int64))

    @cached_property
    def rows_of_items(self) -> Int32[np.ndarray, " items"]:
        """The table row of each item's ID. Reads the whole table when it is first used."""
        rows = np.empty(self.num_items, dtype=np.int32)
        rows[self.items] = np.arange(len(self), dtype=np.int32).repeat(np.diff(self.bucket_starts))
        return rows

    @cached_property
    def positions_of_items(self) -> Int32[np.ndarray, " items"]:
        """The position of each item in ``items``. Reads all of them when it is first used."""
        positions = np.empty(self.num_items, dtype=np.int32)
        positions[self.items] = np.arange(self.num_items, dtype=np.int32)
        return positions


WORD_BITS: Final = 64
"""Rows per machine word."""


class RankedBits:
    """Set of rows that counts and lists its members in a range; takes about 1.5 bits per row.

    A bit vector with rank: row r is bit ``r % 64`` of ``words[r // 64]``, and ``before[w]`` is the
    number of members before word w. So the members before row r are ``before[r // 64]`` plus the
    bits of its word below bit ``r % 64``.

    Parameters
    ----------
    rows
        True for the rows in the set.
    """

    def __init__(self, rows: Bool[np.ndarray, " rows"]) -> None:
        self.words = np.zeros(len(rows) // WORD_BITS + 1, dtype=np.uint64)
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
        is_member = self.words[row >> 6] >> (row & 63).astype(np.uint64) & np.uint64(1)
        members = np.flatnonzero(is_member)
        return Rows(owner[members], row[members])

    def rows(self) -> Int64[np.ndarray, " members"]:
        """List all members."""
        return np.flatnonzero(np.unpackbits(self.words.view(np.uint8), bitorder="little"))

    def _rank(self, row: np.ndarray) -> np.ndarray:
        """Count the members before each row."""
        word = row >> 6
        below = (np.uint64(1) << (row & 63).astype(np.uint64)) - np.uint64(1)
        return np.asarray(
            self.before[word] + np.bitwise_count(self.words[word] & below).astype(np.int64)
        )


@dataclass(eq=False)
class Allowed:
    """Items of one table that a search may return."""

    items: Bool[np.ndarray, " items"]
    """Mask over item rows."""
    ids: RankedBits
    """Table rows whose ID has at least one allowed item."""
    table: IdTable
    rows: Int64[np.ndarray, " rows"] | None = None
    """The rows of the items, if there are few."""

    @staticmethod
    def of(table: IdTable, items: Bool[np.ndarray, " items"]) -> Allowed:
        """Build from a mask over the items of a table."""
        if not len(items):
            return Allowed(items, RankedBits(items), table)
        has_item = np.logical_or.reduceat(items[table.items], table.bucket_starts[:-1])
        return Allowed(items, RankedBits(has_item), table)

    @staticmethod
    def of_rows(table: IdTable, rows: Int64[np.ndarray, " rows"]) -> Allowed:
        """Build from the rows of a few items of a table, without reading the other items."""
        items = np.zeros(table.num_items, dtype=bool)
        items[rows] = True
        has_item = np.zeros(len(table), dtype=bool)
        has_item[table.rows_of_items[rows]] = True
        return Allowed(items, RankedBits(has_item), table, rows)

    @cached_property
    def positions(self) -> RankedBits:
        """Positions of the allowed items in the table's list of items."""
        if self.rows is None:
            return RankedBits(self.items[self.table.items])
        is_position = np.zeros(len(self.items), dtype=bool)
        is_position[self.table.positions_of_items[self.rows]] = True
        return RankedBits(is_position)


class SearchSegment(NamedTuple):
    """A segment of an index, as a search sees it. All segments are searched together."""

    table: IdTable
    alive: Allowed | None = None
    """The items that are not deleted; None if no item is deleted."""
    fine: StoredFineCodes | None = None
    """The fine codes of the items; None if IDs are whole."""


Restriction = tuple[Allowed | None, ...]
"""The items of each segment that a query may return; None allows all of them."""


def count_allowed(segments: Sequence[SearchSegment], restriction: Restriction) -> int:
    """Return the number of items that a query may return."""
    return sum(
        segment.table.num_items if allowed is None else int(allowed.items.sum())
        for segment, allowed in zip(segments, restriction, strict=True)
    )


def children_in_segments(
    segments: Sequence[SearchSegment],
    level: int,
    low: Int64[np.ndarray, "prefixes segments"],
    high: Int64[np.ndarray, "prefixes segments"],
) -> Children:
    """Return the codes that continue prefixes at ``level`` in any of the segments.

    Children of the same parent with the same code are one child, with a range of rows per segment.
    """
    by_segment = [
        segment.table.children(level, low[:, number], high[:, number])
        for number, segment in enumerate(segments)
    ]
    if len(by_segment) == 1:
        parent, code, only_low, only_high = by_segment[0]
        return Children(parent, code, only_low[:, None], only_high[:, None])
    # The key of a child orders by parent, then code: key = parent * num_codes + code.
    num_codes = 1 + max((int(children.code.max(initial=0)) for children in by_segment), default=0)
    keys, position = np.unique(
        np.concatenate([children.parent * num_codes + children.code for children in by_segment]),
        return_inverse=True,
    )
    merged_low = np.zeros((len(keys), len(segments)), dtype=np.int64)
    merged_high = np.zeros_like(merged_low)
    stops = np.cumsum([len(children.parent) for children in by_segment])
    for number, (children, positions) in enumerate(
        zip(by_segment, np.split(position, stops[:-1]), strict=True)
    ):
        merged_low[positions, number] = children.low
        merged_high[positions, number] = children.high
    return Children(keys // num_codes, keys % num_codes, merged_low, merged_high)


def count_ids(
    low: Int64[np.ndarray, "prefixes segments"],
    high: Int64[np.ndarray, "prefixes segments"],
    restrictions: Sequence[Restriction | None],
    owner: Int64[np.ndarray, " prefixes"],
) -> Int64[np.ndarray, " prefixes"]:
    """Count the allowed IDs under each prefix. An ID counts once in each segment that has it.

    Prefix i belongs to query ``owner[i]``, with the restriction ``restrictions[owner[i]]``. The
    prefixes of queries with the same restriction are counted together.
    """
    sizes = high - low
    counts: np.ndarray = sizes.sum(axis=1)
    distinct = {id(restriction): restriction for restriction in restrictions}
    for restriction in distinct.values():
        if restriction is None:
            continue
        is_restricted = np.array([candidate is restriction for candidate in restrictions])
        prefixes = np.flatnonzero(is_restricted[owner])
        counts[prefixes] = 0
        for number, allowed in enumerate(restriction):
            if allowed is None:
                counts[prefixes] += sizes[prefixes, number]
            else:
                counts[prefixes] += allowed.ids.count(low[prefixes, number], high[prefixes, number])
    return counts
