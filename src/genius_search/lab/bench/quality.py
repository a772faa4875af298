"""``genius bench quality``: how much of exact search the IDs keep, beside geometry and faiss."""

from __future__ import annotations

import bisect
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from genius_search.config import SearchConfig, checked
from genius_search.data.mbeir import EvaluationRow, MBeir, read_judgements
from genius_search.errors import UsageError
from genius_search.lab.baselines.faiss_index import NORM_BYTES, FaissIndex, num_bits, num_lists, num_parts
from genius_search.lab.bench.results import Measurements, Row, table
from genius_search.lab.bench.settings import QualitySettings, parse_counts
from genius_search.lab.evaluate import EvaluationPools, embed_queries
from genius_search.lab.methods import PoolCandidates, RowQueries
from genius_search.lab.runs import Hit, Qrels, Run, evaluate, filter_to_pool
from genius_search.lab.settings import EvaluationConfig
from genius_search.lab.table import Table
from genius_search.model import Genius
from genius_search.nn.columns import NUM_EXTRA_COLUMNS, decode_densities
from genius_search.nn.health import Health
from genius_search.progress import Progress
from genius_search.records import candidate_number, did_of, task_name
from genius_search.search.beam import search
from genius_search.search.beams import Beams
from genius_search.search.decoder import Decoder
from genius_search.search.exact import append_bias, append_one, exact_search
from genius_search.search.rank import Evidence, all_ids, rank_items
from genius_search.search.table import IdTable, SearchSegment

