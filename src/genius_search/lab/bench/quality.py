"""``genius bench quality``: how much of exact search the IDs keep, beside geometry and faiss."""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from genius_search.config import Count, Natural, NonNegative, SearchConfig, checked
from genius_search.data.mbeir import EvaluationRow, MBeir, read_judgements
from genius_search.errors import UsageError
from genius_search.lab.baselines.dense import (
    DenseIndex,
    Hnsw,
    IvfPq,
    Residual,
    build,
    num_lists,
    pq_of,
    residual_of,
)
from genius_search.lab.baselines.routing import CodeRouter
from genius_search.lab.bench.results import Figure, Table, draw
from genius_search.lab.evaluate import (
    EvaluationConfig,
    EvaluationPools,
    Pool,
    PoolCandidates,
    RowQueries,
    embed_queries,
)
from genius_search.lab.figure import Line
from genius_search.lab.runs import Hit, Qrels, Run, evaluate, filter_to_pool
from genius_search.lab.table import pareto_front as best_points
from genius_search.model import Genius
from genius_search.nn.density import NUM_EXTRA_COLUMNS, decode_densities
from genius_search.nn.health import Health
from genius_search.progress import Progress
from genius_search.records import candidate_number, did_of, task_name
from genius_search.search.beam import Beams, search
from genius_search.search.decoder import Decoder, DecoderState, DecoderStep
from genius_search.search.rank import Evidence, all_ids, append_bias, append_one, exact_search, rank_items
from genius_search.search.table import IdTable, Part

