"""``genius bench quality``: how much of exact search the IDs keep, beside geometry and faiss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int64
from torch import Tensor

from genius_search.config import SearchConfig, checked
from genius_search.data.mbeir import MBeir, read_judgements
from genius_search.errors import UsageError
from genius_search.lab.baselines.faiss_index import num_lists
from genius_search.lab.baselines.ids import find_rows
from genius_search.lab.bench.coded import ALL
from genius_search.lab.bench.given import K
from genius_search.lab.bench.results import Measurements, Row, table
from genius_search.lab.bench.rivals import NUMBER_BYTES, Rival, faiss_rival, pq_factory
from genius_search.lab.bench.settings import QualitySettings, parse_counts
from genius_search.lab.evaluate import EvaluationPools, embed_queries
from genius_search.lab.methods import PoolCandidates, RowQueries
from genius_search.lab.runs import filter_to_pool
from genius_search.lab.settings import EvaluationConfig
from genius_search.lab.table import Table
from genius_search.model import Genius
from genius_search.nn.columns import NUM_EXTRA_COLUMNS, decode_densities
from genius_search.progress import Progress
from genius_search.records import candidate_number, task_name
from genius_search.search.exact import append_bias, append_one, exact_search
from genius_search.search.find import find
from genius_search.search.rank import Evidence, Wanted
from genius_search.search.table import SearchSegment
from genius_search.search.vectors import StoredVectors, quantize

MEAN: Final = "mean"
"""Stands for a task where all tasks count the same."""
BATCH: Final = 64
"""Queries searched together."""
PAPER_BEAM: Final = 50
"""IDs that the paper keeps at each level."""
EXACT_FUSED: Final = "exact-fused"
"""The others' recall is compared with this."""
Router = Literal["generator", "geometry"]
Order = Literal["none", "codes", "embeddings"]
ROUTERS: Final[tuple[Router, Router]] = ("generator", "geometry")
RERANKED: Final[tuple[Order, Order]] = ("codes", "embeddings")
ORDERS: Final[dict[Order, str]] = {"none": "alone", "codes": "+ codes", "embeddings": "+ embeddings"}
LINES: Final = {
    ("generator", "none"): "ours, by probability",
    ("generator", "codes"): "ours, by codes",
    ("generator", "embeddings"): "ours, by vectors",
    ("geometry", "codes"): "nearest code vectors, by codes",
    ("geometry", "embeddings"): "nearest code vectors, by vectors",
}
"""Their names in the figures of a report."""
HOW_TO_READ: Final = (
    "R@k: share of queries with a right answer among the first k; shares are of exact-fused. Bytes of an "
    "item: the bits of its codes (and its embedding, where one is compared), and as it is kept. "
    "CPU-milliseconds of a query among 64, one thread; the encoder is in no figure. faiss's indexes are "
    "those of `genius bench search`, trained on the pool's own fused embeddings, which favours them; their "
    "lists cost no byte. Geometry is the same beam search without a generator, by the distance between the "
    "query and the vectors of prefixes."
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
    "cpu_ms": "CPU-ms",
    "recall_10": "R@10",
    "stored_bytes": "stored",
    "touched_percent": "of the pool",
}
LEAF_COLUMNS: Final = {
    "task": "task",
    "leaves": "leaves",
    "generator_inside": "generator, inside",
    "geometry_inside": "geometry, inside",
    "gain_inside": "gain, inside",
    "codes_inside": "the best by codes",
    "embeddings_inside": "by embeddings",
    "generator_5": "generator, R@5",
    "geometry_5": "geometry, R@5",
    "gain_5": "gain, R@5",
}
AVERAGED: Final = (
    "recall_1", "recall_5", "recall_10", "touched", "touched_share", "cpu_ms", "generator_inside",
    "geometry_inside", "codes_inside", "embeddings_inside", "generator_5", "geometry_5",
)  # fmt: skip

Rows = list[Int64[np.ndarray, " _"]]
"""Item rows of each query, best first; −1 where a search found fewer."""


def _select(queries: RowQueries, rows: slice | np.ndarray) -> RowQueries:
    qids = np.array(queries.qids, dtype=object)[rows].tolist()
    return RowQueries(qids, queries.raw[rows], queries.fused[rows])


