"""The items of a segment (id, modality, text, image, fields) in SQLite, with indexes for filters.

A store is written once and never changed, so that reading needs no locks between processes. Its
tables, with an item whose JSON is ``{"price": 5, "size": {"width": 30}}``::

    items         row 0   item_id "bag.jpg"   modality "image"   source the JSON   ...
    modalities    modality "image"   items 1
    field_names   path ["price"]           name 0
                  path ["size", "width"]   name 1
    fields        name 0   value 5    row 0
                  name 1   value 30   row 0
    words         the full-text index of text, about and picture_words of the items
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
    "text TEXT, image TEXT, source TEXT, stamp TEXT, content TEXT, root INTEGER, about TEXT, "
    "picture_words TEXT, boxes TEXT)"
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
        "CREATE VIRTUAL TABLE words USING fts5(text, about, picture_words, content='items', "
        "content_rowid='row', columnsize=0, tokenize='unicode61 remove_diacritics 2')"
    ),
    # Twice as fast as with SQLite's 1 MiB.
    "INSERT INTO words(words, rank) VALUES ('hashsize', 16777216)",
    "INSERT INTO words(words) VALUES ('rebuild')",
)
CREATE_FIELDS: Final = (
    "CREATE TABLE fields (name INTEGER, value, row INTEGER, "
    "PRIMARY KEY (name, value, row)) WITHOUT ROWID"
)
"""Sorted by field, value and row: numbers come before texts, and texts before Booleans and times
(:mod:`genius_search.data.values`)."""
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
        # FTS5 creates these for the table of words.
        "CREATE TABLE 'words_data'(id INTEGER PRIMARY KEY, block BLOB)",
        "CREATE TABLE 'words_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID",
        "CREATE TABLE 'words_config'(k PRIMARY KEY, v) WITHOUT ROWID",
    }
)
"""All definitions that a store may have; a view or trigger in a foreign store would run code."""
SHOWN_COLUMNS: Final = (
    "row, CAST(item_id AS TEXT), modality, CAST(text AS TEXT), CAST(image AS TEXT), "
    "CAST(source AS TEXT)"
)
"""A row and the fields of :class:`Item` that every hit shows."""
ITEM_COLUMNS: Final = (
    f"{SHOWN_COLUMNS}, CAST(stamp AS TEXT), CAST(content AS TEXT), CAST(items.root AS INTEGER), "
    "CAST(about AS TEXT), CAST(picture_words AS TEXT), CAST(boxes AS TEXT)"
)
"""A row and all fields of :class:`Item`; a foreign store may have bytes instead of texts."""
STEPS_BETWEEN_CLOCK_CHECKS: Final = 1_000
"""Number of SQLite's steps after which it looks at the clock, and lets a waiting thread fork."""
TOO_SLOW: Final = "the conditions took too long; give fewer, or allow more time"
ROWS_OF_WORDS: Final = (
    "SELECT (SELECT CASE WHEN count(*) <= ?2 THEN coalesce(group_concat(rowid), '') END "
    "FROM (SELECT rowid FROM words WHERE words MATCH value LIMIT ?2 + 1)) FROM json_each(?1)"
)
"""For each word, the rows of the items that contain it, such as "3,8,12".

For a word that more than ?2 items contain, the look-up ends early, and the result is NULL."""
ROWS_OF_NAMES: Final = (
    "SELECT (SELECT CASE WHEN count(*) <= ?2 THEN coalesce(group_concat(row), '') END FROM "
    "(SELECT row FROM fields WHERE name = ?3 AND fields.value = spelt.value LIMIT ?2 + 1)) "
    "FROM json_each(?1) spelt"
)
"""For each spelling, the rows of the items with this name, or NULL as in :data:`ROWS_OF_WORDS`."""
NAME_PATH: Final = '["name"]'
"""The path of the field with a picture's name (:func:`spell_path`)."""
NO_WORDS: Final = "picture"
"""The description of a picture about which nothing is known, so that it is an item all the same."""
_MODALITIES: Final = {modality.mbeir: modality for modality in Modality}
_JSON: Final = json.JSONDecoder(parse_constant=lambda _: None)  # NaN and infinities become None
_JSON_SPACE: Final = " \t\n\r"
"""Characters that may surround a JSON text."""
_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")
"""Characters that no id in a store has: NUL and lone surrogates."""


