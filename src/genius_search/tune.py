"""``genius tune``: choose an index's router, beam, candidates and generator weight by validation queries."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
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
from genius_search.data.mbeir import MBeir, read_judgements, read_queries
from genius_search.embed_mbeir import embed_queries
from genius_search.errors import BadData, UsageError
from genius_search.index.index import Index
from genius_search.index.query import evidence_of
from genius_search.index.settings import Tuned
from genius_search.index.snapshot import Snapshot
from genius_search.nn.columns import decode_densities
from genius_search.progress import Progress
from genius_search.records import TASKS, Modality, Query
from genius_search.search.exact import append_bias, append_one, exact_search
from genius_search.search.fast import Wanted
from genius_search.search.find import find
from genius_search.search.rank import Evidence, Vectors, all_ids, rank_items

FIRST: Final = 5
"""A query is answered when a right answer is among this many first hits."""
K: Final = 10
"""Hits of a search that does not name a number; no beam is narrower."""
NOISE: Final = 0.05
"""Share by which measured times differ without a reason."""


class ValidationQueries(NamedTuple):
    """Queries of a data set whose right answers are in an index."""

    fused: Float[Tensor, "queries dim"]
    evidence: Float[Tensor, "queries dim"]
    """Embeddings in the space that items are ordered in."""
    right: list[frozenset[tuple[int, int]]]
    """Segment and row of each right answer."""
    queries: list[Query]
    wanted: list[Modality]
    """Modality of each query's right answers."""
    left_out: int
    """Queries whose right answers are not in the index."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Choice of the queries that an index is measured with."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    split: str = "val"
    """Split of the data set."""

    rows: tuple[str, ...] = ()
    """Rows of the data set, named as in its files; none means all."""

    queries: Natural = 0
    """At most this many queries of each row, spread evenly; 0 means all."""

    batch: Count = 32
    """Queries searched together."""

    seed: Natural = 0
    """Seed of the choice of instructions."""


def validation_queries(
    index: Index,
    data: MBeir,
    config: ValidationConfig,
    *,
    rerank: Literal["codes", "embeddings"],
    progress: Progress,
) -> ValidationQueries:
    """Embed the queries that have a right answer in the index.

    Raises
    ------
    BadData
        no query has one.
    """
    is_raw = rerank == "embeddings" and index.snapshot.manifest.embeddings == "raw"
    fused, evidence, right, queries, wanted = [], [], [], [], []
    left_out = 0
    with tempfile.TemporaryDirectory() as folder:
        for row in data.rows(config.split, names=config.rows):
            ((qids, features),) = embed_queries(
                data,
                index.model.encoder,
                row,
                Path(folder),
                instructions="hashed" if index.model.instructions else "none",
                max_queries=config.queries,
                seed=config.seed,
                progress=progress,
            )
            embeddings = index.model.embed(features)
            in_evidence = F.normalize(features.total(), dim=-1) if is_raw else embeddings
            judged = read_judgements(row, qids)
            positives = [[did for did, grade in judged[qid].items() if grade > 0] for qid in qids]
            by_id = {query.qid: query for query in read_queries(row.queries)}
            places = _places(index.snapshot, [did for own in positives for did in own])
            for number, own in enumerate(positives):
                found = frozenset(places[did] for did in own if did in places)
                if not found:
                    left_out += 1
                    continue
                right.append(found)
                queries.append(by_id[qids[number]])
                wanted.append(TASKS[row.task_id][1])
                fused.append(embeddings[number])
                evidence.append(in_evidence[number])
    if not right:
        raise BadData(
            f"none of the {left_out} queries of {data.root} (split {config.split}) has a right answer in "
            f"{index.folder}: its items need the ids of the data set's candidates; `genius index create "
            "INDEX --pool FILE` with a pool's .jsonl file of this data set makes such an index"
        )
    if left_out:
        progress.say(f"{left_out:,} queries are left out: their right answers are not in the index")
    return ValidationQueries(torch.stack(fused), torch.stack(evidence), right, queries, wanted, left_out)


def _places(snapshot: Snapshot, dids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return segment and row of those of these items that are alive."""
    places: dict[str, tuple[int, int]] = {}
    for number, segment in enumerate(snapshot.segments):
        rows = segment.items.rows_by_id(dids)
        is_dead = segment.is_dead(np.fromiter(rows.values(), dtype=np.int64, count=len(rows)))
        places |= {
            did: (number, row)
            for (did, row), dead in zip(rows.items(), is_dead.tolist(), strict=True)
            if not dead
        }
    return places


def is_found(
    right: frozenset[tuple[int, int]], segments: Int64[np.ndarray, " hits"], items: Int64[np.ndarray, " hits"]
) -> bool:
    """Return whether a right answer is among the first hits."""
    return not right.isdisjoint(zip(segments[:FIRST].tolist(), items[:FIRST].tolist(), strict=True))


