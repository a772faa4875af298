"""The folder of a cluster: an index in shards, each an index of a contiguous range of the sorted IDs.

.. code-block:: text

    X/cluster.json      the manifest, written last
     /shards/000003/    an index of the IDs from its first one to before that of the next shard
     /model/            the model, if the cluster was built with an encoder
     /pictures/         pictures that came as bytes
     /left-out.jsonl    what could not be used, and why
     /parts/000017/     while it is built: an index of each partition of the pool, sorted by ID
     /.build/           while it is built: the plan, and where shards begin
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from genius_search.artifact import fingerprint_of, first_problem, read_json
from genius_search.cluster.cuts import row_of
from genius_search.errors import ArtifactError, ArtifactMismatch, ArtifactMissing
from genius_search.index.index import Index, manifest_stamp
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import CLUSTER, IndexManifest, Segment, SegmentEntry, read_manifest
from genius_search.index.verify import Verified, check_own_model, verify
from genius_search.index.writer import RESERVE, Piece, one_writer
from genius_search.model import Genius
from genius_search.progress import Progress, Silent
from genius_search.writing import sync, sync_tree, write_atomically

if TYPE_CHECKING:
    from genius_search.cluster.writer import ClusterWriter
    from genius_search.index.adding import Added

SHARDS: Final = "shards"
PARTS: Final = "parts"
MODEL: Final = "./model"
"""The model of a cluster that was built with an encoder, inside its folder."""
LEFT_OUT: Final = "left-out.jsonl"
FORMAT: Final = 2
"""2 lists the segments of every shard."""
MAX_BYTES: Final = 16 << 20
"""Size of ``cluster.json``, enough for ten thousand shards."""
REMEDY: Final = "put back a copy of it, or build the cluster again"


def numbered(number: int) -> str:
    """Return the name of a part or a shard."""
    return f"{number:06d}"


Number: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 63)]


class ShardEntry(BaseModel):
    """A shard in ``cluster.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(pattern=r"^[0-9]{6,18}$")
    first: tuple[Annotated[int, Field(ge=0, lt=1 << 16)], ...] = Field(max_length=256)
    """Prefix of its first ID; empty for the first shard."""
    generation: Number
    """Number of changes of the shard so far."""
    segments: tuple[SegmentEntry, ...]

    @staticmethod
    def of(place: Path, first: Sequence[int]) -> ShardEntry:
        """Return the entry of a new shard in a folder."""
        manifest = read_manifest(place)
        return ShardEntry(
            name=place.name, first=tuple(first), generation=manifest.generation, segments=manifest.segments
        )

    @property
    def items(self) -> int:
        """Number of items that are not deleted."""
        return sum(segment.items - segment.num_deleted for segment in self.segments)


class ClusterManifest(BaseModel):
    """The contents of ``cluster.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int = FORMAT
    generation: int = 1
    """Number of changes so far."""
    model: str
    """Folder of the model, or :data:`MODEL`."""
    model_fingerprint: str
    pool: str
    partitions: Number
    left_out: Number
    """Number of rows and files that could not be used."""
    shards: tuple[ShardEntry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_order(self) -> ClusterManifest:
        firsts = [shard.first for shard in self.shards]
        if firsts[0] or any(one >= other for one, other in itertools.pairwise(firsts)):
            raise ValueError("the shards are not in the order of their first IDs")
        if len({int(shard.name) for shard in self.shards}) < len(self.shards):
            raise ValueError("a shard occurs twice")
        return self

    @property
    def items(self) -> int:
        """Number of items."""
        return sum(shard.items for shard in self.shards)

    def locate_model(self, folder: Path) -> str:
        """Return the folder of the model of the cluster in this folder."""
        return str(folder / self.model) if self.model == MODEL else self.model


def write_cluster(folder: Path, manifest: ClusterManifest) -> None:
    """Make this the state of the cluster, in one step, at the time of the call."""
    body = manifest.model_dump(mode="json")
    now = time.time_ns()
    with write_atomically(folder / CLUSTER) as temporary:
        text = json.dumps({**body, "checksum": fingerprint_of(body)}, indent=2)
        temporary.write_text(text + "\n", encoding="utf-8")
        os.utime(temporary, ns=(now, now))


def shard_manifest(folder: Path, shard: ShardEntry) -> IndexManifest:
    """Return the manifest of a shard in the state that the cluster's manifest lists."""
    own = read_manifest(folder / SHARDS / shard.name)
    return own.replace(generation=shard.generation, segments=shard.segments)


