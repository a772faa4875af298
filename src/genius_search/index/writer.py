"""Writing to an index while others search it.

All files but ``index.json`` are written once and never changed. A change writes a segment of new items or a
list of deleted ones, then replaces ``index.json`` atomically, and finally removes files that are no longer
referenced. So readers see the state before or after a change, and an interrupted writer changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Int64

from genius_search.artifact import MANIFEST, file_fingerprint
from genius_search.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, BadData, UsageError
from genius_search.index.calibrate import Calibration
from genius_search.index.hubness import Hubness
from genius_search.index.items import Item
from genius_search.index.segment_writer import ArraysWriter, write_items, write_manifest
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import (
    CURRENT,
    DELETED,
    DELETED_NAME,
    KIND,
    LOCK,
    NAME,
    NO_PLACE,
    REMEDY,
    SEGMENTS,
    WORK,
    IndexManifest,
    ItemArrays,
    Segment,
    SegmentEntry,
    check_deleted,
    check_segment,
    read_manifest,
)
from genius_search.search.arrays import save_array
from genius_search.search.vectors import stored_width
from genius_search.writing import ArtifactWriter, make_folder, sync, write_file

_UNFINISHED: Final = re.compile(r"\.[0-9]{6,}\.(partial|old|lock|gone)")
"""Names that an interrupted writer may leave beside segments."""


def remove_leftovers(folder: Path, entries: Iterable[SegmentEntry]) -> None:
    """Remove old segments, unfinished ones and old lists of deleted items, but no foreign files."""
    entries = tuple(entries)
    segments = {entry.name for entry in entries}
    for path in _entries_of(folder / SEGMENTS):
        if _UNFINISHED.fullmatch(path.name):
            _remove(path)
        elif NAME.fullmatch(path.name) and path.name not in segments and _is_segment(path):
            # Renamed first, because a partly removed segment looks like a foreign folder.
            _remove(path.rename(path.with_name(f".{path.name}.gone")))
    lists = {entry.deleted for entry in entries}
    for path in _entries_of(folder / DELETED):
        if DELETED_NAME.fullmatch(path.name) and path.name not in lists:
            _remove(path)
    _remove(folder / f"{CURRENT}.tmp")


def _entries_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_segment(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / MANIFEST).read_bytes())["kind"] == KIND)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


PICTURES: Final = "pictures"


def picture_name(data: bytes) -> str:
    """Return the path of a stored picture, relative to the index."""
    digest = hashlib.sha256(data).hexdigest()
    return f"{PICTURES}/{digest[:2]}/{digest}"


def store_picture(folder: Path, data: bytes) -> None:
    """Store a picture in the folder of an index."""
    place = folder / picture_name(data)
    make_folder(place.parent)
    write_file(place, data)


@contextlib.contextmanager
def keep_pictures(writer: Writer, pictures: Mapping[str, bytes]) -> Iterator[set[str]]:
    """Store images, by path, in an index before the block that adds their items; remove them if it fails.

    The block receives a set, to which it adds the paths of images that turn out to be unusable.
    """
    generation = writer.generation
    new: list[str] = []
    unusable: set[str] = set()
    try:
        for name, data in pictures.items():
            place = writer.folder / name
            if not place.exists():
                new.append(name)
                make_folder(place.parent)
                write_file(place, data)
        yield unusable
    except BaseException:
        if writer.generation == generation:
            unusable.update(new)
        raise
    finally:
        for name in unusable.intersection(new):
            (writer.folder / name).unlink(missing_ok=True)


def remove_unused_pictures(folder: Path, segments: Sequence[Segment]) -> None:
    """Remove images that no item refers to; requires the writer's lock."""
    if not (folder / PICTURES).is_dir():
        return
    used = {folder / name for segment in segments for name in _names(segment)}
    for path in (folder / PICTURES).glob("*/*"):
        if path not in used:
            path.unlink()


def check_pictures(folder: Path, segments: Sequence[Segment]) -> list[Path]:
    """Compare every stored image with its name, which is its checksum; return the files.

    A published index contains no images.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        An image is missing or damaged.
    """
    if not (folder / PICTURES).is_dir():
        return []
    paths = sorted({folder / name for segment in segments for name in _names(segment)})
    for path in paths:
        if not path.is_file():
            raise ArtifactMissing(f"{path} is missing; {REMEDY}")
        if file_fingerprint(path) != path.name:
            raise ArtifactMismatch(f"{path} is damaged; {REMEDY}")
    return paths


