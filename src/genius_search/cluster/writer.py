"""Changing a cluster: items are added and deleted, shards compacted, or cut anew.

A change prepares the next state of every shard that it concerns: a segment of new items, and lists of deleted
ones. Then ``cluster.json``, which lists the segments of all shards, is replaced, and all of the change is
there at once. What follows (``index.json`` of each shard, removing what is no longer needed) is done again by
the next writer if it is interrupted.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from genius_search.cluster.cuts import choose_cuts, place_ids, sample_ids
from genius_search.cluster.folder import (
    PARTS,
    SHARDS,
    ClusterManifest,
    ShardEntry,
    numbered,
    open_state,
    read_cluster,
    shard_manifest,
    write_cluster,
    write_range,
)
from genius_search.errors import ArtifactError, BadData
from genius_search.index.items import Item
from genius_search.index.segment_writer import write_manifest
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import NAME, IndexManifest, ItemArrays, check_deleted, read_manifest
from genius_search.index.writer import (
    DISK_FULL,
    RESERVE,
    Changed,
    Deleted,
    Writer,
    keep_reserve,
    remove_leftovers,
    writing_lock,
)
from genius_search.progress import Progress, Silent
from genius_search.writing import sync

HELD: Final = 200_000
"""New items that are held in memory; more are added in several changes."""
EVEN: Final = 1.2
"""Shards are even if the largest has at most this many times the mean."""


class ShardWriter(Writer):
    """Prepares the next state of a shard, which counts once the manifest of the cluster lists it."""

    prepared: IndexManifest | None = None

    def _publish(self, manifest: IndexManifest) -> None:
        self.prepared = manifest

    def put(self, items: Sequence[Item], arrays: ItemArrays, replaced: Sequence[str]) -> Changed:
        """Prepare to add items, and to delete those with the ids ``replaced``."""
        return self._add(self.snapshot, [(items, arrays)], replaced=replaced)

    def finish(self) -> None:
        """Make the prepared state that of the shard's own manifest."""
        if self.prepared is not None:
            super()._publish(self.prepared)
            self.prepared = None

    def discard(self) -> None:
        """Remove the files of the prepared state."""
        self.prepared = self._snapshot = None
        remove_leftovers(self.folder, read_manifest(self.folder).segments)


