"""Writing to an index while others search it.

All files but ``index.json``, which also tells which items are deleted, are written once and never changed. A
change writes a segment of new items, then replaces ``index.json`` atomically, and finally removes files that
are no longer referenced. So readers see the state before or after a change, and an interrupted writer changes
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Float16, Int16, Int64, Shaped, UInt8
from pydantic_core import to_json

from genius_search.artifact import FileFact, check_files, file_fingerprint, fingerprint_of
from genius_search.data.values import Value, table_values
from genius_search.errors import ArtifactMissing, BadData, GeniusError, UsageError
from genius_search.forks import free_in_children, iterate_unlocked, yield_to_fork
from genius_search.index.items import (
    CREATE_FIELD_NAMES,
    CREATE_FIELDS,
    CREATE_FULL_TEXT,
    CREATE_ITEM_IDS,
    CREATE_ITEMS,
    CREATE_MODALITIES,
    ITEMS_FILE,
    STEPS_BETWEEN_CLOCK_CHECKS,
    Item,
    spell_path,
)
from genius_search.index.snapshot import Location, Snapshot
from genius_search.index.store import (
    CODE_COSINE,
    CURRENT,
    DENSITIES,
    EMBEDDINGS,
    IMPOSSIBLE_PATH_ERRORS,
    INDEX_FORMAT,
    LOCK,
    MIN_DELETED_SHARE,
    PASSAGES,
    PENDING_PICTURES,
    PICTURE_NAME,
    PICTURES,
    SCALES,
    SEGMENT_NAME,
    SEGMENTS,
    TEMPORARY,
    WORK,
    IndexManifest,
    Segment,
    SegmentEntry,
    StoredEmbeddings,
    is_same_index,
    read_manifest,
    refuse_links,
    require_same_index,
    segment_name,
    with_advice,
)
from genius_search.records import Modality, composed
from genius_search.search.table import IdTable
from genius_search.search.vectors import EmbeddingBits, is_residual
from genius_search.writing import (
    check_locks,
    make_folder,
    sync,
    sync_tree,
    translate_full_disk,
    write_file,
)

MAX_COPIED_ROWS: Final = 8192
"""Items that are copied together."""
SQLITE_SETTINGS: Final = (  # the file is used only when it is complete
    "page_size = 8192",
    "journal_mode = OFF",
    "synchronous = OFF",
    "locking_mode = EXCLUSIVE",
    "cache_size = -65536",
)
READ_ONLY_ERRORS: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
MAX_SEGMENTS: Final = 8
"""Maximum number of segments of an index."""
MAX_RENAME_WAIT_SECONDS: Final = 10.0
"""Longest wait for another process that changes an index which cannot be read."""
MAX_LOCK_ATTEMPTS: Final = 10
"""Maximum number of attempts to lock a folder that other processes remove, since they failed to fill it."""
Rows: TypeAlias = Int64[np.ndarray, " rows"]
NO_ROWS: Final = np.zeros(0, dtype=np.int64)


class ItemArrays(NamedTuple):
    """IDs and embeddings of items, by row; passages have the rows behind those of all items."""

    codes: Int16[np.ndarray, "items columns"]
    """Codes of the IDs, then half norms and densities (:mod:`genius_search.nn.density`)."""
    code_cosine: Float16[np.ndarray, " items"]
    embeddings: Shaped[np.ndarray, "items width"] | None = None
    """Unit vectors in half precision, or their residuals in packed integers
    (:mod:`genius_search.search.vectors`); None if the index stores no embeddings."""
    densities: UInt8[np.ndarray, " items"] | None = None
    """Density around each item (:meth:`~genius_search.nn.density.NormAndDensity.item_density`), with fused
    embeddings."""
    scales: Float16[np.ndarray, " items"] | None = None
    """Scales of residuals."""

    def take(self, chosen: np.ndarray) -> ItemArrays:
        """Return the chosen rows."""
        return ItemArrays._make(None if array is None else array[chosen] for array in self)


class Passage(NamedTuple):
    """Where a passage is in the text of the item that it follows: characters from ``start`` to ``end``.

    Texts that are longer than an encoder reads have some: an item has a vector and an ID for each.
    """

    start: int
    end: int


Entry: TypeAlias = Item | Passage
"""Passages follow their item. That itself stands for the beginning of its text."""


def items_to_encode(
    entries: Iterable[Entry], complete: Callable[[Item], Item] = lambda item: item
) -> Iterator[Item]:
    """Yield what is encoded: each item, and each passage as an item of its own.

    ``complete`` adds to an item what is inside its file.
    """
    for entry in entries:
        if isinstance(entry, Item):
            item = entry
            yield item
        else:
            text = (complete(item).text or "")[entry.start : entry.end]
            yield Item(f"{item.id}\n{entry.start}", Modality.TEXT, text, stamp=item.stamp)


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
        for file, rows in zip(
            (CODE_COSINE, EMBEDDINGS, DENSITIES, SCALES), arrays[1:], strict=True
        ):
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
        yield from _stored(
            segment, alive_entries([segment]), segment.with_passages(segment.alive_rows())
        )


def stored_batches(
    segments: Sequence[Segment], items: Sequence[Item], places: Sequence[Location]
) -> Iterator[Batch]:
    """Yield items with the IDs, embeddings and passages that are stored at some places, one for each."""
    for number, segment in enumerate(segments):
        own = [at for at, place in enumerate(places) if place.segment == number]
        rows = np.array([places[at].row for at in own], dtype=np.int64)
        entries = _with_passages(segment, (items[at] for at in own), rows)
        yield from _stored(segment, entries, segment.with_passages(rows))


def _stored(
    segment: Segment, entries: Iterator[Entry], rows: Int64[np.ndarray, " rows"]
) -> Iterator[Batch]:
    """Yield items and passages with what is stored in some rows of a segment, one for each."""
    table_rows = segment.table.rows_of_items
    values, scales = segment.embeddings or (None, None)
    for start in range(0, len(rows), MAX_COPIED_ROWS):
        some = rows[start : start + MAX_COPIED_ROWS]
        arrays = ItemArrays(
            segment.table.ids[table_rows[some]],
            segment.code_cosine[some],
            *(
                None if array is None else array[some]
                for array in (values, segment.densities, scales)
            ),
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
    """Make this the state of the index, in one step."""
    body = {"format": INDEX_FORMAT, **manifest.model_dump(mode="json")}
    body = {"checksum": fingerprint_of(body), **body}  # first, where `read_head` reads it
    write_file(folder / CURRENT, to_json(body, indent=2) + b"\n")


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
    lock = free_in_children(RLock(), of_library=True)
    try:
        with lock, closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.set_progress_handler(partial(yield_to_fork, lock), STEPS_BETWEEN_CLOCK_CHECKS)
            for setting in SQLITE_SETTINGS:
                database.execute(f"PRAGMA {setting}")
            database.execute("BEGIN")
            database.execute(CREATE_ITEMS)
            database.execute(CREATE_MODALITIES)
            database.executemany(
                "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    (row, item.id, item.modality.mbeir, *item[2:])
                    for row, item in enumerate(iterate_unlocked(lock, items))
                ),
            )
            database.execute(
                "INSERT INTO modalities SELECT modality, COUNT(*) FROM items GROUP BY modality"
            )
            database.execute("COMMIT")
            try:
                database.execute(CREATE_ITEM_IDS)
            except sqlite3.IntegrityError:
                query = "SELECT item_id FROM items GROUP BY item_id HAVING COUNT(*) > 1 LIMIT 1"
                twice = database.execute(query).fetchone()[0]
                raise BadData(f"two items have the id {twice!r}; ids must be unique") from None
            for statement in CREATE_FULL_TEXT:
                database.execute(statement)
            _index_fields(database)
            return int(
                database.execute("SELECT COALESCE(SUM(items), 0) FROM modalities").fetchone()[0]
            )
    except sqlite3.OperationalError as error:
        if "no such module" in str(error):
            raise UsageError(
                "this Python's SQLite lacks FTS5; use a Python whose SQLite has it"
            ) from None
        raise


def _index_fields(database: sqlite3.Connection) -> None:
    """Write the fields of the items to a sorted table, for filters."""
    names: dict[str, int] = {}
    database.execute(CREATE_FIELD_NAMES)
    database.execute(CREATE_FIELDS)
    database.execute("CREATE TEMP TABLE unsorted (name, value, row)")
    database.execute("BEGIN")
    sources = database.execute("SELECT row, source FROM items WHERE source <> ''")
    database.executemany("INSERT INTO unsorted VALUES (?, ?, ?)", _field_values(sources, names))
    database.executemany("INSERT INTO field_names VALUES (?, ?)", names.items())
    database.execute(
        "INSERT OR IGNORE INTO fields SELECT * FROM unsorted ORDER BY name, value, row"
    )
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


class HeldByAnother(UsageError):
    """Another process or thread holds the index for writing."""


class NotWritable(UsageError):
    """The index's folder cannot be written to."""


