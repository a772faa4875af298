"""An index that lives: items come and go while others search.

All files but ``index.json`` are written once and never changed. A change writes a segment of what is new, or
a list of what is deleted, and then names them in ``index.json`` in one step; what nothing names any more is
removed afterwards. So readers see the state before or the state after, and a killed writer leaves the state
before.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Bool, Float16, Int64

from genius_search.artifact import MANIFEST, ArtifactWriter, file_fingerprint, write_file
from genius_search.errors import ArtifactMismatch, ArtifactMissing, BadData, UsageError
from genius_search.index.items import Item, write_items
from genius_search.index.settings import Calibration, Tuned
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import (
    CURRENT,
    DELETED,
    DELETED_NAME,
    DENSITIES,
    EMBEDDINGS,
    KIND,
    NAME,
    NO_PLACE,
    REMEDY,
    SCALES,
    SEGMENTS,
    TYPICALITY,
    EmbeddingType,
    EmbeddingWriter,
    IndexManifest,
    ItemArrays,
    Segment,
    SegmentEntry,
    check_deleted,
    check_segment,
    fill_arrays,
    read_blocks,
    read_manifest,
    write_manifest,
)
from genius_search.search.arrays import GrowingArray, open_array, save_array
from genius_search.search.table import IdTable

_UNFINISHED: Final = re.compile(r"\.[0-9]{6,}\.(partial|old|lock|gone)")
"""Names of what a killed writer may leave beside segments."""


def remove_leftovers(folder: Path, entries: Iterable[SegmentEntry]) -> None:
    """Remove what no entry names: old segments, what a killed writer began; nothing of anybody else's."""
    entries = tuple(entries)
    segments = {entry.name for entry in entries}
    for path in _entries_of(folder / SEGMENTS):
        if _UNFINISHED.fullmatch(path.name):
            _remove(path)
        elif NAME.fullmatch(path.name) and path.name not in segments and _is_segment(path):
            # First out of sight: what is half removed must not look like somebody else's folder.
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


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, if it is not there; its name has reached the disk then."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        with contextlib.suppress(PermissionError):  # one may be allowed to write names and not to list them
            sync(path.parent)


def sync(*paths: Path) -> None:
    """Wait until files, or the lists of names that folders are, have reached the disk."""
    for path in paths:
        if not path.exists():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


PICTURES: Final = "pictures"


def picture_name(data: bytes) -> str:
    """Where a picture is kept, from the index's folder."""
    digest = hashlib.sha256(data).hexdigest()
    return f"{PICTURES}/{digest[:2]}/{digest}"


def keep_pictures(folder: Path, pictures: Iterable[bytes]) -> None:
    """Write pictures into an index; when this returns they are on the disk."""
    changed = set()
    for data in pictures:
        place = folder / picture_name(data)
        if not place.exists():
            make_folder(place.parent)
            write_file(place, data)
            changed.add(place.parent)
    sync(*changed)


def remove_unused_pictures(folder: Path, segments: Sequence[Segment]) -> None:
    """Remove the pictures that no item names; only for whoever holds the index for writing."""
    if not (folder / PICTURES).is_dir():
        return
    used = {folder / name for segment in segments for name in _names(segment)}
    for path in (folder / PICTURES).glob("*/*"):
        if path not in used:
            path.unlink()


