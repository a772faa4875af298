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

import json
import os
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from genius_search.artifact import file_fingerprint, fingerprint_of, first_problem, read_json, write_json
from genius_search.cluster.cuts import row_of
from genius_search.errors import ArtifactMismatch, ArtifactMissing
from genius_search.index.index import Index, manifest_stamp
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import CLUSTER, CURRENT, IndexManifest, read_manifest
from genius_search.index.verify import Verified, check_own_model, verify
from genius_search.model import Genius

SHARDS: Final = "shards"
PARTS: Final = "parts"
MODEL: Final = "./model"
"""The model of a cluster that was built with an encoder, inside its folder."""
LEFT_OUT: Final = "left-out.jsonl"
FORMAT: Final = 1
REMEDY: Final = "put back a copy of it, or build the cluster again"


def numbered(number: int) -> str:
    """Return the name of a part or a shard."""
    return f"{number:06d}"


class ShardEntry(BaseModel):
    """A shard in ``cluster.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(pattern=r"^[0-9]{6,}$")
    first: tuple[int, ...]
    """Prefix of its first ID; empty for the first shard."""
    items: int
    manifest: str
    """SHA-256 of its ``index.json``, which holds the checksums of its files."""


class ClusterManifest(BaseModel):
    """The contents of ``cluster.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int = FORMAT
    model: str
    """Folder of the model, or :data:`MODEL`."""
    model_fingerprint: str
    pool: str
    partitions: int
    left_out: int
    """Number of rows and files that could not be used."""
    shards: tuple[ShardEntry, ...]

    @property
    def items(self) -> int:
        """Number of items."""
        return sum(shard.items for shard in self.shards)

    def locate_model(self, folder: Path) -> str:
        """Return the folder of the model of the cluster in this folder."""
        return str(folder / self.model) if self.model == MODEL else self.model


def write_cluster(folder: Path, manifest: ClusterManifest) -> None:
    """Write ``cluster.json`` in one step."""
    body = manifest.model_dump(mode="json")
    write_json(folder / CLUSTER, {**body, "checksum": fingerprint_of(body)})


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
    body = read_json(path)
    try:
        if body.get("format", 0) > FORMAT:
            raise ArtifactMismatch(f"{folder} was made by a newer version: upgrade genius")
        if body.pop("checksum", None) != fingerprint_of(body):
            raise ArtifactMismatch(f"{path} is damaged: it does not match its checksum; {REMEDY}")
        return ClusterManifest.model_validate_json(json.dumps(body))
    except ValidationError as error:
        raise ArtifactMismatch(f"{path} is damaged ({first_problem(error)}); {REMEDY}") from None
    except (AttributeError, TypeError) as error:
        raise ArtifactMismatch(f"{path} is damaged ({error}); {REMEDY}") from None


class Cluster(Index):
    """The shards of a cluster, opened on one machine and searched as one index; it is not changed.

    >>> cluster = Cluster.open_folder("X")  # doctest: +SKIP
    >>> cluster.search("a red bag", k=3)  # doctest: +SKIP
    """

    @staticmethod
    def open_folder(
        folder: str | Path,
        *,
        model: str | Path | Genius | None = None,
        device: str = "cpu",
        download: bool = False,
    ) -> Cluster:
        """Open a cluster; raises like :meth:`Index.open`."""
        folder = Path(folder)
        manifest = read_cluster(folder)
        if model is None:
            model = manifest.locate_model(folder)
            if not Path(model).exists():
                raise ArtifactMissing(
                    f"the model of {folder} is not at {model} any more; say where with --model"
                )
        opened = model if isinstance(model, Genius) else Genius.open(model, device=device, download=download)
        if opened.fingerprint != manifest.model_fingerprint:
            raise ArtifactMismatch(
                f"{folder} was built with another model than {opened.folder} (fingerprint "
                f"{manifest.model_fingerprint[:12]}, not {opened.fingerprint[:12]}); give the right --model"
            )
        return Cluster(folder, opened)

    def reopen(self) -> Cluster:
        """Return another handle of the same cluster, with the same model."""
        return Cluster(self.folder, self.model)

    def _stamp(self) -> tuple[int, ...]:
        return tuple(
            number
            for shard in read_cluster(self.folder).shards
            for number in manifest_stamp(self.folder / SHARDS / shard.name)
        )

    def _read(self) -> Snapshot:
        opened = [
            Snapshot.open(self.folder / SHARDS / shard.name) for shard in read_cluster(self.folder).shards
        ]
        manifests = [one.manifest for one in opened]
        manifest = manifests[0].replace(
            generation=sum(one.generation for one in manifests),
            segments=tuple(entry for one in manifests for entry in one.segments),
        )
        return Snapshot(manifest, tuple(segment for one in opened for segment in one.segments))


def is_cluster(folder: Path) -> bool:
    """Return whether a folder holds a finished cluster."""
    return os.path.lexists(folder / CLUSTER)


def open_index(
    folder: Path, *, model: str | Path | Genius | None = None, device: str = "cpu", download: bool = False
) -> Index:
    """Open an index, or a cluster as an index."""
    opening = Cluster.open_folder if is_cluster(folder) else Index.open
    return opening(folder, model=model, device=device, download=download)


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
        manifest = read_manifest(place)
        _check_shard(cluster, shard, manifest, place)
        found.append(verify(place))
        for segment in Snapshot.open(place).segments:
            stop = len(segment.table) if end is None else row_of(segment.table, end)
            if row_of(segment.table, shard.first) != 0 or stop != len(segment.table):
                raise ArtifactMismatch(f"{place} holds IDs of another shard; {REMEDY}")
    own = check_own_model(folder / MODEL, cluster.model_fingerprint) if cluster.model == MODEL else []
    files = [folder / CLUSTER, *own]
    size = sum(file.stat().st_size for file in files)
    total = Verified(*map(sum, zip(*found, strict=True)))
    return total._replace(files=total.files + len(files), bytes=total.bytes + size)


def _check_shard(cluster: ClusterManifest, shard: ShardEntry, manifest: IndexManifest, place: Path) -> None:
    if manifest.model_fingerprint != cluster.model_fingerprint:
        raise ArtifactMismatch(f"{place} was made with another model than the other shards; {REMEDY}")
    if file_fingerprint(place / CURRENT) != shard.manifest:
        raise ArtifactMismatch(f"{place} has changed since the cluster was built; {REMEDY}")


class ClusterInfo(NamedTuple):
    """A description of a cluster."""

    folder: str
    model: str
    model_fingerprint: str
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
        pool=cluster.pool,
        items=cluster.items,
        left_out=cluster.left_out,
        partitions=cluster.partitions,
        bytes=sum(sizes),
        shards=shards,
    )