MEAN: Final = "mean"
"""Stands for a task where all tasks count the same."""
BATCH: Final = 64
"""Queries searched together."""
HITS: Final = 10
PAPER_BEAM: Final = 50
"""IDs that the paper keeps at each level."""
EXACT_FUSED: Final = "exact-fused"
"""The others' recall is compared with this."""
EXACT_FUSED_HUBNESS: Final = "exact-fused+hubness"
"""The same, less the share of density that our own orders take from a score."""
GENERATOR, GEOMETRY = "generator", "geometry"
ORDERS: Final = {"none": "alone", "codes": "+ codes", "embeddings": "+ embeddings"}
LINES: Final = {
    (GENERATOR, "none"): "ours, by probability",
    (GENERATOR, "codes"): "ours, by codes",
    (GENERATOR, "embeddings"): "ours, by vectors",
    (GEOMETRY, "codes"): "nearest code vectors, by codes",
    (GEOMETRY, "embeddings"): "nearest code vectors, by vectors",
}
"""Their names in the figures of a report."""
RESIDUAL_WIDTH: Final = 4
"""Codes that the residual quantizer tries side by side for each level of an item."""
NUMBER_BYTES: Final = 8
"""Bytes of an item's number, which faiss keeps beside its code."""
LIST_EFFORTS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Lists that are looked through, for a curve."""
NODE_EFFORTS: Final = (64, 128, 256, 512)
"""Nodes in view, for a curve; never fewer than the hits that are wanted."""
SAMPLE: Final = 64
"""Queries of a task that decide how many candidates faiss may look at."""
DEPTHS: Final = (1, 2)
"""Semantic codes in a prefix."""
PREFIX_BATCH: Final = 16
"""Queries at a time where beams are as wide as a budget."""
MIN_BEAM: Final = 1024
HOW_TO_READ: Final = (
    "R@k: share of queries with a right answer among the first k; shares are of exact-fused. Bytes of an "
    "item: the bits of its codes (and its embedding, where one is compared), and as it is kept. Levels "
    "decoded: the modality's included. CPU-milliseconds of a query among 64, one thread; for beams decoding "
    "and ranking apart. The encoder is in no figure. faiss's indexes are trained on the pool's own fused "
    "embeddings, which favours them, and look through lists of about as many candidates as the generator's "
    "leaf budget leads to; their lists cost no byte. Geometry is the same beam search without a "
    "generator, by the distance between the query and the vectors of prefixes."
)
# A terminal shows as many of these as have room.
METHOD_COLUMNS: Final = {
    "method": "method",
    "recall_1": "R@1",
    "recall_5": "R@5",
    "of_exact_1": "R@1 of exact",
    "of_exact_5": "R@5 of exact",
    "code_bytes": "bytes",
    "touched": "touched",
    "levels": "levels",
    "cpu_ms": "CPU-ms",
    "recall_10": "R@10",
    "stored_bytes": "stored",
    "touched_percent": "of the pool",
    "route_ms": "decode, CPU-ms",
    "rank_ms": "rank, CPU-ms",
}
LEAF_COLUMNS: Final = {
    "task": "task",
    "leaves": "leaves",
    "semantic_levels": "codes in a prefix",
    "generator_inside": "generator, inside",
    "geometry_inside": "geometry, inside",
    "gain_inside": "gain, inside",
    "generator_5": "generator, R@5",
    "geometry_5": "geometry, R@5",
    "gain_5": "gain, R@5",
}

AVERAGED: Final = (
    "recall_1", "recall_5", "recall_10", "touched", "touched_share", "levels", "route_ms", "rank_ms",
    "generator_inside", "geometry_inside", "generator_5", "geometry_5",
)  # fmt: skip

Rows = list[Int64[np.ndarray, " _"]]
"""Item rows of each query, best first."""


def _select(queries: RowQueries, rows: slice | np.ndarray) -> RowQueries:
    qids = np.array(queries.qids, dtype=object)[rows].tolist()
    return RowQueries(qids, queries.raw[rows], queries.fused[rows])


class Task(NamedTuple):
    """The queries of one row of the data set, and their right answers."""

    row: EvaluationRow
    queries: RowQueries
    qrels: Qrels

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.row.dataset}: {task_name(self.row.task_id)}"

    def batches(self, size: int) -> Iterator[RowQueries]:
        """Yield all queries, ``size`` at a time."""
        for start in range(0, len(self.queries.qids), size):
            yield _select(self.queries, slice(start, start + size))

    def sample(self, limit: int) -> Task:
        """Return at most so many of the queries, spread evenly."""
        count = len(self.queries.qids)
        if limit >= count:
            return self
        queries = _select(self.queries, np.linspace(0, count - 1, limit).astype(np.int64))
        return Task(self.row, queries, {qid: self.qrels[qid] for qid in queries.qids})

    def hit_rates(self, found: Iterable[Sequence[str]]) -> dict[int, float]:
        """Return M-BEIR's R@k of each query's candidate ids, best first; only their order counts."""
        hits = {
            qid: [Hit(did, -float(rank)) for rank, did in enumerate(dids)]
            for qid, dids in zip(self.queries.qids, found, strict=True)
        }
        means = evaluate(self.qrels, Run("bench", hits), ks=(1, 5, 10)).means
        return {k: means[f"R@{k}"] for k in (1, 5, 10)}


class EvalPool:
    """One pool, its vectors in memory so that all methods find them there, and the model that searches it."""

    def __init__(self, model: Genius, candidates: PoolCandidates) -> None:
        self.model = model
        self.candidates = candidates
        self.table: IdTable = candidates.table
        self.segments = [SearchSegment(self.table)]
        self.raw = candidates.raw(slice(None))
        self.fused = candidates.fused(slice(None))
        self.decoders: dict[str, Decoder] = {GENERATOR: model.decoder, GEOMETRY: model.router}
        self.code_bytes = sum(math.log2(size) for size in model.quantizer.sizes) / 8
        """Bytes of an ID, as short as its codes can be written. Half norm and density follow from the codes:
        they are counted in :attr:`stored_bytes` only."""
        table_bytes = self.table.nbytes + self.table.bucket_starts.nbytes + self.table.items.nbytes
        self.stored_bytes = table_bytes / len(candidates)
        """Bytes of an ID as the table keeps it, with its half norm and density, where prefixes begin, and the
        lists of items."""
        self.vector_bytes = 2.0 * model.dim
        """Bytes of an embedding, as an index keeps it."""

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def densities(self) -> UInt8[np.ndarray, " items"]:
        """The density around the items, as it is stored."""
        if self.candidates.densities is None:
            raise ValueError("fused embeddings were not kept")
        return self.candidates.densities

    @cached_property
    def evidence(self) -> Evidence:
        """Codes and fused embeddings, which order items."""
        vectors = [lambda rows: self.fused[torch.from_numpy(rows)]]
        return Evidence(self.model.ranker, vectors, densities=[self.densities])

    @cached_property
    def _rows_of(self) -> dict[int, int]:
        rows = np.repeat(np.arange(len(self.table)), np.diff(self.table.bucket_starts))
        numbers = self.candidates.dids[self.table.items]
        return dict(zip(numbers.tolist(), rows.tolist(), strict=True))

    def right_ids(self, task: Task, qid: str) -> Int64[np.ndarray, " ids"]:
        """Return the rows of the table that hold a query's right answers."""
        right = [did for did, relevance in task.qrels[qid].items() if relevance > 0]
        return np.array([self._rows_of[candidate_number(did)] for did in right], dtype=np.int64)

    def rank(self, beams: Beams, queries: Float[Tensor, "queries dim"], config: SearchConfig) -> Answered:
        """Order the items under beams."""
        answers = [
            rank_items(self.segments, beams, number, query, config=config, evidence=self.evidence, k=HITS)
            for number, query in enumerate(queries)
        ]
        return Answered([answer.items for answer in answers], sum(answer.touched for answer in answers))

    def hit_rates(self, task: Task, items: Rows) -> dict[int, float]:
        """Return M-BEIR's R@k of these item rows."""
        return task.hit_rates([did_of(int(did)) for did in self.candidates.dids[rows]] for rows in items)


