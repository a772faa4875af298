"""Writing the files of a segment, which never change afterwards, and the manifest of an index."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from jaxtyping import Int64, Shaped

from genius_search.artifact import fingerprint_of
from genius_search.data.values import Value, table_values
from genius_search.errors import BadData, UsageError
from genius_search.index.items import (
    FIELD_NAMES,
    FIELDS,
    FULL_TEXT,
    ITEM_IDS,
    ITEMS,
    ITEMS_FILE,
    MODALITIES,
    Entry,
    Item,
    Passage,
    spell_path,
)
from genius_search.index.snapshot import Location
from genius_search.index.store import (
    CODE_COSINE,
    CURRENT,
    DENSITIES,
    EMBEDDINGS,
    FORMAT,
    PASSAGES,
    SCALES,
    IndexManifest,
    ItemArrays,
    Segment,
    StoredEmbeddings,
)
from genius_search.records import Modality
from genius_search.search.table import IdTable
from genius_search.search.vectors import EmbeddingBits, is_residual
from genius_search.writing import write_atomically

ROWS_AT_ONCE: Final = 8192
"""Items that are copied together."""

Batch: TypeAlias = tuple[Sequence[Entry], ItemArrays]
"""Items that are written together, each followed by its passages."""


def append_rows(path: Path, rows: Shaped[np.ndarray, ...]) -> None:
    """Add rows to an ``.npy`` file, or begin one; a full disk is named, unlike by ``np.save``."""
    with path.open("r+b" if path.exists() else "w+b") as file:
        count = 0
        if file.seek(0, os.SEEK_END):
            file.seek(0)
            np.lib.format.read_magic(file)
            (count, *_), _, _ = np.lib.format.read_array_header_1_0(file)
        shape = (count + len(rows), *rows.shape[1:])
        header = {"descr": rows.dtype.str, "fortran_order": False, "shape": shape}
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, header)  # as long for any number of rows
        if len(rows):
            file.seek(0, os.SEEK_END)
            file.write(np.ascontiguousarray(rows).data)


def save_table(table: IdTable, folder: Path) -> None:
    """Save each array of an ID table to its own file in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("ids", "starts", "level_bounds", "bucket_starts", "items"):
        (folder / f"{name}.npy").unlink(missing_ok=True)
        append_rows(folder / f"{name}.npy", getattr(table, name))


def write_segment(folder: Path, batches: Iterable[Batch]) -> int:
    """Write the files of a segment into an empty folder; return the number of its items.

    Embeddings are written batch by batch; other arrays, and those of passages, which are the last rows, are
    in memory until then.

    Raises
    ------
    BadData
        Two items have the same id.
    OSError
        The disk is full.
    """
    of_items: list[ItemArrays] = []
    of_passages: list[ItemArrays] = []
    passages: list[tuple[int, int, int]] = []

    def all_items() -> Iterator[Item]:
        row = -1
        for entries, arrays in batches:
            is_item = np.array([isinstance(entry, Item) for entry in entries])
            own = arrays.take(is_item)
            if own.embeddings is not None:
                append_rows(folder / EMBEDDINGS, own.embeddings)
            of_items.append(own._replace(embeddings=None))
            of_passages.append(arrays.take(~is_item))
            for entry in entries:
                if isinstance(entry, Item):
                    row += 1
                    yield entry
                else:
                    passages.append((row, *entry))

    written = write_items(folder, all_items())
    for arrays in (*of_items, *of_passages):
        for file, rows in zip((CODE_COSINE, EMBEDDINGS, DENSITIES, SCALES), arrays[1:], strict=True):
            if rows is not None:
                append_rows(folder / file, rows)
    if passages:
        append_rows(folder / PASSAGES, np.array(passages, dtype=np.int64))
    codes, code_cosine, *_ = zip(*of_items, *of_passages, strict=True)
    save_table(IdTable.build(np.concatenate(codes), np.concatenate(code_cosine)), folder)
    return written


def alive_items(segment: Segment) -> Iterator[Item]:
    """Yield the items that are not deleted, by row."""
    alive = segment.alive()
    return segment.items.all() if alive is None else itertools.compress(segment.items.all(), alive)


def alive_entries(segments: Sequence[Segment]) -> Iterator[Entry]:
    """Yield the items that are not deleted, with their passages, what was added last first."""
    for segment in reversed(segments):
        yield from _with_passages(segment, alive_items(segment), segment.alive_rows())


def _with_passages(
    segment: Segment, items: Iterable[Item], rows: Int64[np.ndarray, " rows"]
) -> Iterator[Entry]:
    """Yield items, each followed by the passages that a row of a segment has."""
    remaining = iter(items)
    for row in segment.with_passages(rows).tolist():
        at = row - segment.num_items
        yield next(remaining) if at < 0 else Passage(*segment.passages[at, 1:].tolist())


def alive_batches(segments: Sequence[Segment]) -> Iterator[Batch]:
    """Yield the items that are not deleted as they are stored, what was added last first."""
    for segment in reversed(segments):
        yield from _stored(segment, alive_entries([segment]), segment.with_passages(segment.alive_rows()))


