"""The tree of codes of a pool: what lies below a prefix, and which prefixes items share."""

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
        """Return some of them."""
        return Ranges(self.low[chosen], self.high[chosen])


class Picked(NamedTuple):
    """Some items below prefixes, prefix after prefix."""

    owner: Int64[np.ndarray, " picked"]
    """Position of the prefix that each lies below."""
    parts: Int64[np.ndarray, " picked"]
    rows: Int64[np.ndarray, " picked"]
    """Item rows in their parts."""


class SharedPrefixes(NamedTuple):
    """Prefixes that several items share, those of most items first."""

    ranges: Ranges
    items: Int64[np.ndarray, " prefixes"]
    """Number of items that share each."""


class CodeTree:
    """Walks the ID tables of a pool. Deleted items do not count.

    Nothing is built for it but the places of deleted items: the items of an ID stand behind one another in
    the order of the sorted IDs, so the items below a prefix are a range, and without the deleted ones, whose
    places are known, still one. To count and to pick is to subtract and to look up.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    def root(self) -> Ranges:
        """Return the prefix of no codes."""
        high = np.array([[len(part.table) for part in self.parts]], dtype=np.int64)
        return Ranges(np.zeros_like(high), high)

    def find(self, prefix: Sequence[int]) -> Ranges:
        """Return where the IDs are that begin with these codes.

        Raises
        ------
        UnknownPrefix
            There is none.
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
        """Return the codes that continue prefixes at a level, and how many items lie below each (not 0)."""
        if not self.parts:
            nothing, no_ranges = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int64)
            return Children(nothing, nothing, no_ranges, no_ranges), nothing
        children = children_in_parts(self.parts, level, *ranges)
        counts = self.count(Ranges(children.low, children.high))
        alive = np.flatnonzero(counts)
        return children.take(alive), counts[alive]

    def count(self, ranges: Ranges) -> Int64[np.ndarray, " prefixes"]:
        """Count the items below prefixes."""
        return np.asarray((self._item_places(ranges.high) - self._item_places(ranges.low)).sum(axis=1))

    def pick(self, ranges: Ranges, most: int) -> Picked:
        """Pick at most so many items below each prefix, spread evenly over it."""
        first = self._item_places(ranges.low)
        below = (self._item_places(ranges.high) - first).cumsum(axis=1)  # items up to and with each part
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
            here = np.flatnonzero(part == number)
            alive_before = deleted - np.arange(len(deleted))
            rows[here] = own.table.items[place[here] + alive_before.searchsorted(place[here], "right")]
        return Picked(owner, part, rows)

    def first_codes(self, ranges: Ranges, depth: int) -> Int16[np.ndarray, "prefixes depth"]:
        """Return the codes of prefixes, none of which is empty in all parts."""
        codes = np.zeros((len(ranges.low), depth), dtype=np.int16)
        for number, part in enumerate(self.parts):
            here = np.flatnonzero(ranges.high[:, number] > ranges.low[:, number])
            codes[here] = part.table.ids[ranges.low[here, number], :depth]
        return codes

    def shared_prefixes(self, depth: int) -> SharedPrefixes:
        """Return all prefixes of so many codes with at least two items; equally large ones by their codes.

        Inside a part they are read off the table, which knows where prefixes begin. Only those that are in
        several parts are looked up level by level; where one part is large and the others were added lately,
        they are few.

        Raises
        ------
        UsageError
            ``depth`` is below 1.
        """
        if depth < 1:
            raise UsageError(f"prefixes of {depth} codes are wanted; they need one at least")
        several = self._in_several_parts(depth)
        found = [several, *(self._in_one_part(number, depth, several) for number in range(len(self.parts)))]
        ranges = Ranges(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
        counts = self.count(ranges)
        kept = np.flatnonzero(counts > 1)
        ranges, counts = ranges.take(kept), counts[kept]
        order = np.lexsort([*self.first_codes(ranges, depth).T[::-1], -counts])
        return SharedPrefixes(ranges.take(order), counts[order])

    def _in_several_parts(self, depth: int) -> Ranges:
        """Return the prefixes that more than one part has."""
        ranges = self.root()
        if len(self.parts) < 2:
            return ranges.take(slice(0))
        for level in range(depth):
            children = children_in_parts(self.parts, level, *ranges)
            chosen = np.flatnonzero((children.high > children.low).sum(axis=1) > 1)
            ranges = Ranges(children.low[chosen], children.high[chosen])
        return ranges

    def _in_one_part(self, number: int, depth: int, several: Ranges) -> Ranges:
        """Return the prefixes with at least two items, deleted or not, that no other part has."""
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
        """Places of each part's deleted items among its items in the order of their IDs."""
        return [
            np.zeros(0, dtype=np.int64)
            if part.alive is None
            else np.flatnonzero(~part.alive.items[part.table.items])
            for part in self.parts
        ]

    def _item_places(self, rows: Int64[np.ndarray, "prefixes parts"]) -> Int64[np.ndarray, "prefixes parts"]:
        """Return how many living items stand before each row of the tables."""
        places = np.empty_like(rows)
        for number, (part, deleted) in enumerate(zip(self.parts, self._deleted, strict=True)):
            before = part.table.bucket_starts[rows[:, number]].astype(np.int64)
            places[:, number] = before - deleted.searchsorted(before)
        return places


def _prefix_begins(table: IdTable, depth: int) -> Int64[np.ndarray, " prefixes"]:
    """Return the row at which each prefix of so many codes begins."""
    if not len(table):
        return np.zeros(0, dtype=np.int64)
    later = np.sort(table.starts[: table.level_bounds[depth]], kind="stable")  # a few ascending runs
    return np.concatenate([np.zeros(1, dtype=np.int64), later])