def _names(segment: Segment) -> Iterator[str]:
    """Yield the stored pictures of the items of a segment that are not deleted."""
    dead = set(segment.dead.tolist())
    yield from (name for row, name in segment.items.images_below(PICTURES) if row not in dead)


def alive_items(segment: Segment) -> Iterator[Item]:
    """Yield the items that are not deleted, by row."""
    alive = segment.alive()
    items = segment.items.all()
    return items if alive is None else itertools.compress(items, alive)


def remove_work(folder: Path) -> None:
    """Remove the saved work of an interrupted run; requires the writer's lock."""
    shutil.rmtree(folder / WORK, ignore_errors=True)


def work_bytes(folder: Path) -> int:
    """Return the size of the saved work of an interrupted or running writer."""
    found = 0
    for path in (folder / WORK).rglob("*"):
        with contextlib.suppress(OSError):  # a writer removed it meanwhile
            found += path.stat().st_size if path.is_file() else 0
    return found


RESERVE: Final = ".reserve"
"""File whose room is used to delete items, or to compact, when the disk is full."""
DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
MAX_SEGMENTS: Final = 8
"""Maximum number of segments of an index."""


class HeldByAnother(UsageError):
    """Another process holds the index for writing."""


class NotWritable(UsageError):
    """The index's folder cannot be written to."""


class Changed(NamedTuple):
    """The result of adding items."""

    added: int
    replaced: int
    """Number of these that replaced an item with the same id."""


class Deleted(NamedTuple):
    """The result of deleting items."""

    deleted: int
    missing: list[str]
    """Ids that are not in the index."""


@contextlib.contextmanager
def one_writer(folder: Path, *, wait_seconds: float = 0.0) -> Iterator[Writer]:
    """Lock an index for writing, without blocking readers, and remove leftovers of interrupted writers.

    Parameters
    ----------
    wait_seconds
        longest time to wait for another writer; 0 does not wait, infinity waits without limit.

    Raises
    ------
    HeldByAnother
        Another process is writing.
    NotWritable
        The disk is read-only, or its permissions forbid writing.
    UsageError
        ``wait_seconds`` is negative or NaN, or the path cannot be a folder.
    ArtifactMismatch
        The index is damaged; nothing is changed.
    """
    with writing_lock(folder, wait_seconds=wait_seconds):
        writer = Writer(folder)
        try:
            if (folder / CURRENT).exists():
                remove_leftovers(folder, read_manifest(folder).segments)
            yield writer
        finally:
            writer.close()
            with contextlib.suppress(OSError, ArtifactError):
                keep_reserve(folder)


@contextlib.contextmanager
def writing_lock(folder: Path, *, wait_seconds: float) -> Iterator[None]:
    """Lock a folder for writing; raises like :func:`one_writer`."""
    if not wait_seconds >= 0:
        raise UsageError(f"wait for {wait_seconds} seconds: give 0 or more (inf waits as long as it takes)")
    lock = FileLock(folder / LOCK)
    try:
        make_folder(folder)
        lock.acquire(timeout=wait_seconds, poll_interval=0.02)
    except Timeout:
        raise HeldByAnother(
            f"{folder} is being changed by another process; try again when it is done, or wait for it: "
            "--wait SECONDS (in Python: wait_seconds=)"
        ) from None
    except OSError as error:
        if error.errno in READ_ONLY:
            raise NotWritable(
                f"{folder} cannot be changed ({error.strerror}); make it writable, or change a copy"
            ) from None
        if error.errno not in {errno.EEXIST, *NO_PLACE}:
            raise
        raise UsageError(
            f"{folder} cannot be a folder ({error.strerror}); choose another place for the index"
        ) from None
    try:
        yield
    finally:
        lock.release()


def keep_reserve(folder: Path) -> None:
    """Reserve room to delete every item of an index, as far as the disk has it."""
    items = read_manifest(folder).num_items
    with (folder / RESERVE).open("ab", buffering=0) as file:
        missing = (1 << 20) + 8 * items - file.tell()  # a list of them, and small things
        if missing > 0:
            file.write(os.urandom(missing + (1 << 20)))  # a MiB to grow; file systems compress zeros