class Answered(NamedTuple):
    """The hits of some queries."""

    items: Rows
    touched: int
    """Candidates that were compared, for all queries together."""


class Way(NamedTuple):
    """A search whose hits are ordered in one way or several; what the orders share is timed apart."""

    route: Callable[[RowQueries], Any]
    """Beams, or None where a method answers in one step."""
    orders: Mapping[str, tuple[Row, Callable[[Any, RowQueries], Answered]]]
    """Name of a method -> fields of its rows that do not depend on queries, and the step that answers. Fields
    are ``line``, its name in figures; ``code_bytes`` of an item, as short as it can be written, and
    ``stored_bytes``, as it is kept, without what is paid once (weights, centroids, code vectors); and
    settings."""


def one_step(name: str, facts: Row, find: Callable[[RowQueries], Answered]) -> Way:
    """Return a method that answers in one step."""
    return Way(lambda _: None, {name: (facts, lambda _, batch: find(batch))})


def bench_quality(
    data: MBeir, model: Genius, settings: QualitySettings, folder: Path, *, progress: Progress
) -> Measurements:
    """Measure every method on every row; features and codes are kept under ``folder``, as an evaluation does.

    Raises UsageError where a setting is out of range, BadData where an answer, query or candidate is missing.
    """
    settings = checked(settings)
    budgets = parse_counts("--budgets", settings.budgets)
    beams = parse_counts("--grid-beams", settings.grid_beams)
    all_leaves = parse_counts("--grid-candidates", settings.grid_candidates)
    if min(*budgets, *beams, min(all_leaves) + 1) < 1:
        raise UsageError("--budgets and --grid-beams are numbers from 1 up, --grid-candidates from 0 up")
    grid = list(product((GENERATOR, GEOMETRY), beams, all_leaves))
    orders = (SearchConfig(rerank="codes"), SearchConfig(rerank="embeddings"))
    rows = data.rows(
        settings.split, names=tuple(map(str.strip, settings.row.split(","))) if settings.row else ()
    )
    config = EvaluationConfig(
        split=settings.split,
        pools=(settings.pool,),
        methods=(EXACT_FUSED,),
        max_queries=settings.queries,
        seed=settings.seed,
    )
    pools = EvaluationPools(data, model, rows, folder, config, progress=progress)
    methods: list[Row] = []
    leaves: list[Row] = []
    curves: list[Row] = []
    for sharing in [rows] if settings.pool == "global" else [[row] for row in rows]:
        pool = EvalPool(model, pools.of(sharing[0], settings.pool))
        rivals = [] if settings.no_faiss else list(faiss_rivals(pool, seed=settings.seed, progress=progress))
        for eval_row in sharing:
            (queries,) = embed_queries(data, model, eval_row, config, folder, progress)
            qrels = filter_to_pool(read_judgements(eval_row, queries.qids), pool.candidates)
            task = Task(eval_row, queries, qrels)
            progress.say(f"{task.name}: {len(task.queries.qids):,} queries, {len(pool):,} candidates")
            ways = [*_one_step_ways(pool, task, settings, rivals), *routed(pool, settings)]
            methods += measure(pool, task, ways)
            leaves += compare_leaves(pool, task, budgets)
            if settings.grid_queries:
                ways = [way for way in exact_searches(pool) if EXACT_FUSED in way.orders]
                ways += [rival.at(effort) for rival in rivals for effort in rival.efforts()]
                ways += [by_beam(pool, *setting, orders) for setting in grid]
                curves += measure(pool, task.sample(settings.grid_queries), ways)
    methods, curves = with_means(methods, ["method"]), with_means(curves, ["method"])
    gains: list[Row] = []
    for row in with_means(leaves, ["leaves", "semantic_levels"]):
        for kind in ("inside", "5"):
            row[f"gain_{kind}"] = f"{100 * (row[f'generator_{kind}'] - row[f'geometry_{kind}']):+.1f}"
        gains.append({name: row[name] for name in LEAF_COLUMNS})
    health_rows, health_table = _describe_health(pools.health())
    measurements = {"methods": methods, "leaves": gains, "health": health_rows}
    note = f"IDs of {' × '.join(map(str, model.quantizer.sizes))} codes."
    tables = [
        *_method_tables(methods, title=f"{data.name}, {settings.pool} pool", note=note),
        table(
            gains,
            LEAF_COLUMNS,
            name="leaves",
            title="Generator against geometry, equally many leaves",
            note="Both rank all prefixes of one length; from the best on, the IDs under them are taken until "
            "there are exactly so many, of the last prefix those that come first in the table. Inside: share "
            "of queries with a right answer among the leaves; R@5: the leaves ranked by codes; gains in "
            "points.",
        ),
        health_table,
    ]
    if curves:
        measurements["curves"] = curves
    return Measurements(rows=measurements, tables=tables)