class Deleted(NamedTuple):
    """The result of deleting items."""

    deleted: int
    missing: list[str]
    """Ids that are not in the index."""


@contextlib.contextmanager
def open_writer(
    folder: Path, *, wait_seconds: float = 0.0, before: Snapshot | None = None
) -> Iterator[Writer]:
    """Lock an index for writing, without blocking readers, and remove leftovers of interrupted writers.

    Parameters
    ----------
    wait_seconds
        Longest time to wait for another writer; infinity waits without limit. 0 does not wait for another
        process, and without limit for another thread of this one.
    before
        A state that is open: the folder must still hold that index, and its segments are not opened again.

    Raises
    ------
    HeldByAnother
        Another process or thread is writing, or this thread already is.
    NotWritable
        The disk is read-only, its permissions forbid writing, or it does not support locks.
    UsageError
        ``wait_seconds`` is negative or NaN, or the path cannot be a folder.
    ArtifactMismatch
        The index is damaged, or another than ``before``; nothing is changed.
    ArtifactMissing
        The index of ``before`` has been removed; nothing is made in its place.
    """
    if before is not None:
        require_same_index(folder, before.manifest)
    with writing_lock(folder, wait_seconds=wait_seconds, may_create=before is None):
        if before is not None:
            require_same_index(folder, before.manifest)
        if (folder / CURRENT).exists():  # otherwise they may be all that is left of an index
            remove_leftovers(folder, read_manifest(folder))
        writer = Writer(folder, before)
        if (folder / PENDING_PICTURES).exists():  # of a writer that was killed
            writer.remove_unused_pictures()
        try:
            yield writer
        finally:  # if this fails, the next writer repeats it
            with contextlib.suppress(OSError, sqlite3.Error, GeniusError):
                writer.remove_pending_pictures()


