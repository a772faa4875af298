"""Writing to an index while other processes and threads search it.

Files of segments are written once and never change. ``index.json`` names them and says which of
their items are deleted; replacing it is the commit::

    1. write the new segment into tmp/, and sync it to the disk
    2. rename it to segments/000007
    3. replace index.json atomically              <- the commit
    4. remove the files that index.json no longer names

Readers see the state before or after step 3. A writer that is interrupted before it changes
nothing, and the next writer removes its leftovers.
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

from genius_search.artifact import FileFact, check_files, file_fingerprint
from genius_search.data.values import Value, table_values
from genius_search.errors import ArtifactMissing, BadData, GeniusError, UsageError
from genius_search.forks import free_in_children, iterate_unlocked, yield_to_fork
from genius_search.index.filters import Filter
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
from genius_search.index.listing import item_masks
from genius_search.index.snapshot import Location, Snapshot
from genius_search.index.store import (
    CODE_COSINES,
    CURRENT,
    DENSITIES,
    EMBEDDINGS,
    FINE,
    IMPOSSIBLE_PATH_ERRORS,
    INDEX_FORM,
    ITEM_ID_ENDS,
    ITEM_IDS,
    LENGTHS,
    LOCK,
    MIN_DELETED_SHARE,
    MOMENTS,
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
from genius_search.nn.fine import to_blocks
from genius_search.records import Modality, composed
from genius_search.search.table import IdTable
from genius_search.search.vectors import FINE_ROWS, EmbeddingBits, is_residual
from genius_search.writing import (
    check_locks,
    make_folder,
    sync,
    sync_tree,
    translate_full_disk,
    write_file,
)

MAX_COPIED_ROWS: Final = 8192
"""Maximum number of rows that are copied together when segments are merged."""
SQLITE_SETTINGS: Final = (  # no journal: a file is used only after it is complete
    "page_size = 8192",
    "journal_mode = OFF",
    "synchronous = OFF",
    "locking_mode = EXCLUSIVE",
    "cache_size = -65536",
)
READ_ONLY_ERRORS: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Error numbers of a folder that cannot be written to."""
MAX_SEGMENTS: Final = 8
"""Maximum number of segments of an index."""
MAX_RENAME_WAIT_SECONDS: Final = 10.0
"""Maximum time to wait for other processes before a damaged index is renamed."""
LOCK_POLL_SECONDS: Final = 0.02
MAX_LOCK_ATTEMPTS: Final = 10
"""Maximum number of attempts to lock a folder that other processes remove after a failed
creation."""
Rows: TypeAlias = Int64[np.ndarray, " rows"]
NO_ROWS: Final = np.zeros(0, dtype=np.int64)


class ItemArrays(NamedTuple):
    """IDs and embeddings of items, by row; the rows of passages follow those of all items."""

    codes: Int16[np.ndarray, "items columns"]
    """Codes of the IDs, then half norms and densities (:mod:`genius_search.nn.density`)."""
    code_cosine: Float16[np.ndarray, " items"]
    embeddings: Shaped[np.ndarray, "items width"] | None = None
    """Unit vectors in half precision, or their residuals in packed integers
    (:mod:`genius_search.search.vectors`); None if the index stores no embeddings."""
    densities: UInt8[np.ndarray, " items"] | None = None
    """Density around each item (:meth:`~genius_search.nn.density.NormAndDensity.item_density`),
    with fused embeddings."""
    scales: Float16[np.ndarray, " items"] | None = None
    """Scales of residuals."""
    lengths: UInt8[np.ndarray, " items"] | None = None
    """Factors of the vectors that codes and fine codes stand for, as bytes
    (:func:`genius_search.search.vectors.decode_lengths`); only with fine codes and residuals."""
    fine: UInt8[np.ndarray, "items bytes"] | None = None
    """Packed fine codes (:func:`genius_search.nn.fine.pack_fine_codes`); None if IDs are whole."""

    def take(self, rows: np.ndarray) -> ItemArrays:
        """Return the rows of a mask or an array of numbers."""
        return ItemArrays._make(None if array is None else array[rows] for array in self)


class Passage(NamedTuple):
    """Part of the text of an item, the characters from ``start`` to ``end``, or a frame of a video.

    A text that is longer than the encoder reads has passages, each with an embedding and an ID, and
    so has a video: its frames, which are no part of its text, and the cues of its subtitles.
    """

    start: int
    end: int
    moment: int | None = None
    """Time in the video, in milliseconds; None if the item is no video."""

    @property
    def is_frame(self) -> bool:
        """Whether the passage is a frame of a video."""
        return self.moment is not None and self.start == self.end


