"""``genius tune``: choose beam, candidates and generator weight for an index by validation queries."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import numpy as np
import torch
from annotated_types import Gt, Le
from jaxtyping import Float, Float32, Int64
from pydantic import ConfigDict
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import Count, Natural, NonNegative, SearchConfig, checked
from genius_search.data.mbeir import MBeir, read_judgements
from genius_search.embed import embed_queries
from genius_search.errors import BadData, UsageError
from genius_search.index.index import Index
from genius_search.index.settings import Tuned
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import Segment
from genius_search.nn.density import decode_densities
from genius_search.progress import Progress
from genius_search.search.beam import Beams, search
from genius_search.search.rank import (
    Evidence,
    Vectors,
    all_ids,
    append_bias,
    append_one,
    exact_search,
    rank_items,
)

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
    *,
    split: str,
    max_queries: int,
    seed: int,
    rerank: Literal["codes", "embeddings"],
    progress: Progress,
) -> Asked:
    """The queries of these rows (none named: of all), less those whose right answers are not in the index.

    Raises
    ------
    BadData
        none is left.
    """
    is_raw = rerank == "embeddings" and index.snapshot.manifest.embeddings == "raw"
    fused, evidence, right = [], [], []
    left_out = 0
    with tempfile.TemporaryDirectory() as folder:
        for row in data.rows(split, names=rows):
            ((qids, features),) = embed_queries(
                data,
                index.model.encoder,
                row,
                Path(folder),
                max_queries=max_queries,
                seed=seed,
                progress=progress,
            )
            embeddings = index.model.embed(features)
            in_evidence = F.normalize(features.total(), dim=-1) if is_raw else embeddings
            judged = read_judgements(row, qids)
            wanted = [[did for did, grade in judged[qid].items() if grade > 0] for qid in qids]
            places = _places(index.snapshot.segments, [did for own in wanted for did in own])
            for number, own in enumerate(wanted):
                there = frozenset(places[did] for did in own if did in places)
                if not there:
                    left_out += 1
                    continue
                right.append(there)
                fused.append(embeddings[number])
                evidence.append(in_evidence[number])
    if not right:
        raise BadData(
            f"none of the {left_out} queries of {data.root} (split {split}) has a right answer in "
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
    opened = index.snapshot
    if config.rerank == "codes":
        beams, evidence = all_ids(opened.parts, 1), Evidence(index.model.ranker)
        answers = [
            rank_items(opened.parts, beams, 0, query, config=config, evidence=evidence, k=FIRST)
            for query in asked.evidence
        ]
        found = [
            is_found(right, answer.parts, answer.items)
            for right, answer in zip(asked.right, answers, strict=True)
        ]
        return sum(found) / len(found)
    is_crowded = bool(config.density_weight) and opened.manifest.embeddings == "fused"
    nearest = [
        _nearest(
            number,
            segment,
            vectors,
            asked.evidence,
            np.float32(config.density_weight) * _densities(index, number) if is_crowded else None,
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
    if index.snapshot.densities is not None:
        return decode_densities(index.snapshot.densities[part])
    table = index.snapshot.segments[part].table
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
            append_one(queries),
            lambda here: append_bias(vectors(rows[here]), costs[rows[here]]),
            len(rows),
            k=FIRST,
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


K: Final = 10
"""Hits asked for, as a search does that does not say how many; no beam is narrower."""
BEAMS: Final = (10, 20, 50, 100)
CANDIDATES: Final = (0, 150, 300, 600, 1200, 2500, 5000)
"""0 decodes all levels."""
GENERATOR_WEIGHTS: Final = (0.0, 0.003, 0.01, 0.03, 0.1)
NOISE: Final = 0.05
"""By which measured times differ without a reason."""


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What is wanted, and what is tried."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    recall: Annotated[float, Gt(0), Le(1)] | None = None
    """The cheapest settings that find so much of what ordering all items by the same evidence finds (R@5)."""

    milliseconds: Annotated[float, Gt(0)] | None = None
    """The best settings that take at most so many CPU-milliseconds a query. One of the two has to be said."""

    rerank: Literal["codes", "embeddings"] = "codes"
    """The evidence."""

    split: str = "val"
    """Of the data set."""

    rows: tuple[str, ...] = ()
    """Of the data set, named as in its files; none named means all."""

    queries: Count = 300
    """Of each row at most so many, spread evenly."""

    batch: Count = 64
    """Queries asked together; with 1 the time is that of single searches."""

    beams: tuple[Count, ...] = BEAMS
    candidates: tuple[Natural, ...] = CANDIDATES
    generator_weights: tuple[NonNegative, ...] = GENERATOR_WEIGHTS
    """Tried with each other; one weight is chosen for all, since single settings would choose by luck."""

    seed: Natural = 0
    """Of the choice of instructions."""

    @property
    def wish(self) -> str:
        """In words."""
        if self.recall is not None:
            return f"recall {self.recall:g}"
        return f"{self.milliseconds:g} CPU-ms"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Settings, and what they did."""

    search: SearchConfig
    recall: float
    """R@5."""
    share: float
    """Of what ordering all items finds."""
    touched: float
    """Items that were ordered, on average."""
    cpu_ms: float
    """Of a query, without the encoder."""