class ClusterWriter(Writer):
    """Changes a cluster; created by :func:`one_cluster_writer`."""

    pictures_at: ClassVar[str] = "../../"

    def __init__(self, cluster: Path) -> None:
        self._cluster = cluster
        self._open_shards(read_cluster(cluster))
        super().__init__(self._shards[0].folder)

    def _open_shards(self, manifest: ClusterManifest) -> None:
        """Finish or undo what an interrupted writer began."""
        self._manifest = manifest
        known = {shard.name for shard in manifest.shards}
        for place in (self._cluster / SHARDS).iterdir():
            if (NAME.fullmatch(place.name) and place.name not in known) or place.name.startswith("."):
                shutil.rmtree(place)
        shutil.rmtree(self._cluster / PARTS, ignore_errors=True)
        self._shards = []
        for shard in manifest.shards:
            place = self._cluster / SHARDS / shard.name
            expected = shard_manifest(self._cluster, shard)
            if read_manifest(place) != expected:
                write_manifest(place, expected)
            remove_leftovers(place, expected.segments)
            self._shards.append(ShardWriter(place))

    def close(self) -> None:
        """Refuse further changes."""
        super().close()
        for shard in self._shards:
            shard.close()
            with contextlib.suppress(OSError, ArtifactError):
                keep_reserve(shard.folder)

    @property
    def generation(self) -> int:
        """Number of changes on disk so far."""
        return read_cluster(self._cluster).generation

    @property
    def snapshot(self) -> Snapshot:
        """The current state; lists of deleted items are verified, because changes extend them."""
        if self._snapshot is None:
            for shard in self._manifest.shards:
                for entry in shard.segments:
                    check_deleted(self._cluster / SHARDS / shard.name, entry)
            self._snapshot = open_state(self._cluster)[1]
        return self._snapshot

    def add_batches(self, batches: Iterable[tuple[Iterable[Item], ItemArrays]]) -> Changed:
        """Add items to the shards of their IDs; an item replaces the one with the same id, wherever it is.

        Up to about :data:`HELD` items are one change.

        Raises
        ------
        BadData
            Two items have the same id; only changes before them were made.
        """
        self._check_open()
        seen: set[str] = set()
        items: list[Item] = []
        arrays: list[ItemArrays] = []
        replaced = 0
        for some, encoded in batches:
            for item in some:
                if item.id in seen:
                    raise BadData(f"two items have the id {item.id!r}; give each its own")
                seen.add(item.id)
                items.append(item)
            arrays.append(encoded)
            if len(items) >= HELD:
                replaced += self._put(items, arrays)
                items, arrays = [], []
        if items:
            replaced += self._put(items, arrays)
        return Changed(len(seen), replaced)

    def _put(self, items: Sequence[Item], batches: Sequence[ItemArrays]) -> int:
        """Add items in one change; return how many replaced others."""
        arrays = ItemArrays.join(batches)
        ids = [item.id for item in items]
        shards = place_ids(arrays.codes, [shard.first for shard in self._manifest.shards[1:]])
        replaced = 0
        with self._change():
            for number, writer in enumerate(self._shards):
                own = np.flatnonzero(shards == number)
                if len(own):
                    chosen = [items[row] for row in own.tolist()]
                    replaced += writer.put(chosen, arrays.take(own), ids).replaced
                else:
                    replaced += writer.delete(ids).deleted
        return replaced

    def delete(self, item_ids: Iterable[str]) -> Deleted:
        """Delete items, whichever shard they are in."""
        self._check_open()
        ids = list(dict.fromkeys(item_ids))
        try:
            return self._delete(ids)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            for shard in self._shards:
                (shard.folder / RESERVE).unlink(missing_ok=True)
            return self._delete(ids)

    def _delete(self, ids: Sequence[str]) -> Deleted:
        missing = set(ids)
        with self._change():
            for writer in self._shards:
                missing &= set(writer.delete(ids).missing)
        return Deleted(len(ids) - len(missing), [name for name in ids if name in missing])

    def compact(self, change: Callable[[Item], Item] | None = None) -> None:
        """Merge the segments of each shard into one without deleted items, shard by shard."""
        self._check_open()
        for writer in self._shards:
            with self._change():
                writer.compact(change)

    def rebalance(self, shards: int | None = None, *, progress: Progress | None = None) -> bool:
        """Cut the IDs anew into shards of about the same size; return whether that was needed.

        New shards are written beside the old ones, which searches use until all are complete.

        Parameters
        ----------
        shards
            their number, by default as many as there are.
        """
        self._check_open()
        progress = progress or Silent()
        old = self._manifest
        sizes = [shard.items for shard in old.shards]
        if len(sizes) == (shards or len(sizes)) and max(sizes) * len(sizes) <= EVEN * sum(sizes):
            return False
        segments = self.snapshot.segments
        sample = sample_ids(((one.table, one.alive()) for one in segments), self.snapshot.num_alive)
        cuts = choose_cuts(sample, shards or len(sizes))
        base = self.snapshot.manifest
        next_number = 1 + max(int(shard.name) for shard in old.shards)
        entries = []
        progress.begin("write shards", len(cuts) + 1)
        for number, (first, stop) in enumerate(itertools.pairwise([(), *cuts, None])):
            place = self._cluster / SHARDS / numbered(next_number + number)
            write_range(place, base, segments, first or (), stop)
            entries.append(ShardEntry.of(place, first or ()))
            progress.advance(number + 1, {})
        self._snapshot = None
        manifest = old.model_copy(update={"shards": tuple(entries), "generation": old.generation + 1})
        write_cluster(self._cluster, manifest)
        self._open_shards(manifest)
        self.folder = self._shards[0].folder
        return True

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Commit what the shards prepare in the block, or none of it if the block raises."""
        try:
            yield
        except BaseException:
            for writer in self._shards:
                writer.discard()
            raise
        prepared = {writer.folder.name: writer.prepared for writer in self._shards if writer.prepared}
        if not prepared:
            return
        sync(self._cluster / SHARDS)
        entries = []
        for shard in self._manifest.shards:
            state = prepared.get(shard.name)
            update = state and {"generation": state.generation, "segments": state.segments}
            entries.append(shard.model_copy(update=update) if update else shard)
        self._snapshot = None
        self._manifest = self._manifest.model_copy(
            update={"shards": tuple(entries), "generation": self._manifest.generation + 1}
        )
        write_cluster(self._cluster, self._manifest)
        for writer in self._shards:
            writer.finish()


@contextlib.contextmanager
def one_cluster_writer(cluster: Path, *, wait_seconds: float = 0.0) -> Iterator[ClusterWriter]:
    """Lock a cluster for writing, without blocking readers, and finish or undo an interrupted change.

    Raises like :func:`~genius_search.index.writer.one_writer`.
    """
    read_cluster(cluster)
    with writing_lock(cluster, wait_seconds=wait_seconds):
        writer = ClusterWriter(cluster)
        try:
            yield writer
        finally:
            writer.close()