def exact_searches(pool: EvalPool) -> Iterator[Way]:
    """Yield exact search over whole vectors, and with a byte more each, less the density around them."""
    penalty = np.float32(SearchConfig().density_weight) * decode_densities(pool.densities)

    def exact(name: str, vectors: Tensor, queries: Callable[[RowQueries], Tensor], more: int = 0) -> Way:
        def find(batch: RowQueries) -> Answered:
            found = exact_search(queries(batch), vectors.__getitem__, len(pool), k=HITS)
            return Answered(list(found.items), len(pool) * len(found.items))

        size = pool.vector_bytes + more
        return one_step(name, {"line": "exact search", "code_bytes": size, "stored_bytes": size}, find)

    less_density = append_bias(pool.fused, penalty)
    yield exact("exact-raw", pool.raw, lambda batch: batch.raw)
    yield exact(EXACT_FUSED, pool.fused, lambda batch: batch.fused)
    yield exact(EXACT_FUSED_HUBNESS, less_density, lambda batch: append_one(batch.fused), more=1)


def _one_step_ways(
    pool: EvalPool, task: Task, settings: QualitySettings, rivals: Sequence[FaissRival]
) -> list[Way]:
    """Return exact searches, and faiss with about as many candidates as the generator's beams lead to."""
    sample = task.sample(SAMPLE).queries
    by_codes = (SearchConfig(rerank="codes"),)
    beams = by_beam(pool, GENERATOR, settings.beam, settings.candidates, by_codes).route(sample)
    starts = pool.table.bucket_starts
    touched = float((starts[beams.high] - starts[beams.low]).sum()) / len(sample.qids)
    return [*exact_searches(pool), *(rival.touching(sample.fused.numpy(), touched) for rival in rivals)]


