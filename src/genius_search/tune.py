"""``genius tune``: choose an index's router, beam, candidates and generator weight by validation queries."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from annotated_types import Gt, Le
from jaxtyping import Float, Float32, Float64, Int64
from pydantic import ConfigDict
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import Count, Natural, NonNegative, SearchConfig, checked
from genius_search.data.mbeir import MBeir, read_judgements, read_queries
from genius_search.embed_mbeir import embed_queries
from genius_search.errors import BadData, UsageError
from genius_search.index.index import Index
from genius_search.index.query import evidence_of, vectors_at
from genius_search.index.settings import KindChoice, Tuned
from genius_search.index.snapshot import Location, Snapshot
from genius_search.nn.columns import decode_densities
from genius_search.progress import Progress
from genius_search.records import TASKS, Modality, Query
from genius_search.search.exact import append_bias, append_one, exact_search
from genius_search.search.find import find
from genius_search.search.rank import Found, Vectors, Wanted

FIRST: Final = 5
"""A query is answered when a right answer is among this many first hits."""
K: Final = 10
"""Hits of a search that does not name a number; no beam is narrower."""
NOISE: Final = 0.05
"""Share by which measured times differ without a reason."""
FEWEST: Final = 50
"""A kind with fewer queries takes the settings of all queries."""
EVERYTHING: Final = 10**9
ITEM_SHARES: Final = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)
"""Candidates to try when items are the queries, as shares of the index."""

Places: TypeAlias = Int64[np.ndarray, " _"]
"""Segments or rows of items."""
Graded: TypeAlias = Float64[np.ndarray, " _"]
"""How much of what it should each query finds, from 0 to 1."""


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


class Asked(NamedTuple):
    """Queries of one kind, and what they should find."""

    query: Modality
    item: Modality
    level0: frozenset[int]
    """Codes at level 0 of the items asked for; empty means any."""
    fused: Float32[np.ndarray, "queries dim"]
    evidence: Float32[np.ndarray, "queries dim"]
    right: list[frozenset[tuple[int, int]]]
    itself: list[Location] | None = None
    """The items that are the queries, if they are items."""

    def grade(self, number: int, segments: Places, items: Places) -> float:
        """Return whether a right answer is among the first hits; for items, the share that is found."""
        right = self.right[number]
        if self.itself is None:
            return float(is_found(right, segments, items))
        others = _others(self.itself[number], segments, items)
        return len(right.intersection(others)) / max(1, len(right))


def _others(itself: Location, segments: Places, items: Places) -> list[tuple[int, int]]:
    """Return the first hits without the item itself."""
    found = list(zip(segments.tolist(), items.tolist(), strict=True))
    return [place for place in found if place != itself][:K]


def _by_kind(index: Index, queries: ValidationQueries) -> list[Asked]:
    """Return the queries of each kind, which ask for items of the modality of their right answers."""
    kinds = [(query.modality, wanted) for query, wanted in zip(queries.queries, queries.wanted, strict=True)]
    asked = []
    for kind in dict.fromkeys(kinds):
        own = [number for number, one in enumerate(kinds) if one == kind]
        right = [queries.right[number] for number in own]
        fused, evidence = queries.fused[own].numpy(), queries.evidence[own].numpy()
        asked.append(Asked(*kind, _level0(index, kind[1]), fused, evidence, right))
    return asked


def _level0(index: Index, modality: Modality) -> frozenset[int]:
    return index.model.level0_codes(modality) if index.model.level0_is_exact else frozenset()


def _items_as_queries(index: Index, config: TuneConfig, search: SearchConfig) -> list[Asked]:
    """Return items of each modality as queries for each; right are the first of ranking all others."""
    snapshot = index.snapshot
    random = np.random.default_rng(config.seed)
    modalities = snapshot.modalities if index.model.level0_is_exact else snapshot.modalities[:1]
    sampled: dict[Modality, list[Location]] = {}
    for modality in modalities:
        rows = _rows_of(snapshot, _level0(index, modality))
        flat, segments = np.concatenate(rows), np.repeat(np.arange(len(rows)), list(map(len, rows)))
        chosen = np.sort(random.choice(len(flat), min(len(flat), config.queries), replace=False))
        if len(chosen):
            places = zip(segments[chosen].tolist(), flat[chosen].tolist(), strict=True)
            sampled[modality] = [Location(*place) for place in places]
    asked = []
    is_raw = search.rerank == "embeddings"
    for query, own_places in sampled.items():
        vectors = vectors_at(index.model, snapshot, own_places, is_raw=is_raw)
        for item in sampled:
            own = Asked(query, item, _level0(index, item), vectors[:, 0], vectors[:, 1], [], own_places)
            best = rank_everything(index, own, search, k=K + 1)
            right = [frozenset(_others(place, *one)) for place, one in zip(own_places, best, strict=True)]
            asked.append(own._replace(right=right))
    return asked


def _rows_of(snapshot: Snapshot, level0: frozenset[int]) -> list[Places]:
    """Return the rows of each segment that are alive and have one of these codes at level 0."""
    found = []
    for segment in snapshot.segments:
        alive = segment.alive()
        rows = np.arange(segment.table.num_items) if alive is None else alive.nonzero()[0]
        if level0:
            first = segment.table.ids[:, 0][segment.table.rows()[rows]]
            rows = rows[np.isin(first, list(level0))]
        found.append(rows)
    return found


def rank_everything(
    index: Index, asked: Asked, config: SearchConfig, *, k: int
) -> list[tuple[Places, Places]]:
    """Return segments and rows of each query's best of all items asked for, by the evidence."""
    snapshot = index.snapshot
    if config.rerank == "codes":
        everything = dataclasses.replace(config, router="geometry", candidates=EVERYTHING)
        found = _find(index, asked, slice(None), everything, k=k)
        return [(one.ranking.segments, one.ranking.items) for one in found]
    with_density = bool(config.density_weight) and snapshot.manifest.embeddings == "fused"
    queries = torch.from_numpy(asked.evidence)
    wanted = append_one(queries) if with_density else queries
    scores, segments, items = [], [], []
    for number, (rows, vectors) in enumerate(
        zip(_rows_of(snapshot, asked.level0), snapshot.vectors(index.model.ranker) or (), strict=True)
    ):
        read: Vectors = vectors
        if with_density:
            table = snapshot.segments[number].table
            stored = None if snapshot.densities is None else decode_densities(snapshot.densities[number])
            density = index.model.ranker.densities(table.ids)[table.rows()] if stored is None else stored
            read = _with_costs(vectors, density, config)
        best = exact_search(wanted, lambda own: read(rows[own]), len(rows), k=k)  # noqa: B023  called at once
        scores.append(best.scores)
        segments.append(np.full_like(best.items, number))
        items.append(rows[best.items])
    order = np.argsort(-np.concatenate(scores, axis=1), axis=1, kind="stable")[:, :k]
    first_segments = np.take_along_axis(np.concatenate(segments, axis=1), order, 1)
    first_items = np.take_along_axis(np.concatenate(items, axis=1), order, 1)
    return list(zip(first_segments, first_items, strict=True))


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

    rerank: Literal["codes", "embeddings"] | None = None
    """The evidence that orders items; by default the index's own."""

    queries: Count = 300
    """At most this many queries of each row, spread evenly, or items of each modality."""

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
    error: float
    """Standard error of the share, at least what one query counts."""
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


