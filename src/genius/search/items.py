"""What an index knows of its items beside their IDs: name, modality, text, picture; in SQLite."""

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int64

from genius.data.records import Modality
from genius.errors import BadData

ITEMS_FILE: Final = "items.sqlite"
_SCHEMA: Final = (
    "CREATE TABLE items (row INTEGER PRIMARY KEY, item_id TEXT NOT NULL UNIQUE, modality TEXT NOT NULL, "
    "text TEXT, image TEXT, source TEXT)"
)


class Item(NamedTuple):
    """One item as its owner knows it."""

    item_id: str
    """The outside world's name."""
    modality: Modality
    text: str | None = None
    image: str | None = None
    """Path of the picture."""
    source: str | None = None
    """Whatever came with it, as JSON."""


def write_items(folder: Path, items: Iterable[Item]) -> int:
    """Write items in the order of their rows; returns how many.

    Raises
    ------
    BadData
        two items have the same id.
    """
    path = folder / ITEMS_FILE
    path.unlink(missing_ok=True)
    count = 0
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(_SCHEMA)
        for row, item in enumerate(items):
            try:
                database.execute(
                    "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)",
                    (row, item.item_id, item.modality.value, item.text, item.image, item.source),
                )
            except sqlite3.IntegrityError:
                raise BadData(f"two items have the id {item.item_id!r}; ids must be unique") from None
            count = row + 1
    return count


class ItemStore:
    """Reads the items of a finished snapshot; safe to use from several threads.

    The file stays open, so a writer that removes the snapshot takes nothing from whoever reads it.
    """

    def __init__(self, folder: Path) -> None:
        uri = f"{(folder / ITEMS_FILE).resolve().as_uri()}?mode=ro&immutable=1"
        self._database = sqlite3.connect(uri, uri=True, check_same_thread=False)
        self._database.execute("SELECT 1 FROM items LIMIT 1")  # SQLite opens the file when it is asked
        self._lock = threading.Lock()
        weakref.finalize(self, self._database.close)

    def get(self, rows: Sequence[int]) -> list[Item]:
        """Items of these rows, in this order."""
        with self._lock:
            found = {}
            for start in range(0, len(rows), 500):
                part = [int(row) for row in rows[start : start + 500]]
                marks = ",".join("?" * len(part))
                query = (
                    f"SELECT row, item_id, modality, text, image, source FROM items WHERE row IN ({marks})"  # noqa: S608  only question marks
                )
                found.update({entry[0]: _item(entry[1:]) for entry in self._database.execute(query, part)})
        return [found[int(row)] for row in rows]

    def all(self) -> Iterator[Item]:
        """Every item, by row."""
        query = "SELECT item_id, modality, text, image, source FROM items ORDER BY row"
        with self._lock:
            cursor = self._database.execute(query)
        while True:
            with self._lock:
                entries = cursor.fetchmany(1000)
            if not entries:
                return
            yield from (_item(entry) for entry in entries)

    def count_by_modality(self) -> dict[Modality, int]:
        """How many items of each modality there are."""
        query = "SELECT modality, COUNT(*) FROM items GROUP BY modality"
        with self._lock:
            counts = self._database.execute(query).fetchall()
        return {Modality.parse(name): int(count) for name, count in counts}

    def rows_of(self, item_ids: Iterable[str]) -> Int64[np.ndarray, " found"]:
        """Rows of those of these items that are here."""
        found = []
        for item_id in item_ids:
            with self._lock:
                entry = self._database.execute(
                    "SELECT row FROM items WHERE item_id = ?", (item_id,)
                ).fetchone()
            if entry is not None:
                found.append(int(entry[0]))
        return np.array(sorted(found), dtype=np.int64)


def _item(entry: tuple[str, str, str | None, str | None, str | None]) -> Item:
    item_id, modality, text, image, source = entry
    return Item(item_id, Modality.parse(modality), text, image, source)