@contextlib.contextmanager
def writing_lock(folder: Path, *, wait_seconds: float, may_create: bool = True) -> Iterator[None]:
    """Lock a folder for writing, without links inside; raises like :func:`open_writer`.

    It is created if it does not exist and ``may_create``.
    """
    if not wait_seconds >= 0:
        raise UsageError(
            f"wait for {wait_seconds} seconds: give 0 or more (inf waits as long as it takes)"
        )
    began = time.monotonic()
    with _one_thread(folder, wait_seconds):
        seconds = max(0.0, wait_seconds - (time.monotonic() - began))
        lock = _lock_file(folder, seconds, may_create=may_create)
        try:
            yield
        finally:
            lock.release()


class _Turn:
    """A lock between the threads of a process, and the thread that holds it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: int | None = None


_TURNS: Final[dict[tuple[int, str], _Turn]] = {}
"""By process and folder: after a fork, a thread that held one does not exist in the child."""


@contextlib.contextmanager
def _one_thread(folder: Path, wait_seconds: float) -> Iterator[None]:
    """Wait until no other thread of this process writes to a folder."""
    turn = _TURNS.setdefault((os.getpid(), os.path.realpath(folder)), _Turn())
    seconds = min(wait_seconds or threading.TIMEOUT_MAX, threading.TIMEOUT_MAX)
    if turn.thread == threading.get_ident() or not turn.lock.acquire(timeout=seconds):
        raise _held(folder)
    try:
        turn.thread = threading.get_ident()
        yield
    finally:
        turn.thread = None
        turn.lock.release()


def _held(folder: Path) -> HeldByAnother:
    return HeldByAnother(
        f"{folder} is being changed by another process or thread; try again when it is done, or wait for it: "
        "`wait_seconds=60`"
    )


def _lock_file(
    folder: Path, wait_seconds: float, *, may_create: bool, attempts: int = MAX_LOCK_ATTEMPTS
) -> FileLock:
    """Lock a folder between processes, after making it if ``may_create``."""
    lock = FileLock(folder / LOCK)
    try:
        if may_create:
            make_folder(folder)
        refuse_links(folder)
        check_locks(folder / LOCK)
        lock.acquire(timeout=wait_seconds, poll_interval=0.02)
    except UsageError as error:
        raise NotWritable(str(error)) from None
    except Timeout:
        raise _held(folder) from None
    except FileNotFoundError:  # a process that could not create an index has removed the folder
        if not may_create or attempts == 1:
            raise ArtifactMissing(f"{folder} has been removed") from None
        return _lock_file(folder, wait_seconds, may_create=True, attempts=attempts - 1)
    except OSError as error:
        if error.errno in READ_ONLY_ERRORS:
            raise NotWritable(
                f"{folder} cannot be changed ({error.strerror}); make it writable, or change a copy"
            ) from None
        if error.errno not in {errno.EEXIST, errno.EISDIR, *IMPOSSIBLE_PATH_ERRORS}:
            raise
        raise UsageError(
            f"{error.filename or folder} is not what an index has there ({error.strerror}); choose another "
            "place for the index, or remove it"
        ) from None
    return lock


def rename_damaged_index(folder: Path, is_damaged: Callable[[], bool]) -> Path | None:
    """Rename the folder of a damaged index, which may hold what nothing else does; return its new name.

    None if it is not damaged when other processes have finished their changes.
    """
    with writing_lock(folder, wait_seconds=MAX_RENAME_WAIT_SECONDS):
        if not is_damaged():
            return None
        names = (
            folder.with_name(f"{folder.name}.damaged-{number}") for number in itertools.count(1)
        )
        aside = next(name for name in names if not os.path.lexists(name))
        folder.rename(aside)
        (aside / LOCK).unlink()  # who waits for it makes a new one
        sync(folder.parent)
        return aside


def remove_leftovers(folder: Path, manifest: IndexManifest | None) -> None:
    """Remove what a writer left unfinished, and files that the index no longer names; requires the lock.

    Nothing is removed if another index was created in its place, which has its own lock.
    """
    if manifest is not None and manifest.generation and not is_same_index(folder, manifest):
        return
    for place in (folder / TEMPORARY, folder / f"{CURRENT}.tmp"):
        shutil.rmtree(place, ignore_errors=True)
        if place.is_file():
            place.unlink()
    segments = {entry.name for entry in manifest.segments} if manifest is not None else set()
    for path in (folder / SEGMENTS).glob("*"):
        if SEGMENT_NAME.fullmatch(path.name) and path.name not in segments:
            shutil.rmtree(path, ignore_errors=True)


def remove_work(folder: Path) -> None:
    """Remove the saved work of an interrupted run; requires the writer's lock."""
    shutil.rmtree(folder / WORK, ignore_errors=True)