def routed(pool: EvalPool, settings: QualitySettings) -> Iterator[Way]:
    """Yield everything by codes, the paper's full-depth search, and routing within a leaf budget."""
    beam, leaves, weight = settings.beam, settings.candidates, settings.generator_weight
    codes, embeddings = SearchConfig(rerank="codes"), SearchConfig(rerank="embeddings")
    mixed = (SearchConfig(rerank="codes", generator_weight=weight),) if weight else ()
    everything = {"code_bytes": pool.code_bytes, "stored_bytes": pool.stored_bytes, "order": "codes"}
    yield Way(
        lambda batch: all_ids(pool.segments, len(batch.qids)),
        {"exact-codes": (everything, lambda beams, batch: pool.rank(beams, batch.fused, codes))},
    )
    yield by_beam(pool, GENERATOR, PAPER_BEAM, 0, (SearchConfig(rerank="none"), codes, embeddings))
    yield by_beam(pool, GENERATOR, beam, leaves, (codes, *mixed, embeddings))
    yield by_beam(pool, GEOMETRY, beam, leaves, (codes, embeddings))


def by_beam(pool: EvalPool, router: str, beam: int, leaves: int, orders: tuple[SearchConfig, ...]) -> Way:
    """Return a beam search that ends when few enough leaves are left or, with 0, the IDs are settled.

    The first order decides how far is decoded: ``none`` needs all levels.
    """
    config = SearchConfig(beam=beam, candidates=leaves, rerank=orders[0].rerank)
    name = f"{router}, beam {beam}, {f'{leaves:,} leaves' if leaves else 'all levels'}"
    methods = {}
    for order in orders:
        mixed = f" + {order.generator_weight:g} log p" if order.generator_weight else ""
        vectors = pool.vector_bytes + 1 if order.rerank == "embeddings" else 0.0  # with a byte of density
        facts = {
            "line": LINES.get((router, order.rerank), ""),
            "router": router,
            "order": order.rerank,
            "beam": beam,
            "leaves": leaves,
            "code_bytes": pool.code_bytes + vectors,
            "stored_bytes": pool.stored_bytes + vectors,
        }
        methods[f"{name} {ORDERS[order.rerank]}{mixed}"] = (facts, partial(_rank_batch, pool, order))
    return Way(
        lambda batch: search(pool.decoders[router], pool.segments, batch.fused, config),
        methods,
    )


def _rank_batch(pool: EvalPool, order: SearchConfig, beams: Beams, batch: RowQueries) -> Answered:
    return pool.rank(beams, batch.fused, order)


def cut_to_budget(beams: Beams, leaves: int) -> Beams:
    """Return the best prefixes, as many as hold so many IDs; of the last one only the IDs that come first.

    For one segment: leaves are cut in the order of its table.
    """
    sizes = (beams.high - beams.low)[:, :, 0]
    before = sizes.cumsum(axis=1) - sizes
    kept = np.minimum(sizes, np.maximum(leaves - before, 0))
    history = np.where((kept > 0)[..., None], beams.log_probabilities, np.float32(-np.inf))
    return Beams(beams.low, beams.low + kept[..., None], history)