def stored_batches(
    segments: Sequence[Segment], items: Sequence[Item], places: Sequence[Location]
) -> Iterator[Batch]:
    """Yield items with the IDs, embeddings and passages that are stored at some places, one for each."""
    for number, segment in enumerate(segments):
        own = [at for at, place in enumerate(places) if place.segment == number]
        rows = np.array([places[at].row for at in own], dtype=np.int64)
        entries = _with_passages(segment, (items[at] for at in own), rows)
        yield from _stored(segment, entries, segment.with_passages(rows))


def _stored(segment: Segment, entries: Iterator[Entry], rows: Int64[np.ndarray, " rows"]) -> Iterator[Batch]:
    """Yield items and passages with what is stored in some rows of a segment, one for each."""
    table_rows = segment.table.rows_of_items
    values, scales = segment.embeddings or (None, None)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        arrays = ItemArrays(
            segment.table.ids[table_rows[some]],
            segment.code_cosine[some],
            *(None if array is None else array[some] for array in (values, segment.densities, scales)),
        )
        yield [*itertools.islice(entries, len(some))], arrays


def check_bits(bits: EmbeddingBits | None, embeddings: StoredEmbeddings | None) -> None:
    """Raise :class:`UsageError` unless embeddings of this kind can have so many bits a number."""
    if bits not in (None, 1, 2, 4, 8, 16):
        raise UsageError(f"embeddings have 1, 2, 4, 8 or 16 bits a number, not {bits}")
    if bits is not None and is_residual(bits) and embeddings == "raw":
        raise UsageError(
            f"raw embeddings have 16 bits a number, not {bits}, since codes do not approximate them; store "
            "fused ones instead"
        )


def write_manifest(folder: Path, manifest: IndexManifest) -> None:
    """Make this the state of the index, in one step.

    Its time is that of this call: the file system's clock may tick so rarely that two changes share a time.
    """
    body = {"format": FORMAT, **manifest.model_dump(mode="json")}
    body["checksum"] = fingerprint_of(body)
    now = time.time_ns()
    with write_atomically(folder / CURRENT) as temporary:
        temporary.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.utime(temporary, ns=(now, now))


SETTINGS: Final = (  # the file is used only when it is complete
    "page_size = 8192",
    "journal_mode = OFF",
    "synchronous = OFF",
    "locking_mode = EXCLUSIVE",
    "cache_size = -65536",
)


def write_items(folder: Path, items: Iterable[Item]) -> int:
    """Write items in the order of their rows, with the indexes for filters; return their number.

    Memory stays below 150 MB for any number of items.

    Raises
    ------
    BadData
        Two items have the same id.
    """
    path = folder / ITEMS_FILE
    path.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            for setting in SETTINGS:
                database.execute(f"PRAGMA {setting}")
            database.execute("BEGIN")
            database.execute(ITEMS)
            database.execute(MODALITIES)
            database.executemany(
                "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                ((row, item.id, item.modality.mbeir, *item[2:]) for row, item in enumerate(items)),
            )
            database.execute("INSERT INTO modalities SELECT modality, COUNT(*) FROM items GROUP BY modality")
            database.execute("COMMIT")
            try:
                database.execute(ITEM_IDS)
            except sqlite3.IntegrityError:
                query = "SELECT item_id FROM items GROUP BY item_id HAVING COUNT(*) > 1 LIMIT 1"
                twice = database.execute(query).fetchone()[0]
                raise BadData(f"two items have the id {twice!r}; ids must be unique") from None
            for statement in FULL_TEXT:
                database.execute(statement)
            _index_fields(database)
            return int(database.execute("SELECT COALESCE(SUM(items), 0) FROM modalities").fetchone()[0])
    except sqlite3.OperationalError as error:
        if "no such module" in str(error):
            raise UsageError("this Python's SQLite lacks FTS5; use a Python whose SQLite has it") from None
        raise


def _index_fields(database: sqlite3.Connection) -> None:
    """Write the fields of the items to a sorted table, for filters."""
    names: dict[str, int] = {}
    database.execute(FIELD_NAMES)
    database.execute(FIELDS)
    database.execute("CREATE TEMP TABLE unsorted (name, value, row)")
    database.execute("BEGIN")
    sources = database.execute("SELECT row, source FROM items WHERE source <> ''")
    database.executemany("INSERT INTO unsorted VALUES (?, ?, ?)", _field_values(sources, names))
    database.executemany("INSERT INTO field_names VALUES (?, ?)", names.items())
    database.execute("INSERT OR IGNORE INTO fields SELECT * FROM unsorted ORDER BY name, value, row")
    database.execute("COMMIT")
    database.execute("DROP TABLE unsorted")


def _field_values(
    sources: Iterable[tuple[int, str]], names: dict[str, int]
) -> Iterator[tuple[int, Value, int]]:
    """Yield field, value and row of each value, and number the fields."""
    for row, source in sources:
        for path, value in table_values(Item("", Modality.TEXT, source=source).fields):
            if path:
                name = names.setdefault(spell_path(path), len(names))
                if value is not None:
                    yield name, value, row