class Task(NamedTuple):
    """The queries of one row of the data set, and the item rows of their right answers."""

    name: str
    queries: RowQueries
    right: Rows

    def batches(self) -> Iterator[RowQueries]:
        """Yield all queries, :data:`BATCH` at a time."""
        for start in range(0, len(self.queries.qids), BATCH):
            yield _select(self.queries, slice(start, start + BATCH))

    def sample(self, limit: int) -> Task:
        """Return at most so many of the queries, spread evenly."""
        count = len(self.queries.qids)
        if limit >= count:
            return self
        chosen = np.linspace(0, count - 1, limit).astype(np.int64)
        return Task(self.name, _select(self.queries, chosen), [self.right[query] for query in chosen])

    def hit_rate(self, items: Rows, k: int) -> float:
        """Return the share of queries with a right answer among the first ``k`` item rows (M-BEIR's R@k)."""
        pairs = zip(self.right, items, strict=True)
        return float(np.mean([np.isin(rows[:k], right).any() for right, rows in pairs]))


class Answered(NamedTuple):
    """The hits of some queries."""

    items: Rows
    touched: int | None
    """Candidates that were compared, for all queries together, if that is known."""


class EvalPool:
    """One pool, its vectors in memory so that all methods find them there, and the model that searches it."""

    def __init__(self, model: Genius, candidates: PoolCandidates) -> None:
        if candidates.densities is None:
            raise ValueError("fused embeddings were not kept")
        self.model = model
        self.candidates = candidates
        self.segments = [SearchSegment(candidates.table)]
        self.raw = candidates.raw(slice(None))
        self.fused = candidates.fused(slice(None))
        penalty = np.float32(SearchConfig().density_weight) * decode_densities(candidates.densities)
        self.less_density = append_bias(self.fused, penalty)
        """Fused embeddings with one more number: what our own orders take from a score for density."""
        stored = StoredVectors(quantize(self.fused.numpy(), 16), 16)
        self.evidence = Evidence(model.ranker, [stored], densities=[candidates.densities])
        self.code_bytes = sum(math.log2(size) for size in model.quantizer.sizes) / 8
        """Bytes of an ID, as short as its codes can be written. Half norm and density follow from the codes:
        they are counted in :attr:`stored_bytes` only."""
        ids = candidates.table
        self.stored_bytes = (ids.nbytes + ids.bucket_starts.nbytes + ids.items.nbytes) / len(candidates)
        """Bytes of an ID as the table keeps it, with its half norm and density, where prefixes begin, and the
        lists of items."""
        self.vector_bytes = 2.0 * model.dim
        """Bytes of an embedding, as an index keeps it."""

    def __len__(self) -> int:
        return len(self.candidates)

    def search(self, queries: Float[Tensor, "queries dim"], config: SearchConfig, k: int = K) -> Answered:
        """Search as an index does, with compiled code where there is any for the settings."""
        vectors = queries.numpy()
        results = find(
            lambda: self.model.decoder_for(config),
            self.model.fast_for(config),
            self.segments,
            vectors,
            [Wanted(config.beam, k)] * len(vectors),
            config,
            evidence=self.evidence,
            embeddings=list(vectors),
        )
        rankings = [ranking for ranking, _ in results]
        return Answered([found.items for found in rankings], sum(found.touched for found in rankings))