def tune(index: Index, data: MBeir | None, config: TuneConfig, *, progress: Progress) -> TuneResult:
    """Measure settings on an index and choose; the data set's candidate ids are the item ids.

    Recall is measured against what the same evidence finds when it orders every item of the modality asked
    for: no beam can do better but by luck, and the loss by quantization is not the search's. Without data,
    items are the queries, geometry finds the candidates, and what ordering the other items finds is right.

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
    rerank = config.rerank or ("embeddings" if index.settings.rerank == "embeddings" else "codes")
    if rerank == "embeddings" and index.snapshot.manifest.embeddings == "none":
        raise UsageError(f"{index.folder} stores no embeddings; tune it for --rerank codes")
    if not index.snapshot.num_alive:
        raise UsageError(f"{index.folder} has no items to search; add some first")
    by_evidence = SearchConfig(rerank=rerank)
    left_out = 0
    if data is None:
        asked = _items_as_queries(index, config, by_evidence)
        ceilings = [np.ones(len(one.right)) for one in asked]
    else:
        queries = validation_queries(index, data, config, rerank=rerank, progress=progress)
        asked, left_out = _by_kind(index, queries), queries.left_out
        ceilings = [_ceiling(index, one, by_evidence) for one in asked]
    ceiling = float(np.concatenate(ceilings).mean())
    if not ceiling:
        raise BadData(
            f"even with all items ordered by {rerank}, none of {sum(map(len, ceilings))} queries has a right "
            f"answer among its first {FIRST}: this model was not trained for such queries"
        )
    settings = _settings(index, config, rerank, of_items=data is None)
    sums = [_measure(index, one, settings, config, progress) for one in asked]
    trials = _trials(sums, ceilings)
    recalls: dict[float, float] = {}
    for one in trials:
        if one.search.router == "generator":
            weight = one.search.generator_weight
            recalls[weight] = recalls.get(weight, 0.0) + one.recall
    weight = max(recalls, key=lambda weight: (recalls[weight], -weight), default=0.0)

    def of_weight(trials: list[Trial]) -> list[Trial]:
        return [
            one for one in trials if one.search.router == "geometry" or one.search.generator_weight == weight
        ]

    tried = sorted(of_weight(trials), key=lambda one: one.cpu_ms)
    best = _choose(tried, config)
    kinds = [
        KindChoice(
            query=one.query,
            item=one.item,
            **_chosen(choose_for_kind(own, best.search, config, len(upper)), upper),
        )
        for one, measured, upper in zip(asked, sums, ceilings, strict=True)
        for own in [of_weight(_trials([measured], [upper]))]
    ]
    tuned = Tuned(
        **_chosen(best, np.concatenate(ceilings)),
        wish=config.objective,
        data="its own items" if data is None else f"{data.name} {config.split}",
        items=index.snapshot.num_alive,
        kinds=tuple(kinds) if len(kinds) > 1 else (),
    )
    return TuneResult(tuned, tried, ceiling, left_out)


def _chosen(trial: Trial, queries: Sized) -> dict[str, Any]:
    """Return what is kept of a chosen trial."""
    kept = ("search", "recall", "share", "cpu_ms")
    return {"queries": len(queries), **{name: getattr(trial, name) for name in kept}}


def _ceiling(index: Index, asked: Asked, config: SearchConfig) -> Graded:
    """Return which queries are answered when all items are ordered by the evidence."""
    best = rank_everything(index, asked, config, k=FIRST)
    return np.array([asked.grade(number, *one) for number, one in enumerate(best)])


def _settings(
    index: Index, config: TuneConfig, rerank: Literal["codes", "embeddings"], *, of_items: bool
) -> list[SearchConfig]:
    """Return the settings to try."""
    items = index.snapshot.num_alive
    usual = dataclasses.replace(index.model.usual_search(items), rerank=rerank)
    if of_items:
        shares = (round(items * share) for share in (*ITEM_SHARES, 1.0))
        tried = (dataclasses.replace(usual, candidates=max(K, one)) for one in shares)
        return list(dict.fromkeys([usual, *tried]))
    routes = [
        usual,
        *(
            SearchConfig(beam=beam, candidates=candidates, rerank=rerank, router="geometry")
            for beam in config.beams
            for candidates in config.candidates
        ),
    ]
    settings = [route for route in routes if not index.model.uses_generator(route)]
    if index.model.has_generator:
        settings += [
            dataclasses.replace(route, router="generator", generator_weight=weight)
            for route in routes
            for weight in (config.generator_weights if rerank == "codes" else (0.0,))
        ]
    return list(dict.fromkeys(settings))


class _Sums(NamedTuple):
    """Measurements of settings on queries of one kind."""

    grades: Graded
    touched: float
    seconds: float


def _find(index: Index, asked: Asked, own: slice, setting: SearchConfig, *, k: int) -> list[Found]:
    """Search for some of the queries in one batch."""
    model, snapshot = index.model, index.snapshot
    embeddings = asked.fused[own]
    return find(
        lambda: model.decoder_for(setting),
        model.fast_for(setting),
        snapshot.search_segments,
        embeddings,
        [Wanted(max(setting.beam, K), k, asked.level0)] * len(embeddings),
        setting,
        evidence=evidence_of(model, snapshot),
        embeddings=list(asked.evidence[own]),
    )


def _measure(
    index: Index, asked: Asked, settings: Sequence[SearchConfig], config: TuneConfig, progress: Progress
) -> dict[SearchConfig, _Sums]:
    """Measure every setting, in turns, a batch of queries at a time; the first batch warms up."""
    count = len(asked.right)
    grades = {setting: np.zeros(count) for setting in settings}
    costs = {setting: np.zeros(2) for setting in settings}
    batches = [slice(start, start + config.batch) for start in range(0, count, config.batch)]
    progress.begin("tune", len(batches) + 1)
    for turn, own in enumerate([batches[0], *batches]):
        for setting in settings:
            began = time.process_time()
            found = _find(index, asked, own, setting, k=K if asked.itself is None else K + 1)
            seconds = time.process_time() - began
            for number, one in enumerate(found, start=own.start):
                grades[setting][number] = asked.grade(number, one.ranking.segments, one.ranking.items)
            if turn:
                costs[setting] += (sum(one.ranking.touched for one in found), seconds)
        progress.advance(turn + 1, {})
    return {setting: _Sums(grades[setting], *costs[setting].tolist()) for setting in settings}


def _trials(sums: Sequence[dict[SearchConfig, _Sums]], ceilings: Sequence[Graded]) -> list[Trial]:
    """Return the measurements of all queries of some kinds together."""
    ceiling = np.concatenate(ceilings)
    upper, count = float(ceiling.mean()) or 1.0, len(ceiling)
    trials = []
    for setting in sums[0]:
        own = [one[setting] for one in sums]
        grades = np.concatenate([one.grades for one in own])
        share = float(grades.mean()) / upper
        deviation = float((grades - share * ceiling).std())
        trials.append(
            Trial(
                search=setting,
                recall=float(grades.mean()),
                share=share,
                error=max(deviation / math.sqrt(count), 1 / count) / upper,
                touched=sum(one.touched for one in own) / count,
                cpu_ms=1000 * sum(one.seconds for one in own) / count,
            )
        )
    return trials


def choose_for_kind(tried: Sequence[Trial], usual: SearchConfig, config: TuneConfig, queries: int) -> Trial:
    """Return the trial of a kind of query: the settings of all queries, if no other is surely better.

    To reach a recall, another is better if it reaches it with its standard error to spare, and is quicker
    without finding less, or the settings of all queries miss it by theirs. Within a time, it is better if it
    finds more by its standard error, or the settings of all queries take longer. Fewer than :data:`FEWEST`
    queries tell nothing.
    """
    own = next(one for one in tried if one.search == usual)
    if queries < FEWEST:
        return own
    if config.recall is not None:
        is_missed = own.share + own.error < config.recall
        better = [
            one
            for one in tried
            if one.share - one.error >= config.recall
            and (is_missed or (one.share >= own.share and (1 + 2 * NOISE) * one.cpu_ms < own.cpu_ms))
        ]
    else:
        limit = config.milliseconds or 0.0
        better = [
            one
            for one in tried
            if one.cpu_ms <= limit
            and (one.share - one.error > own.share or own.cpu_ms > (1 + 2 * NOISE) * limit)
        ]
    return _choose(better, config) if better else own


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
            f"no settings reach {config.recall:g} of what ordering all items by {best.search.rerank} finds: "
            f"the best reach {best.share:.3f} (beam {best.search.beam}, {best.search.candidates} IDs): "
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
        key=lambda one: (
            one.share,
            one.search.candidates > 0,
            -one.search.candidates,
            -one.search.beam,
            one.search.router == "geometry",
        ),
    )
