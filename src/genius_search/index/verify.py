"""Verification of an index's files, and a description of its contents. No model is needed."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from genius_search.artifact import open_artifact
from genius_search.errors import ArtifactError, ArtifactMismatch, UsageError, plural
from genius_search.index.hubness import Hubness
from genius_search.index.items import ITEMS_FILE
from genius_search.index.snapshot import Snapshot, diagnose_corruption
from genius_search.index.store import (
    CODE_COSINE,
    CURRENT,
    DENSITIES,
    EMBEDDINGS,
    MOST_ATTEMPTS,
    REMEDY,
    SCALES,
    SEGMENTS,
    IndexManifest,
    Segment,
    check_deleted,
    check_segment,
    read_manifest,
)
from genius_search.index.writer import check_pictures, work_bytes
from genius_search.search.table import IdTable

ROWS: Final = 1 << 18
"""Number of table rows that are checked together."""
NAMES: Final = 50_000
"""Number of item ids that are looked up together."""


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
    """Verify every file of an index, which may be in use.

    Compares every file with its checksum, and checks that ID tables are sorted and complete, lists of deleted
    items are in range, item stores are intact and have as many items as the tables, ids are unique, and
    stored images are unchanged.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        A file is missing or damaged. The message names it and says what to do.
    UsageError
        The index changes faster than it can be read.
    """
    manifest = read_manifest(folder)
    for _ in range(MOST_ATTEMPTS):
        try:
            return _verify(folder, manifest)
        except (ArtifactError, OSError, sqlite3.Error):
            now = read_manifest(folder)
            if now == manifest:  # no writer removed it meanwhile
                raise
            manifest = now
    raise UsageError(
        f"{folder} changed {MOST_ATTEMPTS} times while it was read; verify it when it is quieter, or verify "
        "a copy"
    )


def _verify(folder: Path, manifest: IndexManifest) -> Verified:
    files = [folder / CURRENT]  # its own checksum is checked whenever it is read
    for entry in manifest.segments:
        place = folder / SEGMENTS / entry.name
        own = check_segment(place, manifest=entry.manifest, verify=True)
        for path in place.rglob("*"):
            if path.is_file() and path not in own:
                raise ArtifactMismatch(f"{path} is not part of the index; move it away")
        files += own + check_deleted(folder, entry)
    snapshot = Snapshot.load(folder, manifest)
    for segment in snapshot.segments:
        _check_table(segment.folder, segment.table)
        _check_items(segment)
    _check_unique(snapshot.segments)
    files += check_pictures(folder, snapshot.segments)
    if manifest.has_own_model:
        files += check_own_model(folder / manifest.model, manifest.model_fingerprint)
    alive = snapshot.num_alive
    return Verified(
        segments=len(snapshot.segments),
        items=alive,
        deleted=sum(segment.table.num_items for segment in snapshot.segments) - alive,
        files=len(files),
        bytes=sum(file.stat().st_size for file in files),
    )


def check_own_model(folder: Path, fingerprint: str) -> list[Path]:
    """Compare the files of a model inside an index with their checksums; return them."""
    from genius_search.model.file import MODEL_FILE, read_model_file  # noqa: PLC0415  imports torch

    model = read_model_file(folder)
    if model.fingerprint_of_parts() != fingerprint:
        raise ArtifactMismatch(f"{folder / MODEL_FILE} is not the model that assigned the IDs; {REMEDY}")
    for name in model.parts.keys() - {"encoder"}:
        manifest = open_artifact(folder / name, kind=name, verify=True)
        if manifest.fingerprint != model.parts[name].fingerprint:
            raise ArtifactMismatch(f"{folder / name} is not part of this model; {REMEDY}")
    return [path for path in folder.rglob("*") if path.is_file()]


def _check_table(folder: Path, table: IdTable) -> None:
    """Check that IDs are sorted and distinct, and that prefixes, buckets and items match them."""
    place = table.level_bounds[:-1].tolist()
    for rows, levels in _first_differences(folder, table):
        for level in range(table.num_levels):
            expected = rows[levels == level]
            found = table.starts[place[level] : place[level] + len(expected)]
            if not np.array_equal(found, expected):
                raise _wrong(folder / "starts.npy", f"prefixes of level {level} do not begin where it says")
            place[level] += len(expected)
    if place != table.level_bounds[1:].tolist():
        raise _wrong(folder / "level_bounds.npy", "its groups are not those of the IDs")
    bounds = table.bucket_starts
    if bounds[0] != 0 or bounds[-1] != table.num_items or not _is_rising(bounds):
        raise _wrong(folder / "bucket_starts.npy", "an ID without items, or items without an ID")
    if not _is_permutation(table.items):
        raise _wrong(folder / "items.npy", "an item is listed twice or not at all")


def _first_differences(folder: Path, table: IdTable) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the rows after the first, and the level at which each differs from the one before."""
    for start in range(1, len(table), ROWS):
        block = table.ids[start - 1 : start + ROWS]
        steps = block[1:].astype(np.int32) - block[:-1]
        levels = (steps != 0).argmax(axis=1)
        first = np.take_along_axis(steps, levels[:, None], axis=1)
        if (first <= 0).any() or block.min() < 0:
            raise _wrong(folder / "ids.npy", "IDs are not sorted and distinct")
        yield np.arange(start, start + len(steps)), levels


def _is_rising(numbers: Integer[np.ndarray, " rows"]) -> bool:
    return all(
        (
            numbers[start + 1 : start + ROWS + 1] > numbers[start : start + ROWS][: len(numbers) - start - 1]
        ).all()
        for start in range(0, len(numbers) - 1, ROWS)
    )


