"""Ask every way the same queries in turns, a batch at a time; count right answers, candidates and time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from genius.bench.quality_ground import Batch, Ground, Task
from genius.bench.quality_tables import MethodRow
from genius.bench.quality_ways import HITS, LINES, Direct, Routed, Rows
from genius.evaluation.measures import evaluate
from genius.evaluation.runs import Hit, Run
from genius.search.beam import Beams
from genius.search.searcher import rank_items

KS = (1, 5, 10)


@dataclass
class _Tally:
    """What one way has found so far."""

    items: Rows = field(default_factory=list)
    touched: int = 0
    levels: int = 0
    route_seconds: float = 0.0
    rank_seconds: float = 0.0


def measure(ground: Ground, task: Task, ways: Sequence[Routed], others: Sequence[Direct]) -> list[MethodRow]:
    """A row for each way and each of its orders. The first batch is asked once more beforehand, untimed."""
    found: dict[str, _Tally] = {}
    batches = list(task.batches())
    for number, batch in enumerate([*batches[:1], *batches]):
        if number == 1:
            found.clear()
        for other in others:
            _ask(found.setdefault(other.name, _Tally()), other, batch)
        for way in ways:
            _route(found, ground, way, batch)
    rows = [
        _row(
            ground,
            task,
            found[other.name],
            method=other.name,
            line=other.line,
            code_bytes=other.code_bytes,
            stored_bytes=other.stored_bytes,
            lists=other.lists,
        )
        for other in others
    ]
    for way in ways:
        for order in way.orders:
            is_by_vectors = order.rerank == "embeddings"
            vectors = ground.vector_bytes + 1 if is_by_vectors else 0.0  # with a byte of density
            rows.append(
                _row(
                    ground,
                    task,
                    found[way.called(order)],
                    method=way.called(order),
                    line=LINES.get((way.router, order.rerank), ""),
                    code_bytes=ground.code_bytes + vectors,
                    stored_bytes=ground.stored_bytes + vectors,
                    router=way.router,
                    order=order.rerank,
                    beam=way.beam,
                    leaves=way.leaves,
                )
            )
    return rows


def _ask(tally: _Tally, other: Direct, batch: Batch) -> None:
    began = time.process_time()
    answered = other.find(batch)
    tally.rank_seconds += time.process_time() - began
    tally.items += answered.items
    tally.touched += answered.touched


def _route(found: dict[str, _Tally], ground: Ground, way: Routed, batch: Batch) -> None:
    began = time.process_time()
    beams = way.route(batch.fused)
    took = time.process_time() - began
    for order in way.orders:
        tally = found.setdefault(way.called(order), _Tally())
        began = time.process_time()
        answers = [
            rank_items(ground.parts, beams, number, query, config=order, evidence=ground.evidence, k=HITS)
            for number, query in enumerate(batch.fused)
        ]
        tally.rank_seconds += time.process_time() - began
        tally.route_seconds += took
        tally.items += [answer.items for answer in answers]
        tally.touched += sum(answer.touched for answer in answers)
        tally.levels += levels_decoded(beams)


def levels_decoded(beams: Beams) -> int:
    """Of all queries together, the modality's level included."""
    return int(np.isfinite(beams.log_probabilities).any(axis=1).sum())


def _row(
    ground: Ground,
    task: Task,
    tally: _Tally,
    *,
    method: str,
    line: str,
    code_bytes: float,
    stored_bytes: float,
    router: str = "",
    order: str = "",
    beam: int = 0,
    leaves: int = 0,
    lists: int = 0,
) -> MethodRow:
    count = len(task.queries.qids)
    recall = hit_rates(ground, task, tally.items)
    return MethodRow(
        task=task.name,
        queries=count,
        pool_size=len(ground),
        method=method,
        line=line,
        router=router,
        order=order,
        beam=beam,
        leaves=leaves,
        lists=lists,
        recall_1=recall[1],
        recall_5=recall[5],
        recall_10=recall[10],
        code_bytes=code_bytes,
        stored_bytes=stored_bytes,
        touched=tally.touched / count,
        touched_share=tally.touched / count / len(ground),
        levels=tally.levels / count if router else None,
        route_ms=1000 * tally.route_seconds / count,
        rank_ms=1000 * tally.rank_seconds / count,
    )


def hit_rates(ground: Ground, task: Task, items: Rows) -> dict[int, float]:
    """M-BEIR's R@k of these item rows; ranks for scores, since what counts is the order."""
    hits = {
        qid: [Hit(ground.did(int(item)), -float(rank)) for rank, item in enumerate(rows)]
        for qid, rows in zip(task.queries.qids, items, strict=True)
    }
    return dict(evaluate(task.qrels, Run("quality", hits), ks=KS).hit_rate)
