"""The items of a segment (id, modality, text, image, fields) in SQLite, with indexes for filters.

A store is written once and never changed, so that reading needs no locks between processes.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from genius_search.errors import ArtifactMismatch, DeadlinePassed
from genius_search.forks import abandon, free_in_children, renew_in_children, yield_to_fork
from genius_search.records import Modality, composed
from genius_search.text import clean

ITEMS_FILE: Final = "items.sqlite"
CREATE_ITEMS: Final = (
    "CREATE TABLE items (row INTEGER PRIMARY KEY, item_id TEXT NOT NULL, modality TEXT NOT NULL, "
    "text TEXT, image TEXT, source TEXT, stamp TEXT, content TEXT, root INTEGER)"
)
CREATE_MODALITIES: Final = (
    "CREATE TABLE modalities (modality TEXT PRIMARY KEY, items INTEGER NOT NULL)"
)
CREATE_ITEM_IDS: Final = "CREATE UNIQUE INDEX item_ids ON items(item_id)"
CREATE_FIELD_NAMES: Final = (
    "CREATE TABLE field_names (path TEXT NOT NULL, name INTEGER PRIMARY KEY)"
)
CREATE_FULL_TEXT: Final = (
    (
        "CREATE VIRTUAL TABLE words USING fts5(text, content='items', content_rowid='row', columnsize=0, "
        "tokenize='unicode61 remove_diacritics 2')"
    ),
    "INSERT INTO words(words, rank) VALUES ('hashsize', 16777216)",  # twice as fast as SQLite's 1 MiB
    "INSERT INTO words(words) VALUES ('rebuild')",
)
CREATE_FIELDS: Final = "CREATE TABLE fields (name INTEGER, value, row INTEGER, PRIMARY KEY (name, value, row)) WITHOUT ROWID"
"""Sorted by field, value and row: numbers come before texts, texts before Booleans
and times (:mod:`genius_search.data.values`)."""
SCHEMA: Final = frozenset(
    {
        *(
            CREATE_ITEMS,
            CREATE_MODALITIES,
            CREATE_ITEM_IDS,
            CREATE_FIELD_NAMES,
            CREATE_FULL_TEXT[0],
            CREATE_FIELDS,
        ),
        # FTS5 writes these for the table of words.
        "CREATE TABLE 'words_data'(id INTEGER PRIMARY KEY, block BLOB)",
        "CREATE TABLE 'words_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID",
        "CREATE TABLE 'words_config'(k PRIMARY KEY, v) WITHOUT ROWID",
    }
)
"""All that a store may define; a view or a trigger of somebody else would run with a query."""
ITEM_COLUMNS: Final = (
    "row, CAST(item_id AS TEXT), modality, CAST(text AS TEXT), CAST(image AS TEXT), CAST(source AS TEXT), "
    "CAST(stamp AS TEXT), CAST(content AS TEXT), CAST(items.root AS INTEGER)"
)
"""A row and the fields of :class:`Item`; somebody else may have stored bytes instead of texts."""
STEPS_BETWEEN_CLOCK_CHECKS: Final = 1_000
"""Steps of SQLite between two looks at the clock, and at whether a thread waits to fork."""
TOO_SLOW: Final = "the conditions took too long; give fewer, or allow more time"
ROWS_OF_WORDS: Final = (
    "SELECT (SELECT CASE WHEN count(*) <= ?2 THEN coalesce(group_concat(rowid), '') END "
    "FROM (SELECT rowid FROM words WHERE words MATCH value LIMIT ?2 + 1)) FROM json_each(?1)"
)
"""Rows of items with each word, or NULL for one that more items have: the look-ups end early."""
ROWS_OF_NAMES: Final = (
    "SELECT (SELECT CASE WHEN count(*) <= ?2 THEN coalesce(group_concat(row), '') END FROM "
    "(SELECT row FROM fields WHERE name = ?3 AND fields.value = spelt.value LIMIT ?2 + 1)) "
    "FROM json_each(?1) spelt"
)
NAME_PATH: Final = '["name"]'
"""The key of the field that is a picture's name."""
_MODALITIES: Final = {one.mbeir: one for one in Modality}
_JSON: Final = json.JSONDecoder(parse_constant=lambda _: None)  # of NaN and infinities
_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")


class Item(NamedTuple):
    """One item of an index."""

    id: str
    """The item's external name."""
    modality: Modality
    text: str | None = None
    image: str | None = None
    """Path of the picture."""
    source: str | None = None
    """Additional data as text; if it is a JSON object, its keys are the item's fields."""
    stamp: str | None = None
    """Stamp that changes with the item or its file, so that unchanged items need not be looked at again."""
    content: str | None = None
    """Size and hash of what is embedded, by which a file is known after it was moved, renamed or touched."""
    root: int | None = None
    """Number of the root (:attr:`genius_search.Index.roots`) that the item was found in; None for others."""

    @property
    def fields(self) -> dict[str, Any]:
        """The item's fields by name; empty if ``source`` is not a JSON object."""
        if not self.source:
            return {}
        try:
            found = _JSON.decode(self.source)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def spell_path(path: Sequence[str]) -> str:
    """Return the key of a field in the tables."""
    return json.dumps(path).encode(errors="replace").decode()


