"""Which items a search may find, so that a beam passes over prefixes without any of them.

Filters and deletions work inside the beam: every place of it goes to a prefix under which something may be
found, so a filtered search loses nothing against filtering a beam of unlimited width.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from genius.search.table import IdTable

WORD = 64
"""Rows in one machine word."""


class Rows(NamedTuple):
    """Rows of some ranges, range after range, ascending in each."""

    owner: Int64[np.ndarray, " rows"]
    """Which of the ranges each is in."""
    row: Int64[np.ndarray, " rows"]


def rows_inside(low: Int64[np.ndarray, " ranges"], high: Int64[np.ndarray, " ranges"]) -> Rows:
    """All rows of ranges [low, high)."""
    counts = high - low
    owner = np.arange(len(counts)).repeat(counts)
    return Rows(owner, np.arange(len(owner)) - (counts.cumsum() - counts - low)[owner])


class RankedBits:
    """A set of rows that answers how many of them lie in a range, and which; about 1.5 bits a row.

    Parameters
    ----------
    rows
        true for the rows in the set.
    """

    def __init__(self, rows: Bool[np.ndarray, " rows"]) -> None:
        words = np.zeros(len(rows) // WORD + 1, dtype=np.uint64)
        packed = np.packbits(rows, bitorder="little")
        words.view(np.uint8)[: len(packed)] = packed
        self._words = words
        before = np.zeros(len(words), dtype=np.int64)
        np.cumsum(np.bitwise_count(words[:-1]), dtype=np.int64, out=before[1:])
        self._before = before.astype(np.int32) if len(rows) < 2**31 else before

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return int(self._words.nbytes + self._before.nbytes)

    def count(self, low: Int64[np.ndarray, "*shape"], high: Int64[np.ndarray, "*shape"]) -> np.ndarray:
        """Rows of the set in each range [low, high); the same shape, int64."""
        return np.asarray(self._below(high) - self._below(low))

    def inside(self, low: Int64[np.ndarray, " ranges"], high: Int64[np.ndarray, " ranges"]) -> Rows:
        """Rows of the set in each range [low, high); the rest are passed over by the word."""
        first = low >> 6
        words = rows_inside(first, np.where(high > low, ((high - 1) >> 6) + 1, first))
        bits = self._words[words.row]
        filled = bits.nonzero()[0]
        place, bit = np.unpackbits(bits[filled].view(np.uint8), bitorder="little").reshape(-1, WORD).nonzero()
        word = filled[place]
        owner, row = words.owner[word], words.row[word] * WORD + bit
        kept = ((row >= low[owner]) & (row < high[owner])).nonzero()[0]
        return Rows(owner[kept], row[kept])

    def _below(self, row: np.ndarray) -> np.ndarray:
        word = row >> 6
        inside = (np.uint64(1) << (row & 63).astype(np.uint64)) - np.uint64(1)
        return np.asarray(self._before[word] + np.bitwise_count(self._words[word] & inside).astype(np.int64))


class Allowed(NamedTuple):
    """Items of one table that may be found."""

    items: Bool[np.ndarray, " items"]
    """By item row."""
    ids: RankedBits
    """Rows of the table under which there is such an item."""

    @staticmethod
    def of(table: IdTable, items: Bool[np.ndarray, " items"]) -> Allowed:
        """Only these items of a table."""
        if not len(items):
            return Allowed(items, RankedBits(items))
        by_id = np.logical_or.reduceat(items[table.items], table.bucket_starts[:-1])
        return Allowed(items, RankedBits(by_id))


class Part(NamedTuple):
    """One of the tables that are searched together."""

    table: IdTable
    alive: Allowed | None = None
    """The items that were not deleted; None: all of them."""