def check_pictures(folder: Path, segments: Sequence[Segment]) -> list[Path]:
    """Compare every picture that an item names with its own name; returns the files.

    An index that was published has none of its pictures.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        one is gone or is not what was written.
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
    """Pictures kept here of the items of a segment that are alive."""
    dead = set(segment.dead.tolist())
    yield from (name for row, name in segment.items.images_below(PICTURES) if row not in dead)


_NEW: Final = "new"
"""Where the arrays of new items are written first when they are merged with others."""


class _Part(NamedTuple):
    """Arrays to merge."""

    folder: Path
    table: IdTable
    typicality: Float16[np.ndarray, " items"]
    alive: Bool[np.ndarray, " items"] | None
    """Which items are kept; None keeps all."""


def merge_segments(folder: Path, segments: Sequence[Segment]) -> None:
    """Write the files of one segment that holds what is alive in these, in their order."""
    write_items(folder, itertools.chain.from_iterable(map(alive_items, segments)))
    _merge(folder, list(map(_part, segments)))


def merge_arrays(folder: Path, arrays: ItemArrays, segments: Sequence[Segment], kind: EmbeddingType) -> None:
    """Write the arrays of new items, and behind them what is alive in some segments; not the item store."""
    new = folder / _NEW
    new.mkdir()
    fill_arrays(new, arrays, kind)
    first = _Part(new, IdTable.open(new), open_array(new / TYPICALITY, np.float16), None)
    _merge(folder, [first, *map(_part, segments)])
    shutil.rmtree(new)


def alive_items(segment: Segment) -> Iterator[Item]:
    """Items that are not deleted, by row."""
    alive = segment.alive()
    items = segment.items.all()
    return items if alive is None else itertools.compress(items, alive)


def _part(segment: Segment) -> _Part:
    return _Part(segment.folder, segment.table, segment.typicality, segment.alive())


def _merge(folder: Path, parts: Sequence[_Part]) -> None:
    kept = [slice(None) if part.alive is None else part.alive for part in parts]
    codes = [part.table.ids[part.table.rows()[own]] for part, own in zip(parts, kept, strict=True)]
    typicality = np.concatenate([part.typicality[own] for part, own in zip(parts, kept, strict=True)])
    IdTable.build(np.concatenate(codes), typicality).save(folder)
    save_array(folder / TYPICALITY, typicality)
    if (parts[0].folder / EMBEDDINGS).exists():
        _merge_embeddings(folder, parts)
    if all((part.folder / DENSITIES).exists() for part in parts):
        with closing(GrowingArray(folder / DENSITIES, np.uint8)) as file:
            for part in parts:
                densities = open_array(part.folder / DENSITIES, np.uint8)
                file.append(densities if part.alive is None else densities[part.alive])


def _merge_embeddings(folder: Path, parts: Sequence[_Part]) -> None:
    dim = open_array(parts[0].folder / EMBEDDINGS, np.float16, np.int8, dimensions=2).shape[1]
    kind: EmbeddingType = "int8" if (parts[0].folder / SCALES).exists() else "float16"
    with closing(EmbeddingWriter(folder / EMBEDDINGS, folder / SCALES, dim=dim, kind=kind)) as out:
        for part in parts:
            scales = open_array(part.folder / SCALES, np.float16) if kind == "int8" else None
            start = 0
            for block in read_blocks(part.folder / EMBEDDINGS):
                rows = slice(start, start + len(block))
                kept = slice(None) if part.alive is None else part.alive[rows]
                out.append_stored(block[kept], None if scales is None else scales[rows][kept])
                start += len(block)


WORK: Final = ".work"
"""Folder inside the index for what has to survive a kill."""


def remove_work(folder: Path) -> None:
    """Take away what was kept for the case of a kill; only for whoever holds the index for writing."""
    shutil.rmtree(folder / WORK, ignore_errors=True)


def work_bytes(folder: Path) -> int:
    """What is left of a writer that was killed, or is being written now."""
    found = 0
    for path in (folder / WORK).rglob("*"):
        with contextlib.suppress(OSError):  # a writer removed it meanwhile
            found += path.stat().st_size if path.is_file() else 0
    return found


LOCK: Final = ".lock"
MOST_SEGMENTS: Final = 8
"""An index never has more segments than this."""


class HeldByAnother(UsageError):
    """Somebody else holds the index for writing."""


class Changed(NamedTuple):
    """What adding did."""

    added: int
    replaced: int
    """Of those, how many took the place of an item with the same id."""


class Deleted(NamedTuple):
    """What deleting did."""

    deleted: int
    missing: list[str]
    """Ids that were not there."""


@contextlib.contextmanager
def one_writer(folder: Path, *, wait_seconds: float = 0.0) -> Iterator[Writer]:
    """Hold an index for writing; readers are not kept out. Leftovers of a writer that was killed are removed.

    Parameters
    ----------
    wait_seconds
        how long to wait for another writer; 0 does not, and infinity waits for as long as it takes.

    Raises
    ------
    HeldByAnother
        another one is writing.
    UsageError
        the seconds are negative or no number, or the folder cannot be one.
    ArtifactMismatch
        what is there is damaged; nothing is touched then.
    """
    if not wait_seconds >= 0:
        raise UsageError(f"wait for {wait_seconds} seconds: give 0 or more (inf waits as long as it takes)")
    try:
        make_folder(folder)
    except OSError as error:
        if error.errno not in {errno.EEXIST, *NO_PLACE}:
            raise
        raise UsageError(
            f"{folder} cannot be a folder ({error.strerror}); choose another place for the index"
        ) from None
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=wait_seconds, poll_interval=0.02)
    except Timeout:
        raise HeldByAnother(
            f"{folder} is being changed by another process; try again when it is done, or wait for it: "
            "--wait SECONDS (in Python: wait_seconds=)"
        ) from None
    writer = Writer(folder)
    try:
        if (folder / CURRENT).exists():
            remove_leftovers(folder, read_manifest(folder).segments)
        yield writer
    finally:
        writer.close()
        lock.release()


class Writer:
    """Changes an index; made by :func:`one_writer`. What a call has returned from is on the disk.

    >>> with one_writer(folder) as writer:  # doctest: +SKIP
    ...     writer.delete(["old.jpg"])
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._snapshot: Snapshot | None = None
        self._is_open = True

    def close(self) -> None:
        """Refuse to write from now on."""
        self._is_open = False

    @property
    def snapshot(self) -> Snapshot:
        """The state of the index now; lists of deleted items are what was written, for they are continued."""
        if self._snapshot is None:
            state = Snapshot.open(self.folder)
            for entry in state.manifest.segments:
                check_deleted(self.folder, entry)
            self._snapshot = state
        return self._snapshot

    def create(self, manifest: IndexManifest, items: Iterable[Item], arrays: ItemArrays) -> Changed:
        """Make an index, which may be empty.

        Raises
        ------
        UsageError
            there is one already.
        BadData
            two items have the same id, or there are more or fewer items than IDs.
        """
        self._check_open()
        if (self.folder / CURRENT).exists():
            raise UsageError(f"{self.folder} holds an index already; `genius index add` adds to it")
        return self._add(Snapshot(manifest, ()), items, arrays)

    def add(self, items: Iterable[Item], arrays: ItemArrays) -> Changed:
        """Add items; one whose id is here already takes the other's place.

        The last segments are merged into the new one while at most twice as many items are alive in them as
        are written anyway. So when a segment was written, the one before it was more than twice as long:
        adding one by one writes an item a few times over (a logarithm), and small additions leave a large
        segment alone. There are never more than eight segments (:data:`MOST_SEGMENTS`).

        Raises
        ------
        BadData
            two of them have the same id, or there are more or fewer items than IDs; nothing has changed then.
        UsageError
            they do not fit the index: other embeddings, or another number of levels.
        ArtifactMissing, ArtifactMismatch
            a segment to merge with is not what was written; nothing has changed then.
        """
        return self._add(self.snapshot, items, arrays)

    def delete(self, item_ids: Iterable[str]) -> Deleted:
        """Delete items; they are not found any more, and compaction reclaims their room."""
        ids = list(dict.fromkeys(item_ids))
        gone = {segment.name: _alive_rows(segment, ids) for segment in self.snapshot.segments}
        there = {name for found in gone.values() for name in found.ids}
        if there:
            self._commit(self.snapshot, kept=len(self.snapshot.segments), gone=gone, new=None)
        return Deleted(len(there), [name for name in ids if name not in there])

    def tune(self, tuned: Tuned) -> None:
        """Keep settings that searches use from now on unless they say otherwise."""
        self._check_open()
        self._note(self.snapshot.manifest.replace(tuned=tuned))

    def calibrate(self, calibration: Calibration) -> None:
        """Keep what turns scores into probabilities."""
        self._check_open()
        self._note(self.snapshot.manifest.replace(calibration=calibration))

    def _note(self, manifest: IndexManifest) -> None:
        """Say something else about the index; its items stay."""
        self._snapshot = None
        write_manifest(self.folder, manifest.replace(generation=manifest.generation + 1))
        sync(self.folder)

    def compact(self) -> None:
        """Merge all segments into one without deleted items.

        Pictures that the index keeps go with their items.

        Raises
        ------
        ArtifactMissing, ArtifactMismatch
            a file is missing, or is not the one that was written; nothing has changed then.
        """
        state = self.snapshot
        if len(state.segments) > 1 or any(
            len(segment.dead) or not segment.items.has_fields for segment in state.segments
        ):
            self._check_contents(state.manifest.segments)
            with self._new_segment(state) as draft:
                merge_segments(draft.path, state.segments)
                new = _finish(draft, state.num_alive)
            self._commit(state, kept=0, gone={}, new=new)
        remove_unused_pictures(self.folder, self.snapshot.segments)

    def _add(self, state: Snapshot, items: Iterable[Item], arrays: ItemArrays) -> Changed:
        _check_fit(state, arrays)
        count = len(arrays.codes)
        if not count:
            return self._add_nothing(state, items)
        kept = _num_kept(state.segments, count)
        self._check_contents(state.manifest.segments[kept:])
        kind = state.manifest.embedding_type
        gone: dict[str, _Found] = {}
        merged: list[Segment] = []

        def all_items() -> Iterator[Item]:
            """The new items; once their ids are known, what stays of the segments to merge them with."""
            ids: list[str] = []
            for item in items:
                ids.append(item.id)
                yield item
            if len(ids) != count:
                raise BadData(f"{len(ids)} items were given with IDs for {count}; run the same again")
            gone.update((segment.name, _alive_rows(segment, ids)) for segment in state.segments)
            merged.extend(_without(segment, gone[segment.name]) for segment in state.segments[kept:])
            for segment in merged:
                yield from alive_items(segment)

        with self._new_segment(state) as draft:
            written = write_items(draft.path, all_items())
            if merged:
                merge_arrays(draft.path, arrays, merged, kind)
            else:
                fill_arrays(draft.path, arrays, kind)
            new = _finish(draft, written)
        self._commit(state, kept=kept, gone=gone, new=new)
        return Changed(count, sum(len(found.rows) for found in gone.values()))

    def _add_nothing(self, state: Snapshot, items: Iterable[Item]) -> Changed:
        if any(True for _ in items):
            raise BadData("items were given without IDs; run the same again")
        if state.manifest.generation == 0:
            self._commit(state, kept=0, gone={}, new=None)
        return Changed(0, 0)

    def _check_contents(self, entries: Iterable[SegmentEntry]) -> None:
        """Every byte of segments to merge, for damage that is merged looks like what was written."""
        for entry in entries:
            check_segment(self.folder / SEGMENTS / entry.name, manifest=entry.manifest, verify=True)

    @contextlib.contextmanager
    def _new_segment(self, state: Snapshot) -> Iterator[ArtifactWriter]:
        """A folder to fill; removed again when something goes wrong."""
        self._check_open()
        remove_leftovers(self.folder, state.manifest.segments)
        place = self.folder / SEGMENTS / _numbered(state.manifest.generation + 1)
        if os.path.lexists(place):
            raise ArtifactMismatch(f"{place} is in the way and no part of the index; move it away")
        try:
            yield ArtifactWriter(
                place,
                kind=KIND,
                config={
                    "embeddings": state.manifest.embeddings,
                    "embedding_type": state.manifest.embedding_type,
                },
                inputs={"model": state.manifest.model_fingerprint},
            )
        except BaseException:
            remove_leftovers(self.folder, state.manifest.segments)
            raise

    def _commit(
        self, state: Snapshot, *, kept: int, gone: Mapping[str, _Found], new: SegmentEntry | None
    ) -> None:
        """Name the first segments, less what is gone, and the new one as the index's state: in one step."""
        self._check_open()
        generation = state.manifest.generation + 1
        entries = []
        for segment, entry in zip(state.segments[:kept], state.manifest.segments, strict=False):
            rows = gone[segment.name].rows
            if len(rows) < segment.num_alive:
                entries.append(self._without_rows(generation, segment, entry, rows))
        if new is not None:
            entries.append(new)
        sync(self.folder / SEGMENTS, self.folder)
        self._snapshot = None  # first: if what follows fails, it is to be read which state there is
        manifest = state.manifest.replace(generation=generation, segments=tuple(entries))
        write_manifest(self.folder, manifest)
        sync(self.folder)
        remove_leftovers(self.folder, entries)

    def _without_rows(
        self, generation: int, segment: Segment, entry: SegmentEntry, rows: Int64[np.ndarray, " rows"]
    ) -> SegmentEntry:
        """The entry of a segment, with these items deleted too."""
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


