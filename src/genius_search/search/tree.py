"""The IDs of a pool as a tree of codes: items below a prefix, and prefixes that items share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int16, Int64

from genius_search.errors import UsageError
from genius_search.search.table import Children, IdTable, Part, children_in_parts


class UnknownPrefix(UsageError, LookupError):
    """No ID begins with these codes."""


class Ranges(NamedTuple):
    """Prefixes, each a range of rows in the table of every part."""

    low: Int64[np.ndarray, "prefixes parts"]
    high: Int64[np.ndarray, "prefixes parts"]

    def take(self, chosen: Int64[np.ndarray, " kept"] | slice) -> Ranges:
        """Return the chosen prefixes."""
        return Ranges(self.low[chosen], self.high[chosen])


class Picked(NamedTuple):
    """A sample of the items below prefixes, prefix after prefix."""

    owner: Int64[np.ndarray, " picked"]
    """Index of each item's prefix."""
    parts: Int64[np.ndarray, " picked"]
    rows: Int64[np.ndarray, " picked"]
    """Row of each item in its part."""


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

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    def root(self) -> Ranges:
        """Return the empty prefix."""
        high = np.array([[len(part.table) for part in self.parts]], dtype=np.int64)
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
            children = children_in_parts(self.parts, level, *ranges)
            place = np.flatnonzero(children.code == code)
            ranges = Ranges(children.low[place], children.high[place])
            if not len(place) or not self.count(ranges)[0]:
                shown = " ".join(map(str, prefix[: level + 1]))
                raise UnknownPrefix(f"no item of this index has an ID that begins with {shown}")
        return ranges

    def children(self, ranges: Ranges, level: int) -> tuple[Children, Int64[np.ndarray, " children"]]:
        """Return the codes that continue prefixes at a level, and the number of items below each (not 0)."""
        if not self.parts:
            nothing, no_ranges = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int64)
            return Children(nothing, nothing, no_ranges, no_ranges), nothing
        children = children_in_parts(self.parts, level, *ranges)
        counts = self.count(Ranges(children.low, children.high))
        alive = np.flatnonzero(counts)
        return children.take(alive), counts[alive]

    def count(self, ranges: Ranges) -> Int64[np.ndarray, " prefixes"]:
        """Count the items below each prefix."""
        return np.asarray((self._item_places(ranges.high) - self._item_places(ranges.low)).sum(axis=1))

    def pick(self, ranges: Ranges, most: int) -> Picked:
        """Pick up to ``most`` items below each prefix, evenly spaced."""
        first = self._item_places(ranges.low)
        below = (self._item_places(ranges.high) - first).cumsum(axis=1)  # items in the parts up to each
        total = below[:, -1] if below.shape[1] else np.zeros(len(below), dtype=np.int64)
        taken = np.minimum(total, most)
        owner = np.arange(len(taken)).repeat(taken)
        turn = np.arange(len(owner)) - (taken.cumsum() - taken)[owner]
        place = (2 * turn + 1) * total[owner] // (2 * taken[owner])
        part = (below[owner] <= place[:, None]).sum(axis=1)
        start = np.where(part > 0, below[owner, part - 1], 0) if len(owner) else place
        place = place - start + first[owner, part]
        rows = np.empty_like(place)
        for number, (own, deleted) in enumerate(zip(self.parts, self._deleted, strict=True)):
            in_part = np.flatnonzero(part == number)
            alive_before = deleted - np.arange(len(deleted))
            rows[in_part] = own.table.items[
                place[in_part] + alive_before.searchsorted(place[in_part], "right")
            ]
        return Picked(owner, part, rows)

    def first_codes(self, ranges: Ranges, depth: int) -> Int16[np.ndarray, "prefixes depth"]:
        """Return the first ``depth`` codes of prefixes, each of which occurs in some part."""
        codes = np.zeros((len(ranges.low), depth), dtype=np.int16)
        for number, part in enumerate(self.parts):
            in_part = np.flatnonzero(ranges.high[:, number] > ranges.low[:, number])
            codes[in_part] = part.table.ids[ranges.low[in_part, number], :depth]
        return codes

    def shared_prefixes(self, depth: int) -> SharedPrefixes:
        """Return all prefixes of ``depth`` codes with at least two items. Ties are sorted by their codes.

        Prefixes in a single part are read from its table, which stores where prefixes begin. Only those in
        several parts are searched level by level; they are few if one part is large and the others are small.

        Raises
        ------
        UsageError
            ``depth`` is below 1.
        """
        if depth < 1:
            raise UsageError(f"depth is {depth}, it must be at least 1")
        several = self._in_several_parts(depth)
        groups = [several, *(self._in_one_part(number, depth, several) for number in range(len(self.parts)))]
        ranges = Ranges(*(np.concatenate(columns) for columns in zip(*groups, strict=True)))
        counts = self.count(ranges)
        kept = np.flatnonzero(counts > 1)
        ranges, counts = ranges.take(kept), counts[kept]
        order = np.lexsort([*self.first_codes(ranges, depth).T[::-1], -counts])
        return SharedPrefixes(ranges.take(order), counts[order])

    def _in_several_parts(self, depth: int) -> Ranges:
        """Return the prefixes that occur in more than one part."""
        ranges = self.root()
        if len(self.parts) < 2:
            return ranges.take(slice(0))
        for level in range(depth):
            children = children_in_parts(self.parts, level, *ranges)
            chosen = np.flatnonzero((children.high > children.low).sum(axis=1) > 1)
            ranges = Ranges(children.low[chosen], children.high[chosen])
        return ranges

    def _in_one_part(self, number: int, depth: int, several: Ranges) -> Ranges:
        """Return the prefixes with at least two items, deleted or not, that occur in this part only."""
        table = self.parts[number].table
        begins = _prefix_begins(table, depth)
        ends = np.append(begins[1:], len(table))
        items = table.bucket_starts[ends].astype(np.int64) - table.bucket_starts[begins]
        elsewhere = several.low[several.high[:, number] > several.low[:, number], number]
        chosen = np.flatnonzero(items > 1)
        chosen = chosen[~np.isin(begins[chosen], elsewhere)]
        low = np.zeros((len(chosen), len(self.parts)), dtype=np.int64)
        high = np.zeros_like(low)
        low[:, number], high[:, number] = begins[chosen], ends[chosen]
        return Ranges(low, high)

    @cached_property
    def _deleted(self) -> list[Int64[np.ndarray, " deleted"]]:
        """Positions of each part's deleted items in the order of their IDs."""
        return [
            np.zeros(0, dtype=np.int64)
            if part.alive is None
            else np.flatnonzero(~part.alive.items[part.table.items])
            for part in self.parts
        ]

    def _item_places(self, rows: Int64[np.ndarray, "prefixes parts"]) -> Int64[np.ndarray, "prefixes parts"]:
        """Count the items, without deleted ones, before each row of the tables."""
        places = np.empty_like(rows)
        for number, (part, deleted) in enumerate(zip(self.parts, self._deleted, strict=True)):
            before = part.table.bucket_starts[rows[:, number]].astype(np.int64)
            places[:, number] = before - deleted.searchsorted(before)
        return places


def _prefix_begins(table: IdTable, depth: int) -> Int64[np.ndarray, " prefixes"]:
    """Return the first row of each prefix of ``depth`` codes."""
    if not len(table):
        return np.zeros(0, dtype=np.int64)
    later = np.sort(table.starts[: table.level_bounds[depth]], kind="stable")  # a few ascending runs
    return np.concatenate([np.zeros(1, dtype=np.int64), later])
