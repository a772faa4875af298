"""The ID table of a pool: sorted distinct IDs, and which items each stands for.

A prefix is a range of rows. Its children are the sub-ranges in which the next code differs, and where those
begin is written once for each ID, at the level where it first differs from the ID before it: no pointers, no
strings; a byte a code (two where a codebook has more than 256) and four for the row, used as it lies on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int16, Int64, Integer, UInt8

from genius.errors import ArtifactMismatch, BadData
from genius.search.arrays import open_array, save_array
from genius.search.keys import PIECE, sorted_order

LARGEST_CODE: Final = int(np.iinfo(np.int16).max)
LARGEST_SMALL_CODE: Final = int(np.iinfo(np.uint8).max)
"""Tables with a larger code anywhere keep two bytes for each, others one."""
MOST_SMALL_ROWS: Final = int(np.iinfo(np.int32).max)
"""Tables of more items than this number their rows with eight bytes instead of four."""


class Children(NamedTuple):
    """Continuations of some prefixes, those of one prefix next to one another, in order of code."""

    parent: Int64[np.ndarray, " children"]
    """Which of the given prefixes it continues."""
    code: Int64[np.ndarray, " children"]
    low: Int64[np.ndarray, " children"]
    """First row of the table that begins with it."""
    high: Int64[np.ndarray, " children"]
    """One past the last."""


class Buckets(NamedTuple):
    """Items of some IDs, bucket after bucket, the most typical of an ID first."""

    items: Int64[np.ndarray, " items"]
    owner: Int64[np.ndarray, " items"]
    """Which of the asked rows each belongs to."""


class IdTable:
    """All IDs that exist in a pool. Every array may be memory-mapped.

    Parameters
    ----------
    ids
        distinct, in lexicographic order.
    starts
        all rows but the first, grouped by the level at which a row first differs from the row before it,
        ascending inside a group.
    level_bounds
        where each level's group lies in ``starts``; one more entry than levels.
    bucket_starts
        where the items of each ID begin in ``items``; one more entry than IDs.
    items
        item rows, by ID, the most typical of an ID first.
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
        bounds = level_bounds.tolist()
        self._by_level = [starts[low:high] for low, high in pairwise(bounds)]
        self._codes = ids.reshape(-1)  # a view: one look-up finds a row's code

    @staticmethod
    def build(codes: Integer[np.ndarray, "items levels"], typicality: Float[np.ndarray, " items"]) -> IdTable:
        """Sort items into a table; inside an ID the larger ``typicality`` comes first, then the lower row.

        Deviation 18: the released code lists the items of an ID in the pool's order.

        Raises
        ------
        BadData
            a code is negative or too large; says where.
        """
        codes = as_codes(codes)
        num_items, num_levels = codes.shape
        order = sorted_order(codes, typicality)
        dtype = row_type(num_items)
        ids = np.empty((num_items, num_levels), dtype=code_type(codes))
        levels = np.empty(num_items, dtype=np.uint8)
        bucket_starts = np.empty(num_items + 1, dtype=dtype)
        count = 0
        for part in distinct(codes, order):
            stop = count + len(part.ids)
            ids[count:stop], levels[count:stop], bucket_starts[count:stop] = part
            count = stop
        bucket_starts[count] = num_items
        ids.resize((count, num_levels), refcheck=False)  # in place
        bucket_starts.resize(count + 1, refcheck=False)
        by_level = [rows.astype(dtype) for rows in branches(levels[:count], num_levels, first_row=0)]
        return IdTable(
            ids,
            np.concatenate([np.zeros(0, dtype=dtype), *by_level]),
            np.cumsum([0, *map(len, by_level)], dtype=np.int64),
            bucket_starts,
            order.astype(dtype),
        )

    def save(self, folder: Path) -> None:
        """Write the arrays into a folder, a file for each."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("ids", "starts", "level_bounds", "bucket_starts", "items"):
            save_array(folder / f"{name}.npy", getattr(self, name))

    @staticmethod
    def open(folder: Path) -> IdTable:
        """Map a saved table; nothing but its headers is read, so the time does not depend on its size.

        Raises
        ------
        ArtifactMissing
            a file is not there.
        ArtifactMismatch
            one is truncated, of another type, or does not fit the others; names it.
        """
        rows = (np.int32, np.int64)
        ids = open_array(folder / "ids.npy", np.uint8, np.int16, dimensions=2)
        bounds = open_array(folder / "level_bounds.npy", np.int64)
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
        return IdTable(ids, starts, np.array(bounds), bucket_starts, items)

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
        """Bytes that the IDs take, on disk and in memory, their items apart."""
        return int(self.ids.nbytes + self.starts.nbytes)

    def children(
        self, level: int, low: Int64[np.ndarray, " prefixes"], high: Int64[np.ndarray, " prefixes"]
    ) -> Children:
        """All codes that continue these prefixes (ranges of rows) at ``level``; empty ranges have none."""
        starts = self._by_level[level]
        first = starts.searchsorted(low.astype(starts.dtype), "right")  # of another type it would copy all
        counts = starts.searchsorted(high.astype(starts.dtype)) - first
        counts += 1  # a prefix's first child begins where it begins itself
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
        code = self._codes.take(child_low * self.ids.shape[1] + level).astype(np.int64)
        return Children(parent, code, child_low, child_high)

    def bucket(self, row: int) -> Int64[np.ndarray, " items"]:
        """Items that have this ID."""
        items: np.ndarray = self.items[self.bucket_starts[row] : self.bucket_starts[row + 1]]
        return items.astype(np.int64)

    def rows(self) -> Int64[np.ndarray, " items"]:
        """The row of each item's ID; reads the whole table."""
        found = np.empty(self.num_items, dtype=np.int64)
        found[self.items] = np.arange(len(self)).repeat(np.diff(self.bucket_starts))
        return found

    def buckets(self, rows: Int64[np.ndarray, " rows"]) -> Buckets:
        """Items that have these IDs."""
        begins = self.bucket_starts.take(rows).astype(np.int64)
        counts = self.bucket_starts.take(rows + 1) - begins
        owner = np.arange(len(rows)).repeat(counts)
        place = np.arange(len(owner))
        place += (begins - counts.cumsum() + counts).take(owner)
        return Buckets(self.items.take(place).astype(np.int64), owner)