class PictureLine(NamedTuple):
    """A line of text in a picture."""

    words: str
    box: tuple[float, ...]
    """Left, top, right and bottom edge, as shares of the width or height of the upright picture."""


class Item(NamedTuple):
    """An item of an index."""

    id: str
    """The id that the user chose."""
    modality: Modality
    text: str | None = None
    image: str | None = None
    """Path of the picture."""
    source: str | None = None
    """Additional data as text; if it is a JSON object, its keys are the item's fields."""
    stamp: str | None = None
    """Changes with the item or its file, so that unchanged items are not read again."""
    content: str | None = None
    """Size and hash of the embedded content, which identify a file that was moved or renamed."""
    root: int | None = None
    """Number of the root (:attr:`genius_search.Index.roots`) with the item's file, if any."""
    about: str | None = None
    """Words about a picture besides its caption: name, folder, keywords, people, date, place."""
    picture_words: str | None = None
    """Text in the picture, one line per box; empty if there is none, None if it was not read."""
    boxes: str | None = None
    """Boxes of the lines of ``picture_words``, as JSON; see :attr:`picture_text`."""

    @property
    def description(self) -> str:
        """All words of the item, which an encoder of texts reads in place of a picture."""
        if self.image is None:
            return self.text or ""
        parts = filter(None, (self.text, self.about, self.picture_words))
        return "\n".join(parts) or NO_WORDS

    @property
    def picture_text(self) -> list[PictureLine]:
        """The lines of text in the picture with their boxes; empty if they do not fit together."""
        lines = (self.picture_words or "").splitlines()
        try:
            boxes = [tuple(map(float, box)) for box in json.loads(self.boxes or "[]")]
        except (ValueError, TypeError, RecursionError):
            return []
        if len(boxes) != len(lines) or any(len(box) != 4 for box in boxes):
            return []
        return [PictureLine(words, box) for words, box in zip(lines, boxes, strict=True)]

    @property
    def fields(self) -> dict[str, Any]:
        """The item's fields by name; empty if ``source`` is not a JSON object."""
        if not self.source:
            return {}
        source = self.source.strip(_JSON_SPACE)
        try:
            # decode() would look for spaces with patterns, which takes as long as a few fields.
            fields, end = _JSON.raw_decode(source)
        except (ValueError, RecursionError):
            return {}
        return fields if isinstance(fields, dict) and end == len(source) else {}


def spell_path(path: Sequence[str]) -> str:
    """Return the key of a field in the tables.

    >>> spell_path(["size", "width"])
    '["size", "width"]'
    """
    return json.dumps(path).encode(errors="replace").decode()


class Connection:
    """A connection to a database, which runs one statement at a time.

    A forked child opens a new connection, since SQLite's must not cross a fork.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self.lock = free_in_children(threading.RLock())
        self.library_lock = free_in_children(threading.RLock(), of_library=True)
        """Held by the owner of ``lock`` while it is in SQLite. A fork waits for it."""
        self._database: sqlite3.Connection | None = None
        self.open()
        renew_in_children(self)

    def open(self) -> sqlite3.Connection:
        """Return the database; open it at the first use in a forked child."""
        with self.lock, self.library_lock:
            if self._database is None:
                database = sqlite3.connect(
                    self._uri, uri=True, check_same_thread=False, isolation_level=None
                )
                database.create_function("contains", 2, _contains, deterministic=True)
                self._close = weakref.finalize(self, _close, database, self.library_lock)
                self._database = database
            return self._database

    def _renew(self) -> None:
        """Abandon the parent's database in a forked child."""
        if self._database is not None:
            abandon(self._database)
            self._close.detach()
            self._database = None


def _close(database: sqlite3.Connection, lock: threading.RLock) -> None:
    with lock:
        database.close()


def _contains(text: str, part: str) -> bool:
    """Return whether a text contains a part that is cleaned and casefolded; SQL's ``contains``."""
    return part in clean(composed(text)).casefold()