class Connection:
    """A connection to a database; its statements run one at a time. A forked child opens one of its own."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self.lock = free_in_children(threading.RLock())
        self.library_lock = free_in_children(threading.RLock(), of_library=True)
        """Held by the owner of ``lock`` while it is in SQLite; no other thread takes it to use SQLite."""
        self._database: sqlite3.Connection | None = None
        self.open()
        renew_in_children(self)

    def open(self) -> sqlite3.Connection:
        """Return the database, which is opened if this is its first use in a forked child."""
        with self.lock, self.library_lock:
            if self._database is None:
                database = sqlite3.connect(
                    self._uri, uri=True, check_same_thread=False, isolation_level=None
                )
                database.create_function("contains", 2, _contains, deterministic=True)
                self._close = weakref.finalize(self, _close, database, self.library_lock)
                self._database = database
            return self._database

    def renew(self) -> None:
        """Put the parent's database aside."""
        if self._database is not None:
            abandon(self._database)
            self._close.detach()
            self._database = None


def _close(database: sqlite3.Connection, lock: threading.RLock) -> None:
    with lock:
        database.close()


def _contains(text: str, part: str) -> bool:
    return part in clean(composed(text)).casefold()


class ItemStore:
    """Reads the items of a finished store; safe to use from several threads.

    The file stays open, so it remains readable if a writer removes it. Filters have connections of their own,
    so that a slow one delays neither another nor the reading of items.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ITEMS_FILE
        self._uri = f"{self._path.resolve().as_uri()}?mode=ro&immutable=1"
        self._for_items = Connection(self._uri)
        self._for_filters: list[Connection] = []
        """Those that no filter uses."""
        found = self._query(
            "SELECT type, name, sql FROM sqlite_master"
        )  # definitions, none of which is run
        for kind, name, sql in found:
            if sql not in SCHEMA and (kind, sql) != (
                "index",
                None,
            ):  # SQLite's own indexes have no statement
                raise ArtifactMismatch(
                    f"{self._path} defines the {kind} {name!r} in a way that no index does; do not use it"
                )
        if missing := {CREATE_ITEMS, CREATE_MODALITIES, CREATE_FULL_TEXT[0], CREATE_FIELDS} - {
            sql for _, _, sql in found
        }:
            raise ArtifactMismatch(f"{self._path} is damaged: it lacks {sorted(missing)}")

    def open(self) -> None:
        """Open the file again in a forked child, from when on it stays open; raises ``sqlite3.Error``."""
        self._for_items.open()

    @cached_property
    def num_rows(self) -> int:
        """The number of items; their rows count from 0, without gaps."""
        query = "SELECT (SELECT MIN(row) FROM items), (SELECT MAX(row) FROM items), SUM(items) FROM modalities"
        ((first, last, count),) = self._query(query)
        if (first, last) != ((0, count - 1) if count else (None, None)):
            raise ArtifactMismatch(f"{self._path} has {count} items in the rows {first} to {last}")
        return count or 0

    @cached_property
    def field_names(self) -> dict[str, int]:
        """The number of each field by its path (:func:`spell_path`)."""
        return dict(self._query("SELECT path, name FROM field_names"))

    def count_by_modality(self) -> dict[Modality, int]:
        """Return the number of items of each modality."""
        counts = self._query("SELECT modality, items FROM modalities")
        return {Modality.parse(name): count for name, count in counts}

    def get(self, rows: Sequence[int]) -> list[Item]:
        """Return the items of these rows, in this order."""
        query = f"SELECT {ITEM_COLUMNS} FROM json_each(?) CROSS JOIN items ON row = value"  # noqa: S608
        found = {}
        try:
            for row, item_id, modality, *rest in self._query(
                query, [json.dumps(sorted(set(rows)))]
            ):
                found[row] = Item(item_id, _MODALITIES[modality], *rest)
            return [found[row] for row in rows]
        except KeyError as error:
            raise ArtifactMismatch(
                f"{self._path} has no row or modality {error}; do not use it"
            ) from None

    def all(self) -> Iterator[Item]:
        """Yield every item, by row."""
        query = f"SELECT {ITEM_COLUMNS} FROM items WHERE row >= ? ORDER BY row LIMIT 1000"  # noqa: S608
        count = 0
        while entries := self._query(query, [count]):
            for row, item_id, modality, *rest in entries:
                if row != count or modality not in _MODALITIES:
                    raise ArtifactMismatch(f"{self._path} has no item {count:,}; do not use it")
                yield Item(item_id, _MODALITIES[modality], *rest)
                count += 1

    def find_ids(
        self, item_ids: Iterable[str]
    ) -> list[tuple[str, int, str | None, str | None, int | None]]:
        """Return id, row, stamp, content and root of each of these items that is in the store."""
        # SQLite's json_each ends a text at NUL and replaces lone surrogates, so another item would match.
        # Sorted, so that adjacent pages are read together.
        ids = sorted({composed(item_id) for item_id in item_ids if not _UNSTORABLE.search(item_id)})
        query = (
            "SELECT item_id, row, stamp, content, items.root FROM json_each(?) "
            "CROSS JOIN items ON item_id = value"
        )
        return self._query(query, [json.dumps(ids)])

    def images_with_prefix(self, rows: Sequence[int], prefix: str) -> set[str]:
        """Return the paths of pictures that begin with a prefix, of some rows."""
        query = (
            "SELECT CAST(image AS TEXT) FROM json_each(?) CROSS JOIN items ON row = value "
            "WHERE substr(image, 1, length(?2)) = ?2"
        )
        return {image for (image,) in self._query(query, [json.dumps(rows), prefix])}

    def rows_of_images(self, images: Iterable[str]) -> list[tuple[str, int]]:
        """Return the path and the row of each item with one of these pictures; reads all items."""
        query = "SELECT CAST(image AS TEXT), row FROM items WHERE image IN (SELECT value FROM json_each(?))"
        return self._query(query, [json.dumps([*images])])

    def mask(
        self, source: str, values: Sequence[Any], *, row: str = "row", deadline: float = math.inf
    ) -> Bool[np.ndarray, " items"]:
        """Return which items a query finds: what follows FROM, and the values to bind.

        Raises
        ------
        DeadlinePassed
            It took until the deadline, on the clock of :func:`time.monotonic`.
        """
        if time.monotonic() > deadline:
            raise DeadlinePassed(TOO_SLOW)
        connection = self._for_items
        with contextlib.suppress(sqlite3.OperationalError):  # a writer has removed the file
            connection = self._for_filters.pop() if self._for_filters else Connection(self._uri)
        try:
            # Values are bound; the rest of the query contains no user input.
            query = f"SELECT group_concat({row}) FROM {source}"  # noqa: S608
            (rows,) = self._query(query, values, connection, deadline)[0]
        finally:
            if connection is not self._for_items:
                self._for_filters.append(connection)
        found = np.zeros(self.num_rows, dtype=bool)
        listed = np.fromstring(rows or "", dtype=np.int64, sep=",")
        if listed.min(initial=0) < 0 or listed.max(initial=-1) >= len(found):
            raise ArtifactMismatch(f"{self._path} names rows that it does not have")
        found[listed] = True
        return found

    def rows_of_words(
        self, words: Sequence[str], max_items: int
    ) -> list[Int64[np.ndarray, " rows"] | None]:
        """Return the rows of items whose text has a word, or whose ``name`` it is, for each of several words.

        Each row is listed once. It is None for a word that more than ``max_items`` have.

        Parameters
        ----------
        words
            Letters and digits; a word with spaces in it is several words in this order.
        """
        if not words:
            return []
        phrases = [f'"{word}"' for word in words]
        listed = self._query(
            ROWS_OF_WORDS, [json.dumps(phrases), max_items]
        )  # one statement for all words
        name = self.field_names.get(NAME_PATH)
        if name is not None:
            spelt = [spelling for word in words for spelling in (word, word.upper(), word.lower())]
            listed += self._query(ROWS_OF_NAMES, [json.dumps(spelt), max_items, name])
        found: list[Int64[np.ndarray, " rows"] | None] = []
        for number in range(len(words)):
            first_name = len(words) + 3 * number
            lists = [rows for (rows,) in (listed[number], *listed[first_name : first_name + 3])]
            if None in lists:
                found.append(None)
                continue
            rows = np.fromstring(",".join(filter(None, lists)), dtype=np.int64, sep=",")
            found.append(rows if len(lists) == 1 or not len(rows) else np.unique(rows))
        return found

    def _query(
        self,
        query: str,
        values: Sequence[Any] = (),
        connection: Connection | None = None,
        deadline: float = math.inf,
    ) -> list[Any]:
        connection = connection or self._for_items
        with self._reading(connection):
            database, lock = connection.open(), connection.library_lock

            def has_passed() -> bool:
                yield_to_fork(lock)
                return deadline < math.inf and time.monotonic() > deadline

            database.set_progress_handler(has_passed, STEPS_BETWEEN_CLOCK_CHECKS)
            return database.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _reading(self, connection: Connection) -> Iterator[None]:
        with connection.lock, connection.library_lock:
            try:
                yield
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                    raise DeadlinePassed(TOO_SLOW) from None
                if type(error) is not sqlite3.DatabaseError and "decode" not in str(error):
                    raise
                raise ArtifactMismatch(
                    f"{self._path} is damaged ({error}); make the index again"
                ) from None