class Way(NamedTuple):
    """A search."""

    name: str
    facts: Row
    """Fields of its rows that do not depend on queries: ``line``, its name in figures; ``code_bytes`` of an
    item, as short as it can be written, and ``stored_bytes``, as it is kept, without what is paid once
    (weights, centroids, code vectors)."""
    answer: Callable[[RowQueries], Answered]


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
    grid: list[tuple[Router, int, int, Order]] = [
        *product(ROUTERS, beams, filter(None, all_leaves), RERANKED),
        *(("generator", beam, 0, "none") for beam in beams if 0 in all_leaves),
    ]
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
        rivals = list(faiss_ways(pool, seed=settings.seed, progress=progress))
        for eval_row in sharing:
            (queries,) = embed_queries(data, model, eval_row, config, folder, progress)
            qrels = filter_to_pool(read_judgements(eval_row, queries.qids), pool.candidates)
            answers = [
                [candidate_number(did) for did, relevance in judged.items() if relevance > 0]
                for judged in qrels.values()
            ]
            right = find_rows(np.array([*chain.from_iterable(answers)]), pool.candidates.dids)
            name = f"{eval_row.dataset}: {task_name(eval_row.task_id)}"
            task = Task(name, queries, np.split(right, np.cumsum([len(own) for own in answers])[:-1]))
            progress.say(f"{task.name}: {len(task.queries.qids):,} queries, {len(pool):,} candidates")
            methods += measure(pool, task, [*exact_ways(pool), *rivals, *routed_ways(pool, settings)])
            leaves += compare_leaves(pool, task, settings.beam, budgets)
            if settings.grid_queries:
                ways = [way for way in exact_ways(pool) if way.name == EXACT_FUSED]
                ways += [*rivals, *(by_beam(pool, *setting) for setting in grid)]
                curves += measure(pool, task.sample(settings.grid_queries), ways)
    methods, curves = with_means(methods, ["method"]), with_means(curves, ["method"])
    gains: list[Row] = []
    for row in with_means(leaves, ["leaves"]):
        for kind in ("inside", "5"):
            row[f"gain_{kind}"] = f"{100 * (row[f'generator_{kind}'] - row[f'geometry_{kind}']):+.1f}"
        gains.append({name: row[name] for name in LEAF_COLUMNS})
    measurements = {"methods": methods, "leaves": gains}
    note = f"IDs of {' × '.join(map(str, model.quantizer.sizes))} codes."
    tables = [
        *_method_tables(methods, title=f"{data.name}, {settings.pool} pool", note=note),
        table(
            gains,
            LEAF_COLUMNS,
            name="leaves",
            title="Generator against geometry, equally many leaves",
            note=f"Searches by codes with a beam of {settings.beam} and so many candidates. Inside: share of "
            "queries with a right answer among them, or among as many of the best of all items; R@5: the "
            "candidates ranked by codes; gains in points.",
        ),
    ]
    if curves:
        measurements["curves"] = curves
    return Measurements(rows=measurements, tables=tables)


def exact_ways(pool: EvalPool) -> Iterator[Way]:
    """Yield exact search over whole vectors, and with a byte more each, less the density around them."""

    def exact(name: str, vectors: Tensor, queries: Callable[[RowQueries], Tensor], more: int = 0) -> Way:
        def answer(batch: RowQueries) -> Answered:
            found = exact_search(queries(batch), vectors.__getitem__, len(pool), k=K)
            return Answered(list(found.items), len(pool) * len(found.items))

        size = pool.vector_bytes + more
        return Way(name, {"line": "exact search", "code_bytes": size, "stored_bytes": size}, answer)

    yield exact("exact-raw", pool.raw, lambda batch: batch.raw)
    yield exact(EXACT_FUSED, pool.fused, lambda batch: batch.fused)
    yield exact("exact-fused+hubness", pool.less_density, lambda batch: append_one(batch.fused), more=1)


def faiss_ways(pool: EvalPool, *, seed: int, progress: Progress) -> Iterator[Way]:
    """Yield searches of faiss's indexes of the pool's fused embeddings: codes of as many bytes, and a graph.

    That favours them: our codebooks were learned from the training pool. So does that a list's centroid
    explains a part of a vector and costs them no byte, where the first code of an ID is counted.
    """

    def at(rival: Rival, line: str, effort: int) -> Way:
        size = rival.item_bytes - NUMBER_BYTES * rival.has_lists
        facts = {"line": line, "code_bytes": size, "stored_bytes": rival.item_bytes}
        find = rival.search(effort)
        return Way(rival.title(effort), facts, lambda batch: Answered(list(find(batch.fused.numpy())), None))

    vectors = pool.fused.numpy()
    num_items, dim = vectors.shape
    num_bytes, lists = math.ceil(pool.code_bytes + NUM_EXTRA_COLUMNS), num_lists(num_items)
    factories = {
        "IVF-PQ": pq_factory(lists, dim, num_items, num_bytes),
        "residual codes": f"IVF{lists},RQ{2 * (num_bytes - 1)}x4fs_32_Nrq2x4",
        "HNSW": "HNSW32",
    }
    for line, factory in factories.items():
        progress.say(f"building faiss {factory}")
        rival = faiss_rival(factory, vectors, seed=seed)
        yield from (at(rival, line, effort) for effort in rival.efforts)


def routed_ways(pool: EvalPool, settings: QualitySettings) -> Iterator[Way]:
    """Yield everything by codes, the paper's search of all levels, and routing within a leaf budget."""
    everything = SearchConfig(candidates=ALL, rerank="codes", router="geometry")
    yield Way(
        "exact-codes",
        {"line": "", "code_bytes": pool.code_bytes, "stored_bytes": pool.stored_bytes, "order": "codes"},
        lambda batch: pool.search(batch.fused, everything),
    )
    yield by_beam(pool, "generator", PAPER_BEAM, 0, "none")
    for router, order in product(ROUTERS, RERANKED):
        yield by_beam(pool, router, settings.beam, settings.candidates, order)


