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
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Int64

from genius_search.artifact import FileFact, file_fingerprint
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.index.calibrate import Calibration
from genius_search.index.hubness import Hubness
from genius_search.index.items import Item
from genius_search.index.segment_writer import ArraysWriter, write_items, write_manifest
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import (
    CURRENT,
    DELETED,
    LOCK,
    NAME,
    NO_PLACE,
    REMEDY,
    SEGMENTS,
    TEMPORARY,
    WORK,
    IndexManifest,
    ItemArrays,
    Segment,
    SegmentEntry,
    check_deleted,
    check_segment,
    read_manifest,
)
from genius_search.search.vectors import save_array
from genius_search.writing import make_folder, sync, sync_tree, write_file


def remove_leftovers(folder: Path, entries: Iterable[SegmentEntry]) -> None:
    """Remove what a writer left unfinished, and files that the index no longer names; requires the lock."""
    entries = tuple(entries)
    shutil.rmtree(folder / TEMPORARY, ignore_errors=True)
    (folder / f"{CURRENT}.tmp").unlink(missing_ok=True)
    segments = {entry.name for entry in entries}
    for path in (folder / SEGMENTS).glob("*"):
        if NAME.fullmatch(path.name) and path.name not in segments:
            shutil.rmtree(path, ignore_errors=True)
    lists = {entry.deleted for entry in entries}
    for path in (folder / DELETED).glob("*.npy"):
        if path.name not in lists:
            path.unlink()


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
        if (folder / CURRENT).exists():
            remove_leftovers(folder, read_manifest(folder).segments)
        yield Writer(folder)


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


