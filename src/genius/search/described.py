"""What an index holds, and what each part of it costs; no model is needed to say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from genius.data.records import Modality
from genius.search.damage import naming_damage
from genius.search.items import ITEMS_FILE
from genius.search.segment import DENSITIES, EMBEDDINGS, SCALES, TYPICALITY, Segment
from genius.search.state import IndexState
from genius.search.table import IdTable
from genius.search.tuned import Tuned
from genius.search.work import work_bytes


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One of the parts that an index is stored in."""

    name: str
    items: int
    """Deleted ones included."""
    deleted: int
    ids: int


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """What an index holds."""

    folder: str
    model: str
    model_fingerprint: str
    generation: int
    """How often it has changed."""
    items: int
    by_modality: dict[str, int]
    distinct_ids: int
    collision_rate: float
    """Share of the items whose ID is shared."""
    bytes_per_item: dict[str, float]
    """On disk, by part: ``ids`` (codes, and where prefixes begin), ``buckets`` (which items each ID stands
    for), ``typicality``, ``embeddings``, ``items`` (the store of texts and fields), and ``deleted``: what
    deleted items still take until `genius index compact`."""
    embeddings: str
    """What is stored for re-ranking, and how."""
    tuned: Tuned | None
    """How it is searched unless one says otherwise, as `genius tune` chose it."""
    segments: list[SegmentInfo]
    work_bytes: int
    """What a `genius index add` that was killed, or is running, keeps to go on from."""


def describe(folder: Path, state: IndexState) -> IndexInfo:
    """Describe an open state of the index in a folder.

    Raises
    ------
    ArtifactMismatch
        it is damaged.
    """
    with naming_damage(folder):
        return _described(folder, state)


def _described(folder: Path, state: IndexState) -> IndexInfo:
    sizes = _bucket_sizes(state.segments)
    facts, count = state.facts, state.num_alive
    return IndexInfo(
        folder=str(folder),
        model=facts.model,
        model_fingerprint=facts.model_fingerprint,
        generation=state.generation,
        items=count,
        by_modality={
            modality.label: number for modality, number in count_by_modality(state.segments).items()
        },
        distinct_ids=len(sizes),
        collision_rate=float(sizes[sizes > 1].sum() / max(1, count)),
        bytes_per_item=_bytes_per_item(state.segments),
        embeddings=facts.embeddings
        if facts.embeddings == "none"
        else f"{facts.embeddings}, {facts.embedding_type}",
        tuned=state.tuned,
        segments=[
            SegmentInfo(segment.name, segment.table.num_items, len(segment.dead), len(segment.table))
            for segment in state.segments
        ],
        work_bytes=work_bytes(folder),
    )


def count_by_modality(segments: Sequence[Segment]) -> dict[Modality, int]:
    """How many items of each modality are alive; none that has none."""
    counts: Counter[Modality] = Counter()
    for segment in segments:
        counts.update(segment.items.count_by_modality())
        counts.subtract(Counter(item.modality for item in segment.items.get(segment.dead.tolist())))
    return {modality: count for modality, count in counts.items() if count}


def _bucket_sizes(segments: Sequence[Segment]) -> Int64[np.ndarray, " ids"]:
    """How many items that are alive share each ID."""
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
            "typicality": _size(segment.folder / TYPICALITY),
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