Entry: TypeAlias = Item | Passage
"""An item, or a passage of the last item before it. The item stands for the beginning of its text::

    Item("report.txt"), Passage(1400, 2790), Passage(2700, 3950), Item("kite.jpg"), ...
"""
Batch: TypeAlias = tuple[Sequence[Entry], ItemArrays]
"""Items and passages that are written together, and their arrays, one row for each entry."""


def append_rows(path: Path, rows: Shaped[np.ndarray, ...]) -> None:
    """Append rows to an ``.npy`` file, which is created if it does not exist.

    Unlike that of ``np.save``, the error of a full disk says so.
    """
    with path.open("r+b" if path.exists() else "w+b") as file:
        count = 0
        if file.seek(0, os.SEEK_END):
            file.seek(0)
            np.lib.format.read_magic(file)
            (count, *_), _, _ = np.lib.format.read_array_header_1_0(file)
        shape = (count + len(rows), *rows.shape[1:])
        header = {"descr": rows.dtype.str, "fortran_order": False, "shape": shape}
        file.seek(0)
        # NumPy pads the header, so that its length is the same for any number of rows.
        np.lib.format.write_array_header_1_0(file, header)
        if len(rows):
            file.seek(0, os.SEEK_END)
            file.write(np.ascontiguousarray(rows).data)


