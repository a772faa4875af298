"""Verification of an index's files, and a description of its contents. No model is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from genius_search.artifact import check_files, file_fingerprint, open_artifact
from genius_search.errors import ArtifactMismatch, ArtifactMissing, plural
from genius_search.index.snapshot import Snapshot, diagnose_corruption
from genius_search.index.store import (
    CURRENT,
    DELETED,
    REMEDY,
    SEGMENTS,
    Hubness,
    IndexManifest,
    Segment,
    read_state,
    with_hint,
)
from genius_search.index.writer import stored_pictures
from genius_search.nn.codebooks import KIND, METRIC
from genius_search.search.table import IdTable


class Verified(NamedTuple):
    """The size of an index whose files are all intact."""

    segments: int
    items: int
    """Without deleted ones."""
    deleted: int
    """Deleted items that still take up space."""
    files: int
    bytes: int


def verify(folder: Path) -> Verified:
    """Compare every file of an index, which may be in use, with its checksum, and open the index.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        A file is missing or damaged. The message names it and says what to do.
    UsageError
        The index changes faster than it can be read.
    """
    return read_state(folder, partial(_verify, folder))


def _verify(folder: Path, manifest: IndexManifest) -> Verified:
    files = [folder / CURRENT]  # reading it compares it with its own checksum
    with with_hint():
        for entry in manifest.segments:
            check_files(folder / SEGMENTS / entry.name, entry.files, verify=True)
            files += [folder / SEGMENTS / entry.name / name for name in entry.files]
            files += [folder / DELETED / entry.deleted] if entry.deleted else []
    snapshot = Snapshot.load(folder, manifest)  # which verifies the lists of deleted items
    for picture in sorted(stored_pictures(folder, snapshot.segments)):
        if not picture.is_file():
            raise ArtifactMissing(f"{picture} is missing; {REMEDY}")
        if file_fingerprint(picture) != picture.name:
            raise ArtifactMismatch(f"{picture} is damaged; {REMEDY}")
        files.append(picture)
    if manifest.has_own_model:
        files += _verify_model(folder / manifest.model, manifest.model_fingerprint)
    alive = snapshot.num_alive
    return Verified(
        segments=len(snapshot.segments),
        items=alive,
        deleted=sum(segment.table.num_items for segment in snapshot.segments) - alive,
        files=len(files),
        bytes=sum(file.stat().st_size for file in files),
    )


def _verify_model(folder: Path, fingerprint: str) -> list[Path]:
    """Compare the files of a model inside an index with their checksums; return them."""
    from genius_search.model import MODEL_FILE, read_model_file  # noqa: PLC0415  with its encoder's libraries

    model = read_model_file(folder)
    if model.fingerprint_of_parts() != fingerprint:
        raise ArtifactMismatch(f"{folder / MODEL_FILE} is not the model that assigned the IDs; {REMEDY}")
    for name in model.parts.keys() - {"encoder"}:
        if open_artifact(folder / name, kind=name, verify=True).fingerprint != model.parts[name].fingerprint:
            raise ArtifactMismatch(f"{folder / name} is not part of this model; {REMEDY}")
    return [path for path in folder.rglob("*") if path.is_file()]


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """The size of a segment."""

    name: str
    items: int
    """Deleted ones included."""
    deleted: int
    ids: int


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """A description of an index."""

    folder: str
    model: str
    model_fingerprint: str
    generation: int
    """Number of changes so far."""
    items: int
    by_modality: dict[str, int]
    distinct_ids: int
    collision_rate: float
    """Share of the items that share their ID with another."""
    bytes_per_item: dict[str, float]
    """On disk, by the name of the file."""
    embeddings: str
    """The stored embeddings and their type."""
    knows_queries: bool
    """Whether codebooks were fitted with vectors of queries; see :meth:`genius_search.Index.create`."""
    hubness: Hubness | None
    """The weight of densities and how it was measured; None if it is the default."""
    segments: list[SegmentInfo]


def describe(folder: Path, snapshot: Snapshot) -> IndexInfo:
    """Describe an open index.

    Raises
    ------
    ArtifactMismatch
        The index is damaged.
    """
    with diagnose_corruption(snapshot):
        manifest, count = snapshot.manifest, snapshot.num_alive
        buckets = _bucket_sizes(snapshot.segments)
        sizes: Counter[str] = Counter()
        for entry in manifest.segments:
            sizes.update({Path(name).stem: fact.bytes for name, fact in entry.files.items()})
        bits = "" if manifest.embeddings == "none" else f", {plural(manifest.embedding_bits, 'bit')} a number"
        return IndexInfo(
            folder=str(folder),
            model=manifest.model,
            model_fingerprint=manifest.model_fingerprint,
            generation=manifest.generation,
            items=count,
            by_modality={kind.value: number for kind, number in snapshot.count_by_modality().items()},
            distinct_ids=len(buckets),
            collision_rate=float(buckets[buckets > 1].sum() / max(1, count)),
            bytes_per_item={name: size / max(1, count) for name, size in sizes.items()},
            embeddings=f"{manifest.embeddings}{bits}",
            knows_queries=manifest.has_own_model
            and METRIC in open_artifact(folder / manifest.model / "quantizer", kind=KIND).inputs,
            hubness=manifest.hubness,
            segments=[
                SegmentInfo(segment.name, segment.table.num_items, len(segment.dead), len(segment.table))
                for segment in snapshot.segments
            ],
        )


def _bucket_sizes(segments: Sequence[Segment]) -> Int64[np.ndarray, " ids"]:
    """Return the number of items with each ID, without deleted ones."""
    if len(segments) == 1 and not len(segments[0].dead):
        return np.diff(segments[0].table.bucket_starts).astype(np.int64)
    found = [np.zeros((0, segments[0].table.num_levels if segments else 1), dtype=np.int16)]
    found += [segment.table.ids[segment.table.rows()[segment.alive_rows()]] for segment in segments]
    codes = np.concatenate(found)
    table = IdTable.build(codes, np.zeros(len(codes), dtype=np.float16))
    return np.diff(table.bucket_starts).astype(np.int64)