def stored_pictures(folder: Path, segments: Iterable[Segment]) -> set[Path]:
    """Return the stored pictures of the items that are not deleted."""
    if not (folder / PICTURES).is_dir():  # a published index has none
        return set()
    items = itertools.chain.from_iterable(map(alive_items, segments))
    return {
        folder / item.image
        for item in items
        if item.image and item.image.startswith(f"{PICTURES}/")
    }


class Writer:
    """Changes an index; created by :func:`open_writer`. When a method returns, its change is on disk.

    >>> with open_writer(folder) as writer:  # doctest: +SKIP
    ...     writer.delete(["old.jpg"])
    """

    def __init__(self, folder: Path, before: Snapshot | None = None) -> None:
        self.folder = folder
        self._before = before
        self._snapshot: Snapshot | None = None
        self._unsettled: set[str] = set()
        """Stored pictures that items named before this change, or may name after it."""

    @property
    def snapshot(self) -> Snapshot:
        """The current state."""
        if self._snapshot is None:
            if self._before is not None:
                require_same_index(self.folder, self._before.manifest)
            self._snapshot = Snapshot.open(self.folder, self._before)
        return self._snapshot

    def begin(self, manifest: IndexManifest) -> None:
        """Begin an index, which :meth:`add` creates, even without items.

        Raises
        ------
        UsageError
            An index exists already.
        """
        if (self.folder / CURRENT).exists():
            raise UsageError(f"{self.folder} holds an index already; `genius index add` adds to it")
        self._snapshot = Snapshot(manifest, ())

    def add(self, batches: Iterable[Batch], *, delete: Collection[str] = ()) -> tuple[int, int]:
        """Add items as one segment, and delete others in the same step; a new item replaces an old one.

        Returns the number of items that were added, and how many of these replaced others.

        The last segment is merged into the new one as long as it has at most twice as many items, without
        deleted ones, as are written already. So each segment is more than twice as long as the next: adding
        one by one writes an item a logarithmic number of times, and small additions do not rewrite a large
        segment. There are never more than :data:`MAX_SEGMENTS`.

        Raises
        ------
        BadData
            Two items have the same id; nothing is changed.
        ArtifactMissing, ArtifactMismatch
            A segment to merge with is damaged; nothing is changed.
        """
        snapshot = self.snapshot
        segments = snapshot.segments
        ids: list[str] = []
        gone: dict[str, Rows] = {}
        kept = len(segments)

        filled = (batch for batch in batches if len(batch[1].codes))
        first = next(filled, None)
        if first is None:
            if snapshot.manifest.generation == 0:
                self._change(snapshot, kept=0)
            self.delete(delete)
            return 0, 0

        def with_merged() -> Iterator[Batch]:
            nonlocal kept
            for batch in itertools.chain([first], filled):
                yield batch
                ids.extend(entry.id for entry in batch[0] if isinstance(entry, Item))
            kept = first_to_merge(segments, len(ids))
            self._check_contents(snapshot.manifest.segments[kept:])
            gone.update(
                (segment.name, _alive_rows(segment, [*ids, *delete])[1]) for segment in segments
            )
            rest = [
                segment._replace(dead=np.union1d(segment.dead, gone[segment.name]))
                for segment in segments[kept:]
            ]
            yield from alive_batches(rest)

        new = _write_segment(self.folder, snapshot.manifest, with_merged())
        self._change(snapshot, kept=kept, gone=gone, new=new)
        return len(ids), sum(map(len, gone.values())) - len(delete)

    def rewrite(self, manifest: IndexManifest, batches: Iterable[Batch]) -> Snapshot:
        """Write all items anew, with the model and settings of a manifest; return that state.

        :meth:`commit` makes it the state of the index; until then nothing has changed.
        """
        new = _write_segment(self.folder, manifest, batches)
        written = manifest.replace(generation=manifest.generation + 1, segments=(new,))
        return Snapshot.load(self.folder, written)

    def commit(self, manifest: IndexManifest) -> None:
        """Make this the state of the index, whose files are on disk; remove those of the state before.

        Raises
        ------
        ArtifactMissing, ArtifactMismatch
            The index was removed meanwhile, or another one was created in its place.
        """
        if manifest.generation > 1:
            require_same_index(self.folder, manifest)
        sync(self.folder / SEGMENTS, self.folder)
        self._snapshot = None  # first, because what follows may fail on either side of the change
        write_manifest(self.folder, manifest)
        remove_leftovers(self.folder, manifest)

    def update_manifest(self, **changes: Any) -> None:
        """Change entries of the manifest, such as ``calibration``, but not the items."""
        manifest = self.snapshot.manifest
        self.commit(manifest.replace(generation=manifest.generation + 1, **changes))

    def delete(self, item_ids: Iterable[str]) -> Deleted:
        """Delete items; compaction frees their space."""
        ids = list(dict.fromkeys(map(composed, item_ids)))
        snapshot = self.snapshot
        found = {segment.name: _alive_rows(segment, ids) for segment in snapshot.segments}
        there = {name for names, _ in found.values() for name in names}
        if there:
            self._change(
                snapshot, kept=len(found), gone={name: rows for name, (_, rows) in found.items()}
            )
        return Deleted(len(there), [name for name in ids if name not in there])

    def compact(self, min_deleted: float = MIN_DELETED_SHARE) -> None:
        """Free the space of deleted items, if there are many, in time proportional to their number.

        The first segment with at least this share of deleted items is merged with those behind it. With 0,
        all segments are merged, and the saved work of an interrupted run is removed, too.

        Raises
        ------
        ArtifactMissing, ArtifactMismatch
            A file is missing or damaged; nothing is changed.
        """
        snapshot = self.snapshot
        segments = snapshot.segments
        kept = first_to_compact(segments, min_deleted)
        if kept == len(segments) and min_deleted > 0:
            return
        self.remove_unused_pictures()  # of versions that kept pictures of deleted items until then
        if kept < len(segments):
            self._check_contents(snapshot.manifest.segments[kept:])
            new = None
            if any(one.num_alive for one in segments[kept:]):
                new = _write_segment(self.folder, snapshot.manifest, alive_batches(segments[kept:]))
            self._change(snapshot, kept=kept, new=new)
        if min_deleted <= 0:
            remove_work(self.folder)

    def store_picture(self, data: bytes) -> str:
        """Store a picture before an item names it; return its path, relative to the index.

        It is removed at the end of the change unless an item names it then.
        """
        digest = hashlib.sha256(data).hexdigest()
        name = f"{PICTURES}/{digest[:2]}/{digest}"
        place = self.folder / name
        if not place.exists():
            self._unsettle({name})
            make_folder(place.parent)
            write_file(place, data)
        return name

    def remove_pending_pictures(self) -> None:
        """Remove the pictures of this change that no item names any more."""
        if not self._unsettled:
            return
        named = set()
        for segment in self.snapshot.segments if (self.folder / CURRENT).exists() else ():
            dead = set(segment.dead.tolist())
            rows = segment.items.rows_of_images(self._unsettled)
            named |= {image for image, row in rows if row not in dead}
        self._remove_pictures(self.folder / name for name in self._unsettled - named)

    def remove_unused_pictures(self) -> None:
        """Remove all pictures that no item names, after reading all items."""
        named: set[Path] = set()
        if (self.folder / CURRENT).exists():
            refuse_links(self.folder, with_pictures=True)
            named = stored_pictures(self.folder, self.snapshot.segments)
        self._remove_pictures(
            path for path in (self.folder / PICTURES).glob("*/*") if path not in named
        )

    def _unsettle(self, names: set[str]) -> None:
        """Note that no item may name these pictures after this change, also if this process is killed."""
        if names and not self._unsettled:
            make_folder(self.folder / PICTURES)
            write_file(self.folder / PENDING_PICTURES, b"")
        self._unsettled |= names

    def _remove_pictures(self, paths: Iterable[Path]) -> None:
        """Remove pictures, folders that are empty then, and the note that they may have to be removed."""
        parents = set()
        for path in list(paths):
            path.unlink(missing_ok=True)
            parents.add(path.parent)
        sync(*parents)
        (self.folder / PENDING_PICTURES).unlink(missing_ok=True)
        self._unsettled.clear()
        for folder in (*parents, self.folder / PICTURES):
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()

    def _check_contents(self, entries: Iterable[SegmentEntry]) -> None:
        """Verify segments before merging them, because damaged data would get a valid checksum."""
        with with_advice():
            for entry in entries:
                check_files(self.folder / SEGMENTS / entry.name, entry.files, check_contents=True)

    def _change(
        self,
        snapshot: Snapshot,
        *,
        kept: int,
        gone: Mapping[str, Rows] | None = None,
        new: SegmentEntry | None = None,
    ) -> None:
        """Commit a new state: the first ``kept`` segments without the deleted rows, and the new segment."""
        generation = snapshot.manifest.generation + 1
        gone = gone or {}
        if (self.folder / PICTURES).is_dir():
            for segment in snapshot.segments:
                images = segment.items.images_with_prefix(
                    gone.get(segment.name, NO_ROWS).tolist(), f"{PICTURES}/"
                )
                self._unsettle({*filter(PICTURE_NAME.fullmatch, images)})
        entries = []
        for segment, entry in zip(
            snapshot.segments[:kept], snapshot.manifest.segments, strict=False
        ):
            rows = gone.get(segment.name)
            if rows is None or not len(rows):
                entries.append(entry)
            elif len(rows) < segment.num_alive:
                entries.append(entry.without(np.union1d(segment.dead, rows)))
        if new is not None:
            entries.append(new)
        self.commit(snapshot.manifest.replace(generation=generation, segments=tuple(entries)))
        with contextlib.suppress(
            OSError, sqlite3.Error, GeniusError
        ):  # the change is made in any case
            self.remove_pending_pictures()