class TuneResult(NamedTuple):
    """What was found; nothing has been changed yet."""

    best: Tuned
    tried: list[Tried]
    """One for each beam and leaf budget, with the generator weight that was chosen."""
    ceiling: float
    """R@5 of ordering all items by the evidence."""
    left_out: int
    """Queries whose right answers are not in the index."""


def tune(index: Index, data: MBeir, config: TuneConfig, *, progress: Progress) -> TuneResult:
    """Measure settings on the index's own items, and choose; the data set's candidate ids are the item ids.

    Recall is measured against what the same evidence finds when it orders every item: no beam can do better
    but by luck, and what quantization costs is not the search's doing.

    Raises
    ------
    UsageError
        neither or both of recall and milliseconds are asked for; no settings are good enough; the evidence is
        not in the index.
    BadData
        no query of the split has a right answer in the index.
    """
    config = checked(config)
    if (config.recall is None) is (config.milliseconds is None):
        raise UsageError("say either what recall is wanted or how many milliseconds a query may take")
    if not (config.beams and config.candidates and config.generator_weights):
        raise UsageError("beams, candidates and generator weights: name at least one of each to try")
    opened = index.snapshot
    stored = opened.manifest.embeddings
    if config.rerank == "embeddings" and stored == "none":
        raise UsageError(f"{index.folder} stores no embeddings; tune it for --rerank codes")
    asked = answerable(
        index,
        data,
        config.rows,
        split=config.split,
        max_queries=config.queries,
        seed=config.seed,
        rerank=config.rerank,
        progress=progress,
    )
    ceiling = order_everything(index, asked, SearchConfig(rerank=config.rerank))
    if not ceiling:
        raise BadData(
            f"even with all items ordered by {config.rerank}, none of {len(asked.right)} queries has a right "
            f"answer among its first {FIRST}: this model was not trained for such queries"
        )
    weights = config.generator_weights if config.rerank == "codes" else (0.0,)
    found = _measure(index, opened, asked, config, weights, ceiling, progress)
    by_weight = {
        weight: [one for one in found if one.search.generator_weight == weight] for weight in weights
    }
    chosen = max(by_weight, key=lambda weight: (sum(one.recall for one in by_weight[weight]), -weight))
    tried = sorted(by_weight[chosen], key=lambda one: one.cpu_ms)
    best = _choose(tried, config)
    tuned = Tuned(
        search=best.search,
        wish=config.wish,
        data=f"{data.name} {config.split}",
        queries=len(asked.right),
        items=opened.num_alive,
        recall=best.recall,
        share=best.share,
        cpu_ms=best.cpu_ms,
    )
    return TuneResult(tuned, tried, ceiling, asked.left_out)