def save_table(table: IdTable, folder: Path) -> None:
    """Save each array of an ID table as a file in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("ids", "starts", "level_bounds", "bucket_starts", "items"):
        (folder / f"{name}.npy").unlink(missing_ok=True)
        append_rows(folder / f"{name}.npy", getattr(table, name))


def write_segment(folder: Path, batches: Iterable[Batch]) -> int:
    """Write the files of a segment into an empty folder; return the number of its items.

    The embeddings of items are written batch by batch. All other arrays stay in memory until the
    end, because the rows of passages follow those of all items::

        entries   a, a's passage 1, a's passage 2, b, c, c's passage 1
        rows      a, b, c, a's passage 1, a's passage 2, c's passage 1

    Raises
    ------
    BadData
        Two items have the same id.
    OSError
        The disk is full.
    """
    item_arrays: list[ItemArrays] = []
    passage_arrays: list[ItemArrays] = []
    passages: list[tuple[int, int, int]] = []
    moments: list[int] = []

    def split_batches() -> Iterator[Item]:
        """Yield the items, and collect the arrays and the passages meanwhile."""
        row = -1
        num_id_bytes = append_item_ids(folder, [], 0)  # an empty segment has the files, too
        for entries, arrays in batches:
            item_ids = [entry.id for entry in entries if isinstance(entry, Item)]
            num_id_bytes = append_item_ids(folder, item_ids, num_id_bytes)
            is_item = np.array([isinstance(entry, Item) for entry in entries])
            of_items = arrays.take(is_item)
            if of_items.embeddings is not None:
                append_rows(folder / EMBEDDINGS, of_items.embeddings)
            item_arrays.append(of_items._replace(embeddings=None))
            passage_arrays.append(arrays.take(~is_item))
            for entry in entries:
                if isinstance(entry, Item):
                    row += 1
                    yield entry
                else:
                    passages.append((row, entry.start, entry.end))
                    moments.append(-1 if entry.moment is None else entry.moment)

    num_items = write_items(folder, split_batches())
    if passages:
        append_rows(folder / PASSAGES, np.array(passages, dtype=np.int64))
    if max(moments, default=-1) >= 0:
        append_rows(folder / MOMENTS, np.array(moments, dtype=np.int64))
    _write_arrays(folder, [*item_arrays, *passage_arrays])
    return num_items


def _write_arrays(folder: Path, all_arrays: Sequence[ItemArrays]) -> None:
    """Append the arrays of all rows to the files of a segment, and write its ID table."""
    files = (CODE_COSINES, EMBEDDINGS, DENSITIES, SCALES, LENGTHS)
    for arrays in all_arrays:
        for file, rows in zip(files, arrays[1:-1], strict=True):
            if rows is not None:
                append_rows(folder / file, rows)
    codes, code_cosine, *_ = zip(*all_arrays, strict=True)
    table = IdTable.build(np.concatenate(codes), np.concatenate(code_cosine))
    save_table(table, folder)
    fine = [arrays.fine for arrays in all_arrays if arrays.fine is not None]
    if fine:
        append_rows(folder / FINE, to_blocks(np.concatenate(fine), table.items, FINE_ROWS))


def append_item_ids(folder: Path, item_ids: Sequence[str], num_bytes: int) -> int:
    """Append the ids of a segment's items (:class:`genius_search.index.store.ItemIds`).

    ``num_bytes`` is the length of the ids before them; return that with these ids.
    """
    encoded = [item_id.encode() for item_id in item_ids]
    ends = num_bytes + np.cumsum([*map(len, encoded)], dtype=np.int64)
    append_rows(folder / ITEM_IDS, np.frombuffer(b"".join(encoded), dtype=np.uint8))
    append_rows(folder / ITEM_ID_ENDS, ends)
    return int(ends[-1]) if len(ends) else num_bytes


def alive_items(segment: Segment) -> Iterator[Item]:
    """Yield the items that are not deleted, by row."""
    mask = segment.alive_mask()
    return segment.items.all() if mask is None else itertools.compress(segment.items.all(), mask)


def alive_entries(segments: Sequence[Segment]) -> Iterator[Entry]:
    """Yield the items that are not deleted, with their passages, newest segment first."""
    for segment in reversed(segments):
        yield from _with_passages(segment, alive_items(segment), segment.alive_rows())


def _with_passages(segment: Segment, items: Iterable[Item], item_rows: Rows) -> Iterator[Entry]:
    """Yield the items of some rows, each followed by its passages."""
    remaining = iter(items)
    for row in segment.with_passages(item_rows).tolist():
        passage = row - segment.num_items  # the rows of passages follow those of items
        if passage < 0:
            yield next(remaining)
        else:
            moment = -1 if segment.moments is None else int(segment.moments[passage])
            _, start, end = segment.passages[passage].tolist()
            yield Passage(start, end, None if moment < 0 else moment)


def alive_batches(segments: Sequence[Segment]) -> Iterator[Batch]:
    """Yield the items that are not deleted as they are stored, newest segment first."""
    for segment in reversed(segments):
        rows = segment.with_passages(segment.alive_rows())
        yield from _copy_rows(segment, alive_entries([segment]), rows)


def stored_batches(
    segments: Sequence[Segment], items: Sequence[Item], locations: Sequence[Location]
) -> Iterator[Batch]:
    """Yield items with the IDs, embeddings and passages that are stored at locations.

    ``items[i]`` gets the arrays of ``locations[i]``; items of one segment are yielded together.
    """
    for number, segment in enumerate(segments):
        numbers = [i for i, location in enumerate(locations) if location.segment == number]
        rows = np.array([locations[i].row for i in numbers], dtype=np.int64)
        entries = _with_passages(segment, (items[i] for i in numbers), rows)
        yield from _copy_rows(segment, entries, segment.with_passages(rows))


def _copy_rows(segment: Segment, entries: Iterator[Entry], rows: Rows) -> Iterator[Batch]:
    """Yield entries in batches with the arrays of a segment's rows, one row for each entry."""
    table_rows = segment.table.rows_of_items
    values, scales = segment.embeddings or (None, None)
    for start in range(0, len(rows), MAX_COPIED_ROWS):
        batch_rows = rows[start : start + MAX_COPIED_ROWS]
        arrays = ItemArrays(
            segment.table.ids[table_rows[batch_rows]],
            segment.code_cosine[batch_rows],
            None if values is None else values[batch_rows],
            None if segment.densities is None else segment.densities[batch_rows],
            None if scales is None else scales[batch_rows],
            None if segment.fine is None else segment.fine.lengths_of(batch_rows),
            None if segment.fine is None else segment.fine.packed_codes(batch_rows),
        )
        yield [*itertools.islice(entries, len(batch_rows))], arrays


def check_bits(bits: EmbeddingBits | None, embeddings: StoredEmbeddings | None) -> None:
    """Raise :class:`UsageError` unless embeddings of this kind can have ``bits`` per number."""
    if bits not in (None, 1, 2, 4, 8, 16):
        raise UsageError(f"embeddings have 1, 2, 4, 8 or 16 bits per number, not {bits}")
    if bits is not None and is_residual(bits) and embeddings == "raw":
        raise UsageError(
            f"raw embeddings have 16 bits per number, not {bits}, since codes do not approximate "
            "them; store fused embeddings instead"
        )


def write_manifest(folder: Path, manifest: IndexManifest) -> None:
    """Commit a state: replace ``index.json`` atomically."""
    body = INDEX_FORM.seal(manifest.model_dump(mode="json"))  # `read_head` reads the checksum
    write_file(folder / CURRENT, to_json(body, indent=2) + b"\n")


