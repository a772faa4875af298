"""The IDs of a pool as a tree of codes: items below a prefix, and prefixes that items share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int16, Int64

from genius_search.errors import UsageError
from genius_search.search.table import Children, IdTable, SearchSegment, children_in_segments


class UnknownPrefix(UsageError, LookupError):
    """No ID begins with these codes."""


class Ranges(NamedTuple):
    """Prefixes, each a range of rows in the table of every segment."""

    low: Int64[np.ndarray, "prefixes segments"]
    high: Int64[np.ndarray, "prefixes segments"]

    def take(self, chosen: Int64[np.ndarray, " kept"] | slice) -> Ranges:
        """Return the chosen prefixes."""
        return Ranges(self.low[chosen], self.high[chosen])


class Picked(NamedTuple):
    """A sample of the items below prefixes, prefix after prefix."""

    owner: Int64[np.ndarray, " picked"]
    """Index of each item's prefix."""
    segments: Int64[np.ndarray, " picked"]
    rows: Int64[np.ndarray, " picked"]
    """Row of each item in its segment."""


class SharedPrefixes(NamedTuple):
    """Prefixes shared by several items, in descending order of their number of items."""

    ranges: Ranges
    items: Int64[np.ndarray, " prefixes"]
    """Number of items below each prefix."""