class Writer:
    """Changes an index; created by :func:`one_writer`. When a method returns, its change is on disk.

    >>> with one_writer(folder) as writer:  # doctest: +SKIP
    ...     writer.delete(["old.jpg"])
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._snapshot: Snapshot | None = None

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
            Two items have the same id.
        """
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
            Two items have the same id; nothing is changed.
        ArtifactMissing, ArtifactMismatch
            A segment to merge with is damaged; nothing is changed.
        """
        return self._add(self.snapshot, batches)

    def write_replacement(
        self, manifest: IndexManifest, batches: Iterable[tuple[Iterable[Item], ItemArrays]]
    ) -> Snapshot:
        """Write all items anew, with the model and settings of a manifest; return that state.

        :meth:`replace` makes it the state of the index; until then nothing has changed.
        """

        def all_items(writer: ArraysWriter) -> Iterator[Item]:
            for items, arrays in batches:
                writer.append(arrays)
                yield from items

        new = self._write_segment(Snapshot(manifest, ()), all_items)
        written = manifest.replace(generation=manifest.generation + 1, segments=(new,))
        return Snapshot.load(self.folder, written)

    def replace(self, written: Snapshot) -> None:
        """Let what :meth:`write_replacement` has written become the state of the index."""
        self._commit(written.manifest)

    def delete(self, item_ids: Iterable[str]) -> Deleted:
        """Delete items; compaction frees their space."""
        ids = list(dict.fromkeys(item_ids))
        snapshot = self.snapshot
        found = {segment.name: _alive_rows(segment, ids) for segment in snapshot.segments}
        there = {name for names, _ in found.values() for name in names}
        if there:
            gone = {name: rows for name, (_, rows) in found.items()}
            self._change(snapshot, kept=len(found), gone=gone, new=None)
        return Deleted(len(there), [name for name in ids if name not in there])

    def calibrate(self, calibration: Calibration) -> None:
        """Store a calibration."""
        self._note(self.snapshot.manifest.replace(calibration=calibration))

    def keep_hubness(self, hubness: Hubness) -> None:
        """Store the weight of densities; a calibration with another one does not apply any more."""
        self._note(self.snapshot.manifest.replace(hubness=hubness))

    def _note(self, manifest: IndexManifest) -> None:
        """Replace the manifest without changing the items."""
        self._snapshot = None
        write_manifest(self.folder, manifest.replace(generation=manifest.generation + 1))

    def compact(self, change: Callable[[Item], Item] | None = None) -> None:
        """Merge all segments into one without deleted items.

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
        snapshot = self.snapshot
        segments = snapshot.segments
        remove_unused_pictures(self.folder, segments)
        if len(segments) > 1 or any(len(one.dead) for one in segments) or change is not None:
            self._check_contents(snapshot.manifest.segments)
            new = None
            if snapshot.num_alive:
                new = self._write_segment(
                    snapshot, lambda arrays: map(change or _same, _merge(arrays, segments))
                )
            self._change(snapshot, kept=0, gone={}, new=new)

    def _add(
        self,
        snapshot: Snapshot,
        batches: Iterable[tuple[Iterable[Item], ItemArrays]],
    ) -> Changed:
        """Add items; delete those with the same ids."""
        segments = snapshot.segments
        ids: list[str] = []
        gone: dict[str, Int64[np.ndarray, " rows"]] = {}
        kept = len(segments)

        filled = (batch for batch in batches if len(batch[1].codes))
        first = next(filled, None)
        if first is None:
            if snapshot.manifest.generation == 0:
                self._change(snapshot, kept=0, gone={}, new=None)
            return Changed(0, 0)

        def all_items(writer: ArraysWriter) -> Iterator[Item]:
            nonlocal kept
            for items, arrays in itertools.chain([first], filled):
                writer.append(arrays)
                for item in items:
                    yield item
                    ids.append(item.id)
            kept = _num_kept(segments, len(ids))
            self._check_contents(snapshot.manifest.segments[kept:])
            gone.update((segment.name, _alive_rows(segment, ids)[1]) for segment in segments)
            rest = [
                segment._replace(dead=np.union1d(segment.dead, gone[segment.name]))
                for segment in segments[kept:]
            ]
            yield from _merge(writer, rest)

        new = self._write_segment(snapshot, all_items)
        self._change(snapshot, kept=kept, gone=gone, new=new)
        return Changed(len(ids), sum(map(len, gone.values())))

    def _write_segment(
        self, snapshot: Snapshot, items: Callable[[ArraysWriter], Iterable[Item]]
    ) -> SegmentEntry:
        """Write a segment; remove the unfinished folder if an error occurs."""
        manifest = snapshot.manifest
        remove_leftovers(self.folder, manifest.segments)
        draft = self.folder / TEMPORARY
        place = self.folder / SEGMENTS / _numbered(manifest.generation + 1)
        try:
            make_folder(draft)
            with closing(ArraysWriter(draft, manifest.embedding_bits)) as arrays:
                written = write_items(draft, items(arrays))
                arrays.finish()
            sync_tree(draft)
            files = {
                path.name: FileFact(bytes=path.stat().st_size, sha256=file_fingerprint(path))
                for path in sorted(draft.iterdir())
            }
            make_folder(place.parent)
            draft.rename(place)
        except BaseException:
            remove_leftovers(self.folder, manifest.segments)
            raise
        return SegmentEntry(name=place.name, items=written, files=files)

    def _check_contents(self, entries: Iterable[SegmentEntry]) -> None:
        """Verify segments before merging them, because damaged data would get a valid checksum."""
        for entry in entries:
            check_segment(self.folder / SEGMENTS / entry.name, entry.files, verify=True)

    def _change(
        self,
        snapshot: Snapshot,
        *,
        kept: int,
        gone: Mapping[str, Int64[np.ndarray, " rows"]],
        new: SegmentEntry | None,
    ) -> None:
        """Commit a new state: the first ``kept`` segments without the deleted rows, and the new segment."""
        generation = snapshot.manifest.generation + 1
        entries = []
        for segment, entry in zip(snapshot.segments[:kept], snapshot.manifest.segments, strict=False):
            rows = gone[segment.name]
            if len(rows) < segment.num_alive:
                entries.append(self._without_rows(generation, segment, entry, rows))
        if new is not None:
            entries.append(new)
        self._commit(snapshot.manifest.replace(generation=generation, segments=tuple(entries)))

    def _commit(self, manifest: IndexManifest) -> None:
        """Make this the state of the index, whose files are on disk; remove those of the state before."""
        sync(self.folder / SEGMENTS, self.folder)
        self._snapshot = None  # first, because what follows may fail on either side of the change
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


def _numbered(generation: int) -> str:
    return f"{generation:06d}"
