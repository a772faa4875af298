"""Sorting items by ID, then typicality, then row: one sort of 64-bit words, then a repair of its ties.

A word packs the first codes of an item above the item's own row, so sorting the words sorts the rows, in
place and stably, at a sixth of the cost of numpy's argsort. Runs of equal codes (near duplicates, exact
copies) are sorted again by the codes that follow and at last by typicality, a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from jaxtyping import Bool, Float, Int64, Integer, UInt64

WORD_BITS: Final = 64
FLOAT_BITS: Final = 16
"""A typicality is compared in columns of so many bits: one of a half, two of a float."""
PIECE: Final = 1 << 16
"""Items handled at once: their words fit a core's cache, and leave room for a column beside any row."""


def sorted_order(
    codes: Integer[np.ndarray, "items levels"], typicality: Float[np.ndarray, " items"]
) -> Int64[np.ndarray, " items"]:
    """Item rows in order of their IDs; inside an ID the larger typicality first, then the lower row.

    Nothing that is compared is copied: beside the result it takes a byte an item, and more only where many
    items agree in their first codes. An unknown typicality (NaN) counts as the smallest.
    """
    columns = _Columns(codes, typicality)
    row_bits = _bits(len(codes) - 1)
    used = columns.fitting(0, WORD_BITS - row_bits)
    words = np.empty(len(codes), dtype=np.uint64)
    for start in range(0, len(codes), PIECE):
        part = words[start : start + PIECE]
        rows = np.arange(start, start + len(part), dtype=np.uint64)
        part[:] = columns.packed(np.zeros(len(part), dtype=np.uint64), 0, used, rows) << row_bits | rows
    words.sort()
    fresh = _fresh(words, row_bits)
    words &= (1 << row_bits) - 1
    order = words.view(np.int64)
    _settle(order, fresh, columns, used)
    return order


def descending_bits(typicality: Float[np.ndarray, " items"]) -> Integer[np.ndarray, " items"]:
    """Unsigned integers of the same width that are smaller where the typicality is larger."""
    plain = np.where(np.isnan(typicality), -np.inf, typicality + 0).astype(typicality.dtype)  # + 0: no −0
    bits = plain.view(f"u{plain.itemsize}")
    descending: np.ndarray = np.where(np.signbit(plain), bits, ~bits & (np.iinfo(bits.dtype).max >> 1))
    return descending


class _Columns:
    """What items are compared by, the most significant first: a column for each level, then typicality."""

    def __init__(
        self, codes: Integer[np.ndarray, "items levels"], typicality: Float[np.ndarray, " items"]
    ) -> None:
        self.codes = codes
        self.typicality = typicality if typicality.dtype == np.float16 else typicality.astype(np.float32)
        self.num_levels = codes.shape[1]
        of_floats = [FLOAT_BITS] * (self.typicality.itemsize * 8 // FLOAT_BITS)
        self.widths = [*(_bits(int(codes[:, level].max(initial=0))) for level in range(self.num_levels))]
        self.widths += of_floats

    def __len__(self) -> int:
        return len(self.widths)

    def fitting(self, first: int, room: int) -> int:
        """One past the last column that still fits when those from ``first`` on share so many bits."""
        last = first
        while last < len(self) and self.widths[last] <= room:
            room -= self.widths[last]
            last += 1
        return last

    def packed(
        self,
        words: UInt64[np.ndarray, " rows"],
        first: int,
        last: int,
        rows: Integer[np.ndarray, " rows"],
    ) -> UInt64[np.ndarray, " rows"]:
        """The words with these columns of the rows written below what they held."""
        for column in range(first, last):
            words = words << self.widths[column] | self._values(column, rows).astype(np.uint64)
        return words

    def _values(self, column: int, rows: Integer[np.ndarray, " rows"]) -> Integer[np.ndarray, " rows"]:
        if column < self.num_levels:
            values: np.ndarray = self.codes[rows, column]
            return values
        bits = descending_bits(self.typicality[rows])
        return bits >> FLOAT_BITS * (len(self) - 1 - column) & (1 << FLOAT_BITS) - 1


def _settle(
    rows: Int64[np.ndarray, " items"], fresh: Bool[np.ndarray, " items"], columns: _Columns, first: int
) -> None:
    """Sort, in place, each run of rows that were equal so far by the columns from ``first`` on.

    A run begins where ``fresh`` is true. Rows keep their order where no column tells them apart.
    """
    if first == len(columns):
        return
    for start, stop in _pieces(fresh):
        tied = ~fresh[start:stop]
        tied[:-1] |= tied[1:]
        places = np.flatnonzero(tied) + start
        if not len(places):
            continue
        members = rows[places]
        run = np.cumsum(fresh[places], dtype=np.uint64) - 1
        place_bits = _bits(len(places) - 1)
        last = columns.fitting(first, WORD_BITS - place_bits - _bits(int(run[-1])))
        words = columns.packed(run, first, last, members) << place_bits
        words |= np.arange(len(places), dtype=np.uint64)
        words.sort()
        members = members[words & ((1 << place_bits) - 1)]
        _settle(members, _fresh(words, place_bits), columns, last)
        rows[places] = members


def _pieces(fresh: Bool[np.ndarray, " items"]) -> Iterator[tuple[int, int]]:
    """Spans of whole runs, cut at the first end of a run after ``PIECE`` items."""
    start = 0
    while start < len(fresh):
        stop = min(start + PIECE, len(fresh))
        if stop < len(fresh):
            more = int(fresh[stop:].argmax())
            stop = stop + more if fresh[stop + more] else len(fresh)
        yield start, stop
        start = stop


def _fresh(words: UInt64[np.ndarray, " items"], low_bits: int) -> Bool[np.ndarray, " items"]:
    """Where a word differs from the one before it, the low bits apart."""
    fresh = np.ones(len(words), dtype=bool)
    for start in range(1, len(words), PIECE):
        part = words[start : start + PIECE]
        fresh[start : start + PIECE] = (part ^ words[start - 1 : start - 1 + len(part)]) >> low_bits != 0
    return fresh


def _bits(largest: int) -> int:
    """Bits that hold 0 … ``largest``."""
    return max(largest, 0).bit_length()