def _write_segment(folder: Path, manifest: IndexManifest, batches: Iterable[Batch]) -> SegmentEntry:
    """Write a segment for the state after a manifest's; remove what is unfinished if an error occurs."""
    draft = folder / TEMPORARY
    place = folder / SEGMENTS / segment_name(manifest.generation + 1)
    if manifest.generation:
        require_same_index(folder, manifest)
    remove_leftovers(folder, manifest)  # of a change before this one that failed
    try:
        make_folder(draft)
        with translate_full_disk(folder):
            written = write_segment(draft, batches)
        sync_tree(draft)
        files = {
            path.name: FileFact(bytes=path.stat().st_size, sha256=file_fingerprint(path))
            for path in sorted(draft.iterdir())
        }
        make_folder(place.parent)
        draft.rename(place)
    except BaseException:
        remove_leftovers(folder, manifest)
        raise
    return SegmentEntry(name=place.name, items=written, files=files)


def _alive_rows(segment: Segment, ids: Sequence[str]) -> tuple[list[str], Rows]:
    """Return the ids that are in a segment and not deleted, and their rows."""
    found = {name: row for name, row, *_ in segment.items.find_ids(ids)}
    rows = np.fromiter(found.values(), dtype=np.int64, count=len(found))
    alive = ~np.isin(rows, segment.dead)
    return list(itertools.compress(found, alive)), rows[alive]


def first_to_merge(segments: Sequence[Segment], count: int) -> int:
    """Return the number of segments to keep when adding ``count`` items; the others are merged."""
    kept = len(segments)
    while kept and (kept >= MAX_SEGMENTS or segments[kept - 1].num_alive <= 2 * count):
        kept -= 1
        count += segments[kept].num_alive
    return kept


def first_to_compact(segments: Sequence[Segment], min_deleted: float) -> int:
    """Return the number of segments to keep when compacting; the others are merged."""
    if min_deleted <= 0:
        return len(segments) if len(segments) == 1 and not len(segments[0].dead) else 0
    due = (len(one.dead) >= min_deleted * one.num_items for one in segments)
    return next(itertools.compress(itertools.count(), due), len(segments))
