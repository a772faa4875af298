"""Merging ID tables on disk, however large, within a memory budget.

All items of all tables are cut into chunks by exact keys, so that what every table has between two cuts fits
in memory together; each chunk is sorted and its IDs are appended to the new table's files.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Float16, Int16, Int64, Integer, Shaped, UInt8, UInt64

from genius_search.errors import ArtifactMismatch, ArtifactMissing, BadData

HEADER: Final = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)"
    rb"\{'descr': '(?P<type>[<|][biuf]\d)', 'fortran_order': False, "
    rb"'shape': \((?P<rows>\d{1,18}),(?: (?P<columns>\d{1,9}))?\), \} *\n",
    re.DOTALL,
)
"""What numpy writes before the rows of a small-endian array of one or two dimensions."""
HEADER_BYTES: Final = 1024
"""More than any such header has."""


class GrowingArray:
    """An ``.npy`` file that rows are appended to; its header is right once it is closed.

    Parameters
    ----------
    columns
        length of a row; None for plain numbers.

    >>> with contextlib.closing(GrowingArray(Path("items.npy"), np.int32)) as items:  # doctest: +SKIP
    ...     items.append(np.arange(3))
    """

    def __init__(self, path: Path, dtype: np.typing.DTypeLike, columns: int | None = None) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.columns = columns
        self.num_rows = 0
        self._file = path.open("wb")
        self._write_header()

    def append(self, rows: Shaped[np.ndarray, "rows ..."]) -> None:
        """Write rows at the end."""
        if len(rows):
            self._file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
            self.num_rows += len(rows)

    def close(self) -> None:
        """Write the header with the number of rows there are."""
        if not self._file.closed:
            with self._file:  # closed also when the disk is full
                self._file.seek(0)
                self._write_header()

    def _write_header(self) -> None:
        shape = (self.num_rows,) if self.columns is None else (self.num_rows, self.columns)
        np.lib.format.write_array_header_1_0(  # it leaves room for any number of rows
            self._file, {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        )


def save_array(path: Path, array: Shaped[np.ndarray, "rows ..."]) -> None:
    """Write an ``.npy`` file; unlike numpy's own saving it says why when it fails, as on a full disk."""
    columns = array.shape[1] if array.ndim == 2 else None
    with closing(GrowingArray(path, array.dtype, columns)) as file:
        file.append(array)


def open_array(
    path: Path, *dtypes: np.typing.DTypeLike, dimensions: int = 1
) -> Shaped[np.ndarray, "rows ..."]:
    """An array as it lies on disk, memory-mapped and read-only, of one of these types.

    Raises
    ------
    ArtifactMissing
        there is no such file.
    ArtifactMismatch
        it is truncated, of another type or shape, or no array at all.
    """
    wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
    try:
        with path.open("rb") as file:
            begin = file.read(HEADER_BYTES)
            size = file.seek(0, 2)
    except FileNotFoundError:
        raise ArtifactMissing(f"{path} is missing; restore it, or make its folder again") from None
    header = HEADER.match(begin)
    if header is None or header.end() != 10 + int.from_bytes(header["length"], "little"):
        raise ArtifactMismatch(f"{path} is damaged or no array of {wanted}; restore it, or make it again")
    shape = tuple(int(header[name]) for name in ("rows", "columns") if header[name] is not None)
    dtype = next((np.dtype(kind) for kind in dtypes if np.dtype(kind).str == header["type"].decode()), None)
    if dtype is None or len(shape) != dimensions:
        raise ArtifactMismatch(
            f"{path} holds {header['type'].decode()} of shape {shape}, expected {wanted} of {dimensions} "
            "dimensions; it belongs to something else, make it again"
        )
    expected = header.end() + dtype.itemsize * shape[0] * (shape[1] if dimensions == 2 else 1)
    if size != expected:
        raise ArtifactMismatch(f"{path} is damaged: it has {size} bytes, its header promises {expected}")
    if 0 in shape:
        return np.zeros(shape, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=header.end(), shape=shape))


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