def exhaustive_recall(index: Index, queries: ValidationQueries, config: SearchConfig) -> float:
    """Return R@5 when all items are ordered by the evidence: the ceiling of any beam."""
    snapshot = index.snapshot
    if config.rerank == "codes":
        beams, evidence = all_ids(snapshot.search_segments, 1), Evidence(index.model.ranker)
        rankings = [
            rank_items(snapshot.search_segments, beams, 0, query, config=config, evidence=evidence, k=FIRST)
            for query in queries.evidence
        ]
        found = [
            is_found(right, one.segments, one.items)
            for right, one in zip(queries.right, rankings, strict=True)
        ]
        return sum(found) / len(found)
    with_density = bool(config.density_weight) and snapshot.manifest.embeddings == "fused"
    wanted = append_one(queries.evidence) if with_density else queries.evidence
    scores, segments, items = [], [], []
    for number, (segment, vectors) in enumerate(zip(snapshot.segments, snapshot.vectors or (), strict=True)):
        alive = segment.alive()
        rows = np.arange(segment.table.num_items) if alive is None else alive.nonzero()[0]
        read: Vectors = vectors
        if with_density:
            stored = None if snapshot.densities is None else decode_densities(snapshot.densities[number])
            of_ids = index.model.ranker.densities
            density = of_ids(segment.table.ids)[segment.table.rows()] if stored is None else stored
            read = _with_costs(vectors, density, config)
        best = exact_search(wanted, lambda own: read(rows[own]), len(rows), k=FIRST)  # noqa: B023  called at once
        scores.append(best.scores)
        segments.append(np.full_like(best.items, number))
        items.append(rows[best.items])
    order = np.argsort(-np.concatenate(scores, axis=1), axis=1, kind="stable")[:, :FIRST]
    first_segments = np.take_along_axis(np.concatenate(segments, axis=1), order, 1)
    first_items = np.take_along_axis(np.concatenate(items, axis=1), order, 1)
    return sum(map(is_found, queries.right, first_segments, first_items)) / len(order)


def _with_costs(vectors: Vectors, density: Float32[np.ndarray, " items"], config: SearchConfig) -> Vectors:
    """Return a reader of vectors with one more number, by which density lowers their scores."""
    costs = np.float32(config.density_weight) * density
    return lambda rows: append_bias(vectors(rows), costs[rows])


@dataclass(frozen=True, kw_only=True)
class TuneConfig(ValidationConfig):
    """The objective, and the settings to try."""

    recall: Annotated[float, Gt(0), Le(1)] | None = None
    """Take the cheapest settings that find this share of what ordering all items by the same evidence finds
    (R@5)."""

    milliseconds: Annotated[float, Gt(0)] | None = None
    """Take the best settings within this many CPU-milliseconds a query. Give this or ``recall``."""

    rerank: Literal["codes", "embeddings"] = "codes"
    """The evidence that orders items."""

    queries: Count = 300
    """At most this many queries of each row, spread evenly."""

    batch: Count = 64
    """Queries searched together; with 1 the time is that of single searches."""

    beams: tuple[Count, ...] = (10, 20, 50, 100)
    candidates: tuple[Natural, ...] = (0, 150, 300, 600, 1200, 2500, 5000)
    """Leaf budgets; 0 decodes all levels."""
    generator_weights: tuple[NonNegative, ...] = (0.0, 0.003, 0.01, 0.03, 0.1)
    """Tried with each other; one weight is chosen for all, since single settings would choose by luck."""

    @property
    def objective(self) -> str:
        """The objective in words."""
        return f"{self.milliseconds:g} CPU-ms" if self.recall is None else f"recall {self.recall:g}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Settings and their measurements."""

    search: SearchConfig
    recall: float
    """R@5."""
    share: float
    """Share of the recall of ordering all items."""
    touched: float
    """Items that were ordered, on average."""
    cpu_ms: float
    """CPU-milliseconds a query, without the encoder."""


class TuneResult(NamedTuple):
    """The chosen settings; the index is unchanged."""

    best: Tuned
    tried: list[Trial]
    """One for each router, beam and leaf budget; the generator's, if there is one, with the weight that was
    chosen."""
    ceiling: float
    """R@5 of ordering all items by the evidence."""
    left_out: int
    """Queries whose right answers are not in the index."""


