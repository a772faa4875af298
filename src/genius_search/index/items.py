"""What an index knows of its items beside their IDs: name, modality, text, picture; in SQLite.

A store is written once and never changed, so that reading needs no locks between processes.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Int64

from genius_search.errors import ArtifactMismatch, BadData, UsageError
from genius_search.index.filters import Bound, Filter, full_text_query, register_functions
from genius_search.records import Modality

ITEMS_FILE: Final = "items.sqlite"
_SETTINGS: Final = (  # the file is used only when it is complete
    "page_size = 8192",
    "journal_mode = OFF",
    "synchronous = OFF",
    "locking_mode = EXCLUSIVE",
    "cache_size = -65536",
)
_SCHEMA: Final = (
    (
        "CREATE TABLE items (row INTEGER PRIMARY KEY, item_id TEXT NOT NULL, modality TEXT NOT NULL, "
        "text TEXT, image TEXT, source TEXT, stamp TEXT)"
    ),
    "CREATE TABLE modalities (modality TEXT PRIMARY KEY, items INTEGER NOT NULL)",
)
_FULL_TEXT: Final = (
    (
        "CREATE VIRTUAL TABLE words USING fts5(text, content='items', content_rowid='row', columnsize=0, "
        "tokenize='unicode61 remove_diacritics 2')"
    ),
    "INSERT INTO words(words, rank) VALUES ('hashsize', 16777216)",  # twice as fast as SQLite's 1 MiB
    "INSERT INTO words(words) VALUES ('rebuild')",
)
_ASKED_AT_ONCE: Final = 20_000
_ROWS_AT_ONCE: Final = 2**19
"""Between two such parts of a long question others have their turn."""


class Item(NamedTuple):
    """One item as its owner knows it."""

    id: str
    """The item's external name."""
    modality: Modality
    text: str | None = None
    image: str | None = None
    """Path of the picture."""
    source: str | None = None
    """Whatever came with it; the keys of a JSON object are fields to filter by."""
    stamp: str | None = None
    """Changes whenever its contents do, so that what has not changed need not be indexed again."""

    @property
    def fields(self) -> dict[str, Any]:
        """Its fields by name: the JSON object that came with it, if there is one."""
        try:
            found = json.loads(self.source or "null")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def write_items(folder: Path, items: Iterable[Item]) -> int:
    """Write items in the order of their rows, with their full text; returns how many.

    Memory stays below 150 MB, however many there are.

    Raises
    ------
    BadData
        two items have the same id, or an item cannot be stored.
    OSError
        the disk is full.
    """
    path = folder / ITEMS_FILE
    path.unlink(missing_ok=True)
    counts: Counter[str] = Counter()
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            for setting in _SETTINGS:
                database.execute(f"PRAGMA {setting}")
            for statement in ("BEGIN", *_SCHEMA):
                database.execute(statement)
            database.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?)", _entries(items, counts))
            database.executemany("INSERT INTO modalities VALUES (?, ?)", counts.items())
            database.execute("COMMIT")
            _index_ids(database)
            _index_words(database)
        with path.open("r+b") as file:
            os.fsync(file.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
        if isinstance(error, UnicodeEncodeError):
            text = str(error.object)[:80]
            raise BadData(f"an item holds half a character (a lone surrogate): {text!r}") from None
        raise
    return counts.total()


def _entries(items: Iterable[Item], counts: Counter[str]) -> Iterator[tuple[int | str | None, ...]]:
    for row, item in enumerate(items):
        modality = item.modality.mbeir
        counts[modality] += 1
        if "\0" in item.id:
            raise BadData(f"the id {item.id!r} holds a NUL character; rename the item")
        yield row, item.id, modality, item.text, item.image, item.source, item.stamp


def _index_ids(database: sqlite3.Connection) -> None:
    try:
        database.execute("CREATE UNIQUE INDEX item_ids ON items(item_id)")
    except sqlite3.IntegrityError:
        query = "SELECT item_id FROM items GROUP BY item_id HAVING COUNT(*) > 1 LIMIT 1"
        twice = database.execute(query).fetchone()[0]
        raise BadData(f"two items have the id {twice!r}; ids must be unique") from None


def _index_words(database: sqlite3.Connection) -> None:
    """Full text, if this SQLite has it; without, a store can do everything but match."""
    try:
        for statement in _FULL_TEXT:
            database.execute(statement)
    except sqlite3.OperationalError as error:
        if "no such module" not in str(error):
            raise


class ItemStore:
    """Reads the items of a finished store; safe to use from several threads.

    The file stays open, so a writer that removes it takes nothing from whoever reads it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ITEMS_FILE
        uri = f"{self._path.resolve().as_uri()}?mode=ro&immutable=1"
        self._database = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
        self._lock = threading.Lock()
        weakref.finalize(self, self._database.close)
        self._ask("SELECT 1 FROM items LIMIT 1", ())  # SQLite opens the file when it is asked
        register_functions(self._database)

    def get(self, rows: Sequence[int]) -> list[Item]:
        """Items of these rows, in this order."""
        query = (
            "SELECT row, item_id, modality, text, image, source, stamp "
            "FROM json_each(?) CROSS JOIN items ON row = value"
        )
        found = {entry[0]: _item(entry[1:]) for entry in self._look_up(query, {int(row) for row in rows})}
        return [found[int(row)] for row in rows]

    def all(self) -> Iterator[Item]:
        """Every item, by row."""
        query = "SELECT item_id, modality, text, image, source, stamp FROM items ORDER BY row"
        with self._reading():
            cursor = self._database.execute(query)
        while True:
            with self._reading():
                entries = cursor.fetchmany(1000)
            if not entries:
                return
            yield from (_item(entry) for entry in entries)

    def count_by_modality(self) -> dict[Modality, int]:
        """How many items of each modality there are."""
        counts = self._ask("SELECT modality, items FROM modalities", ())
        return {Modality.parse(name): count for name, count in counts}

    def rows_of(self, item_ids: Iterable[str]) -> Int64[np.ndarray, " found"]:
        """Rows of those of these items that are here, ascending."""
        rows = np.fromiter(self.rows_by_id(item_ids).values(), dtype=np.int64)
        rows.sort()
        return rows

    def rows_by_id(self, item_ids: Iterable[str]) -> dict[str, int]:
        """The row of each of those of these items that are here."""
        query = "SELECT item_id, row FROM json_each(?) CROSS JOIN items ON item_id = value"
        return dict(self._look_up(query, set(item_ids)))

    def stamps(self, item_ids: Iterable[str]) -> dict[str, str | None]:
        """The stamp of each of those of these items that are here."""
        query = "SELECT item_id, stamp FROM json_each(?) CROSS JOIN items ON item_id = value"
        return dict(self._look_up(query, set(item_ids)))

    def matching(self, filter_: Filter) -> Int64[np.ndarray, " rows"]:
        """Rows of the items that satisfy a filter, ascending.

        Words and ids are looked up; other conditions are checked item by item, in 1 to 3 seconds a million.

        Raises
        ------
        UsageError
            words are asked for, and this SQLite or the one that wrote the store has no full text.
        """
        bound: Bound = {}
        clauses = [condition.clause(bound) for condition in filter_.conditions]
        if filter_.modality is not None:
            bound["modality"] = filter_.modality.mbeir
            clauses.append("modality = :modality")
        if filter_.match is not None:
            self._refuse_without_full_text()
            bound["words"] = full_text_query(filter_.match)
        rows = self._rows_where(clauses, bound)
        if filter_.item_ids is None:
            return rows
        return np.intersect1d(rows, self.rows_of(filter_.item_ids), assume_unique=True)

    def _rows_where(self, clauses: Sequence[str], bound: Bound) -> Int64[np.ndarray, " rows"]:
        words = "FROM words WHERE words MATCH :words AND rowid >= :first AND rowid < :end"
        where = ["row >= :first", "row < :end"]
        if "words" in bound:
            where.append(f"row IN (SELECT rowid {words})")
        # What a person typed is bound; the clauses are of our own making.
        query = f"SELECT group_concat(row) FROM items WHERE {' AND '.join([*where, *clauses])}"  # noqa: S608
        if "words" in bound and not clauses:
            query = f"SELECT group_concat(rowid) {words}"
        (last,) = self._ask("SELECT MAX(row) FROM items", ())[0]
        parts = []
        for first in range(0, -1 if last is None else last + 1, _ROWS_AT_ONCE):
            part = {**bound, "first": first, "end": first + _ROWS_AT_ONCE}
            (found,) = self._ask(query, part)[0]
            parts.append(np.fromstring(found or "", dtype=np.int64, sep=","))
        rows = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        rows.sort()
        return rows

    def _refuse_without_full_text(self) -> None:
        try:
            self._ask("SELECT 1 FROM words LIMIT 0", ())
        except sqlite3.OperationalError:
            raise UsageError(
                f"{self._path} cannot be asked for words: this Python's SQLite {sqlite3.sqlite_version}, or "
                "the one that wrote it, has no full text (FTS5); give a condition such as text~leather "
                "instead, or use a Python whose SQLite has FTS5"
            ) from None

    def _look_up(self, query: str, keys: set[Any]) -> Iterator[Any]:
        """Answers for many keys; in their order, so that neighbours in the index are read together."""
        ordered = sorted(keys)
        for start in range(0, len(ordered), _ASKED_AT_ONCE):
            yield from self._ask(query, (json.dumps(ordered[start : start + _ASKED_AT_ONCE]),))

    def _ask(self, query: str, bound: Any) -> list[Any]:
        with self._reading():
            return self._database.execute(query, bound).fetchall()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.DatabaseError as error:
                if type(error) is not sqlite3.DatabaseError:
                    raise
                raise ArtifactMismatch(f"{self._path} is damaged ({error}); make the index again") from None


def _item(entry: tuple[str, str, str | None, str | None, str | None, str | None]) -> Item:
    item_id, modality, *rest = entry
    return Item(item_id, Modality.parse(modality), *rest)