class Distinct(NamedTuple):
    """Some of the distinct IDs of sorted items."""

    ids: Integer[np.ndarray, "ids levels"]
    levels: UInt8[np.ndarray, " ids"]
    """The level at which each first differs from the ID before it."""
    begins: Int64[np.ndarray, " ids"]
    """Where its items begin among the sorted ones."""


def distinct(
    codes: Integer[np.ndarray, "items levels"],
    order: Int64[np.ndarray, " items"],
    before: Integer[np.ndarray, " levels"] | None = None,
) -> Iterator[Distinct]:
    """The distinct IDs of items in sorted order, a piece at a time.

    Parameters
    ----------
    before
        the ID before the first item: one that equals it is not listed again. Without it the first ID counts
        as differing at level 0.
    """
    num_levels = codes.shape[1]
    for start in range(0, len(order), PIECE):
        ids = codes.take(order[start : start + PIECE], axis=0)
        levels = np.full(len(ids), num_levels, dtype=np.uint8)
        for level in reversed(range(num_levels)):
            column = ids[:, level]
            np.copyto(levels[1:], level, where=column[1:] != column[:-1])
        changes = [0] if before is None else np.flatnonzero(ids[0] != before)
        levels[0] = changes[0] if len(changes) else num_levels
        before = ids[-1]
        new = np.flatnonzero(levels < num_levels)
        yield Distinct(ids[new] if len(new) < len(ids) else ids, levels[new], new + start)


def branches(
    levels: UInt8[np.ndarray, " ids"], num_levels: int, *, first_row: int
) -> list[Int64[np.ndarray, " _"]]:
    """For each level, the rows of the table that first differ there; row 0 differs from nothing.

    Parameters
    ----------
    first_row
        the row of the first of these IDs.
    """
    skipped = 0 if first_row else 1
    return [np.flatnonzero(levels[skipped:] == level) + (first_row + skipped) for level in range(num_levels)]


def as_codes(
    codes: Integer[np.ndarray, "items levels"], *, first_row: int = 0
) -> Int16[np.ndarray, "items levels"]:
    """The same codes in two bytes each.

    Raises
    ------
    BadData
        a code is negative or too large; names the item, counted from ``first_row``, and the level.
    """
    for level in range(codes.shape[1]):
        column = codes[:, level]
        if len(column) and (column.min() < 0 or column.max() > LARGEST_CODE):
            row = int(((column < 0) | (column > LARGEST_CODE)).argmax())
            raise BadData(
                f"item row {first_row + row} has code {column[row]} at level {level}; codes must lie in "
                f"0 … {LARGEST_CODE}: make its ID again, with the model of the index"
            )
    return codes.astype(np.int16, copy=False)


def code_type(codes: Integer[np.ndarray, "items levels"]) -> np.dtype[np.integer]:
    """The smallest type that keeps these codes."""
    return np.dtype(np.uint8 if codes.max(initial=0) <= LARGEST_SMALL_CODE else np.int16)


def row_type(num_items: int) -> np.dtype[np.signedinteger]:
    """The smallest type that numbers the rows of a table of so many items."""
    return np.dtype(np.int32 if num_items <= MOST_SMALL_ROWS else np.int64)