MEAN: Final = "mean"
"""Stands for a task where all tasks count the same."""
HOW_TO_READ: Final = (
    "R@k: share of queries with a right answer among the first k; shares are of exact-fused. Bytes of an "
    "item: the bits of its codes (and its embedding, where one is compared), and as it is kept. Levels "
    "decoded: the modality's included. CPU-milliseconds of a query among 64, one thread; for beams decoding "
    "and ranking apart. The encoder is in no figure. faiss's indexes are trained on the pool's own fused "
    "embeddings, which favours them, and look through lists of about as many candidates as the generator's "
    "leaf budget leads to; their lists cost no byte. Geometry is the same beam search without a "
    "generator, by the distance between the query and the vectors of prefixes; on one level, the nearest "
    "first codes until the leaves are as many as allowed."
)
METHOD_COLUMNS: Final = (
    ("method", "method"),
    ("recall_1", "R@1"),
    ("recall_5", "R@5"),
    ("recall_10", "R@10"),
    ("of_exact_1", "R@1 of exact"),
    ("of_exact_5", "R@5 of exact"),
    ("code_bytes", "bytes"),
    ("stored_bytes", "stored"),
    ("touched", "touched"),
    ("touched_percent", "of the pool"),
    ("levels", "levels"),
    ("route_ms", "decode, CPU-ms"),
    ("rank_ms", "rank, CPU-ms"),
    ("cpu_ms", "CPU-ms"),
)
METHOD_BRIEF: Final = (
    ("method", "method"),
    ("recall_1", "R@1"),
    ("recall_5", "R@5"),
    ("of_exact_1", "R@1 of"),
    ("of_exact_5", "R@5 of"),
    ("code_bytes", "bytes"),
    ("touched", "touched"),
    ("levels", "levels"),
    ("cpu_ms", "CPU-ms"),
)
DRAWN: Final = (
    "exact search",
    "IVF-PQ",
    "residual codes",
    "nearest code vectors, by codes",
    "nearest code vectors, by vectors",
    "ours, by codes",
    "ours, by vectors",
)


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One way of searching, on one task."""

    task: str
    queries: int
    pool_size: int
    method: str
    line: str
    """Its name in drawings."""
    router: str
    order: str
    """What orders the items under the beams."""
    beam: int
    leaves: int
    """Budget; 0 decodes until the IDs are settled."""
    lists: int
    """Of faiss, looked through."""
    recall_1: float
    recall_5: float
    recall_10: float
    """Share of queries with any right answer among the first hits (M-BEIR's R@k)."""
    of_exact_1: float | None = None
    of_exact_5: float | None = None
    """Of exact search over fused embeddings; nothing where that finds nothing."""
    code_bytes: float
    """Of an item: bits of its codes, and its embedding where one is needed."""
    stored_bytes: float
    """The same as it is kept: ours with the lists of items, faiss's with item numbers; without what is paid
    once (weights, centroids, code vectors)."""
    touched: float
    """Candidates compared, the mean of the queries."""
    touched_share: float
    levels: float | None
    """Levels decoded, the modality's included; nothing where nothing routes."""
    route_ms: float
    rank_ms: float
    """CPU-milliseconds of a query, one thread, asked with others; the mean."""

    @property
    def cpu_ms(self) -> float:
        """Both together."""
        return self.route_ms + self.rank_ms

    @property
    def touched_percent(self) -> str:
        """Of the pool."""
        return f"{100 * self.touched_share:.2f} %"


@dataclass(frozen=True, kw_only=True)
class LeafRow:
    """One router with a budget of leaves, on one task."""

    task: str
    queries: int
    leaves: int
    semantic_levels: int
    """Semantic codes in the prefixes that leaves are taken under."""
    router: str
    positive_inside: float
    """Share of queries with a right answer among the leaves."""
    recall_1: float
    recall_5: float
    """The leaves ranked by codes."""


@dataclass(frozen=True, kw_only=True)
class GainRow:
    """What the generator adds to geometry."""

    task: str
    leaves: int
    semantic_levels: int
    generator_inside: float
    geometry_inside: float
    gain_inside: str
    """Points."""
    generator_5: float
    geometry_5: float
    gain_5: str


@dataclass(frozen=True, kw_only=True)
class HealthRow:
    """How one level's codes are used."""

    level: int
    codes: int
    used: int
    perplexity: float
    largest_share: float


def beside_exact(rows: Sequence[MethodRow], exact: str) -> list[MethodRow]:
    """The same rows of one task, with their shares of what exact search finds."""
    best = next(row for row in rows if row.method == exact)
    return [
        dataclasses.replace(
            row,
            of_exact_1=row.recall_1 / best.recall_1 if best.recall_1 else None,
            of_exact_5=row.recall_5 / best.recall_5 if best.recall_5 else None,
        )
        for row in rows
    ]


def method_mean(rows: Sequence[MethodRow]) -> MethodRow:
    """Of one method over tasks, every task counting the same; shares are not averaged but made anew."""
    return dataclasses.replace(
        rows[0],
        task=MEAN,
        queries=sum(row.queries for row in rows),
        recall_1=_mean(rows, lambda row: row.recall_1),
        recall_5=_mean(rows, lambda row: row.recall_5),
        recall_10=_mean(rows, lambda row: row.recall_10),
        touched=_mean(rows, lambda row: row.touched),
        touched_share=_mean(rows, lambda row: row.touched_share),
        levels=None if rows[0].levels is None else _mean(rows, lambda row: row.levels or 0.0),
        route_ms=_mean(rows, lambda row: row.route_ms),
        rank_ms=_mean(rows, lambda row: row.rank_ms),
    )


def leaf_mean(rows: Sequence[LeafRow]) -> LeafRow:
    """Of one router and budget over tasks."""
    return dataclasses.replace(
        rows[0],
        task=MEAN,
        queries=sum(row.queries for row in rows),
        positive_inside=_mean(rows, lambda row: row.positive_inside),
        recall_1=_mean(rows, lambda row: row.recall_1),
        recall_5=_mean(rows, lambda row: row.recall_5),
    )


def gains(rows: Sequence[LeafRow], ours: str, theirs: str) -> Iterator[GainRow]:
    """Two routers beside each other."""
    others = {(row.task, row.leaves, row.semantic_levels): row for row in rows if row.router == theirs}
    for row in rows:
        if row.router == ours:
            other = others[row.task, row.leaves, row.semantic_levels]
            yield GainRow(
                task=row.task,
                leaves=row.leaves,
                semantic_levels=row.semantic_levels,
                generator_inside=row.positive_inside,
                geometry_inside=other.positive_inside,
                gain_inside=_points(row.positive_inside - other.positive_inside),
                generator_5=row.recall_5,
                geometry_5=other.recall_5,
                gain_5=_points(row.recall_5 - other.recall_5),
            )


def method_tables(rows: Sequence[MethodRow], *, title: str, measured: str) -> Iterator[Table]:
    """Every way, a table for each task; the last one's note says how to read them."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    for task in tasks:
        own = [row for row in rows if row.task == task]
        size = f"{own[0].queries:,} queries, {own[0].pool_size:,} candidates."
        yield Table(
            name="methods",
            title=f"{title}: {task}",
            note=f"{size} {measured} {HOW_TO_READ}" if task == tasks[-1] else size,
            columns=METHOD_COLUMNS,
            brief=METHOD_BRIEF,
            rows=own,
        )


def leaf_table(rows: Sequence[GainRow]) -> Table:
    """The generator against geometry."""
    return Table(
        name="leaves",
        title="Generator against geometry, equally many leaves",
        note="Both rank all prefixes of one length; from the best on, the IDs under them are taken until "
        "there are exactly so many, of the last prefix those that come first in the table. Inside: share of "
        "queries with a right answer among the leaves; R@5: the leaves ranked by codes; differences in "
        "points.",
        columns=(
            ("task", "task"),
            ("leaves", "leaves"),
            ("semantic_levels", "codes in a prefix"),
            ("generator_inside", "generator, inside"),
            ("geometry_inside", "geometry, inside"),
            ("gain_inside", "difference"),
            ("generator_5", "generator, R@5"),
            ("geometry_5", "geometry, R@5"),
            ("gain_5", "difference"),
        ),
        brief=(
            ("task", "task"),
            ("leaves", "leaves"),
            ("semantic_levels", "codes"),
            ("generator_inside", "generator"),
            ("geometry_inside", "geometry"),
            ("gain_inside", "points"),
            ("generator_5", "R@5"),
            ("geometry_5", "R@5"),
            ("gain_5", "points"),
        ),
        rows=rows,
    )


def curve_table(rows: Sequence[MethodRow]) -> Table:
    """Every setting of the grid."""
    return Table(
        name="curves",
        title="Recall against cost: every setting",
        note="A sample of the queries of each task. Columns are those of the first table.",
        columns=(("task", "task"), *METHOD_COLUMNS),
        rows=rows,
        is_long=True,
    )


def health_table(health: Health) -> Table:
    """How the codes are used."""
    purity = "no modality level" if health.purity is None else f"purity of level 0 {health.purity:.2%}"
    return Table(
        name="health",
        title="Health of the IDs",
        note=f"{health.candidates:,} candidates, {health.distinct_ids:,} distinct IDs; "
        f"{health.collision_rate:.2%} share their ID, the fullest has {health.largest_bucket:,}; {purity}; "
        f"mean cosine between an embedding and its ID's vector {health.reconstruction:.3f}. Verdict: "
        f"{health.verdict}.",
        columns=(
            ("level", "level"),
            ("codes", "codes"),
            ("used", "used"),
            ("perplexity", "perplexity"),
            ("largest_share", "largest share"),
        ),
        rows=[
            HealthRow(
                level=level.level,
                codes=level.size,
                used=level.used,
                perplexity=level.perplexity,
                largest_share=level.largest_share,
            )
            for level in health.levels
        ],
    )


def quality_figure(rows: Sequence[MethodRow]) -> Figure:
    """R@5 over CPU time."""
    points = {line: [(row.cpu_ms, row.recall_5) for row in rows if row.line == line] for line in DRAWN}
    lines = [Line(line, best_points(found), ()) for line, found in points.items() if found]
    return Figure(
        title="R@5 against CPU time: of each kind, the settings that no cheaper one of it reaches",
        alt=f"R@5 of {', '.join(line.name for line in lines)} against CPU-milliseconds of a query among 64",
        image=draw(lines, x="CPU-milliseconds of a query among 64", y="R@5", log_y=False),
    )


def _mean(rows: Sequence[MethodRow] | Sequence[LeafRow], value: Callable[..., float]) -> float:
    return math.fsum(value(row) for row in rows) / len(rows)


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"


BATCH: Final = 64
"""Queries that are asked together."""


class Batch(NamedTuple):
    """Some queries of a task."""

    raw: Float[Tensor, "queries dim"]
    fused: Float[Tensor, "queries dim"]


class Task(NamedTuple):
    """The queries of one row of the data set, and what is right."""

    row: EvaluationRow
    queries: RowQueries
    qrels: Qrels

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.row.dataset}: {task_name(self.row.task_id)}"

    def batches(self) -> Iterator[Batch]:
        """All queries, :data:`BATCH` at a time."""
        for start in range(0, len(self.queries.qids), BATCH):
            here = slice(start, start + BATCH)
            yield Batch(self.queries.raw[here], self.queries.fused[here])

    def spread(self, limit: int) -> Task:
        """At most so many of the queries, evenly."""
        count = len(self.queries.qids)
        if limit >= count:
            return self
        chosen = np.linspace(0, count - 1, limit).astype(np.int64)
        qids = [self.queries.qids[number] for number in chosen.tolist()]
        rows = torch.from_numpy(chosen)
        queries = RowQueries(qids, self.queries.raw[rows], self.queries.fused[rows])
        return Task(self.row, queries, {qid: self.qrels[qid] for qid in qids})


class Ground:
    """One pool, its vectors in memory so that all methods find them there, and the model that searches it."""

    def __init__(self, model: Genius, candidates: PoolCandidates) -> None:
        self.model = model
        self.candidates = candidates
        self.table: IdTable = candidates.table
        self.parts = [Part(self.table)]
        self.raw = candidates.raw(slice(None))
        self.fused = candidates.fused(slice(None))

    def __len__(self) -> int:
        return len(self.candidates)

    @cached_property
    def densities(self) -> Float32[np.ndarray, " items"]:
        """How crowded it is around the items."""
        return decode_densities(self._kept_densities)

    @property
    def _kept_densities(self) -> UInt8[np.ndarray, " items"]:
        if self.candidates.densities is None:
            raise ValueError("fused embeddings were not kept")
        return self.candidates.densities

    @cached_property
    def evidence(self) -> Evidence:
        """What orders items: codes, and fused embeddings."""
        vectors = [lambda rows: self.fused[torch.from_numpy(rows)]]
        return Evidence(self.model.ranker, vectors, densities=[self._kept_densities])

    @cached_property
    def code_bytes(self) -> float:
        """Of an ID, as short as its codes can be written.

        Its half norm and density (:mod:`genius_search.nn.density`) follow from the codes: they are counted in
        :attr:`stored_bytes`, not here.
        """
        return sum(math.log2(size) for size in self.model.quantizer.sizes) / 8

    @cached_property
    def stored_bytes(self) -> float:
        """Of an ID as the table keeps it: codes, half norm, density, where prefixes begin, lists of items."""
        table = self.table
        return (table.nbytes + table.bucket_starts.nbytes + table.items.nbytes) / len(self)

    @property
    def vector_bytes(self) -> float:
        """Of an embedding, as an index keeps it."""
        return 2.0 * self.model.dim

    @property
    def semantic_sizes(self) -> tuple[int, ...]:
        """Codes at each level but the modality's."""
        sizes = self.model.quantizer.sizes
        return sizes[1:] if self.model.quantizer.has_modality_level else sizes

    def did(self, item: int) -> str:
        """The candidate in this row."""
        return did_of(int(self.candidates.dids[item]))

    @cached_property
    def _rows_of(self) -> dict[int, int]:
        items = np.repeat(np.arange(len(self.table)), np.diff(self.table.bucket_starts))
        numbers = self.candidates.dids[self.table.items]
        return dict(zip(numbers.tolist(), items.tolist(), strict=True))

    def right_ids(self, task: Task, qid: str) -> Int64[np.ndarray, " ids"]:
        """Rows of the table under which a query's right answers are."""
        right = [did for did, relevance in task.qrels[qid].items() if relevance > 0]
        return np.array([self._rows_of[candidate_number(did)] for did in right], dtype=np.int64)


HITS: Final = 10
"""Asked of every method."""
PAPER_BEAM: Final = 50
"""IDs that the paper keeps at each level."""
EXACT_FUSED: Final = "exact-fused"
"""What the others' recall is compared with."""
EXACT_FUSED_HUBNESS: Final = "exact-fused+hubness"
"""The same, less the share of density that our own orders take from a score."""
GENERATOR, GEOMETRY, ONE_LEVEL = "generator", "geometry", "geometry, one level"
ORDERS: Final = {"none": "alone", "codes": "+ codes", "embeddings": "+ embeddings"}
LINES: Final = {
    (GENERATOR, "none"): "ours, by probability",
    (GENERATOR, "codes"): "ours, by codes",
    (GENERATOR, "embeddings"): "ours, by vectors",
    (GEOMETRY, "codes"): "nearest code vectors, by codes",
    (GEOMETRY, "embeddings"): "nearest code vectors, by vectors",
}
"""What they are called in drawings."""

Route = Callable[[Float[Tensor, "queries dim"]], Beams]
Rows = list[Int64[np.ndarray, " _"]]
"""Item rows of each query, best first."""


class Routed(NamedTuple):
    """A way of getting at candidates, and ways of ordering them."""

    name: str
    router: str
    """:data:`GENERATOR` or one of the others; empty where nothing routes."""
    beam: int
    leaves: int
    route: Route
    orders: tuple[SearchConfig, ...]

    def called(self, order: SearchConfig) -> str:
        """The name of one of them."""
        mixed = f" + {order.generator_weight:g} log p" if order.generator_weight else ""
        return f"{self.name} {ORDERS[order.rerank]}{mixed}" if self.router else self.name


class Answered(NamedTuple):
    """What a way without beams found."""

    items: Rows
    touched: int
    """Candidates that were compared, of all queries together."""


class Direct(NamedTuple):
    """A way that answers in one go."""

    name: str
    line: str
    """Its name in drawings."""
    find: Callable[[Batch], Answered]
    code_bytes: float
    """Of an item, as short as it can be written."""
    stored_bytes: float
    """Of an item, as it is kept."""
    lists: int = 0
    """Of faiss, looked through."""


def direct(ground: Ground) -> list[Direct]:
    """Exact search over whole vectors; with a byte more each, less what crowded places cost."""
    uncrowded = append_bias(ground.fused, np.float32(SearchConfig().density_weight) * ground.densities)

    def exact(name: str, vectors: Tensor, queries: Callable[[Batch], Tensor], more: int = 0) -> Direct:
        size = ground.vector_bytes + more

        def find(batch: Batch) -> Answered:
            found = exact_search(queries(batch), vectors.__getitem__, len(ground), k=HITS)
            return Answered(list(found.items), len(ground) * len(found.items))

        return Direct(name, "exact search", find, size, size)

    return [
        exact("exact-raw", ground.raw, lambda batch: batch.raw),
        exact(EXACT_FUSED, ground.fused, lambda batch: batch.fused),
        exact(EXACT_FUSED_HUBNESS, uncrowded, lambda batch: append_one(batch.fused), more=1),
    ]


def routed(ground: Ground, *, beam: int, leaves: int, generator_weight: float) -> Iterator[Routed]:
    """Everything by codes, the paper's full-depth search, and routing within a leaf budget."""
    codes, embeddings = SearchConfig(rerank="codes"), SearchConfig(rerank="embeddings")
    mixed = (SearchConfig(rerank="codes", generator_weight=generator_weight),) if generator_weight else ()
    yield Routed("exact-codes", "", 0, 0, lambda queries: all_ids(ground.parts, len(queries)), (codes,))
    yield Routed(
        f"{GENERATOR}, beam {PAPER_BEAM}, all levels",
        GENERATOR,
        PAPER_BEAM,
        0,
        by_beam(ground, ground.model.decoder, beam=PAPER_BEAM, leaves=0, is_ordered=False),
        (SearchConfig(rerank="none"), codes, embeddings),
    )
    routers: dict[str, Decoder] = {GENERATOR: ground.model.decoder, GEOMETRY: ground.model.router}
    for router, decoder in routers.items():
        yield Routed(
            f"{router}, beam {beam}, {leaves:,} leaves",
            router,
            beam,
            leaves,
            by_beam(ground, decoder, beam=beam, leaves=leaves),
            (codes, *(mixed if router == GENERATOR else ()), embeddings),
        )
    one_level = CodeRouter(
        ground.parts,
        ground.model.quantizer.tables(),
        has_modality_level=ground.model.quantizer.has_modality_level,
    )
    yield Routed(
        f"{ONE_LEVEL}, {leaves:,} leaves",
        ONE_LEVEL,
        0,
        leaves,
        lambda queries: filled(one_level.route(queries, beam=leaves), leaves),
        (codes, embeddings),
    )


def by_beam(ground: Ground, decoder: Decoder, *, beam: int, leaves: int, is_ordered: bool = True) -> Route:
    """Beam search, until few enough leaves are left or, with 0, the IDs are settled.

    Parameters
    ----------
    is_ordered
        whether something orders the items afterwards; without, every level of every ID is scored.
    """
    config = SearchConfig(beam=beam, candidates=leaves, rerank="codes" if is_ordered else "none")
    return lambda queries: search(decoder, ground.parts, queries, config)


def filled(beams: Beams, leaves: int) -> Beams:
    """The best prefixes, as many as hold so many IDs; of the last one only the IDs that come first.

    For one part: leaves are cut in the order of its table.
    """
    sizes = (beams.high - beams.low)[:, :, 0]
    before = sizes.cumsum(axis=1) - sizes
    kept = np.minimum(sizes, np.maximum(leaves - before, 0))
    history = np.where((kept > 0)[..., None], beams.log_probabilities, np.float32(-np.inf))
    return Beams(beams.low, beams.low + kept[..., None], history)


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


NUMBER_BYTES: Final = 8
"""Of an item's number, which faiss keeps beside its code."""
EFFORTS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Lists looked through, for a curve."""
HNSW_EFFORTS: Final = (64, 128, 256, 512)
"""Nodes in view, for a curve; never fewer than the hits that are asked for."""


class Rival(NamedTuple):
    """An index of faiss's, which looks at more for more time."""

    name: str
    line: str
    """Its name in drawings."""
    dense: DenseIndex
    most: int
    """Of its lists there are so many; so many of its nodes are in view at most."""
    code_bytes: float
    stored_bytes: float
    build_seconds: float

    @property
    def is_graph(self) -> bool:
        """Nodes, not lists."""
        return isinstance(self.dense.kind, Hnsw)

    def at(self, effort: int) -> Direct:
        """Looking through so many lists, or at so many nodes."""

        def find(batch: Batch) -> Answered:
            return answered(self.dense, batch.fused.numpy(), effort)

        return Direct(
            f"{self.name}, {effort:,} {'nodes' if self.is_graph else f'of {self.most:,} lists'}",
            self.line,
            find,
            self.code_bytes,
            self.stored_bytes,
            0 if self.is_graph else effort,
        )

    def efforts(self) -> list[int]:
        """Numbers of lists, or nodes, for a curve."""
        return [effort for effort in (HNSW_EFFORTS if self.is_graph else EFFORTS) if effort <= self.most]

    def touching(self, queries: Float32[np.ndarray, "queries dim"], wanted: float) -> Direct:
        """Looking through as many lists as hold about so many candidates for queries like these."""

        def touched(effort: int) -> float:
            return answered(self.dense, queries, effort).touched / len(queries)

        enough = 1
        while enough < self.most and touched(enough) < wanted:
            enough = min(2 * enough, self.most)
        fewer = range(enough // 2 + 1, enough + 1)
        more = fewer[min(bisect.bisect_left(fewer, wanted, key=touched), len(fewer) - 1)]
        chosen = min((max(more - 1, 1), more), key=lambda lists: abs(touched(lists) - wanted))
        return self.at(chosen)._replace(name=self.name)


def rivals(ground: Ground, *, seed: int, progress: Progress) -> Iterator[Rival]:
    """IVF-PQ and IVF residual quantizers, trained on the pool's own fused embeddings, and a graph of them.

    That favours them: our codebooks were learned from the training pool. So does that a list's centroid
    explains a part of a vector and costs them no byte, where the first code of an ID is counted.
    """
    vectors = ground.fused.numpy()
    num_items, dim = vectors.shape
    num_bytes = math.ceil(ground.code_bytes + NUM_EXTRA_COLUMNS)
    product = pq_of(num_items=num_items, dim=dim, code_bytes=num_bytes)
    coarse = residual_of(num_items=num_items, code_bytes=num_bytes)
    fine = residual_of(num_items=num_items, code_bytes=num_bytes, is_fast=True)
    kinds: list[tuple[str, IvfPq | Residual, int]] = [
        ("IVF-PQ", product, product.parts),
        ("IVF-RQ", coarse, coarse.codebooks),
        ("IVF-RQ fast", fine, fine.codebooks),
    ]
    for short, kind, count in kinds:
        norm = "" if isinstance(kind, IvfPq) else " and a norm"
        name = f"faiss {short} ({count} × {kind.bits} bits{norm})"
        line = "IVF-PQ" if isinstance(kind, IvfPq) else "residual codes"
        progress.say(f"building {name}")
        began = time.process_time()
        dense = build(vectors, kind, seed=seed)
        took = time.process_time() - began
        size = kind.code_bytes
        yield Rival(name, line, dense, num_lists(num_items), size, size + NUMBER_BYTES, took)
    progress.say("building faiss HNSW")
    began = time.process_time()
    graph = build(vectors, Hnsw(), seed=seed)
    took = time.process_time() - began
    size = float(dim * vectors.itemsize)
    yield Rival("faiss HNSW", "HNSW", graph, max(HNSW_EFFORTS), size, graph.bytes_per_item(), took)


def answered(index: DenseIndex, queries: Float32[np.ndarray, "queries dim"], lists: int) -> Answered:
    """Ask an index, and count what it compared."""
    index.set_effort(lists)
    counted = index.search_counting(queries, HITS)
    return Answered([items[items >= 0] for items in counted.found.items], counted.compared)


DEPTHS: Final = (1, 2)
"""Semantic codes in a prefix."""
QUALITY_LEAVES_BATCH: Final = 16
"""Queries at a time: beams are as wide as a budget."""
LEAST_BEAM: Final = 1024
BY_CODES: Final = SearchConfig(rerank="codes")


class Shallow:
    """A decoder that ends after its first levels: its IDs are prefixes."""

    def __init__(self, decoder: Decoder, levels: int) -> None:
        self._decoder = decoder
        self.sizes: tuple[int, ...] = decoder.sizes[:levels]
        self.device = decoder.device

    def start(self, queries: Float[Tensor, "queries dim"]) -> DecoderState:
        """The state before any code."""
        return self._decoder.start(queries)

    def advance(self, state: Any, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes."""
        return self._decoder.advance(state, codes)

    def logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Of one level's codes."""
        return self._decoder.logits(hidden, level)

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Of one level's codes, normalised."""
        return self._decoder.log_probabilities(hidden, level, scores)


class Prefixes:
    """The distinct prefixes of one length in a table."""

    def __init__(self, table: IdTable, levels: int) -> None:
        codes = np.asarray(table.ids[:, :levels])
        is_first = np.ones(len(codes), dtype=bool)
        is_first[1:] = (codes[1:] != codes[:-1]).any(axis=1)
        starts = is_first.nonzero()[0]
        self.levels = levels
        self.bounds: Int64[np.ndarray, " fences"] = np.append(starts, len(table))
        self.part = Part(IdTable.build(codes[starts], np.zeros(len(starts), dtype=np.float16)))

    def best(self, decoder: Decoder, queries: Float[Tensor, "queries dim"], count: int) -> Beams:
        """The best prefixes of each query, as ranges of the whole table."""
        found = search(Shallow(decoder, self.levels), [self.part], queries, SearchConfig(beam=count))
        low = self.bounds[found.low]
        high = np.where(found.high > found.low, self.bounds[found.low + 1], low)
        return Beams(low, high, found.log_probabilities)


def compare_leaves(ground: Ground, task: Task, budgets: Sequence[int]) -> Iterator[LeafRow]:
    """For each depth and budget, what either router finds.

    A beam as wide as the largest budget fills it, for a prefix holds at least one ID. It is never narrower
    than :data:`LEAST_BEAM`, so that among prefixes of two codes the best are found, unless there are more
    first codes than that.
    """
    first = 1 if ground.model.quantizer.has_modality_level else 0
    right = [ground.right_ids(task, qid) for qid in task.queries.qids]
    decoders: dict[str, Decoder] = {GENERATOR: ground.model.decoder, GEOMETRY: ground.model.router}
    for depth in DEPTHS:
        if first + depth > len(ground.model.quantizer.sizes):
            continue
        prefixes = Prefixes(ground.table, first + depth)
        for router, decoder in decoders.items():
            inside = dict.fromkeys(budgets, 0)
            items: dict[int, Rows] = {budget: [] for budget in budgets}
            for start in range(0, len(right), QUALITY_LEAVES_BATCH):
                queries = task.queries.fused[start : start + QUALITY_LEAVES_BATCH]
                beams = prefixes.best(decoder, queries, max(LEAST_BEAM, *budgets))
                for budget in budgets:
                    kept = filled(beams, budget)
                    items[budget] += [
                        rank_items(
                            ground.parts,
                            kept,
                            number,
                            query,
                            config=BY_CODES,
                            evidence=ground.evidence,
                            k=HITS,
                        ).items
                        for number, query in enumerate(queries)
                    ]
                    inside[budget] += sum(
                        _is_inside(kept, number, right[start + number]) for number in range(len(queries))
                    )
            for budget in budgets:
                recall = hit_rates(ground, task, items[budget])
                yield LeafRow(
                    task=task.name,
                    queries=len(right),
                    leaves=budget,
                    semantic_levels=depth,
                    router=router,
                    positive_inside=inside[budget] / len(right),
                    recall_1=recall[1],
                    recall_5=recall[5],
                )


def _is_inside(beams: Beams, query: int, right: Int64[np.ndarray, " ids"]) -> bool:
    """Whether one of these IDs is under the beams."""
    low, high = beams.low[query, :, 0], beams.high[query, :, 0]
    return bool(((low <= right[:, None]) & (right[:, None] < high)).any())


SAMPLE: Final = 64
"""Queries of a task that say how many candidates faiss may look at."""


@dataclass(frozen=True, kw_only=True)
class QualitySettings:
    """What is measured."""

    split: str = "test"
    rows: tuple[str, ...] = ()
    """Of the data set, named as in its files; none named means all."""
    pool: Pool = "global"
    queries: Natural = 0
    """Of each row at most so many, spread evenly; 0 means all."""
    beam: Count = 50
    candidates: Count = 500
    """Of the search within a leaf budget."""
    generator_weight: NonNegative = 0.0
    """Also rank by codes with so many times the log-probability; 0 leaves that out."""
    budgets: tuple[Count, ...] = (150, 300, 600, 1200, 2000)
    """Leaves for which the generator and geometry are compared."""
    grid_beams: tuple[Count, ...] = (1, 2, 5, 10, 20, 50, 100)
    grid_candidates: tuple[Natural, ...] = (0, 150, 500, 1500, 5000)
    """Settings of the curves; 0 leaves decodes all levels."""
    grid_queries: Natural = 200
    """Of each row at most so many for the curves; 0 leaves them out."""
    faiss: bool = True
    seed: Natural = 0


class Quality(NamedTuple):
    """What was found."""

    tables: list[Table]
    figures: list[Figure]


def bench_quality(
    data: MBeir, model: Genius, settings: QualitySettings, folder: Path, *, progress: Progress
) -> Quality:
    """Measure every way on every row; features and codes are kept under ``folder``, as an evaluation does.

    Raises
    ------
    UsageError
        a setting is out of range.
    BadData
        a right answer, a query or a candidate is missing.
    """
    settings = checked(settings)
    if not settings.budgets or not settings.grid_beams or not settings.grid_candidates:
        raise UsageError("leaf budgets, beams and candidates of the grid: name at least one of each")
    rows = data.rows(settings.split, names=settings.rows)
    config = EvaluationConfig(
        split=settings.split,
        pools=(settings.pool,),
        methods=(EXACT_FUSED,),
        max_queries=settings.queries,
        seed=settings.seed,
    )
    pools = EvaluationPools(
        data,
        model,
        rows,
        folder,
        split=settings.split,
        pools=config.pools,
        methods=config.methods,
        progress=progress,
    )
    found = _Found([], [], [])
    for together in [rows] if settings.pool == "global" else [[row] for row in rows]:
        ground = Ground(model, pools.of(together[0], settings.pool))
        tasks = [_task(data, row, ground, config, folder, progress) for row in together]
        _measure(ground, tasks, settings, found, progress)
    measured = f"IDs of {' × '.join(map(str, model.quantizer.sizes))} codes."
    tables = [
        *method_tables(
            _with_means(found.methods), title=f"{data.name}, {settings.pool} pool", measured=measured
        ),
        leaf_table(list(gains(_with_leaf_means(found.leaves), GENERATOR, GEOMETRY))),
        health_table(pools.health()),
    ]
    figures = []
    if found.curves:
        curves = _with_means(found.curves)
        tables.append(curve_table(curves))
        figures.append(quality_figure([row for row in curves if row.task == curves[0].task]))
    return Quality(tables, figures)


class _Found(NamedTuple):
    methods: list[MethodRow]
    leaves: list[LeafRow]
    curves: list[MethodRow]


def _task(
    data: MBeir,
    row: EvaluationRow,
    ground: Ground,
    config: EvaluationConfig,
    folder: Path,
    progress: Progress,
) -> Task:
    (queries,) = embed_queries(data, ground.model, row, config, folder, progress)
    return Task(row, queries, filter_to_pool(read_judgements(row, queries.qids), ground.candidates))


def _measure(
    ground: Ground, tasks: Sequence[Task], settings: QualitySettings, found: _Found, progress: Progress
) -> None:
    built = list(rivals(ground, seed=settings.seed, progress=progress)) if settings.faiss else []
    ways = list(
        routed(
            ground,
            beam=settings.beam,
            leaves=settings.candidates,
            generator_weight=settings.generator_weight,
        )
    )
    whole = direct(ground)
    for task in tasks:
        progress.say(f"{task.name}: {len(task.queries.qids):,} queries, {len(ground):,} candidates")
        sample = task.spread(SAMPLE).queries.fused
        touched = _touched(ground, sample, settings)
        others = [rival.touching(sample.numpy(), touched) for rival in built]
        rows = measure(ground, task, ways, [*whole, *others])
        found.methods.extend(beside_exact(rows, EXACT_FUSED))
        found.leaves.extend(compare_leaves(ground, task, settings.budgets))
        if settings.grid_queries:
            fewer = task.spread(settings.grid_queries)
            curves = measure(ground, fewer, list(_grid(ground, settings)), _curve_rivals(whole, built))
            found.curves.extend(beside_exact(curves, EXACT_FUSED))


def _touched(ground: Ground, queries: Float[Tensor, "queries dim"], settings: QualitySettings) -> float:
    """Candidates under the generator's beams, the mean of some queries."""
    route = by_beam(ground, ground.model.decoder, beam=settings.beam, leaves=settings.candidates)
    beams, starts = route(queries), ground.table.bucket_starts
    return float((starts[beams.high] - starts[beams.low]).sum()) / len(queries)


def _grid(ground: Ground, settings: QualitySettings) -> Iterator[Routed]:
    """Both routers at every setting."""
    orders = (SearchConfig(rerank="codes"), SearchConfig(rerank="embeddings"))
    routers: dict[str, Decoder] = {GENERATOR: ground.model.decoder, GEOMETRY: ground.model.router}
    for router, decoder in routers.items():
        for beam in settings.grid_beams:
            for leaves in settings.grid_candidates:
                setting = f"{leaves:,} leaves" if leaves else "all levels"
                yield Routed(
                    f"{router}, beam {beam}, {setting}",
                    router,
                    beam,
                    leaves,
                    by_beam(ground, decoder, beam=beam, leaves=leaves),
                    orders,
                )


def _curve_rivals(whole: Sequence[Direct], built: Sequence[Rival]) -> list[Direct]:
    exact = [way for way in whole if way.name == EXACT_FUSED]
    return [*exact, *(rival.at(lists) for rival in built for lists in rival.efforts())]


def _with_means(rows: Sequence[MethodRow]) -> list[MethodRow]:
    """The means over tasks first; none for a single task."""
    by_way: dict[str, list[MethodRow]] = {}
    for row in rows:
        by_way.setdefault(row.method, []).append(row)
    tasks = {row.task for row in rows}
    means = [method_mean(own) for own in by_way.values() if len(own) == len(tasks) > 1]
    return [*(beside_exact(means, EXACT_FUSED) if means else ()), *rows]


def _with_leaf_means(rows: Sequence[LeafRow]) -> list[LeafRow]:
    by_way: dict[tuple[int, int, str], list[LeafRow]] = {}
    for row in rows:
        by_way.setdefault((row.leaves, row.semantic_levels, row.router), []).append(row)
    tasks = {row.task for row in rows}
    return [*(leaf_mean(own) for own in by_way.values() if len(own) == len(tasks) > 1), *rows]