def tune(index: Index, data: MBeir, config: TuneConfig, *, progress: Progress) -> TuneResult:
    """Measure settings on an index and choose; the data set's candidate ids are the item ids.

    Recall is measured against what the same evidence finds when it orders every item: no beam can do better
    but by luck, and the loss by quantization is not the search's.

    Raises
    ------
    UsageError
        neither or both of recall and milliseconds are given; no settings are good enough; the evidence is
        not in the index.
    BadData
        no query of the split has a right answer in the index.
    """
    config = checked(config)
    if (config.recall is None) is (config.milliseconds is None):
        raise UsageError("give either a recall to reach or the milliseconds a query may take")
    if not (config.beams and config.candidates and config.generator_weights):
        raise UsageError("beams, candidates and generator weights: name at least one of each to try")
    if config.rerank == "embeddings" and index.snapshot.manifest.embeddings == "none":
        raise UsageError(f"{index.folder} stores no embeddings; tune it for --rerank codes")
    queries = validation_queries(index, data, config, rerank=config.rerank, progress=progress)
    ceiling = exhaustive_recall(index, queries, SearchConfig(rerank=config.rerank))
    if not ceiling:
        raise BadData(
            f"even with all items ordered by {config.rerank}, none of {len(queries.right)} queries has a "
            f"right answer among its first {FIRST}: this model was not trained for such queries"
        )
    trials = _measure(index, queries, config, ceiling, progress)
    recalls: dict[float, float] = {}
    for one in trials:
        if one.search.router == "generator":
            weight = one.search.generator_weight
            recalls[weight] = recalls.get(weight, 0.0) + one.recall
    weight = max(recalls, key=lambda weight: (recalls[weight], -weight), default=0.0)
    tried = sorted(
        (one for one in trials if one.search.router == "geometry" or one.search.generator_weight == weight),
        key=lambda one: one.cpu_ms,
    )
    best = _choose(tried, config)
    tuned = Tuned(
        search=best.search,
        wish=config.objective,
        data=f"{data.name} {config.split}",
        queries=len(queries.right),
        items=index.snapshot.num_alive,
        recall=best.recall,
        share=best.share,
        cpu_ms=best.cpu_ms,
    )
    return TuneResult(tuned, tried, ceiling, queries.left_out)


def _measure(
    index: Index, queries: ValidationQueries, config: TuneConfig, ceiling: float, progress: Progress
) -> list[Trial]:
    """Measure every setting, in turns, a batch of queries at a time; the first batch warms up."""
    snapshot = index.snapshot
    weights = config.generator_weights if config.rerank == "codes" else (0.0,)
    evidence = evidence_of(index.model, snapshot)
    usual = dataclasses.replace(index.model.usual_search(snapshot.num_alive), rerank=config.rerank)
    routes = [
        usual,
        *(
            SearchConfig(beam=beam, candidates=candidates, rerank=config.rerank, router="geometry")
            for beam in config.beams
            for candidates in config.candidates
        ),
    ]
    sums = {route: np.zeros(3) for route in routes if not index.model.uses_generator(route)}
    if index.model.has_generator:
        sums |= {
            dataclasses.replace(route, router="generator", generator_weight=weight): np.zeros(3)
            for route in routes
            for weight in weights
        }
    batches = [slice(start, start + config.batch) for start in range(0, len(queries.right), config.batch)]
    progress.begin("tune", len(batches) + 1)
    for turn, own in enumerate([batches[0], *batches]):
        embeddings, right = queries.fused[own].numpy(), queries.right[own]
        evidence_queries = list(queries.evidence[own].numpy())
        for setting in sums:
            began = time.process_time()
            answers = find(
                lambda: index.model.decoder_for(setting),  # noqa: B023  called at once
                index.model.fast_for(setting),
                snapshot.search_segments,
                embeddings,
                [Wanted(max(setting.beam, K), K)] * len(right),
                setting,
                evidence=evidence,
                embeddings=evidence_queries,
            )
            seconds = time.process_time() - began
            rankings = [answer.ranking for answer in answers]
            hits = sum(
                is_found(wanted, one.segments, one.items) for wanted, one in zip(right, rankings, strict=True)
            )
            if turn:
                sums[setting] += (hits, sum(one.touched for one in rankings), seconds)
        progress.advance(turn + 1, {})
    means = {setting: (total / len(queries.right)).tolist() for setting, total in sums.items()}
    return [
        Trial(search=setting, recall=recall, share=recall / ceiling, touched=touched, cpu_ms=1000 * seconds)
        for setting, (recall, touched, seconds) in means.items()
    ]


def _choose(tried: Sequence[Trial], config: TuneConfig) -> Trial:
    """Return the cheapest trial that is good enough, or the best that is cheap enough.

    Among several that take about as long (:data:`NOISE`) the best wins, among equal ones the least budget.
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


def _best(tried: Sequence[Trial]) -> Trial:
    return max(
        tried,
        key=lambda one: (one.share, one.search.candidates > 0, -one.search.candidates, -one.search.beam),
    )