def by_beam(pool: EvalPool, router: Router, beam: int, leaves: int, order: Order) -> Way:
    """Return a beam search that ends when few enough leaves are left; 0 decodes all levels."""
    config = SearchConfig(beam=beam, candidates=leaves, rerank=order, router=router)
    vectors = pool.vector_bytes + 1 if order == "embeddings" else 0.0  # with a byte of density
    facts = {
        "line": LINES.get((router, order), ""),
        "router": router,
        "order": order,
        "beam": beam,
        "leaves": leaves,
        "code_bytes": pool.code_bytes + vectors,
        "stored_bytes": pool.stored_bytes + vectors,
    }
    depth = f"{leaves:,} leaves" if leaves else "all levels"
    name = f"{router}, beam {beam}, {depth} {ORDERS[order]}"
    return Way(name, facts, lambda batch: pool.search(batch.fused, config))


def measure(pool: EvalPool, task: Task, ways: Sequence[Way]) -> list[Row]:
    """Return a row for each way; they take turns, and the first batch is searched once before, untimed."""
    batches, count = list(task.batches()), len(task.queries.qids)
    for way in ways:
        way.answer(batches[0])
    answers: dict[str, list[Answered]] = {way.name: [] for way in ways}
    seconds = dict.fromkeys(answers, 0.0)
    for batch in batches:
        for way in ways:
            began = time.process_time()
            answers[way.name].append(way.answer(batch))
            seconds[way.name] += time.process_time() - began
    rows = []
    for way in ways:
        found = answers[way.name]
        items = [rows for one in found for rows in one.items]
        row: Row = {"task": task.name, "queries": count, "pool_size": len(pool), "method": way.name}
        row |= {"router": "", "order": "", "beam": 0, "leaves": 0, **way.facts}
        row |= {f"recall_{k}": task.hit_rate(items, k) for k in (1, 5, 10)}
        compared = [one.touched for one in found if one.touched is not None]
        touched = sum(compared) / count if compared else None
        row |= {"touched": touched, "touched_share": touched and touched / len(pool)}
        rows.append({**row, "cpu_ms": 1000 * seconds[way.name] / count})
    return beside_exact(rows)


def beside_exact(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one task with their shares of what exact search over fused embeddings finds."""
    best = next(row for row in rows if row["method"] == EXACT_FUSED)

    def share(row: Row, measure: str) -> float | None:
        return row[measure] / best[measure] if best[measure] else None

    def percent(touched: float | None) -> str | None:
        return None if touched is None else f"{100 * touched:.2f} %"

    return [
        {
            **row,
            "of_exact_1": share(row, "recall_1"),
            "of_exact_5": share(row, "recall_5"),
            "touched_percent": percent(row["touched_share"]),
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


def compare_leaves(pool: EvalPool, task: Task, beam: int, budgets: Sequence[int]) -> Iterator[Row]:
    """Measure what the generator and geometry find among equally many leaves, beside the best ones."""
    queries, most = task.queries.fused, min(max(budgets), len(pool))
    nearest = exact_search(append_one(queries), pool.less_density.__getitem__, len(pool), k=most).items

    def found(router: Router, leaves: int, k: int) -> Rows:
        config = SearchConfig(beam=beam, candidates=leaves, rerank="codes", router=router)
        return [items for batch in task.batches() for items in pool.search(batch.fused, config, k).items]

    by_codes = found("geometry", ALL, most)
    for budget in budgets:
        row: Row = {"task": task.name, "queries": len(queries), "leaves": budget}
        for router in ROUTERS:
            items = found(router, budget, min(budget, len(pool)))
            row |= {f"{router}_inside": task.hit_rate(items, budget), f"{router}_5": task.hit_rate(items, 5)}
        row["codes_inside"] = task.hit_rate(by_codes, budget)
        row["embeddings_inside"] = task.hit_rate(list(nearest), budget)
        yield row


def _method_tables(rows: Sequence[Row], *, title: str, note: str) -> Iterator[Table]:
    """Yield a table for each task; the last one's note says how to read them."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for task in tasks:
        own = [row for row in rows if row["task"] == task]
        size = f"{own[0]['queries']:,} queries, {own[0]['pool_size']:,} candidates."
        how = f"{size} {note} {HOW_TO_READ}" if task == tasks[-1] else size
        yield table(own, METHOD_COLUMNS, name="methods", title=f"{title}: {task}", note=how)
