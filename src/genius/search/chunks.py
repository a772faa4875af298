"""Sorted tables cut into chunks that fit in memory, by exact keys, and the chunks read.

What every table has between two cuts belongs together in the sorted whole, and nothing else does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float16, Int64, Integer

from genius.search.keys import PIECE, descending_bits
from genius.search.table import IdTable

_Key: TypeAlias = tuple[list[int], int, int, int]
"""What items are ordered by: codes, typicality (falling), table, place in the table."""


class Source(NamedTuple):
    """A table to merge."""

    table: IdTable
    typicality: Float16[np.ndarray, " items"]
    """By item row."""
    alive: Bool[np.ndarray, " items"] | None
    """Which item rows are kept; None keeps all."""


class Chunk(NamedTuple):
    """Neighbouring items of all tables, not yet sorted."""

    codes: Integer[np.ndarray, "items levels"]
    typicality: Float16[np.ndarray, " items"]
    rows: Int64[np.ndarray, " items"]
    """Their new row numbers, ascending among those that agree in codes and typicality."""


class NewRows:
    """Row numbers of a table's items when those that are not alive are left out.

    One bit an item, and the number of living items before each 64 of them.
    """

    def __init__(self, source: Source) -> None:
        self.num_alive = source.table.num_items
        self.alive = source.alive
        if source.alive is not None:
            packed = np.packbits(source.alive, bitorder="little")
            self._bits = np.pad(packed, (0, -len(packed) % 8)).view("<u8")
            counts = np.bitwise_count(self._bits)
            self.num_alive = int(counts.sum(dtype=np.int64))
            self._before = np.cumsum(counts, dtype=np.int64) - counts

    def of(self, rows: Int64[np.ndarray, " items"]) -> Int64[np.ndarray, " items"]:
        """The new numbers of living items."""
        if self.alive is None:
            return rows
        word = rows >> 6
        below = (np.uint64(1) << (rows & 63).astype(np.uint64)) - np.uint64(1)
        numbers: np.ndarray = self._before[word] + np.bitwise_count(self._bits[word] & below)
        return numbers


def cuts(sources: Sequence[Source], chunk_items: int) -> Iterator[list[int]]:
    """Where to cut each table so that all pieces between two cuts have at most ``chunk_items`` items.

    Every table is sampled at equal steps and the samples are sorted by key. Between two of them that are so
    many samples apart, a table has at most a step more items than its samples there stand for. (Budgets of
    fewer than eight items a table are overstepped.)
    """
    step = max(1, chunk_items // (8 * len(sources)))
    samples = sorted(
        _key(source, number, place)
        for number, source in enumerate(sources)
        for place in range(step, source.table.num_items, step)
    )
    cut = [0] * len(sources)
    yield cut
    for sample in samples[7 * len(sources) - 1 :: 7 * len(sources)]:
        cut = [
            _place(source, number, sample, low)
            for (number, source), low in zip(enumerate(sources), cut, strict=True)
        ]
        yield cut
    yield [source.table.num_items for source in sources]


def _place(source: Source, number: int, key: _Key, low: int) -> int:
    """Where a table's items reach a key, at ``low`` or after."""
    places = range(source.table.num_items)
    return bisect_left(places, key, low, key=lambda place: _key(source, number, place))


def _key(source: Source, number: int, place: int) -> _Key:
    """What the item at a place of table ``number`` is ordered by."""
    table = source.table
    item = int(table.items[place])
    typicality = descending_bits(source.typicality[item : item + 1])
    return table.ids[_row_at(table, place)].tolist(), int(typicality[0]), number, place


def _row_at(table: IdTable, place: int) -> int:
    """The ID whose bucket holds a place of the items."""
    fences = table.bucket_starts
    return int(fences.searchsorted(fences.dtype.type(place), "right")) - 1


def read_chunk(
    sources: Sequence[Source], rows: Sequence[NewRows], begins: Sequence[int], ends: Sequence[int]
) -> Chunk:
    """What all tables have between two cuts, the living items only."""
    size = sum(ends) - sum(begins)
    codes = np.empty((size, sources[0].table.num_levels), dtype=np.int16)
    chunk = Chunk(codes, np.empty(size, dtype=np.float16), np.empty(size, dtype=np.int64))
    filled = first_row = 0
    for source, kept, begin, end in zip(sources, rows, begins, ends, strict=True):
        for start in range(begin, end, PIECE):
            part = _read_piece(source, kept, start, min(start + PIECE, end))
            room = slice(filled, filled + len(part.rows))
            chunk.codes[room], chunk.typicality[room] = part.codes, part.typicality
            chunk.rows[room] = part.rows + first_row
            filled = room.stop
        first_row += kept.num_alive
    return Chunk(*(values[:filled] for values in chunk))


def _read_piece(source: Source, kept: NewRows, start: int, stop: int) -> Chunk:
    """Living items at some places of one table, numbered from 0 on."""
    table = source.table
    first, last = _row_at(table, start), _row_at(table, stop - 1)
    fences = table.bucket_starts[first : last + 2].astype(np.int64).clip(start, stop)
    codes = table.ids[first : last + 1].repeat(np.diff(fences), axis=0)
    items = table.items[start:stop].astype(np.int64)
    if source.alive is not None:
        alive = source.alive[items]
        codes, items = codes[alive], items[alive]
    return Chunk(codes, source.typicality[items], kept.of(items))