class _Found(NamedTuple):
    """Those of some items that are in a segment and not deleted."""

    ids: list[str]
    rows: Int64[np.ndarray, " found"]


def _alive_rows(segment: Segment, ids: Sequence[str]) -> _Found:
    found = segment.items.rows_by_id(ids)
    rows = np.fromiter(found.values(), dtype=np.int64, count=len(found))
    alive = ~segment.is_dead(rows)
    names = [name for name, is_alive in zip(found, alive.tolist(), strict=True) if is_alive]
    return _Found(names, rows[alive])


def _without(segment: Segment, found: _Found) -> Segment:
    return segment._replace(dead=np.union1d(segment.dead, found.rows))


def _num_kept(segments: Sequence[Segment], count: int) -> int:
    """How many segments are left alone when ``count`` items are added; the others are merged with them."""
    kept = len(segments)
    while kept and (kept >= MOST_SEGMENTS or segments[kept - 1].num_alive <= 2 * count):
        kept -= 1
        count += segments[kept].num_alive
    return kept


def _check_fit(state: Snapshot, arrays: ItemArrays) -> None:
    """Refuse items that the index has no room for: other embeddings, or IDs of another length."""
    wanted = state.manifest.embeddings
    if arrays.stored != wanted or (arrays.embeddings is None) is not (wanted == "none"):
        raise UsageError(
            f"the items come with {arrays.stored} embeddings, the index keeps {wanted}; encode them for it"
        )
    for segment in state.segments[:1]:
        given, here = _widths(arrays.codes, arrays.embeddings), _widths(segment.table.ids, segment.embeddings)
        if given != here:
            raise UsageError(
                f"levels and widths of the items are {given}, those of the index {here}; encode them with "
                "its model"
            )


def _widths(*arrays: np.ndarray | None) -> list[int]:
    return [array.shape[1] for array in arrays if array is not None]


def _finish(draft: ArtifactWriter, items: int) -> SegmentEntry:
    """Put a filled folder in its place, all of it on the disk."""
    sync(*(path for path in draft.path.rglob("*") if path.is_file()))
    draft.finish(facts={"items": items})
    sync(draft.folder)
    return SegmentEntry(
        name=draft.folder.name, items=items, manifest=file_fingerprint(draft.folder / MANIFEST)
    )


def _numbered(generation: int) -> str:
    return f"{generation:06d}"