def _is_permutation(items: Integer[np.ndarray, " items"]) -> bool:
    if len(items) and not (items.min() >= 0 and items.max() < len(items)):
        return False
    seen = np.zeros(len(items), dtype=bool)
    for start in range(0, len(items), ROWS):
        seen[items[start : start + ROWS]] = True
    return bool(seen.all())


def _check_items(segment: Segment) -> None:
    """Check that the item store is intact and has rows 0, 1, … for the items of the table."""
    path = segment.folder / ITEMS_FILE
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            (answer,) = database.execute("PRAGMA integrity_check(1)").fetchone()
            count, low, high, others = database.execute(
                "SELECT COUNT(*), MIN(row), MAX(row), SUM('blob' IN (typeof(item_id), typeof(modality), "
                "typeof(text), typeof(image), typeof(source), typeof(stamp))) FROM items"
            ).fetchone()
    except sqlite3.DatabaseError as error:
        raise _wrong(path, str(error)) from None
    if answer != "ok":
        raise _wrong(path, answer)
    if others:
        raise _wrong(path, f"{others} items have bytes where texts belong")
    if (count, low, high) != (segment.table.num_items, 0, segment.table.num_items - 1):
        raise _wrong(path, f"it has {count} items (rows {low} … {high}), the table {segment.table.num_items}")


def _check_unique(segments: tuple[Segment, ...]) -> None:
    """Check that no id occurs in two segments; within one the item store ensures it."""
    for place, segment in enumerate(segments[1:], start=1):
        alive = segment.alive()
        ids = (item.id for item in segment.items.all())
        names = ids if alive is None else itertools.compress(ids, alive.tolist())
        while some := list(itertools.islice(names, NAMES)):
            for other in segments[:place]:
                found = other.items.rows_by_id(some)
                rows = np.fromiter(found.values(), dtype=np.int64, count=len(found))
                twice = np.flatnonzero(~other.is_dead(rows))
                if len(twice):
                    raise _wrong(
                        segment.folder / ITEMS_FILE,
                        f"item {list(found)[twice[0]]!r} is in segment {other.name} too",
                    )


def _wrong(path: Path, why: str) -> ArtifactMismatch:
    return ArtifactMismatch(f"{path} is damaged ({why}); {REMEDY}")


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
    """On disk, by part: ``ids`` (codes and prefixes), ``buckets`` (the items of each ID), ``typicality``,
    ``embeddings``, ``items`` (texts and fields), and ``deleted``: deleted items, until `genius index
    compact`."""
    embeddings: str
    """The stored embeddings and their type."""
    hubness: Hubness | None
    """The weight of densities and how it was measured; None if it is the default."""
    segments: list[SegmentInfo]
    work_bytes: int
    """Size of the temporary files of an interrupted or running `genius index add`."""


def describe(folder: Path, snapshot: Snapshot) -> IndexInfo:
    """Describe an open index.

    Raises
    ------
    ArtifactMismatch
        The index is damaged.
    """
    with diagnose_corruption(snapshot):
        return _describe(folder, snapshot)


def _describe(folder: Path, snapshot: Snapshot) -> IndexInfo:
    sizes = _bucket_sizes(snapshot.segments)
    manifest, count = snapshot.manifest, snapshot.num_alive
    return IndexInfo(
        folder=str(folder),
        model=manifest.model,
        model_fingerprint=manifest.model_fingerprint,
        generation=manifest.generation,
        items=count,
        by_modality={modality.value: number for modality, number in snapshot.count_by_modality().items()},
        distinct_ids=len(sizes),
        collision_rate=float(sizes[sizes > 1].sum() / max(1, count)),
        bytes_per_item=_bytes_per_item(snapshot.segments),
        embeddings=manifest.embeddings
        if manifest.embeddings == "none"
        else f"{manifest.embeddings}, {plural(manifest.embedding_bits, 'bit')} a number",
        hubness=manifest.hubness,
        segments=[
            SegmentInfo(segment.name, segment.table.num_items, len(segment.dead), len(segment.table))
            for segment in snapshot.segments
        ],
        work_bytes=work_bytes(folder),
    )


def _bucket_sizes(segments: Sequence[Segment]) -> Int64[np.ndarray, " ids"]:
    """Return the number of items with each ID, without deleted ones."""
    if len(segments) == 1 and not len(segments[0].dead):
        return np.diff(segments[0].table.bucket_starts).astype(np.int64)
    found = [np.zeros((0, segments[0].table.num_levels if segments else 1), dtype=np.int16)]
    for segment in segments:
        table, alive = segment.table, segment.alive()
        codes = np.repeat(table.ids, np.diff(table.bucket_starts), axis=0)
        found.append(codes if alive is None else codes[alive[table.items]])
    codes = np.concatenate(found)
    table = IdTable.build(codes, np.zeros(len(codes), dtype=np.float16))
    return np.diff(table.bucket_starts).astype(np.int64)


def _bytes_per_item(segments: Sequence[Segment]) -> dict[str, float]:
    parts = dict.fromkeys(("ids", "buckets", "typicality", "embeddings", "items", "deleted"), 0.0)
    for segment in segments:
        table = segment.table
        sizes = {
            "ids": table.nbytes,
            "buckets": table.bucket_starts.nbytes + table.items.nbytes,
            "typicality": _size(segment.folder / CODE_COSINE),
            "embeddings": sum(_size(segment.folder / name) for name in (EMBEDDINGS, SCALES, DENSITIES)),
            "items": _size(segment.folder / ITEMS_FILE),
        }
        share = segment.num_alive / max(1, table.num_items)
        for part, size in sizes.items():
            parts[part] += size * share
            parts["deleted"] += size * (1 - share)
    count = max(1, sum(segment.num_alive for segment in segments))
    return {part: size / count for part, size in parts.items()}


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