class Writer:
    """Changes an index; created by :func:`one_writer`. When a method returns, its change is on disk.

    >>> with one_writer(folder) as writer:  # doctest: +SKIP
    ...     writer.delete(["old.jpg"])
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._snapshot: Snapshot | None = None
        self._is_open = True

    def close(self) -> None:
        """Refuse further changes."""
        self._is_open = False

    @property
    def generation(self) -> int:
        """Number of changes on disk so far."""
        return read_manifest(self.folder).generation

    @property
    def snapshot(self) -> Snapshot:
        """The current state; lists of deleted items are verified, because changes extend them."""
        if self._snapshot is None:
            state = Snapshot.open(self.folder)
            for entry in state.manifest.segments:
                check_deleted(self.folder, entry)
            self._snapshot = state
        return self._snapshot

    def create(self, manifest: IndexManifest, items: Iterable[Item], arrays: ItemArrays) -> Changed:
        """Create an index, which may be empty; see :meth:`create_batches`."""
        return self.create_batches(manifest, [(items, arrays)])

    def create_batches(
        self, manifest: IndexManifest, batches: Iterable[tuple[Iterable[Item], ItemArrays]]
    ) -> Changed:
        """Create an index, which may be empty.

        Raises
        ------
        UsageError
            An index exists already.
        BadData
            Two items have the same id, or the numbers of items and IDs differ.
        """
        self._check_open()
        if (self.folder / CURRENT).exists():
            raise UsageError(f"{self.folder} holds an index already; `genius index add` adds to it")
        return self._add(Snapshot(manifest, ()), batches)

    def add(self, items: Iterable[Item], arrays: ItemArrays) -> Changed:
        """Add items; see :meth:`add_batches`."""
        return self.add_batches([(items, arrays)])

    def add_batches(self, batches: Iterable[tuple[Iterable[Item], ItemArrays]]) -> Changed:
        """Add items as one segment; an item replaces the one with the same id.

        The last segment is merged into the new one as long as it has at most twice as many items, without
        deleted ones, as are written already. So each segment is more than twice as long as the next: adding
        one by one writes an item a logarithmic number of times, and small additions do not rewrite a large
        segment. There are never more than :data:`MAX_SEGMENTS`.

        Raises
        ------
        BadData
            Two items have the same id, or the numbers of items and IDs differ; nothing is changed.
        UsageError
            The items have other embeddings or another number of levels than the index.
        ArtifactMissing, ArtifactMismatch
            A segment to merge with is damaged; nothing is changed.
        """
        self._check_open()
        return self._add(self.snapshot, batches)

    def replace_items(
        self,
        manifest: IndexManifest,
        batches: Iterable[tuple[Iterable[Item], ItemArrays]],
        *,
        accept: Callable[[Snapshot], bool] | None = None,
    ) -> None:
        """Replace all items, and the model and settings by those of a manifest, in one step.

        ``accept`` is called with the new state before it becomes that of the index; if it returns False,
        nothing changes.
        """
        self._check_open()
        self._add(Snapshot(manifest, ()), batches, accept)

    def delete(self, item_ids: Iterable[str]) -> Deleted:
        """Delete items; compaction frees their space."""
        ids = list(dict.fromkeys(item_ids))
        snapshot = self.snapshot
        found = {segment.name: _alive_rows(segment, ids) for segment in snapshot.segments}
        there = {name for names, _ in found.values() for name in names}
        if there:
            gone = {name: rows for name, (_, rows) in found.items()}
            self._use_reserve(partial(self._commit, snapshot, kept=len(found), gone=gone, new=None))
        return Deleted(len(there), [name for name in ids if name not in there])

    def calibrate(self, calibration: Calibration) -> None:
        """Store a calibration."""
        self._check_open()
        self._note(self.snapshot.manifest.replace(calibration=calibration))

    def keep_hubness(self, hubness: Hubness) -> None:
        """Store the weight of densities; a calibration with another one does not apply any more."""
        self._check_open()
        self._note(self.snapshot.manifest.replace(hubness=hubness))

    def _note(self, manifest: IndexManifest) -> None:
        """Replace the manifest without changing the items."""
        self._snapshot = None
        write_manifest(self.folder, manifest.replace(generation=manifest.generation + 1))

    def compact(self, change: Callable[[Item], Item] | None = None) -> None:
        """Merge all segments into one without deleted items, in the current format.

        Stored images of deleted items are removed first.

        Parameters
        ----------
        change
            returns what to write for an item.

        Raises
        ------
        ArtifactMissing, ArtifactMismatch
            A file is missing or damaged; nothing is changed.
        """
        remove_unused_pictures(self.folder, self.snapshot.segments)
        self._use_reserve(partial(self._merge_all, change))

    def _merge_all(self, change: Callable[[Item], Item] | None) -> None:
        snapshot = self.snapshot
        segments = snapshot.segments
        outdated = any(len(one.dead) or not one.items.has_fields for one in segments)
        if len(segments) > 1 or outdated or change is not None:
            self._check_contents(snapshot.manifest.segments)
            new = None
            if snapshot.num_alive:
                new = self._write_segment(
                    snapshot, lambda arrays: map(change or _same, _merge(arrays, segments))
                )
            self._commit(snapshot, kept=0, gone={}, new=new)

    def _use_reserve(self, change: Callable[[], None]) -> None:
        """Make a change that frees room; if the disk is full, give the reserved room to it."""
        try:
            change()
        except OSError as error:
            reserve = self.folder / RESERVE
            if error.errno not in DISK_FULL or not reserve.exists():
                raise
            reserve.unlink()
            change()

    def _add(
        self,
        snapshot: Snapshot,
        batches: Iterable[tuple[Iterable[Item], ItemArrays]],
        accept: Callable[[Snapshot], bool] | None = None,
    ) -> Changed:
        """Add items; delete those with the same ids."""
        segments = snapshot.segments
        ids: list[str] = []
        gone: dict[str, Int64[np.ndarray, " rows"]] = {}
        kept = len(segments)

        def add_new() -> Iterator[tuple[Item, ItemArrays | None]]:
            """Yield every new item, with the arrays of its batch at the first."""
            for items, arrays in batches:
                _check_fit(snapshot, arrays)
                before = len(ids)
                for item in items:
                    yield item, arrays if len(ids) == before else None
                    ids.append(item.id)
                if len(ids) - before != len(arrays.codes):
                    raise BadData(
                        f"{len(ids) - before} items were given with IDs for {len(arrays.codes)}; run the "
                        "same again"
                    )

        new_items = add_new()
        first = next(new_items, None)
        if first is None:
            if snapshot.manifest.generation == 0:
                self._commit(snapshot, kept=0, gone={}, new=None)
            return Changed(0, 0)

        def all_items(writer: ArraysWriter) -> Iterator[Item]:
            nonlocal kept
            for item, arrays in itertools.chain([first], new_items):
                if arrays is not None:
                    writer.append(arrays)
                yield item
            kept = _num_kept(segments, len(ids))
            self._check_contents(snapshot.manifest.segments[kept:])
            gone.update((segment.name, _alive_rows(segment, ids)[1]) for segment in segments)
            rest = [
                segment._replace(dead=np.union1d(segment.dead, gone[segment.name]))
                for segment in segments[kept:]
            ]
            yield from _merge(writer, rest)

        new = self._write_segment(snapshot, all_items)
        self._commit(snapshot, kept=kept, gone=gone, new=new, accept=accept)
        return Changed(len(ids), sum(map(len, gone.values())))

    def _write_segment(
        self, snapshot: Snapshot, items: Callable[[ArraysWriter], Iterable[Item]]
    ) -> SegmentEntry:
        """Write a segment; remove the unfinished folder if an error occurs."""
        self._check_open()
        manifest = snapshot.manifest
        remove_leftovers(self.folder, manifest.segments)
        place = self.folder / SEGMENTS / _numbered(manifest.generation + 1)
        if os.path.lexists(place):
            raise ArtifactMismatch(f"{place} is in the way and not part of the index; move it away")
        try:
            draft = ArtifactWriter(
                place,
                kind=KIND,
                config={"embeddings": manifest.embeddings, "embedding_bits": manifest.embedding_bits},
                inputs={"model": manifest.model_fingerprint},
            )
            with closing(ArraysWriter(draft.path, manifest.embedding_bits)) as arrays:
                written = write_items(draft.path, items(arrays))
                arrays.finish()
            draft.finish(facts={"items": written})
            return SegmentEntry(name=place.name, items=written, manifest=file_fingerprint(place / MANIFEST))
        except BaseException:
            remove_leftovers(self.folder, manifest.segments)
            raise

    def _check_contents(self, entries: Iterable[SegmentEntry]) -> None:
        """Verify segments before merging them, because damaged data would get a valid checksum."""
        for entry in entries:
            check_segment(self.folder / SEGMENTS / entry.name, manifest=entry.manifest, verify=True)

    def _commit(
        self,
        snapshot: Snapshot,
        *,
        kept: int,
        gone: Mapping[str, Int64[np.ndarray, " rows"]],
        new: SegmentEntry | None,
        accept: Callable[[Snapshot], bool] | None = None,
    ) -> None:
        """Commit a new state: the first ``kept`` segments without the deleted rows, and the new segment.

        If ``accept`` is given and returns False for it, the new segment is removed again.
        """
        self._check_open()
        generation = snapshot.manifest.generation + 1
        entries = []
        for segment, entry in zip(snapshot.segments[:kept], snapshot.manifest.segments, strict=False):
            rows = gone[segment.name]
            if len(rows) < segment.num_alive:
                entries.append(self._without_rows(generation, segment, entry, rows))
        if new is not None:
            entries.append(new)
        sync(self.folder / SEGMENTS, self.folder)
        self._snapshot = None  # first, because what follows may fail on either side of the change
        manifest = snapshot.manifest.replace(generation=generation, segments=tuple(entries))
        if accept is not None and not accept(Snapshot.load(self.folder, manifest)):
            remove_leftovers(self.folder, snapshot.manifest.segments)
            return
        write_manifest(self.folder, manifest)
        remove_leftovers(self.folder, manifest.segments)

    def _without_rows(
        self, generation: int, segment: Segment, entry: SegmentEntry, rows: Int64[np.ndarray, " rows"]
    ) -> SegmentEntry:
        """Return the entry of a segment after deleting more rows."""
        if not len(rows):
            return entry
        dead = np.union1d(segment.dead, rows)
        path = self.folder / DELETED / f"{_numbered(generation)}-{segment.name}.npy"
        path.parent.mkdir(exist_ok=True)
        save_array(path, dead)
        sync(path, path.parent)
        return entry.model_copy(
            update={"deleted": path.name, "num_deleted": len(dead), "deleted_sha256": file_fingerprint(path)}
        )

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError(f"{self.folder} is not held for writing any more; use one_writer again")


def _merge(arrays: ArraysWriter, segments: Iterable[Segment]) -> Iterator[Item]:
    """Yield the items of segments that are not deleted, and write their arrays."""
    for segment in segments:
        arrays.append_segment(segment)
        yield from alive_items(segment)


def _same(item: Item) -> Item:
    return item


def _alive_rows(segment: Segment, ids: Sequence[str]) -> tuple[list[str], Int64[np.ndarray, " found"]]:
    """Return the ids that are in a segment and not deleted, and their rows."""
    found = segment.items.rows_by_id(ids)
    rows = np.fromiter(found.values(), dtype=np.int64, count=len(found))
    alive = ~segment.is_dead(rows)
    return list(itertools.compress(found, alive)), rows[alive]


def _num_kept(segments: Sequence[Segment], count: int) -> int:
    """Return the number of segments to keep when adding ``count`` items; the others are merged."""
    kept = len(segments)
    while kept and (kept >= MAX_SEGMENTS or segments[kept - 1].num_alive <= 2 * count):
        kept -= 1
        count += segments[kept].num_alive
    return kept


def _check_fit(snapshot: Snapshot, arrays: ItemArrays) -> None:
    """Check that items have the embeddings that the index stores, and IDs of the same length."""
    wanted = snapshot.manifest.embeddings
    if arrays.stored != wanted or (arrays.embeddings is None) is not (wanted == "none"):
        raise UsageError(
            f"the items come with {arrays.stored} embeddings, the index keeps {wanted}; encode them for it"
        )
    for segment in snapshot.segments[:1]:
        given, here = [arrays.codes.shape[1]], [segment.table.ids.shape[1]]
        if arrays.embeddings is not None and segment.embeddings is not None:
            given.append(stored_width(arrays.embeddings.shape[1], segment.bits))
            here.append(segment.embeddings.values.shape[1])
        if given != here:
            raise UsageError(
                f"levels and widths of the items are {given}, those of the index {here}; encode them with "
                "its model"
            )


def _numbered(generation: int) -> str:
    return f"{generation:06d}"
