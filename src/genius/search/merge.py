"""Merging ID tables on disk, however large, within a memory budget.

All items of all tables are cut into chunks by exact keys, so that what every table has between two cuts fits
in memory together; each chunk is sorted and its IDs are appended to the new table's files.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float, Integer

from genius.errors import BadData
from genius.search.arrays import GrowingArray, open_array, save_array
from genius.search.chunks import Chunk, NewRows, Source, cuts, read_chunk
from genius.search.keys import PIECE, sorted_order
from genius.search.table import IdTable, as_codes, branches, distinct, row_type

__all__ = ["Source", "TableWriter", "merge_tables"]

RUNS: Final = ".runs"
"""Folder of sorted parts while a table is being written."""
CODE_COPIES: Final = 4
OTHER_BYTES: Final = 72
"""What an item takes while it is sorted: so many copies of its codes, and of other things so many bytes."""


def merge_tables(sources: Sequence[Source], folder: Path, *, memory_bytes: int) -> IdTable:
    """One table of the items of several, written into ``folder``: equal to building it from all of them.

    Item rows are numbered anew: tables in the order given, items that are not alive left out. No table may
    lie in ``folder`` itself.

    Parameters
    ----------
    memory_bytes
        what the chunk being sorted may take; beside it lie only a quarter of a byte an item, for numbering,
        where some are not alive, and whatever pages of the tables the system finds room for.

    Raises
    ------
    BadData
        the tables cannot be merged: there is none, their IDs are of different lengths, or the items of one
        do not match its typicality or its living.
    """
    _check(sources)
    num_levels = sources[0].table.num_levels
    folder.mkdir(parents=True, exist_ok=True)
    rows = [NewRows(source) for source in sources]
    chunk_items = max(1, memory_bytes // _bytes_per_item(num_levels))
    code_dtype = np.result_type(*(source.table.ids.dtype for source in sources))
    files = _TableFiles(folder, num_levels, code_dtype, num_items=sum(kept.num_alive for kept in rows))
    with contextlib.closing(files):
        for begins, ends in pairwise(cuts(sources, chunk_items)):
            files.append(read_chunk(sources, rows, begins, ends))
        files.finish()
    return IdTable.open(folder)


class TableWriter:
    """Builds a table from items that come in parts, sorting as much at a time as fits in memory.

    >>> writer = TableWriter(Path("table"), levels=9, memory_bytes=1 << 30)  # doctest: +SKIP
    >>> writer.add(codes, typicality)  # doctest: +SKIP
    >>> table = writer.finish()  # doctest: +SKIP

    Parameters
    ----------
    memory_bytes
        what collecting, sorting and merging may take, each at its time.
    """

    def __init__(self, folder: Path, *, levels: int, memory_bytes: int) -> None:
        self.folder = folder
        self.levels = levels
        self.memory_bytes = memory_bytes
        self._runs: list[Path] = []
        self._num_written = 0
        self._num_waiting = 0
        capacity = max(1, memory_bytes // _bytes_per_item(levels))
        self._codes = np.empty((capacity, levels), dtype=np.int16)  # takes no memory before it is filled
        self._typicality = np.empty(capacity, dtype=np.float16)
        shutil.rmtree(folder / RUNS, ignore_errors=True)  # of a writer that was killed

    def add(
        self, codes: Integer[np.ndarray, "items levels"], typicality: Float[np.ndarray, " items"]
    ) -> None:
        """Take more items; their rows follow those taken before. Typicality is kept in two bytes.

        Raises
        ------
        BadData
            the IDs have another length, or a code is negative or too large; says where.
        """
        if codes.shape[1] != self.levels:
            raise BadData(f"these IDs have {codes.shape[1]} codes, the table is of {self.levels} levels")
        codes = as_codes(codes, first_row=self._num_written + self._num_waiting)
        start = 0
        while start < len(codes):
            part = slice(start, start + len(self._codes) - self._num_waiting)
            room = slice(self._num_waiting, self._num_waiting + len(codes[part]))
            self._codes[room] = codes[part]
            self._typicality[room] = typicality[part]
            self._num_waiting = room.stop
            start = part.stop
            if self._num_waiting == len(self._codes):
                self._write_run()

    def finish(self) -> IdTable:
        """Write the table into the folder and open it."""
        if not self._runs:
            self._build().save(self.folder)
            return IdTable.open(self.folder)
        if self._num_waiting:
            self._write_run()
        del self._codes, self._typicality
        sources = [
            Source(IdTable.open(run), open_array(run / "typicality.npy", np.float16), None)
            for run in self._runs
        ]
        table = merge_tables(sources, self.folder, memory_bytes=self.memory_bytes)
        shutil.rmtree(self.folder / RUNS)
        return table

    def _build(self) -> IdTable:
        waiting = slice(self._num_waiting)
        return IdTable.build(self._codes[waiting], self._typicality[waiting])

    def _write_run(self) -> None:
        run = self.folder / RUNS / f"{len(self._runs):06d}"
        self._build().save(run)
        save_array(run / "typicality.npy", self._typicality[: self._num_waiting])
        self._runs.append(run)
        self._num_written += self._num_waiting
        self._num_waiting = 0


class _TableFiles:
    """The files of a table that grows by chunks, in order."""

    def __init__(
        self, folder: Path, num_levels: int, code_dtype: np.dtype[np.integer], num_items: int
    ) -> None:
        dtype = row_type(num_items)
        self._folder = folder
        self._ids = GrowingArray(folder / "ids.npy", code_dtype, num_levels)
        self._starts = GrowingArray(folder / "starts.npy", dtype)
        self._bucket_starts = GrowingArray(folder / "bucket_starts.npy", dtype)
        self._items = GrowingArray(folder / "items.npy", dtype)
        self._by_level = [GrowingArray(folder / f".starts-{level}.npy", dtype) for level in range(num_levels)]
        self._last_id: np.ndarray | None = None

    def append(self, chunk: Chunk) -> None:
        """Sort a chunk, all of which comes after what is there, and write it."""
        order = sorted_order(chunk.codes, chunk.typicality)
        for part in distinct(chunk.codes, order, self._last_id):
            of_level = branches(part.levels, len(self._by_level), first_row=self._ids.num_rows)
            for file, rows in zip(self._by_level, of_level, strict=True):
                file.append(rows)
            self._ids.append(part.ids)
            self._bucket_starts.append(part.begins + self._items.num_rows)
        for start in range(0, len(order), PIECE):
            self._items.append(chunk.rows[order[start : start + PIECE]])
        if len(order):
            self._last_id = chunk.codes[order[-1]]

    def finish(self) -> None:
        """Write what is known only at the end, and put the levels' rows behind one another."""
        self._bucket_starts.append(np.array([self._items.num_rows]))
        bounds = [0]
        for file in self._by_level:
            file.close()
            rows = open_array(file.path, file.dtype)
            for start in range(0, len(rows), PIECE):
                self._starts.append(rows[start : start + PIECE])
            bounds.append(self._starts.num_rows)
            file.path.unlink()
        save_array(self._folder / "level_bounds.npy", np.array(bounds, dtype=np.int64))

    def close(self) -> None:
        """Let go of the files."""
        for file in (self._ids, self._starts, self._bucket_starts, self._items, *self._by_level):
            file.close()


def _check(sources: Sequence[Source]) -> None:
    if not sources:
        raise BadData("there is no table to merge; give one at least")
    levels = sorted({source.table.num_levels for source in sources})
    if len(levels) > 1:
        raise BadData(f"tables of {levels} levels cannot be merged: make their IDs with one model")
    for place, source in enumerate(sources):
        for name, values in (("typicality", source.typicality), ("alive", source.alive)):
            if values is not None and len(values) != source.table.num_items:
                raise BadData(
                    f"table {place} has {source.table.num_items} items and {len(values)} values of {name}; "
                    "give one for each item"
                )


def _bytes_per_item(num_levels: int) -> int:
    """What an item takes at most while it is sorted."""
    return CODE_COPIES * 2 * num_levels + OTHER_BYTES