def open_state(folder: Path) -> tuple[ClusterManifest, Snapshot]:
    """Open the current state of a cluster, the segments of one shard after those of another."""
    cluster = read_cluster(folder)
    while True:
        try:
            manifests = [shard_manifest(folder, shard) for shard in cluster.shards]
            opened = [
                Snapshot.load(folder / SHARDS / shard.name, manifest)
                for shard, manifest in zip(cluster.shards, manifests, strict=True)
            ]
            break
        except (ArtifactError, OSError, sqlite3.Error):
            now = read_cluster(folder)
            if now == cluster:  # no writer removed it meanwhile, so something is wrong
                raise
            cluster = now
    manifest = manifests[0].replace(
        generation=cluster.generation, segments=tuple(entry for one in manifests for entry in one.segments)
    )
    return cluster, Snapshot(manifest, tuple(segment for one in opened for segment in one.segments))


@contextlib.contextmanager
def attempt(place: Path) -> Iterator[Path]:
    """Yield a folder that takes its place when the block ends, unless another attempt was quicker."""
    draft = place.with_name(f".{place.name}.{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        (draft / RESERVE).unlink(missing_ok=True)
        sync_tree(draft)
        draft.rename(place)
        sync(place.parent)
    except OSError:
        if not place.exists():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_range(
    place: Path,
    manifest: IndexManifest,
    segments: Iterable[Segment],
    first: Sequence[int],
    stop: Sequence[int] | None,
) -> None:
    """Write a shard: the items of some segments whose IDs lie from one prefix to before another."""
    with attempt(place) as draft, one_writer(draft) as writer:
        writer.create_from(manifest, (_piece(segment, first, stop) for segment in segments))


def _piece(segment: Segment, first: Sequence[int], stop: Sequence[int] | None) -> Piece:
    """Return the items whose IDs lie in a range; only the rows from the first to the last are read."""
    table = segment.table
    bounds = [row_of(table, first), len(table) if stop is None else row_of(table, stop)]
    begin, end = table.bucket_starts[bounds].tolist()
    rows = table.items[begin:end]
    if not len(rows):
        return Piece(segment, 0, 0)
    low, high = int(rows.min()), int(rows.max()) + 1
    is_left_out = np.ones(high - low, dtype=bool)
    is_left_out[rows - low] = False
    is_left_out[segment.dead[(segment.dead >= low) & (segment.dead < high)] - low] = True
    return Piece(segment._replace(dead=low + np.flatnonzero(is_left_out)), low, high)


def read_cluster(folder: Path) -> ClusterManifest:
    """Read ``cluster.json``.

    Raises
    ------
    ArtifactMissing
        There is none: the folder holds no cluster, or an unfinished one.
    ArtifactMismatch
        It is damaged, or of a newer version.
    """
    path = folder / CLUSTER
    if not path.is_file():
        raise ArtifactMissing(f"{folder} holds no finished cluster; `genius cluster build` makes one")
    if path.stat().st_size > MAX_BYTES:
        raise ArtifactMismatch(f"{path} has more than {MAX_BYTES:,} bytes, so it is damaged; {REMEDY}")
    body = read_json(path)
    try:
        if body.get("format", 0) > FORMAT:
            raise ArtifactMismatch(f"{folder} was made by a newer version: upgrade genius")
        if body.get("format", 0) < FORMAT:
            raise ArtifactMismatch(f"{folder} was made by an older version: build the cluster again")
        if body.pop("checksum", None) != fingerprint_of(body):
            raise ArtifactMismatch(f"{path} is damaged: it does not match its checksum; {REMEDY}")
        return ClusterManifest.model_validate_json(json.dumps(body))
    except ValidationError as error:
        raise ArtifactMismatch(f"{path} is damaged ({first_problem(error)}); {REMEDY}") from None
    except (AttributeError, TypeError) as error:
        raise ArtifactMismatch(f"{path} is damaged ({error}); {REMEDY}") from None


class Cluster(Index):
    """The shards of a cluster, opened on one machine, and searched and changed as one index.

    >>> cluster = Cluster.open("X")  # doctest: +SKIP
    >>> cluster.search("a red bag", k=3)  # doctest: +SKIP
    >>> cluster.add("more.parquet")  # doctest: +SKIP
    >>> cluster.rebalance()  # doctest: +SKIP
    """

    def reopen(self) -> Cluster:
        """Return another handle of the same cluster, with the same model."""
        return Cluster(self.folder, self.model)

    def add(
        self,
        pool: str | Path,
        *,
        captions: bool = True,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> Added:
        """Add the items of a pool, of any kind that `genius cluster build` takes; see :meth:`Index.add`."""
        from genius_search.cluster.pool import open_partitions  # noqa: PLC0415  searching does not need it
        from genius_search.index.adding import add_pool  # noqa: PLC0415

        with (
            tempfile.TemporaryDirectory() as scratch,
            self._one_writer(wait_seconds) as writer,
        ):
            items = open_partitions(str(pool), self.folder, Path(scratch), captions=captions)
            return add_pool(writer, self._model_for(writer.snapshot), items, progress=progress or Silent())

    def rebalance(
        self,
        shards: int | None = None,
        *,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> bool:
        """Cut the IDs anew into shards of about the same size; return whether that was needed.

        Searches go on meanwhile, and find the same before and after.

        Parameters
        ----------
        shards
            their number, by default as many as there are.
        """
        with self._one_writer(wait_seconds) as writer:
            return writer.rebalance(shards, progress=progress)

    def _one_writer(self, wait_seconds: float) -> AbstractContextManager[ClusterWriter]:
        from genius_search.cluster.writer import one_cluster_writer  # noqa: PLC0415  imports this module

        return one_cluster_writer(self.folder, wait_seconds=wait_seconds)

    @staticmethod
    def _named_model(folder: Path) -> tuple[str, str]:
        manifest = read_cluster(folder)
        return manifest.locate_model(folder), manifest.model_fingerprint

    def _stamp(self) -> tuple[int, ...]:
        return manifest_stamp(self.folder, CLUSTER, read_cluster)

    def _read(self) -> Snapshot:
        return open_state(self.folder)[1]


def is_cluster(folder: Path) -> bool:
    """Return whether a folder holds a finished cluster."""
    return os.path.lexists(folder / CLUSTER)


def open_index(
    folder: Path, *, model: str | Path | Genius | None = None, device: str = "cpu", download: bool = False
) -> Index:
    """Open an index, or a cluster as an index."""
    kind = Cluster if is_cluster(folder) else Index
    return kind.open(folder, model=model, device=device, download=download)


def fingerprint_at(folder: Path) -> str:
    """Return the fingerprint of the model of an index or a cluster."""
    reading = read_cluster if is_cluster(folder) else read_manifest
    return reading(folder).model_fingerprint


def verify_cluster(folder: Path) -> Verified:
    """Verify every shard, that it is the one of the manifest, and that its IDs lie in its range.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        A file is missing or damaged. The message names it.
    """
    cluster = read_cluster(folder)
    found = []
    bounds = [*(shard.first for shard in cluster.shards[1:]), None]
    for shard, end in zip(cluster.shards, bounds, strict=True):
        place = folder / SHARDS / shard.name
        manifest = shard_manifest(folder, shard)
        if manifest.model_fingerprint != cluster.model_fingerprint:
            raise ArtifactMismatch(f"{place} was made with another model than the other shards; {REMEDY}")
        found.append(verify(place, partial(_current_manifest, folder, shard.name)))
        for segment in Snapshot.load(place, manifest).segments:
            stop = len(segment.table) if end is None else row_of(segment.table, end)
            if row_of(segment.table, shard.first) != 0 or stop != len(segment.table):
                raise ArtifactMismatch(f"{place} holds IDs of another shard; {REMEDY}")
    own = check_own_model(folder / MODEL, cluster.model_fingerprint) if cluster.model == MODEL else []
    files = [folder / CLUSTER, *own]
    size = sum(file.stat().st_size for file in files)
    total = Verified(*map(sum, zip(*found, strict=True)))
    return total._replace(files=total.files + len(files), bytes=total.bytes + size)


def _current_manifest(folder: Path, name: str, _: Path) -> IndexManifest:
    """Return the manifest of a shard in the current state of a cluster."""
    for shard in read_cluster(folder).shards:
        if shard.name == name:
            return shard_manifest(folder, shard)
    raise ArtifactMissing(f"{folder} was cut into other shards meanwhile; verify it again")


class ClusterInfo(NamedTuple):
    """A description of a cluster."""

    folder: str
    model: str
    model_fingerprint: str
    generation: int
    """Number of changes so far."""
    pool: str
    items: int
    left_out: int
    partitions: int
    bytes: int
    shards: list[dict[str, object]]
    """Name, first prefix, items and bytes of each."""


def describe_cluster(folder: Path) -> ClusterInfo:
    """Describe a cluster; no model is needed."""
    cluster = read_cluster(folder)
    shards: list[dict[str, object]] = []
    sizes = []
    for shard in cluster.shards:
        place = folder / SHARDS / shard.name
        sizes.append(sum(file.stat().st_size for file in place.rglob("*") if file.is_file()))
        shards.append(
            {"name": shard.name, "first": list(shard.first), "items": shard.items, "bytes": sizes[-1]}
        )
    return ClusterInfo(
        folder=str(folder),
        model=cluster.model,
        model_fingerprint=cluster.model_fingerprint,
        generation=cluster.generation,
        pool=cluster.pool,
        items=cluster.items,
        left_out=cluster.left_out,
        partitions=cluster.partitions,
        bytes=sum(sizes),
        shards=shards,
    )