def write_items(folder: Path, items: Iterable[Item]) -> int:
    """Write items and their indexes for filters to SQLite, by row; return their number.

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
            _insert_items(database, iterate_unlocked(lock, items))
            _index_ids(database)
            for statement in CREATE_FULL_TEXT:
                database.execute(statement)
            _index_fields(database)
            counts = database.execute("SELECT COALESCE(SUM(items), 0) FROM modalities")
            return int(counts.fetchone()[0])
    except sqlite3.OperationalError as error:
        if "no such module" in str(error):
            raise UsageError(
                "this Python's SQLite lacks FTS5; use a Python whose SQLite has it"
            ) from None
        raise


def _insert_items(database: sqlite3.Connection, items: Iterable[Item]) -> None:
    """Write the items, and the number of items of each modality."""
    database.execute("BEGIN")
    database.execute(CREATE_ITEMS)
    database.execute(CREATE_MODALITIES)
    database.executemany(
        "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        ((row, item.id, item.modality.mbeir, *item[2:]) for row, item in enumerate(items)),
    )
    database.execute(
        "INSERT INTO modalities SELECT modality, COUNT(*) FROM items GROUP BY modality"
    )
    database.execute("COMMIT")


def _index_ids(database: sqlite3.Connection) -> None:
    """Create the index of ids; raise :class:`BadData` if two items have the same id."""
    try:
        database.execute(CREATE_ITEM_IDS)
    except sqlite3.IntegrityError:
        query = "SELECT item_id FROM items GROUP BY item_id HAVING COUNT(*) > 1 LIMIT 1"
        duplicate = database.execute(query).fetchone()[0]
        raise BadData(f"two items have the id {duplicate!r}; ids must be unique") from None


def _index_fields(database: sqlite3.Connection) -> None:
    """Write the fields of the items to a sorted table, for filters."""
    numbers: dict[str, int] = {}
    database.execute(CREATE_FIELD_NAMES)
    database.execute(CREATE_FIELDS)
    database.execute("CREATE TEMP TABLE unsorted (name, value, row)")
    database.execute("BEGIN")
    sources = database.execute("SELECT row, source FROM items WHERE source <> ''")
    database.executemany("INSERT INTO unsorted VALUES (?, ?, ?)", _field_values(sources, numbers))
    database.executemany("INSERT INTO field_names VALUES (?, ?)", numbers.items())
    database.execute(
        "INSERT OR IGNORE INTO fields SELECT * FROM unsorted ORDER BY name, value, row"
    )
    database.execute("COMMIT")
    database.execute("DROP TABLE unsorted")


def _field_values(
    sources: Iterable[tuple[int, str]], numbers: dict[str, int]
) -> Iterator[tuple[int, Value, int]]:
    """Yield the field's number, the value and the row of each value.

    ``numbers`` maps the paths of fields to their numbers, and gets the new ones. For example, row 3
    with ``{"price": 20, "size": {"width": 30}}`` yields ``(0, 20, 3)`` and ``(1, 30, 3)``.
    """
    for row, source in sources:
        for path, value in table_values(Item("", Modality.TEXT, source=source).fields):
            if path:
                number = numbers.setdefault(spell_path(path), len(numbers))
                if value is not None:
                    yield number, value, row


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
    """Lock an index for writing, and remove the leftovers of interrupted writers.

    Readers are not blocked.

    Parameters
    ----------
    wait_seconds
        Maximum time to wait for another writer; infinity waits without limit. With 0, another
        process is not waited for, but another thread of this process without limit.
    before
        An open state: the folder must still hold that index, and its segments are not opened again.

    Raises
    ------
    HeldByAnother
        Another process or thread is writing, or this thread already is.
    NotWritable
        The disk is read-only, its permissions forbid writing, or it does not support locks.
    UsageError
        ``wait_seconds`` is negative or NaN, or the path cannot be a folder.
    ArtifactMismatch
        The index is damaged, or is another index than ``before``; nothing is changed.
    ArtifactMissing
        The index of ``before`` has been removed; no index is created in its place.
    """
    if before is not None:
        require_same_index(folder, before.manifest)
    with writing_lock(folder, wait_seconds=wait_seconds, may_create=before is None):
        if before is not None:
            require_same_index(folder, before.manifest)
        # Without a manifest, the files may be all that remains of an index, and are not removed.
        if (folder / CURRENT).exists():
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
    """Lock a folder for writing, and refuse links in it; raises like :func:`open_writer`.

    With ``may_create``, the folder is created if it does not exist.
    """
    if not wait_seconds >= 0:
        raise UsageError(
            f"wait_seconds is {wait_seconds}; give 0 or more (inf waits without limit)"
        )
    began = time.monotonic()
    with _thread_lock(folder, wait_seconds):
        remaining_seconds = max(0.0, wait_seconds - (time.monotonic() - began))
        lock = _lock_folder(folder, remaining_seconds, may_create=may_create)
        try:
            yield
        finally:
            lock.release()


_THREAD_LOCKS: Final[dict[tuple[int, str], threading.Lock]] = {}
"""Locks between threads, by process and folder. After a fork, the child does not have the thread
that held one."""
_LOCK_HOLDERS: Final[dict[tuple[int, str], int]] = {}
"""The threads that hold these locks."""


@contextlib.contextmanager
def _thread_lock(folder: Path, wait_seconds: float) -> Iterator[None]:
    """Wait until no other thread of this process writes to a folder."""
    key = (os.getpid(), os.path.realpath(folder))
    lock = _THREAD_LOCKS.setdefault(key, threading.Lock())
    seconds = min(wait_seconds or threading.TIMEOUT_MAX, threading.TIMEOUT_MAX)
    is_own = _LOCK_HOLDERS.get(key) == threading.get_ident()
    if is_own or not lock.acquire(timeout=seconds):
        raise _held_by_another(folder)
    try:
        _LOCK_HOLDERS[key] = threading.get_ident()
        yield
    finally:
        _LOCK_HOLDERS.pop(key, None)
        lock.release()


def _held_by_another(folder: Path) -> HeldByAnother:
    """Return the error for an index that another writer holds."""
    return HeldByAnother(
        f"{folder} is being changed by another process or thread; try again later, or wait for it: "
        "`wait_seconds=60`"
    )


def _lock_folder(
    folder: Path, wait_seconds: float, *, may_create: bool, attempts: int = MAX_LOCK_ATTEMPTS
) -> FileLock:
    """Lock a folder between processes; with ``may_create``, create it first."""
    lock = FileLock(folder / LOCK)
    try:
        if may_create:
            make_folder(folder)
        refuse_links(folder)
        check_locks(folder / LOCK)
        lock.acquire(timeout=wait_seconds, poll_interval=LOCK_POLL_SECONDS)
    except UsageError as error:
        raise NotWritable(str(error)) from None
    except Timeout:
        raise _held_by_another(folder) from None
    except FileNotFoundError:
        # A process that failed to create an index has removed the folder meanwhile.
        if not may_create or attempts == 1:
            raise ArtifactMissing(f"{folder} has been removed") from None
        return _lock_folder(folder, wait_seconds, may_create=True, attempts=attempts - 1)
    except OSError as error:
        if error.errno in READ_ONLY_ERRORS:
            raise NotWritable(
                f"{folder} cannot be changed ({error.strerror}); make it writable, or change a copy"
            ) from None
        if error.errno not in {errno.EEXIST, errno.EISDIR, *IMPOSSIBLE_PATH_ERRORS}:
            raise
        raise UsageError(
            f"{error.filename or folder} cannot be used by an index ({error.strerror}); remove it, "
            "or choose another folder for the index"
        ) from None
    return lock


def rename_damaged_index(folder: Path, is_damaged: Callable[[], bool]) -> Path | None:
    """Rename the folder of a damaged index, and return the new path.

    It is not removed, since it may hold the only copy of choices and pictures. Returns None if the
    index is not damaged after other processes have finished their changes.
    """
    with writing_lock(folder, wait_seconds=MAX_RENAME_WAIT_SECONDS):
        if not is_damaged():
            return None
        number = 1
        while os.path.lexists(new_path := folder.with_name(f"{folder.name}.damaged-{number}")):
            number += 1
        folder.rename(new_path)
        (new_path / LOCK).unlink()  # a process that waits for it creates a new one
        sync(folder.parent)
        return new_path


def remove_leftovers(folder: Path, manifest: IndexManifest | None) -> None:
    """Remove unfinished files, and segments that the manifest does not name; requires the lock.

    Nothing is removed if the folder now holds another index, whose writer has another lock.
    """
    if manifest is not None and manifest.generation and not is_same_index(folder, manifest):
        return
    for unfinished in (folder / TEMPORARY, folder / f"{CURRENT}.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)
        if unfinished.is_file():
            unfinished.unlink()
    named = {entry.name for entry in manifest.segments} if manifest is not None else set()
    for path in (folder / SEGMENTS).glob("*"):
        if SEGMENT_NAME.fullmatch(path.name) and path.name not in named:
            shutil.rmtree(path, ignore_errors=True)


def remove_work(folder: Path) -> None:
    """Remove the saved work of an interrupted run; requires the writer's lock."""
    shutil.rmtree(folder / WORK, ignore_errors=True)


