"""Verification of an index's files, a description of its contents, and items that share codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from genius_search.artifact import check_files, file_fingerprint, open_artifact
from genius_search.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, UsageError, plural
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot, diagnose_corruption
from genius_search.index.store import (
    CURRENT,
    DELETED,
    LEARNED,
    REMEDY,
    SEGMENTS,
    Hubness,
    IndexManifest,
    Segment,
    read_manifest,
    read_state,
    refuse_links,
    with_hint,
)
from genius_search.index.writer import stored_pictures
from genius_search.model import MODEL_FILE, read_model_file
from genius_search.nn.codebooks import KIND, METRIC, StoredQuantizer

EXAMPLES: Final = 20
"""Items listed of a group."""


class Verified(NamedTuple):
    """The size of an index whose files are all intact."""

    segments: int
    items: int
    """Without deleted ones."""
    deleted: int
    """Deleted items that still take up space."""
    files: int
    bytes: int


def verify(folder: Path, opened: Snapshot | None = None, *, with_pictures: bool = True) -> Verified:
    """Compare every file of an index, which may be in use, with its checksum, and open the index.

    If damage is found, searches of ``opened``, a state that is in use, raise an error from then on.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        A file is missing or damaged. The message names it and says what to do.
    UsageError
        The index changes faster than it can be read.
    """
    refuse_links(folder, with_pictures=with_pictures)
    return read_state(folder, partial(_verify, folder, opened, with_pictures=with_pictures))


def _verify(
    folder: Path, opened: Snapshot | None, manifest: IndexManifest, *, with_pictures: bool
) -> Verified:
    files = [folder / CURRENT]  # reading it compares it with its own checksum
    try:
        for entry in manifest.segments:
            place = folder / SEGMENTS / entry.name
            with with_hint():
                check_files(place, entry.files, verify=True)
            files += [place / name for name in entry.files]
            files += [folder / DELETED / entry.deleted] if entry.deleted else []
        snapshot = Snapshot.load(folder, manifest)  # which verifies the lists of deleted items
        if (folder / LEARNED / CURRENT).exists():
            verify(folder / LEARNED)
            files += [path for path in (folder / LEARNED).rglob("*") if path.is_file()]
        files += _verify_model(folder, snapshot)
    except ArtifactError as error:
        if opened is not None and opened.manifest == read_manifest(folder):
            opened.damage, opened.needs_check = str(error), True
        raise
    for picture in sorted(stored_pictures(folder, snapshot.segments)) if with_pictures else ():
        if not picture.is_file():
            raise ArtifactMissing(f"{picture} is missing; {REMEDY}")
        if file_fingerprint(picture) != picture.name:
            raise ArtifactMismatch(f"{picture} is damaged; {REMEDY}")
        files.append(picture)
    alive = snapshot.num_alive
    return Verified(
        segments=len(snapshot.segments),
        items=alive,
        deleted=sum(segment.table.num_items for segment in snapshot.segments) - alive,
        files=len(files),
        bytes=sum(file.stat().st_size for file in files),
    )


def _verify_model(index: Path, snapshot: Snapshot) -> list[Path]:
    """Compare an index with its model, if that is a folder here; return the files of one inside the index."""
    manifest = snapshot.manifest
    folder = Path(manifest.locate_model(index))
    if not manifest.has_own_model and not (manifest.model and (folder / MODEL_FILE).exists()):
        return []
    model = read_model_file(folder)
    if model.fingerprint_of_parts() != manifest.model_fingerprint:
        if not manifest.has_own_model:  # it is opened with another folder, which is compared then
            return []
        raise ArtifactMismatch(f"{folder / MODEL_FILE} is not the model that assigned the IDs; {REMEDY}")
    for name in model.parts.keys() - {"encoder"}:
        if open_artifact(folder / name, kind=name, verify=True).fingerprint != model.parts[name].fingerprint:
            raise ArtifactMismatch(f"{folder / name} is not part of this model; {REMEDY}")
    snapshot.fit(StoredQuantizer(folder / "quantizer").codebooks, {})
    return [path for path in folder.rglob("*") if path.is_file()] if manifest.has_own_model else []


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
        segments = snapshot.segments
        shared = _group_items(segments)[-1] if count else np.zeros(0, np.int64)
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
            distinct_ids=len(shared),
            collision_rate=float(shared[shared > 1].sum() / max(1, count)),
            bytes_per_item={name: size / max(1, count) for name, size in sizes.items()},
            embeddings=f"{manifest.embeddings}{bits}",
            knows_queries=manifest.has_own_model
            and METRIC in open_artifact(folder / manifest.model / "quantizer", kind=KIND).inputs,
            hubness=manifest.hubness,
            segments=[
                SegmentInfo(segment.name, segment.table.num_items, len(segment.dead), len(segment.table))
                for segment in segments
            ],
        )


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Items whose IDs begin with the same codes."""

    codes: tuple[int, ...]
    """The codes they share."""
    items: int
    examples: list[Item]
    """At most :data:`EXAMPLES` of them."""


def near_duplicates(
    snapshot: Snapshot, num_levels: int, levels: int, *, offset: int, limit: int
) -> list[SharedGroup]:
    """Return some groups of items that share all but the last ``levels`` codes, largest first, then by code.

    Raises
    ------
    UsageError
        The page is invalid, or no code would be shared.
    """
    if not 0 <= levels < num_levels:
        raise UsageError(f"all but the last {levels} of {num_levels} codes cannot be shared")
    if offset < 0 or limit < 0:
        raise UsageError(f"offset is {offset} and limit is {limit}; both must be at least 0")
    if not snapshot.num_alive:
        return []
    codes, segments, rows, begins, sizes = _group_items(snapshot.segments, num_levels - levels)
    largest = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes > 1)]
    groups = []
    for group in largest[offset : offset + limit].tolist():
        begin, size = int(begins[group]), int(sizes[group])
        shown = slice(begin, begin + min(size, EXAMPLES))
        examples = snapshot.items(segments[shown], rows[shown])
        groups.append(SharedGroup(tuple(codes[begin].tolist()), size, examples))
    return groups


def _group_items(segments: Sequence[Segment], columns: int | None = None) -> tuple[np.ndarray, ...]:
    """Sort the items that are not deleted by the first columns of their IDs.

    Returns
    -------
    These columns, segment and row of each item, and where each group begins and how many items it has.
    """
    parts = []
    for number, segment in enumerate(segments):
        alive = segment.alive_rows()
        codes = segment.table.ids[segment.table.rows_of_items[alive], :columns]
        parts.append((codes, np.full(len(alive), number), alive))
    codes, numbers, rows = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort(codes.T[::-1])  # its primary key is the last
    codes = codes[order]
    begins = np.append(0, np.flatnonzero((codes[1:] != codes[:-1]).any(axis=1)) + 1)
    return codes, numbers[order], rows[order], begins, np.diff(begins, append=len(codes))