class CodeTree:
    """Tree view of the ID tables of a pool. Deleted items do not count.

    A table stores its items in the order of their IDs, so the items below a prefix are a range, with or
    without the deleted ones. Counting is a subtraction and picking a look-up; only the positions of deleted
    items are computed in advance.
    """

    def __init__(self, segments: Sequence[SearchSegment]) -> None:
        self.segments = segments

    def root(self) -> Ranges:
        """Return the empty prefix."""
        high = np.array([[len(segment.table) for segment in self.segments]], dtype=np.int64)
        return Ranges(np.zeros_like(high), high)

    def find(self, prefix: Sequence[int]) -> Ranges:
        """Return the ranges of the IDs that begin with these codes.

        Raises
        ------
        UnknownPrefix
            No ID does.
        """
        ranges = self.root()
        for level, code in enumerate(prefix):
            children = children_in_segments(self.segments, level, *ranges)
            position = np.flatnonzero(children.code == code)
            ranges = Ranges(children.low[position], children.high[position])
            if not len(position) or not self.count(ranges)[0]:
                shown = " ".join(map(str, prefix[: level + 1]))
                raise UnknownPrefix(f"no item of this index has an ID that begins with {shown}")
        return ranges

    def children(self, ranges: Ranges, level: int) -> tuple[Children, Int64[np.ndarray, " children"]]:
        """Return the codes that continue prefixes at a level, and the number of items below each (not 0)."""
        if not self.segments:
            nothing, no_ranges = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int64)
            return Children(nothing, nothing, no_ranges, no_ranges), nothing
        children = children_in_segments(self.segments, level, *ranges)
        counts = self.count(Ranges(children.low, children.high))
        alive = np.flatnonzero(counts)
        return children.take(alive), counts[alive]

    def count(self, ranges: Ranges) -> Int64[np.ndarray, " prefixes"]:
        """Count the items below each prefix."""
        return np.asarray((self._items_before(ranges.high) - self._items_before(ranges.low)).sum(axis=1))

    def pick(self, ranges: Ranges, most: int) -> Picked:
        """Pick up to ``most`` items below each prefix, evenly spaced."""
        first = self._items_before(ranges.low)
        below = (self._items_before(ranges.high) - first).cumsum(axis=1)  # items in the segments up to each
        total = below[:, -1] if below.shape[1] else np.zeros(len(below), dtype=np.int64)
        taken = np.minimum(total, most)
        owner = np.arange(len(taken)).repeat(taken)
        turn = np.arange(len(owner)) - (taken.cumsum() - taken)[owner]
        position = (2 * turn + 1) * total[owner] // (2 * taken[owner])
        segment = (below[owner] <= position[:, None]).sum(axis=1)
        start = np.where(segment > 0, below[owner, segment - 1], 0) if len(owner) else position
        position = position - start + first[owner, segment]
        rows = np.empty_like(position)
        for number, (own, deleted) in enumerate(zip(self.segments, self._deleted, strict=True)):
            in_segment = np.flatnonzero(segment == number)
            alive_before = deleted - np.arange(len(deleted))
            rows[in_segment] = own.table.items[
                position[in_segment] + alive_before.searchsorted(position[in_segment], "right")
            ]
        return Picked(owner, segment, rows)

    def first_codes(self, ranges: Ranges, depth: int) -> Int16[np.ndarray, "prefixes depth"]:
        """Return the first ``depth`` codes of prefixes, each of which occurs in some segment."""
        codes = np.zeros((len(ranges.low), depth), dtype=np.int16)
        for number, segment in enumerate(self.segments):
            in_segment = np.flatnonzero(ranges.high[:, number] > ranges.low[:, number])
            codes[in_segment] = segment.table.ids[ranges.low[in_segment, number], :depth]
        return codes

    def shared_prefixes(self, depth: int) -> SharedPrefixes:
        """Return all prefixes of ``depth`` codes with at least two items. Ties are sorted by their codes.

        Prefixes in a single segment are read from its table, which stores where prefixes begin. Only those in
        several segments are searched level by level; they are few if one segment is large and the others
        are small.

        Raises
        ------
        UsageError
            ``depth`` is below 1.
        """
        if depth < 1:
            raise UsageError(f"depth is {depth}, it must be at least 1")
        several = self._in_several_segments(depth)
        groups = [
            several,
            *(self._in_one_segment(number, depth, several) for number in range(len(self.segments))),
        ]
        ranges = Ranges(*(np.concatenate(columns) for columns in zip(*groups, strict=True)))
        counts = self.count(ranges)
        kept = np.flatnonzero(counts > 1)
        ranges, counts = ranges.take(kept), counts[kept]
        order = np.lexsort([*self.first_codes(ranges, depth).T[::-1], -counts])
        return SharedPrefixes(ranges.take(order), counts[order])

    def _in_several_segments(self, depth: int) -> Ranges:
        """Return the prefixes that occur in more than one segment."""
        ranges = self.root()
        if len(self.segments) < 2:
            return ranges.take(slice(0))
        for level in range(depth):
            children = children_in_segments(self.segments, level, *ranges)
            chosen = np.flatnonzero((children.high > children.low).sum(axis=1) > 1)
            ranges = Ranges(children.low[chosen], children.high[chosen])
        return ranges

    def _in_one_segment(self, number: int, depth: int, several: Ranges) -> Ranges:
        """Return the prefixes with at least two items, deleted or not, that occur in this segment only."""
        table = self.segments[number].table
        begins = _prefix_begins(table, depth)
        ends = np.append(begins[1:], len(table))
        items = table.bucket_starts[ends].astype(np.int64) - table.bucket_starts[begins]
        elsewhere = several.low[several.high[:, number] > several.low[:, number], number]
        chosen = np.flatnonzero(items > 1)
        chosen = chosen[~np.isin(begins[chosen], elsewhere)]
        low = np.zeros((len(chosen), len(self.segments)), dtype=np.int64)
        high = np.zeros_like(low)
        low[:, number], high[:, number] = begins[chosen], ends[chosen]
        return Ranges(low, high)

    @cached_property
    def _deleted(self) -> list[Int64[np.ndarray, " deleted"]]:
        """Positions of each segment's deleted items in the order of their IDs."""
        return [
            np.zeros(0, dtype=np.int64)
            if segment.alive is None
            else np.flatnonzero(~segment.alive.items[segment.table.items])
            for segment in self.segments
        ]

    def _items_before(
        self, rows: Int64[np.ndarray, "prefixes segments"]
    ) -> Int64[np.ndarray, "prefixes segments"]:
        """Count the items, without deleted ones, before each row of the tables."""
        positions = np.empty_like(rows)
        for number, (segment, deleted) in enumerate(zip(self.segments, self._deleted, strict=True)):
            before = segment.table.bucket_starts[rows[:, number]].astype(np.int64)
            positions[:, number] = before - deleted.searchsorted(before)
        return positions


def _prefix_begins(table: IdTable, depth: int) -> Int64[np.ndarray, " prefixes"]:
    """Return the first row of each prefix of ``depth`` codes."""
    if not len(table):
        return np.zeros(0, dtype=np.int64)
    later = np.sort(table.starts[: table.level_bounds[depth]], kind="stable")  # a few ascending runs
    return np.concatenate([np.zeros(1, dtype=np.int64), later])