def stored_pictures(folder: Path, segments: Iterable[Segment]) -> set[Path]:
    """Return the paths of the stored pictures of items that are not deleted."""
    if not (folder / PICTURES).is_dir():  # a published index has none
        return set()
    items = itertools.chain.from_iterable(map(alive_items, segments))
    return {
        folder / item.image
        for item in items
        if item.image and item.image.startswith(f"{PICTURES}/")
    }


class Writer:
    """Changes an index; created by :func:`open_writer`.

    When a method returns, its change is on the disk.

    >>> with open_writer(folder) as writer:  # doctest: +SKIP
    ...     writer.delete(["old.jpg"])
    """

    def __init__(self, folder: Path, before: Snapshot | None = None) -> None:
        self.folder = folder
        self._before = before
        self._snapshot: Snapshot | None = None
        self._pending: set[str] = set()
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
        """Begin a new index, which the next :meth:`add` writes, even without items.

        Raises
        ------
        UsageError
            An index exists already.
        """
        if (self.folder / CURRENT).exists():
            raise UsageError(f"{self.folder} holds an index already; `genius index add` adds to it")
        self._snapshot = Snapshot(manifest, ())

    def add(self, batches: Iterable[Batch], *, delete: Collection[str] = ()) -> tuple[int, int]:
        """Add items as one segment, and delete others in the same commit.

        Returns the number of added items, and the number of old items that they replaced, which had
        the same ids.

        The last segments are merged into the new one while they have at most twice as many alive
        items as are written already. So each segment is more than twice as long as the next one::

            sizes 1000 300 40 10   + 25 items   ->   10 <= 2 * 25 and 40 <= 2 * 35 are merged
            sizes 1000 300 75

        Adding items one by one writes each item a logarithmic number of times, and a small addition
        does not rewrite a large segment. There are never more than :data:`MAX_SEGMENTS` segments.

        Raises
        ------
        BadData
            Two items have the same id; nothing is changed.
        ArtifactMissing, ArtifactMismatch
            A segment to merge is damaged; nothing is changed.
        """
        snapshot = self.snapshot
        segments = snapshot.segments
        filled_batches = (batch for batch in batches if len(batch[1].codes))
        first_batch = next(filled_batches, None)
        if first_batch is None:
            if snapshot.manifest.generation == 0:
                self._commit_change(snapshot, num_kept=0)
            self.delete(delete)
            return 0, 0
        new_ids: list[str] = []
        deleted_rows: dict[str, Rows] = {}
        num_kept = len(segments)

        def new_and_merged() -> Iterator[Batch]:
            """Yield the new items, whose number decides what to merge; then the merged ones."""
            nonlocal num_kept
            for batch in itertools.chain([first_batch], filled_batches):
                yield batch
                new_ids.extend(entry.id for entry in batch[0] if isinstance(entry, Item))
            num_kept = first_to_merge(segments, len(new_ids))
            self._check_contents(snapshot.manifest.segments[num_kept:])
            for segment in segments:
                deleted_rows[segment.name] = _alive_rows(segment, [*new_ids, *delete])[1]
            merged = []
            for segment in segments[num_kept:]:
                dead = np.union1d(segment.dead, deleted_rows[segment.name])
                merged.append(segment._replace(dead=dead))
            yield from alive_batches(merged)

        new_segment = _write_new_segment(self.folder, snapshot.manifest, new_and_merged())
        self._commit_change(
            snapshot, num_kept=num_kept, deleted_rows=deleted_rows, new_segment=new_segment
        )
        return len(new_ids), sum(map(len, deleted_rows.values())) - len(delete)

    def rewrite(self, manifest: IndexManifest, batches: Iterable[Batch]) -> Snapshot:
        """Write all items of a new or refitted index, with the model and settings of a manifest.

        Nothing changes until :meth:`commit` makes the returned state that of the index.
        """
        segment = _write_new_segment(self.folder, manifest, batches)
        written = manifest.replace(generation=manifest.generation + 1, segments=(segment,))
        return Snapshot.load(self.folder, written)

    def commit(self, manifest: IndexManifest) -> None:
        """Replace the state of the index by one whose files are written; remove the old files.

        Raises
        ------
        ArtifactMissing, ArtifactMismatch
            The index was removed meanwhile, or another index was created in its folder.
        """
        if manifest.generation > 1:
            require_same_index(self.folder, manifest)
        sync(self.folder / SEGMENTS, self.folder)
        # Forgotten first: if the next lines fail, the old or the new state may be on the disk.
        self._snapshot = None
        write_manifest(self.folder, manifest)
        remove_leftovers(self.folder, manifest)

    def update_manifest(self, **changes: Any) -> None:
        """Change entries of the manifest that do not concern items, such as ``calibration``."""
        manifest = self.snapshot.manifest
        self.commit(manifest.replace(generation=manifest.generation + 1, **changes))

    def delete(self, item_ids: Iterable[str]) -> Deleted:
        """Delete items; compaction frees their space."""
        ids = list(dict.fromkeys(map(composed, item_ids)))
        snapshot = self.snapshot
        deleted_ids: set[str] = set()
        deleted_rows: dict[str, Rows] = {}
        for segment in snapshot.segments:
            segment_ids, rows = _alive_rows(segment, ids)
            deleted_ids.update(segment_ids)
            deleted_rows[segment.name] = rows
        if deleted_ids:
            self._commit_change(
                snapshot, num_kept=len(snapshot.segments), deleted_rows=deleted_rows
            )
        return Deleted(len(deleted_ids), [item_id for item_id in ids if item_id not in deleted_ids])

    def delete_where(self, conditions: Filter) -> int:
        """Delete the items that conditions allow, and return their number."""
        snapshot = self.snapshot
        masks = item_masks(snapshot, conditions)
        deleted_rows = {
            segment.name: np.flatnonzero(mask)
            for segment, mask in zip(snapshot.segments, masks, strict=True)
        }
        count = sum(map(len, deleted_rows.values()))
        if count:
            self._commit_change(
                snapshot, num_kept=len(snapshot.segments), deleted_rows=deleted_rows
            )
        return count

    def compact(self, min_deleted: float = MIN_DELETED_SHARE) -> None:
        """Free the space of deleted items if they are many, in time proportional to their number.

        The first segment with at least this share of deleted items is merged with all segments
        after it. With 0, all segments are merged, and the saved work of an interrupted run is
        removed, too.

        Raises
        ------
        ArtifactMissing, ArtifactMismatch
            A file is missing or damaged; nothing is changed.
        """
        snapshot = self.snapshot
        segments = snapshot.segments
        num_kept = first_to_compact(segments, min_deleted)
        if num_kept == len(segments) and min_deleted > 0:
            return
        # Old versions kept the pictures of deleted items until an index was compacted.
        self.remove_unused_pictures()
        if num_kept < len(segments):
            self._check_contents(snapshot.manifest.segments[num_kept:])
            new_segment = None
            if any(segment.num_alive for segment in segments[num_kept:]):
                batches = alive_batches(segments[num_kept:])
                new_segment = _write_new_segment(self.folder, snapshot.manifest, batches)
            self._commit_change(snapshot, num_kept=num_kept, new_segment=new_segment)
        if min_deleted <= 0:
            remove_work(self.folder)

    def store_picture(self, data: bytes) -> str:
        """Store a picture for a new item; return its path, relative to the index.

        At the end of the change the picture is removed, unless an item names it.
        """
        digest = hashlib.sha256(data).hexdigest()
        name = f"{PICTURES}/{digest[:2]}/{digest}"
        path = self.folder / name
        if not path.exists():
            self._mark_pending({name})
            make_folder(path.parent)
            write_file(path, data)
        return name

    def remove_pending_pictures(self) -> None:
        """Remove the pictures of this change that no item names after it."""
        if not self._pending:
            return
        named = set()
        for segment in self.snapshot.segments if (self.folder / CURRENT).exists() else ():
            dead = set(segment.dead.tolist())
            rows = segment.items.rows_of_images(self._pending)
            named |= {image for image, row in rows if row not in dead}
        self._remove_pictures(self.folder / name for name in self._pending - named)

    def remove_unused_pictures(self) -> None:
        """Remove all pictures that no item names; this reads all items."""
        named: set[Path] = set()
        if (self.folder / CURRENT).exists():
            refuse_links(self.folder, with_pictures=True)
            named = stored_pictures(self.folder, self.snapshot.segments)
        self._remove_pictures(
            path for path in (self.folder / PICTURES).glob("*/*") if path not in named
        )

    def _mark_pending(self, names: set[str]) -> None:
        """Note on the disk that pictures may have to be removed, even if this process is killed."""
        if names and not self._pending:
            make_folder(self.folder / PICTURES)
            write_file(self.folder / PENDING_PICTURES, b"")
        self._pending |= names

    def _remove_pictures(self, paths: Iterable[Path]) -> None:
        """Remove pictures, folders that become empty, and the note of :meth:`_mark_pending`."""
        parents = set()
        for path in list(paths):
            path.unlink(missing_ok=True)
            parents.add(path.parent)
        sync(*parents)
        (self.folder / PENDING_PICTURES).unlink(missing_ok=True)
        self._pending.clear()
        for folder in (*parents, self.folder / PICTURES):
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()

    def _check_contents(self, entries: Iterable[SegmentEntry]) -> None:
        """Check segments before they are merged: damaged data would get a valid checksum."""
        with with_advice():
            for entry in entries:
                check_files(self.folder / SEGMENTS / entry.name, entry.files, check_contents=True)

    def _commit_change(
        self,
        snapshot: Snapshot,
        *,
        num_kept: int,
        deleted_rows: Mapping[str, Rows] | None = None,
        new_segment: SegmentEntry | None = None,
    ) -> None:
        """Commit a state that keeps the first segments, and replaces all others by a new one.

        Parameters
        ----------
        num_kept
            The number of segments that stay.
        deleted_rows
            Rows to delete, by the names of segments.
        """
        deleted_rows = deleted_rows or {}
        if (self.folder / PICTURES).is_dir():
            for segment in snapshot.segments:
                rows = deleted_rows.get(segment.name, NO_ROWS)
                images = segment.items.images_with_prefix(rows.tolist(), f"{PICTURES}/")
                self._mark_pending({*filter(PICTURE_NAME.fullmatch, images)})
        entries = []
        for segment, entry in zip(
            snapshot.segments[:num_kept], snapshot.manifest.segments, strict=False
        ):
            rows = deleted_rows.get(segment.name, NO_ROWS)
            if not len(rows):
                entries.append(entry)
            elif len(rows) < segment.num_alive:  # else the whole segment is removed
                entries.append(entry.without(np.union1d(segment.dead, rows)))
        if new_segment is not None:
            entries.append(new_segment)
        generation = snapshot.manifest.generation + 1
        self.commit(snapshot.manifest.replace(generation=generation, segments=tuple(entries)))
        # The change is committed. If this fails, the next writer repeats it.
        with contextlib.suppress(OSError, sqlite3.Error, GeniusError):
            self.remove_pending_pictures()