def _measure(
    index: Index,
    opened: Snapshot,
    asked: Asked,
    config: TuneConfig,
    weights: Sequence[float],
    ceiling: float,
    progress: Progress,
) -> list[Tried]:
    """Every setting, in turns, a batch of queries at a time; the first batch once more, for nothing."""
    routes = [
        SearchConfig(beam=beam, candidates=candidates, rerank=config.rerank)
        for beam in config.beams
        for candidates in config.candidates
    ]
    settings = [dataclasses.replace(route, generator_weight=weight) for route in routes for weight in weights]
    tallies = {setting: _Tally() for setting in settings}
    batches = list(asked.batches(config.batch))
    progress.begin("tune", len(batches) + 1)
    for turn, here in enumerate([batches[0], *batches]):
        for route in routes:
            began = time.process_time()
            beams = search(
                index.model.decoder,
                opened.parts,
                asked.fused[here],
                route,
                widths=[max(route.beam, K)] * (here.stop - here.start),
            )
            took = time.process_time() - began
            for weight in weights:
                setting = dataclasses.replace(route, generator_weight=weight)
                one = _rank(index, opened, asked, beams, here, setting)
                if turn:
                    tallies[setting] = tallies[setting].plus(one, took)
        progress.advance(turn + 1, {})
    count = len(asked.right)
    return [
        Tried(
            search=setting,
            recall=tally.found / count,
            share=tally.found / count / ceiling,
            touched=tally.touched / count,
            cpu_ms=1000 * tally.seconds / count,
        )
        for setting, tally in tallies.items()
    ]


class _Tally(NamedTuple):
    """What settings have done so far."""

    found: int = 0
    touched: int = 0
    seconds: float = 0.0

    def plus(self, other: _Tally, seconds: float) -> _Tally:
        """Both together, and so much more time."""
        return _Tally(
            self.found + other.found, self.touched + other.touched, self.seconds + other.seconds + seconds
        )


def _rank(
    index: Index, opened: Snapshot, asked: Asked, beams: Beams, here: slice, setting: SearchConfig
) -> _Tally:
    """Order what is under the beams of some queries."""
    is_raw = opened.manifest.embeddings == "raw"
    evidence = Evidence(index.model.ranker, opened.vectors, is_raw, opened.densities)
    began = time.process_time()
    answers = [
        rank_items(opened.parts, beams, number, query, config=setting, evidence=evidence, k=K)
        for number, query in enumerate(asked.evidence[here])
    ]
    seconds = time.process_time() - began
    found = sum(
        is_found(right, answer.parts, answer.items)
        for right, answer in zip(asked.right[here], answers, strict=True)
    )
    return _Tally(found, sum(answer.touched for answer in answers), seconds)


def _choose(tried: Sequence[Tried], config: TuneConfig) -> Tried:
    """The cheapest that is good enough, or the best that is cheap enough.

    Of several that take about as long (:data:`NOISE`) the best, and of equal ones that with the least budget.
    """
    if config.recall is not None:
        enough = [one for one in tried if one.share >= config.recall]
        if enough:
            limit = (1 + NOISE) * min(one.cpu_ms for one in enough)
            return _best([one for one in enough if one.cpu_ms <= limit])
        best = max(tried, key=lambda one: (one.share, -one.cpu_ms))
        raise UsageError(
            f"no settings reach {config.recall:g} of what ordering all items by {config.rerank} finds; the "
            f"best reach {best.share:.3f} (beam {best.search.beam}, candidates {best.search.candidates}): "
            "ask for less with --recall"
        )
    limit = config.milliseconds or 0.0
    quick = [one for one in tried if one.cpu_ms <= limit]
    if quick:
        most = max(one.share for one in quick)
        cheapest = min(one.cpu_ms for one in quick if one.share == most)
        return _best([one for one in quick if one.cpu_ms <= (1 + NOISE) * cheapest])
    fastest = min(tried, key=lambda one: one.cpu_ms)
    raise UsageError(
        f"no settings take at most {limit:g} CPU-ms a query; the quickest take {fastest.cpu_ms:.2g}: ask for "
        "more with --milliseconds"
    )


def _best(tried: Sequence[Tried]) -> Tried:
    return max(
        tried,
        key=lambda one: (one.share, one.search.candidates > 0, -one.search.candidates, -one.search.beam),
    )