@dataclass
class _Tally:
    """The results of one method so far."""

    facts: Row
    items: Rows = field(default_factory=list)
    touched: int = 0
    levels: int = 0
    """Levels decoded for all queries together, the modality's included."""
    route_seconds: float = 0.0
    rank_seconds: float = 0.0

    def add(self, answered: Answered, began: float) -> None:
        self.rank_seconds += time.process_time() - began
        self.items += answered.items
        self.touched += answered.touched


def measure(pool: EvalPool, task: Task, ways: Sequence[Way]) -> list[Row]:
    """Return a row for each way and each of its orders; the first batch is searched once before, untimed."""
    batches = list(task.batches(BATCH))
    for timed in (batches[:1], batches):
        found = {name: _Tally(facts) for way in ways for name, (facts, _) in way.orders.items()}
        for batch in timed:
            for way in ways:
                began = time.process_time()
                beams = way.route(batch)
                route_seconds = time.process_time() - began
                for name, (_, answer) in way.orders.items():
                    began = time.process_time()
                    tally = found[name]
                    tally.add(answer(beams, batch), began)
                    if beams is not None:
                        tally.route_seconds += route_seconds
                        tally.levels += int(np.isfinite(beams.log_probabilities).any(axis=1).sum())
    count = len(task.queries.qids)
    rows = [
        {
            "task": task.name,
            "queries": count,
            "pool_size": len(pool),
            "method": name,
            "line": "",
            "router": "",
            "order": "",
            "beam": 0,
            "leaves": 0,
            "lists": 0,
            **tally.facts,
            **{f"recall_{k}": rate for k, rate in pool.hit_rates(task, tally.items).items()},
            "touched": tally.touched / count,
            "touched_share": tally.touched / count / len(pool),
            "levels": tally.levels / count if tally.facts.get("router") else None,
            "route_ms": 1000 * tally.route_seconds / count,
            "rank_ms": 1000 * tally.rank_seconds / count,
        }
        for name, tally in found.items()
    ]
    return beside_exact(rows)