def _write_new_segment(
    folder: Path, manifest: IndexManifest, batches: Iterable[Batch]
) -> SegmentEntry:
    """Write a segment for the generation after a manifest's; if that fails, remove its files."""
    draft = folder / TEMPORARY
    target = folder / SEGMENTS / segment_name(manifest.generation + 1)
    if manifest.generation:
        require_same_index(folder, manifest)
    remove_leftovers(folder, manifest)  # of an earlier change by this writer that failed
    try:
        make_folder(draft)
        with translate_full_disk(folder):
            num_items = write_segment(draft, batches)
        sync_tree(draft)
        files = {
            path.name: FileFact(bytes=path.stat().st_size, sha256=file_fingerprint(path))
            for path in sorted(draft.iterdir())
        }
        make_folder(target.parent)
        draft.rename(target)
    except BaseException:
        remove_leftovers(folder, manifest)
        raise
    return SegmentEntry(name=target.name, items=num_items, files=files)


def _alive_rows(segment: Segment, ids: Sequence[str]) -> tuple[list[str], Rows]:
    """Return the ids that are in a segment and not deleted, and their rows."""
    row_of_id = {item_id: row for item_id, row, *_ in segment.items.find_ids(ids)}
    rows = np.fromiter(row_of_id.values(), dtype=np.int64, count=len(row_of_id))
    is_alive = ~np.isin(rows, segment.dead)
    return list(itertools.compress(row_of_id, is_alive)), rows[is_alive]


def first_to_merge(segments: Sequence[Segment], num_new: int) -> int:
    """Return the number of the first segment to merge with new items.

    All segments after it are merged, too.
    """
    number = len(segments)
    num_written = num_new
    while number and (number >= MAX_SEGMENTS or segments[number - 1].num_alive <= 2 * num_written):
        number -= 1
        num_written += segments[number].num_alive
    return number


def first_to_compact(segments: Sequence[Segment], min_deleted: float) -> int:
    """Return the number of the first segment to compact; all after it are merged with it."""
    if min_deleted <= 0:
        return len(segments) if len(segments) == 1 and not len(segments[0].dead) else 0
    for number, segment in enumerate(segments):
        if len(segment.dead) >= min_deleted * segment.num_items:
            return number
    return len(segments)
