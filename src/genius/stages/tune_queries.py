"""What ``genius tune`` asks: queries whose right answers are in the index, and what is there to be found."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from genius.config import SearchConfig
from genius.data.mbeir import MBeir
from genius.errors import BadData
from genius.index import Index
from genius.models.marks import measured
from genius.search.exact import exact_search, less, with_one
from genius.search.searcher import Evidence, Vectors, rank_items
from genius.search.segment import Segment
from genius.search.whole import everything
from genius.stages.evaluate import EvaluationConfig, embed_queries, judgements
from genius.stages.progress import Progress

FIRST: Final = 5
"""A query is answered when a right answer is among so many first hits."""


class Asked(NamedTuple):
    """Queries whose right answers are in the index."""

    fused: Float[Tensor, "queries dim"]
    evidence: Float[Tensor, "queries dim"]
    """In the space of what items are ordered by."""
    right: list[frozenset[tuple[int, int]]]
    """Part and item row of each right answer."""
    left_out: int

    def batches(self, size: int) -> Iterator[slice]:
        """So many at a time."""
        for start in range(0, len(self.right), size):
            yield slice(start, min(start + size, len(self.right)))


def answerable(
    index: Index,
    data: MBeir,
    rows: Sequence[str],
    settings: EvaluationConfig,
    *,
    rerank: Literal["codes", "embeddings"],
    progress: Progress,
) -> Asked:
    """The queries of these rows (none named: of all), less those whose right answers are not in the index.

    Raises
    ------
    BadData
        none is left.
    """
    is_raw = rerank == "embeddings" and index.opened.state.facts.embeddings == "raw"
    fused, evidence, right = [], [], []
    left_out = 0
    with tempfile.TemporaryDirectory() as folder:
        for row in data.rows(settings.split, names=rows):
            (queries,) = embed_queries(data, index.model, row, settings, Path(folder), progress)
            judged = judgements(row, queries.qids)
            wanted = [[did for did, grade in judged[qid].items() if grade > 0] for qid in queries.qids]
            places = _places(index.opened.segments, [did for own in wanted for did in own])
            for number, own in enumerate(wanted):
                there = frozenset(places[did] for did in own if did in places)
                if not there:
                    left_out += 1
                    continue
                right.append(there)
                fused.append(queries.fused[number])
                evidence.append((queries.raw if is_raw else queries.fused)[number])
    if not right:
        raise BadData(
            f"none of the {left_out} queries of {data.root} (split {settings.split}) has a right answer in "
            f"{index.folder}: its items need the ids of the data set's candidates; `genius index create "
            "INDEX --pool FILE` with a pool's .jsonl file of this data set makes such an index"
        )
    if left_out:
        progress.say(f"{left_out:,} queries are left out: their right answers are not in the index")
    return Asked(torch.stack(fused), torch.stack(evidence), right, left_out)


def is_found(
    right: frozenset[tuple[int, int]], parts: Int64[np.ndarray, " hits"], items: Int64[np.ndarray, " hits"]
) -> bool:
    """Whether a right answer is among the first hits."""
    first = zip(parts[:FIRST].tolist(), items[:FIRST].tolist(), strict=True)
    return not right.isdisjoint(first)


def order_everything(index: Index, asked: Asked, config: SearchConfig) -> float:
    """Share of queries with a right answer among the first when all items are ordered by the evidence."""
    opened = index.opened
    if config.rerank == "codes":
        beams, evidence = everything(opened.parts, 1), Evidence(index.model.ranker)
        answers = [
            rank_items(opened.parts, beams, 0, query, config=config, evidence=evidence, k=FIRST)
            for query in asked.evidence
        ]
        found = [
            is_found(right, answer.parts, answer.items)
            for right, answer in zip(asked.right, answers, strict=True)
        ]
        return sum(found) / len(found)
    is_crowded = bool(config.hubness) and opened.state.facts.embeddings == "fused"
    nearest = [
        _nearest(
            number,
            segment,
            vectors,
            asked.evidence,
            np.float32(config.hubness) * _densities(index, number) if is_crowded else None,
        )
        for number, (segment, vectors) in enumerate(zip(opened.segments, opened.vectors or (), strict=True))
    ]
    together = _Nearest(*(np.concatenate(columns, axis=1) for columns in zip(*nearest, strict=True)))
    order = np.argsort(-together.scores, axis=1, kind="stable")[:, :FIRST]
    parts = np.take_along_axis(together.parts, order, 1)
    items = np.take_along_axis(together.items, order, 1)
    return sum(map(is_found, asked.right, parts, items)) / len(order)


def _densities(index: Index, part: int) -> Float32[np.ndarray, " items"]:
    """How crowded it is around the items of a part; around their IDs, where no more is known."""
    if index.opened.densities is not None:
        return measured(index.opened.densities[part])
    table = index.opened.segments[part].table
    found: np.ndarray = index.model.ranker.densities(table.ids)[table.rows()]
    return found


class _Nearest(NamedTuple):
    """The best items of one part, for each query."""

    scores: np.ndarray
    parts: np.ndarray
    items: np.ndarray


def _nearest(
    number: int, segment: Segment, vectors: Vectors, queries: Tensor, costs: np.ndarray | None
) -> _Nearest:
    """By inner product, less what each item costs."""
    alive = segment.alive()
    rows = np.arange(segment.table.num_items) if alive is None else alive.nonzero()[0]
    if costs is None:
        found = exact_search(queries, lambda here: vectors(rows[here]), len(rows), k=FIRST)
    else:
        found = exact_search(
            with_one(queries), lambda here: less(vectors(rows[here]), costs[rows[here]]), len(rows), k=FIRST
        )
    return _Nearest(found.scores, np.full_like(found.items, number), rows[found.items])


def _places(segments: Sequence[Segment], dids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Part and row of those of these items that can be found."""
    places: dict[str, tuple[int, int]] = {}
    for number, segment in enumerate(segments):
        rows = segment.items.rows_by_id(dids)
        is_dead = segment.is_dead(np.fromiter(rows.values(), dtype=np.int64, count=len(rows)))
        here = zip(rows.items(), is_dead.tolist(), strict=True)
        places |= {did: (number, row) for (did, row), dead in here if not dead}
    return places