def beside_exact(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one task with their shares of what exact search over fused embeddings finds."""
    best = next(row for row in rows if row["method"] == EXACT_FUSED)

    def share(row: Row, measure: str) -> float | None:
        return row[measure] / best[measure] if best[measure] else None

    return [
        {
            **row,
            "of_exact_1": share(row, "recall_1"),
            "of_exact_5": share(row, "recall_5"),
            "touched_percent": f"{100 * row['touched_share']:.2f} %",
            "cpu_ms": row["route_ms"] + row["rank_ms"],
        }
        for row in rows
    ]


def with_means(rows: Sequence[Row], keys: list[str]) -> list[Row]:
    """Return the rows behind their means over tasks, every task counting the same; none for a single task.

    A method that was not measured on every task has no mean.
    """
    frame = pd.DataFrame(rows)
    if frame.empty or (num_tasks := frame["task"].nunique()) < 2:
        return list(rows)
    averaged = [name for name in AVERAGED if name in frame]
    means: list[Row] = []
    for _, own in frame.groupby(keys, sort=False):
        if len(own) == num_tasks:
            first = rows[own.index[0]]
            mean = {name: float(own[name].mean()) for name in averaged if first[name] is not None}
            means.append({**first, "task": MEAN, "queries": int(own["queries"].sum()), **mean})
    return [*(beside_exact(means) if keys == ["method"] else means), *rows]


class FaissRival(NamedTuple):
    """An index of faiss's, which compares more candidates for more time."""

    name: str
    line: str
    """Its name in figures."""
    faiss: FaissIndex
    code_bytes: float
    stored_bytes: float

    def at(self, effort: int, name: str = "") -> Way:
        """Return a search through so many lists, or with so many nodes in view."""

        def find(batch: RowQueries) -> Answered:
            found = self.faiss.search(batch.fused.numpy(), HITS, effort=effort)
            return Answered(found.items, found.compared)

        lists = self.faiss.num_lists
        setting = f"{effort:,} of {lists:,} lists" if lists else f"{effort:,} nodes"
        facts = {"line": self.line, "code_bytes": self.code_bytes, "stored_bytes": self.stored_bytes}
        return one_step(name or f"{self.name}, {setting}", {**facts, "lists": effort if lists else 0}, find)

    def efforts(self) -> list[int]:
        """Return numbers of lists, or of nodes, for a curve."""
        most = self.faiss.num_lists
        return [effort for effort in LIST_EFFORTS if effort <= most] if most else list(NODE_EFFORTS)

    def touching(self, queries: Float32[np.ndarray, "queries dim"], wanted: float) -> Way:
        """Return a search through as many lists as hold about so many candidates for queries like these."""

        def touched(effort: int) -> float:
            return self.faiss.search(queries, HITS, effort=effort).compared / len(queries)

        most = self.faiss.num_lists or max(NODE_EFFORTS)
        enough = 1
        while enough < most and touched(enough) < wanted:
            enough = min(2 * enough, most)
        fewer = range(enough // 2 + 1, enough + 1)
        more = fewer[min(bisect.bisect_left(fewer, wanted, key=touched), len(fewer) - 1)]
        chosen = min((max(more - 1, 1), more), key=lambda effort: abs(touched(effort) - wanted))
        return self.at(chosen, self.name)


def faiss_rivals(pool: EvalPool, *, seed: int, progress: Progress) -> Iterator[FaissRival]:
    """Build IVF-PQ, IVF residual quantizers and a graph, trained on the pool's own fused embeddings.

    That favours them: our codebooks were learned from the training pool. So does that a list's centroid
    explains a part of a vector and costs them no byte, where the first code of an ID is counted.
    """
    vectors = pool.fused.numpy()
    num_items, dim = vectors.shape
    num_bytes = math.ceil(pool.code_bytes + NUM_EXTRA_COLUMNS)
    lists, bits = num_lists(num_items), num_bits(num_items)
    parts, codebooks = num_parts(dim, num_bytes), num_bytes - NORM_BYTES
    rivals = [
        (f"IVF-PQ ({parts} × {bits} bits)", "IVF-PQ", f"PQ{parts}x{bits}np", parts * bits / 8),
        (f"IVF-RQ ({codebooks} × {bits} bits and a norm)", "residual codes",
         f"RQ{codebooks}x{bits}_Nqint8", codebooks * bits / 8 + NORM_BYTES),
        (f"IVF-RQ fast ({2 * codebooks} × 4 bits and a norm)", "residual codes",
         f"RQ{2 * codebooks}x4fs_32_Nrq2x4", float(num_bytes)),
    ]  # fmt: skip
    for name, line, codes, code_bytes in rivals:
        progress.say(f"building faiss {name}")
        index = FaissIndex(f"IVF{lists},{codes}", vectors, seed=seed, width=RESIDUAL_WIDTH)
        yield FaissRival(f"faiss {name}", line, index, code_bytes, code_bytes + NUMBER_BYTES)
    progress.say("building faiss HNSW")
    graph = FaissIndex("HNSW32", vectors, seed=seed)
    yield FaissRival("faiss HNSW", "HNSW", graph, float(dim * vectors.itemsize), graph.item_bytes)


class PrefixDecoder:
    """A decoder that ends after its first levels: its IDs are prefixes."""

    def __init__(self, decoder: Decoder, levels: int) -> None:
        self.sizes = decoder.sizes[:levels]
        self.device = decoder.device
        self.start, self.advance = decoder.start, decoder.advance
        self.logits, self.log_probabilities = decoder.logits, decoder.log_probabilities


class Prefixes:
    """The distinct prefixes of one length in a table."""

    def __init__(self, ids: IdTable, levels: int) -> None:
        codes = np.asarray(ids.ids[:, :levels])
        is_first = np.ones(len(codes), dtype=bool)
        is_first[1:] = (codes[1:] != codes[:-1]).any(axis=1)
        starts = is_first.nonzero()[0]
        self.levels = levels
        self.bounds: Int64[np.ndarray, " fences"] = np.append(starts, len(ids))
        self.segment = SearchSegment(IdTable.build(codes[starts], np.zeros(len(starts), dtype=np.float16)))

    def best(self, decoder: Decoder, queries: Float[Tensor, "queries dim"], count: int) -> Beams:
        """Return the best prefixes of each query, as ranges of the whole table."""
        config = SearchConfig(beam=count)
        found = search(PrefixDecoder(decoder, self.levels), [self.segment], queries, config)
        low = self.bounds[found.low]
        high = np.where(found.high > found.low, self.bounds[found.low + 1], low)
        return Beams(low, high, found.log_probabilities)


def compare_leaves(pool: EvalPool, task: Task, budgets: Sequence[int]) -> Iterator[Row]:
    """Measure what the generator and geometry find among equally many leaves, by depth and budget.

    A beam as wide as the largest budget fills it, for a prefix holds at least one ID. It is never narrower
    than :data:`MIN_BEAM`, so that among prefixes of two codes the best are found, unless there are more
    first codes than that.
    """
    quantizer = pool.model.quantizer
    first = 1 if quantizer.has_modality_level else 0
    right = [pool.right_ids(task, qid) for qid in task.queries.qids]
    by_codes = SearchConfig(rerank="codes")
    for depth in DEPTHS:
        if first + depth > len(quantizer.sizes):
            continue
        prefixes = Prefixes(pool.table, first + depth)
        shared = {"task": task.name, "queries": len(right), "semantic_levels": depth}
        rows: dict[int, Row] = {budget: {**shared, "leaves": budget} for budget in budgets}
        for router, decoder in pool.decoders.items():
            inside = dict.fromkeys(budgets, 0)
            items: dict[int, Rows] = defaultdict(list)
            for start in range(0, len(right), PREFIX_BATCH):
                queries = task.queries.fused[start : start + PREFIX_BATCH]
                beams = prefixes.best(decoder, queries, max(MIN_BEAM, *budgets))
                for budget in rows:
                    kept = cut_to_budget(beams, budget)
                    items[budget] += pool.rank(kept, queries, by_codes).items
                    ranges = zip(right[start:], kept.low[..., 0], kept.high[..., 0], strict=False)
                    for ids, low, high in ranges:
                        is_inside = (low <= ids[:, None]) & (ids[:, None] < high)
                        inside[budget] += bool(is_inside.any())
            for budget, row in rows.items():
                row[f"{router}_inside"] = inside[budget] / len(right)
                row[f"{router}_5"] = pool.hit_rates(task, items[budget])[5]
        yield from rows.values()


def _method_tables(rows: Sequence[Row], *, title: str, note: str) -> Iterator[Table]:
    """Yield a table for each task; the last one's note says how to read them."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for task in tasks:
        own = [row for row in rows if row["task"] == task]
        size = f"{own[0]['queries']:,} queries, {own[0]['pool_size']:,} candidates."
        how = f"{size} {note} {HOW_TO_READ}" if task == tasks[-1] else size
        yield table(own, METHOD_COLUMNS, name="methods", title=f"{title}: {task}", note=how)


def _describe_health(health: Health) -> tuple[list[Row], Table]:
    columns = ("level", "codes", "used", "perplexity", "largest_share")
    levels = [{"codes": level.size, **asdict(level)} for level in health.levels]
    rows = [{name: level[name] for name in columns} for level in levels]
    purity = "no modality level" if health.purity is None else f"purity of level 0 {health.purity:.2%}"
    return rows, table(
        rows,
        {name: name.replace("_", " ") for name in columns},
        name="health",
        title="Health of the IDs",
        note=f"{health.candidates:,} candidates, {health.distinct_ids:,} distinct IDs; "
        f"{health.collision_rate:.2%} share their ID, the fullest has {health.largest_bucket:,}; {purity}; "
        f"mean cosine between an embedding and its ID's vector {health.reconstruction:.3f}. Verdict: "
        f"{health.verdict}.",
    )
