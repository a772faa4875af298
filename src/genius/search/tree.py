"""The tree of codes: what lies below a prefix of an ID, in all parts of a pool together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from genius.errors import UsageError
from genius.search.allowed import Part
from genius.search.prefixes import Continuations, continuations


class UnknownPrefix(UsageError, LookupError):
    """No ID begins with these codes."""


class Ranges(NamedTuple):
    """Prefixes, each a range of rows in the table of every part."""

    low: Int64[np.ndarray, "prefixes parts"]
    high: Int64[np.ndarray, "prefixes parts"]


class Picked(NamedTuple):
    """Some items below prefixes, prefix after prefix."""

    owner: Int64[np.ndarray, " picked"]
    """Which of the prefixes."""
    parts: Int64[np.ndarray, " picked"]
    rows: Int64[np.ndarray, " picked"]
    """Item rows there."""


class CodeTree:
    """Walks the ID tables of a pool; nothing is built for it but where the deleted items stand.

    Items are numbered as they stand behind the sorted IDs, the deleted ones left out: below a prefix lies a
    range of them, so to count and to pick is to subtract and to look up.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    def root(self) -> Ranges:
        """The prefix of no codes."""
        high = np.array([[len(part.table) for part in self.parts]], dtype=np.int64)
        return Ranges(np.zeros_like(high), high)

    def find(self, prefix: Sequence[int]) -> Ranges:
        """Where the IDs are that begin with these codes.

        Raises
        ------
        UnknownPrefix
            there is none.
        """
        ranges = self.root()
        for level, code in enumerate(prefix):
            children = continuations(self.parts, level, *ranges)
            here = np.flatnonzero(children.code == code)
            ranges = Ranges(children.low[here], children.high[here])
            if not len(here) or not self.count(ranges)[0]:
                shown = " ".join(map(str, prefix[: level + 1]))
                raise UnknownPrefix(f"no item of this index has an ID that begins with {shown}")
        return ranges

    def children(self, ranges: Ranges, level: int) -> tuple[Continuations, Int64[np.ndarray, " children"]]:
        """All codes that continue prefixes at a level, and how many items lie below each: at least one."""
        if not self.parts:
            nothing, no_ranges = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int64)
            return Continuations(nothing, nothing, no_ranges, no_ranges), nothing
        children = continuations(self.parts, level, *ranges)
        counts = self.count(Ranges(children.low, children.high))
        alive = np.flatnonzero(counts)
        return children.take(alive), counts[alive]

    def count(self, ranges: Ranges) -> Int64[np.ndarray, " prefixes"]:
        """Items below prefixes that are not deleted."""
        first, last = self._places(ranges)
        return np.asarray((last - first).sum(axis=1))

    def pick(self, ranges: Ranges, most: int) -> Picked:
        """At most so many items below each prefix, spread evenly over it."""
        first, last = self._places(ranges)
        below = (last - first).cumsum(axis=1)  # by part: so many items up to and with it
        total = below[:, -1] if below.shape[1] else np.zeros(len(below), dtype=np.int64)
        taken = np.minimum(total, most)
        owner = np.arange(len(taken)).repeat(taken)
        turn = np.arange(len(owner)) - (taken.cumsum() - taken)[owner]
        place = (2 * turn + 1) * total[owner] // (2 * taken[owner])
        part = (below[owner] <= place[:, None]).sum(axis=1)
        start = np.where(part > 0, below[owner, part - 1], 0) if len(owner) else place
        place = place - start + first[owner, part]
        rows = np.empty_like(place)
        for number, own in enumerate(self.parts):
            here = np.flatnonzero(part == number)
            rows[here] = own.table.items[self._with_deleted(number, place[here])]
        return Picked(owner, part, rows)

    @cached_property
    def _deleted(self) -> list[Int64[np.ndarray, " deleted"]]:
        """Of each part: where its deleted items stand behind the sorted IDs."""
        return [
            np.zeros(0, dtype=np.int64)
            if part.alive is None
            else np.flatnonzero(~part.alive.items[part.table.items])
            for part in self.parts
        ]

    def _places(
        self, ranges: Ranges
    ) -> tuple[Int64[np.ndarray, "prefixes parts"], Int64[np.ndarray, "prefixes parts"]]:
        """The range of items below each prefix, numbered without the deleted ones."""
        found = []
        for rows in ranges:
            places = np.empty_like(rows)
            for number, part in enumerate(self.parts):
                behind = part.table.bucket_starts[rows[:, number]].astype(np.int64)
                places[:, number] = behind - self._deleted[number].searchsorted(behind)
            found.append(places)
        return found[0], found[1]

    def _with_deleted(
        self, number: int, places: Int64[np.ndarray, " places"]
    ) -> Int64[np.ndarray, " places"]:
        """Where items stand that were numbered without the deleted ones."""
        deleted = self._deleted[number]
        before = deleted - np.arange(len(deleted))  # living items before each deleted one
        return np.asarray(places + before.searchsorted(places, "right"))