class ItemStore:
    """Reads the items of a finished store; safe to use from several threads.

    The file stays open, so it remains readable if a writer removes it. Each running filter has a
    connection, so that a slow filter delays neither another one nor the reading of items.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ITEMS_FILE
        self._uri = f"{self._path.resolve().as_uri()}?mode=ro&immutable=1"
        self._for_items = Connection(self._uri)
        self._for_filters: list[Connection] = []
        """Idle connections for filters."""
        self.columns: dict[str, object] = {}
        """Cached columns of fields (:mod:`genius_search.index.columns`)."""
        self._check_schema()

    def _check_schema(self) -> None:
        """Raise :class:`ArtifactMismatch` if the store has other tables, or lacks some.

        Reading definitions runs none of them.
        """
        definitions = self._query("SELECT type, name, sql FROM sqlite_master")
        for definition, name, sql in definitions:
            is_automatic_index = (definition, sql) == ("index", None)
            if sql not in SCHEMA and not is_automatic_index:
                raise ArtifactMismatch(
                    f"{self._path} defines the {definition} {name!r} in a way that no index does; "
                    "do not use it"
                )
        required = {CREATE_ITEMS, CREATE_MODALITIES, CREATE_FULL_TEXT[0], CREATE_FIELDS}
        if missing := required - {sql for _, _, sql in definitions}:
            raise ArtifactMismatch(f"{self._path} is damaged: it lacks {sorted(missing)}")

    def open(self) -> None:
        """Open the file again in a forked child, where it then stays open.

        Raises
        ------
        sqlite3.Error
            The file cannot be opened.
        """
        self._for_items.open()

    @cached_property
    def num_rows(self) -> int:
        """The number of items; their rows count from 0, without gaps."""
        query = (
            "SELECT (SELECT MIN(row) FROM items), (SELECT MAX(row) FROM items), SUM(items) "
            "FROM modalities"
        )
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

    def get(self, rows: Sequence[int], columns: str = ITEM_COLUMNS) -> list[Item]:
        """Return the items in the given rows, in the same order.

        With :data:`SHOWN_COLUMNS`, which takes less time, they lack their last fields.
        """
        source = "json_each(?) CROSS JOIN items ON row = value"
        query = f"SELECT {columns} FROM {source}"  # noqa: S608
        items = {}
        try:
            for row, item_id, modality, *values in self._query(
                query, [json.dumps(sorted(set(rows)))]
            ):
                items[row] = Item(item_id, _MODALITIES[modality], *values)
            return [items[row] for row in rows]
        except KeyError as error:
            raise ArtifactMismatch(
                f"{self._path} has no row or modality {error}; do not use it"
            ) from None

    def all(self) -> Iterator[Item]:
        """Yield every item in the order of rows."""
        source = "items WHERE row >= ? ORDER BY row LIMIT 1000"
        query = f"SELECT {ITEM_COLUMNS} FROM {source}"  # noqa: S608
        count = 0
        while entries := self._query(query, [count]):
            for row, item_id, modality, *columns in entries:
                if row != count or modality not in _MODALITIES:
                    raise ArtifactMismatch(f"{self._path} has no item {count:,}; do not use it")
                yield Item(item_id, _MODALITIES[modality], *columns)
                count += 1

    def find_ids(
        self, item_ids: Iterable[str]
    ) -> list[tuple[str, int, str | None, str | None, int | None]]:
        """Return id, row, stamp, content and root of each item of the store with a given id."""
        # SQLite's json_each ends a text at NUL and replaces lone surrogates, so that such an id
        # would match another item. Ids are sorted so that adjacent pages are read together.
        ids = sorted({composed(item_id) for item_id in item_ids if not _UNSTORABLE.search(item_id)})
        query = (
            "SELECT item_id, row, stamp, content, items.root FROM json_each(?) "
            "CROSS JOIN items ON item_id = value"
        )
        return self._query(query, [json.dumps(ids)])

    def ids_after(self, item_id: str, count: int) -> list[tuple[str, int]]:
        """Return the first ids after an id in the order of their characters, with their rows."""
        query = (
            "SELECT CAST(item_id AS TEXT), row FROM items WHERE item_id > ? "
            "ORDER BY item_id LIMIT ?"
        )
        return self._query(query, [item_id, count])

    def images_with_prefix(self, rows: Sequence[int], prefix: str) -> set[str]:
        """Return the paths of pictures in the given rows that begin with a prefix."""
        query = (
            "SELECT CAST(image AS TEXT) FROM json_each(?) CROSS JOIN items ON row = value "
            "WHERE substr(image, 1, length(?2)) = ?2"
        )
        return {image for (image,) in self._query(query, [json.dumps(rows), prefix])}

    def rows_of_images(self, images: Iterable[str]) -> list[tuple[str, int]]:
        """Return path and row of each item with one of the given pictures; this reads all items."""
        query = (
            "SELECT CAST(image AS TEXT), row FROM items "
            "WHERE image IN (SELECT value FROM json_each(?))"
        )
        return self._query(query, [json.dumps([*images])])

    def rows_of_unread_pictures(self) -> list[int]:
        """Return the rows of the items with a picture whose text has not been read."""
        query = "SELECT row FROM items WHERE image IS NOT NULL AND picture_words IS NULL"
        return [row for (row,) in self._query(query)]

    def mask(
        self, source: str, values: Sequence[Any], *, row: str = "row", deadline: float = math.inf
    ) -> Bool[np.ndarray, " items"]:
        """Return a mask of the items that a query finds.

        Parameters
        ----------
        source
            The query after FROM, without any user input.
        values
            Values to bind.
        row
            Name of the column with the row.

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
            query = f"SELECT group_concat({row}) FROM {source}"  # noqa: S608
            (joined_rows,) = self._query(query, values, connection, deadline)[0]
        finally:
            if connection is not self._for_items:
                self._for_filters.append(connection)
        mask = np.zeros(self.num_rows, dtype=bool)
        rows = np.fromstring(joined_rows or "", dtype=np.int64, sep=",")
        if rows.min(initial=0) < 0 or rows.max(initial=-1) >= len(mask):
            raise ArtifactMismatch(f"{self._path} names rows that it does not have")
        mask[rows] = True
        return mask

    def rows_by_value(
        self, source: str, value: str, order: str, bound: Sequence[Any], deadline: float
    ) -> list[tuple[Any, str]]:
        """Return the values that a query groups items by, ascending, with their rows as "3,8,12".

        Parameters
        ----------
        source
            The query after FROM, with GROUP BY, without any user input.
        value, order
            Expressions of the value and of the order.
        bound
            Values to bind.
        """
        query = f"SELECT {value}, group_concat(row) FROM {source} ORDER BY {order}"  # noqa: S608
        return self._query(query, bound, deadline=deadline)

    def rows_of_words(
        self, words: Sequence[str], max_items: int
    ) -> list[Int64[np.ndarray, " rows"] | None]:
        """Return for each word the rows of the items whose text contains it, or whose name it is.

        Each row is listed once. The result is None for a word of more than ``max_items`` items.

        Parameters
        ----------
        words
            Letters and digits; a word with spaces in it is a phrase.
        """
        if not words:
            return []
        phrases = [f'"{word}"' for word in words]
        rows_by_text = self._query(ROWS_OF_WORDS, [json.dumps(phrases), max_items])
        rows_by_name = self._rows_of_names(words, max_items)
        rows_of_words: list[Int64[np.ndarray, " rows"] | None] = []
        for (text_rows,), name_rows in zip(rows_by_text, rows_by_name, strict=True):
            lists = [text_rows, *name_rows]
            if None in lists:
                rows_of_words.append(None)
                continue
            rows = np.fromstring(",".join(filter(None, lists)), dtype=np.int64, sep=",")
            has_duplicates = len(lists) > 1 and len(rows)
            rows_of_words.append(np.unique(rows) if has_duplicates else rows)
        return rows_of_words

    def _rows_of_names(self, words: Sequence[str], max_items: int) -> list[list[str | None]]:
        """Return for each word the rows of the items with its three spellings as their name.

        For "Kite" these are the rows of Kite, KITE and kite. Without names the lists are empty.
        """
        name = self.field_names.get(NAME_PATH)
        if name is None:
            return [[] for _ in words]
        spellings = []
        for word in words:
            spellings += [word, word.upper(), word.lower()]
        results = self._query(ROWS_OF_NAMES, [json.dumps(spellings), max_items, name])
        rows = [rows for (rows,) in results]
        return [rows[first : first + 3] for first in range(0, len(rows), 3)]

    def _query(
        self,
        query: str,
        values: Sequence[Any] = (),
        connection: Connection | None = None,
        deadline: float = math.inf,
    ) -> list[Any]:
        """Run a query and return all rows of its result."""
        connection = connection or self._for_items
        with self._reading(connection):
            database = connection.open()
            lock = connection.library_lock

            def has_passed() -> bool:
                """Let a waiting thread fork; return True to interrupt the query."""
                yield_to_fork(lock)
                return deadline < math.inf and time.monotonic() > deadline

            database.set_progress_handler(has_passed, STEPS_BETWEEN_CLOCK_CHECKS)
            return database.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _reading(self, connection: Connection) -> Iterator[None]:
        """Hold the locks of a connection, and translate SQLite's errors."""
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
