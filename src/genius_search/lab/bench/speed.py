"""``genius bench speed``: time and memory of a search as the pool grows, beside the usual ways to search.

Without a data set, pools of drawn codes show speed alone. With one, every method searches the same embeddings
of one row, and recall is measured too.
"""

from __future__ import annotations

import math
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from genius_search.config import SearchConfig, checked
from genius_search.data.mbeir import MBeir
from genius_search.errors import UsageError
from genius_search.index.store import quantize
from genius_search.lab.baselines.faiss_index import FaissIndex
from genius_search.lab.baselines.generate import HfGenerate, PointerTrie
from genius_search.lab.baselines.routing import CodeRouter
from genius_search.lab.bench.measure import Latency, read_memory, time_build, time_queries, time_rounds
from genius_search.lab.bench.pools import (
    DIM,
    NumberedPool,
    PaddedPool,
    Searcher,
    SyntheticPool,
    padded,
    random_queries,
    searcher_of,
    synthetic_searcher,
)
from genius_search.lab.bench.results import Measurements, Row, table
from genius_search.lab.bench.settings import SpeedSettings, parse_counts
from genius_search.lab.bench.tasks import EvalData, Task, select_rows
from genius_search.lab.figure import Drawing, Line, draw_fronts, draw_lines, lines_by_size
from genius_search.lab.table import Table
from genius_search.model import Genius
from genius_search.nn.density import NUM_EXTRA_COLUMNS
from genius_search.progress import Progress
from genius_search.search.beam import Beams, search
from genius_search.search.rank import Evidence, rank_items
from genius_search.search.table import IdTable, Part

HITS: Final = 50
SYNTHETIC_SIZES: Final = "1e4,1e5,1e6,1e7,1e8"
FULL: Final = "full search"
LEAF_STOP: Final = "leaf stop"
SHALLOW: Final = "small decoder, leaf budget"
NUMBERS: Final = "numbers as IDs (GRACE)"
VOCABULARY: Final = "full search, vocabulary scores"
GENERATE: Final = "HF generate, prefix callback"
EXACT: Final = "exact search (32-bit vectors)"
SYNTHETIC_FAMILIES: Final = ("ours", "numbers", "exact", "generate")
REAL_FAMILIES: Final = ("ours", "routing", "exact", "hnsw", "ivf", "ivf-pq", "residual", "generate")
HNSW_EFFORTS: Final = (16, 32, 64, 128, 256)
IVF_EFFORTS: Final = (1, 4, 16, 64)
REFINED_EFFORTS: Final = (4, 16, 64)
"""Lists that are looked through where whole vectors are kept."""
ROUTES: Final = (1, 2, 4, 8, 16)
"""First codes that are taken when only their vectors decide."""
BUDGETS: Final = ((1, 1000), (4, 1000), (10, 1000), (10, 4000), (50, 4000))
"""Beams and leaf budgets."""
SHORTLIST: Final = 100
EXACT_QUERIES: Final = 8
MEMORY_SHARE: Final = 0.6
"""Of the free memory, that the vectors of exact search may take."""
TOLERANCE: Final = 1e-4
"""Scores that differ by no more may stand in either order: the two sum in different orders."""

Found = list[Int64[np.ndarray, " _"]]
"""Item rows of each query, best first."""
Queries = Float[Tensor, "queries dim"]


class Method(NamedTuple):
    """A way of searching, ready to answer."""

    name: str
    line: str
    """Its name in figures, which all settings of a method share."""
    family: str
    search: Callable[[Queries], Found | None]
    """Returns None where items are not ranked."""
    item_bytes: float
    """Bytes that grow with the pool, for each item."""
    fixed_bytes: float = 0.0
    """Bytes that do not: weights, centroids, code vectors. The encoder, which all need, is in none."""
    build_seconds: float | None = None
    repeats: int = 1
    """So many times the usual number of queries is timed one by one."""


@dataclass(frozen=True)
class _Bench:
    """What is measured, and the rows so far."""

    settings: SpeedSettings
    families: Sequence[str]
    sizes: Sequence[int]
    folder: Path
    progress: Progress
    queries: list[Row] = field(default_factory=list)
    builds: list[Row] = field(default_factory=list)
    agreement: list[Row] = field(default_factory=list)


def bench_speed(
    settings: SpeedSettings,
    folder: Path,
    *,
    data: MBeir | None = None,
    model: Genius | None = None,
    progress: Progress,
) -> Measurements:
    """Measure every method at every size.

    Tables are built in ``folder`` and removed again; features of a data set stay. A data set needs a model; a
    model without a data set decodes in place of drawn weights. Raises UsageError where a setting is out of
    range, or the data set has several rows and none is named.
    """
    settings = checked(settings)
    known = SYNTHETIC_FAMILIES if data is None else REAL_FAMILIES
    families = known if settings.methods == "all" else tuple(map(str.strip, settings.methods.split(",")))
    if not set(families) <= set(known):
        raise UsageError(f"--methods {settings.methods!r}: choose from {', '.join(known)}")
    sizes = parse_counts("--sizes", settings.sizes or ("0" if data else SYNTHETIC_SIZES))
    if min(sizes) < (0 if data else 1):
        raise UsageError(f"--sizes {settings.sizes}: a pool needs an item or more")
    bench = _Bench(settings, families, sorted(set(sizes)), folder, progress)
    if data is None:
        if "exact" in families and settings.rival_items < min(sizes):
            raise UsageError(
                f"exact search is measured up to {settings.rival_items:,} items and all pools are larger, so "
                "that nothing could be calculated from; add a smaller size, or leave exact out of --methods"
            )
        description = _measure_synthetic(bench, model)
    elif model is None:
        raise UsageError("a data set needs a --model to embed it")
    else:
        description = _measure_real(bench, data, model)
    rows = {"queries": bench.queries, "builds": bench.builds}
    if bench.agreement:
        rows["agreement"] = bench.agreement
    tables = _tables(bench, description, has_recall=data is not None)
    figures = _size_figures(bench) if data is None else _recall_figures(bench.queries)
    return Measurements(rows=rows, tables=tables, figures=figures)


# Drawn pools


def _measure_synthetic(bench: _Bench, model: Genius | None) -> str:
    """Measure pools of drawn codes, the smallest first; return how the methods search."""
    settings, place = bench.settings, bench.folder / "tables"
    large = synthetic_searcher("reference", seed=settings.seed) if model is None else searcher_of(model)
    small = large
    if model is None:
        small = synthetic_searcher("tiny", seed=settings.seed, sizes=large.decoder.sizes)
    count = max(10 * settings.timed, settings.batch, settings.compared)
    queries = random_queries(count, large.dim, seed=settings.seed + 1)
    full = SearchConfig(beam=settings.beam)
    stopped = SearchConfig(beam=settings.beam, candidates=4 * settings.beam, rerank="codes")
    budget = SearchConfig(beam=settings.small_beam, candidates=settings.small_candidates, rerank="codes")
    bench.progress.begin("speed", len(bench.sizes))
    for number, items in enumerate(bench.sizes, start=1):
        pool = SyntheticPool(items=items, sizes=large.decoder.sizes, kind=settings.codes, seed=settings.seed)
        bench.builds.append({"structure": "our IDs", **build_apart(pool, place)})
        ids = IdTable.open(place)
        methods = []
        if "ours" in bench.families:
            methods = [
                _our_method(FULL, large, ids, full),
                _our_method(LEAF_STOP, large, ids, stopped),
                _our_method(SHALLOW, small, ids, budget)._replace(repeats=10),
            ]
        if "generate" in bench.families and items <= settings.rival_items:
            methods += _generate_methods(bench, large, ids, queries)
        bench.queries.extend(_time(settings, methods, queries, items))
        del ids, methods
        if "numbers" in bench.families:
            numbered = NumberedPool(items=items)
            build_apart(numbered, place)
            digits = synthetic_searcher("reference", seed=settings.seed, sizes=numbered.sizes)
            method = _our_method(NUMBERS, digits, IdTable.open(place), full)
            drawn = random_queries(count, DIM, seed=settings.seed + 1)
            bench.queries.extend(_time(settings, [method], drawn, items))
            del method
        if "exact" in bench.families:
            bench.queries.append(_exact_row(settings, items, bench.queries))
        shutil.rmtree(place)
        bench.progress.advance(number, {})
    decoder = "decoder of the paper's size" if model is None else large.name
    return (
        f"Pools of {settings.codes} drawn codes, {len(large.decoder.sizes)} levels. {FULL}: {decoder}, beam "
        f"{settings.beam}, all levels. {LEAF_STOP}: the same, until {4 * settings.beam} IDs are left, ranked "
        f"by codes. {SHALLOW}: {'one layer of width 128' if model is None else 'the same decoder'}, beam "
        f"{settings.small_beam}, until {settings.small_candidates:,} IDs are left, ranked by codes. "
        f"{NUMBERS}: {FULL} for the items' numbers, a level for each digit. {EXACT}: faiss, all vectors "
        f"of {DIM} numbers. What is marked calculated was not measured: it is in proportion to the largest "
        "pool that was."
    )


def build_apart(pool: SyntheticPool | NumberedPool, folder: Path) -> Row:
    """Build a pool's ID table in a folder, in a process of its own so that its memory can be told apart."""
    shutil.rmtree(folder, ignore_errors=True)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        row = executor.submit(build_table, pool, folder).result()
    opening = []
    for _ in range(5):
        began = time.perf_counter()
        ids = IdTable.open(folder)
        opening.append(1000 * (time.perf_counter() - began))
    return {**_table_facts(ids), **row, "open_ms": float(np.median(opening))}


def build_table(pool: SyntheticPool | NumberedPool, folder: Path) -> Row:
    """Build a pool's ID table in a folder; drawing the codes is not in the times."""
    next(pool.blocks())  # what drawing needs stays out of the peak
    before = read_memory("VmRSS")
    blocks = list(pool.blocks())
    codes = np.concatenate([block.codes for block in blocks])
    cosines = np.concatenate([block.typicality for block in blocks])
    del blocks
    _, times = time_build(lambda: IdTable.build(codes, cosines).save(folder))
    peak = read_memory("VmHWM")
    grown = None if peak is None or before is None else max(0, peak - before) / 2**20
    return {**times, "peak_mib": grown}


def _table_facts(ids: IdTable) -> Row:
    per_item = (ids.nbytes + ids.bucket_starts.nbytes + ids.items.nbytes) / ids.num_items
    sizes = {"bytes_per_id": ids.nbytes / len(ids), "bytes_per_item": per_item}
    return {"items": ids.num_items, "ids": len(ids), **sizes}


def _our_method(name: str, searcher: Searcher, ids: IdTable, config: SearchConfig) -> Method:
    parts, evidence = [Part(ids)], Evidence(searcher.ranker)

    def answer(queries: Queries) -> Found:
        return _rank(parts, search(searcher.decoder, parts, queries, config), queries, config, evidence)

    return Method(name, name, "ours", answer, _table_facts(ids)["bytes_per_item"])


def _rank(
    parts: Sequence[Part], beams: Beams, queries: Queries, config: SearchConfig, evidence: Evidence
) -> Found:
    return [
        rank_items(parts, beams, number, query, config=config, evidence=evidence, k=HITS).items
        for number, query in enumerate(queries)
    ]


def _generate_methods(bench: _Bench, searcher: Searcher, ids: IdTable, queries: Queries) -> Iterator[Method]:
    """Yield the search that generate does and generate itself; compare their rankings, and add its trie."""
    settings = bench.settings
    bench.progress.say("the pointer trie that generate needs")
    if searcher.generator is None:
        raise UsageError(f"{searcher.name} has no generator, which Hugging Face's generate needs")
    codes = ids.ids[:, : len(searcher.decoder.sizes)]
    _, times = time_build(lambda: PointerTrie(codes))
    hf = HfGenerate(searcher.generator, codes)
    trie_bytes, item_bytes = hf.trie.num_bytes(), hf.trie.num_bytes() / ids.num_items
    sizes = {"bytes_per_id": trie_bytes / len(hf.trie), "bytes_per_item": item_bytes}
    row = {"structure": "pointer trie", "items": ids.num_items, "ids": len(hf.trie), **sizes, **times}
    bench.builds.append({**row, "peak_mib": None, "open_ms": None})
    config = SearchConfig(beam=settings.beam, scores="vocabulary")
    if settings.compared:
        ours, theirs = [], []
        for some in queries[: settings.compared].split(settings.batch):
            ours += rankings_of(ids, search(searcher.decoder, [Part(ids)], some, config))
            generated = hf.search(some, beam=settings.beam)
            theirs += [
                Ranking(codes[np.isfinite(scores)], scores[np.isfinite(scores)])
                for codes, scores in zip(generated.codes, generated.scores, strict=True)
            ]
        bench.agreement.append({"items": ids.num_items, **compare_rankings(ours, theirs)})
    yield _our_method(VOCABULARY, searcher, ids, config)

    def answer(some: Queries) -> None:
        hf.codes(some, beam=settings.beam)

    yield Method(GENERATE, GENERATE, "generate", answer, item_bytes)


class Ranking(NamedTuple):
    """The IDs of one query, best first."""

    ids: Int64[np.ndarray, "beams levels"]
    scores: Float32[np.ndarray, " beams"]


def rankings_of(ids: IdTable, beams: Beams) -> list[Ranking]:
    """Return the rankings of a search of one table with all levels decoded, norms and densities left out."""
    levels = beams.log_probabilities.shape[2]
    return [
        Ranking(ids.ids[low[places, 0], :levels].astype(np.int64), values[places])
        for low, values, places in zip(beams.low, beams.scores(), beams.filled(), strict=True)
    ]


def compare_rankings(ours: Sequence[Ranking], theirs: Sequence[Ranking]) -> Row:
    """Count queries with the same IDs in the same order, and those that differ among equal scores only."""
    identical = tied = 0
    for left, right in zip(ours, theirs, strict=True):
        if np.array_equal(left.ids, right.ids):
            identical += 1
        elif _differ_in_ties_only(left, right):
            tied += 1
    share = (identical + tied) / len(ours)
    return {"compared": len(ours), "identical": identical, "tied": tied, "share": share}


def _differ_in_ties_only(left: Ranking, right: Ranking) -> bool:
    """Scores agree place by place and ID by ID; an ID that only one side has ties with the other's last."""
    if len(left.scores) != len(right.scores):
        return False
    if np.abs(left.scores - right.scores).max(initial=0) > TOLERANCE:
        return False
    for one, other in ((left, right), (right, left)):
        known = dict(zip(map(tuple, other.ids.tolist()), other.scores.tolist(), strict=True))
        last = float(other.scores[-1])
        for codes, score in zip(map(tuple, one.ids.tolist()), one.scores.tolist(), strict=True):
            if abs(score - known.get(codes, last)) > TOLERANCE:
                return False
    return True


def _exact_row(settings: SpeedSettings, items: int, rows: Sequence[Row]) -> Row:
    """Return the time of exact search, measured if the vectors fit, else from the largest pool that did."""
    free = read_memory("MemAvailable")
    fits = free is None or items * DIM * (4 + 2) < MEMORY_SHARE * free
    if items > settings.rival_items or not fits:
        measured = [row for row in rows if row["method"] == EXACT and not row["calculated"]]
        if not measured:
            raise UsageError(
                f"the vectors of {items:,} items do not fit, and no smaller pool was measured to calculate "
                "exact search from; free some memory, add a smaller size, or leave exact out of --methods"
            )
        largest = max(measured, key=lambda row: row["items"])
        cpu_ms = largest["cpu_ms"] * items / largest["items"]
        unmeasured = {"p50_ms": None, "p99_ms": None, "calculated": True}
        return {**largest, "items": items, "cpu_ms": cpu_ms, **unmeasured}
    random = np.random.default_rng(settings.seed)
    some = random.standard_normal((min(items, 65_536), DIM), dtype=np.float32).astype(np.float16)
    index = FaissIndex("Flat", np.resize(some, (items, DIM)))
    queries = random_queries(EXACT_QUERIES, DIM, seed=settings.seed + 1)
    method = Method(EXACT, EXACT, "exact", _dense_search(index, None), 4.0 * DIM)
    return _time(replace(settings, timed=EXACT_QUERIES), [method], queries, items, with_batch=False)[0]


# Real pools


def _measure_real(bench: _Bench, data: MBeir, model: Genius) -> str:
    """Measure one row of a data set at each size; return what was searched."""
    settings = bench.settings
    rows = select_rows(data, settings)
    if len(rows) != 1:
        names = ", ".join(row.name for row in rows)
        raise UsageError(f"{data.name} has {len(rows)} rows in split {settings.split} ({names}); name one")
    eval_data = EvalData(data, model, rows, settings, bench.folder / "features", bench.progress)
    candidates = eval_data.candidates(rows[0])
    task = eval_data.task(rows[0], candidates)
    queries = task.queries.fused
    searcher = searcher_of(model)
    for items in bench.sizes:
        pool = padded(model, candidates, items=items, seed=settings.seed)
        bench.progress.say(f"{len(pool):,} items, {len(pool.table):,} IDs, {len(queries):,} queries")
        ids, times = time_build(partial(IdTable.build, pool.codes, np.zeros(len(pool), dtype=np.float16)))
        row = {"structure": "our IDs", **times, **_table_facts(ids), "peak_mib": None, "open_ms": None}
        bench.builds.append(row)
        methods = list(_dense_methods(bench, model, pool))
        methods += _id_methods(bench.families, searcher, model, pool, times["build_cpu_seconds"])
        if "generate" in bench.families and searcher.generator is not None:
            methods += _generate_methods(bench, searcher, pool.table, queries)
        recall = {method.name: _recall(method, task, pool, settings.batch) for method in methods}
        for timed in _time(settings, methods, queries, len(pool)):
            bench.queries.append({**timed, **recall[timed["method"]]})
    padding = (
        ", padded with noisy copies of theirs, which are never right answers" if any(bench.sizes) else ""
    )
    return (
        f"{data.name}, {rows[0].name}: {len(candidates):,} candidates{padding}; "
        f"{len(queries):,} queries, all methods over the same embeddings of {model.dim} numbers. "
        "R@k: share of queries with a right answer among the first k. IVF-PQ refined re-ranks 200 items by "
        "vectors kept beside the codes; ours by vectors those that the codes put first: 100, or with all "
        "levels decoded every item found."
    )


def _recall(method: Method, task: Task, pool: PaddedPool, batch_size: int) -> Row:
    found: Found = []
    for batch in task.batches(batch_size):
        items = method.search(batch.fused)
        if items is None:
            return {"recall_1": None, "recall_5": None, "recall_10": None}
        found += items
    rates = task.hit_rates([pool.did(int(item)) for item in items] for items in found)
    return {f"recall_{k}": rate for k, rate in rates.items()}


def _dense_methods(bench: _Bench, model: Genius, pool: PaddedPool) -> Iterator[Method]:
    """Build faiss's indexes, each with the efforts it is tried with.

    Those of codes have as many bits an item as our packed IDs with norm and density (``packed``), or as our
    table (``stored``). Those of whole vectors keep them in 8 bits too, as our index can.
    """
    dim, lists = pool.vectors.shape[1], min(1024, max(1, len(pool) // 32))
    sizes = model.quantizer.sizes
    packed = math.ceil(sum(math.log2(size) for size in sizes if size > 1) / 8) + NUM_EXTRA_COLUMNS
    stored = 2 * (len(sizes) + NUM_EXTRA_COLUMNS) + 4
    few, many = (
        next(parts for parts in range(min(most, dim), 0, -1) if dim % parts == 0) for most in (packed, stored)
    )
    residual = {size: f"RQ{2 * (size - 1)}x4fs_32_Nrq2x4" for size in (packed, stored)}
    refined = f"IVF{lists},PQ{many}x8np"
    indexes: list[tuple[str, str, str, str, tuple[int | None, ...]]] = [
        ("exact", "exact search", "32-bit vectors", "Flat", (None,)),
        ("exact", "exact search", "8-bit vectors", "SQ8", (None,)),
        ("hnsw", "HNSW", "32-bit vectors", "HNSW32", HNSW_EFFORTS),
        ("hnsw", "HNSW", "8-bit vectors", "HNSW32_SQ8", HNSW_EFFORTS),
        ("ivf", "IVF", "8-bit vectors", f"IVF{lists},SQ8", REFINED_EFFORTS),
        ("ivf-pq", "IVF-PQ refined", "16-bit vectors", f"{refined},Refine(SQfp16)", REFINED_EFFORTS),
        ("ivf-pq", "IVF-PQ refined", "8-bit vectors", f"{refined},Refine(SQ8)", REFINED_EFFORTS),
        ("residual", "residual codes", f"{packed} bytes", residual[packed], (None,)),
        ("residual", "residual codes", f"{stored} bytes", residual[stored], (None,)),
        ("residual", "residual codes", f"{packed} bytes", f"IVF{lists},{residual[packed]}", IVF_EFFORTS),
    ]
    indexes += [
        ("ivf-pq", "IVF-PQ", f"{parts} bytes", f"IVF{lists},PQ{parts}x8np", IVF_EFFORTS)
        for parts in dict.fromkeys((few, many))
    ]
    for family, line, kept, factory, efforts in indexes:
        if family not in bench.families:
            continue
        bench.progress.say(f"building {line} ({kept})")
        index = FaissIndex(factory, pool.vectors, seed=bench.settings.seed)
        for effort in efforts:
            setting = "" if effort is None else f", {effort} list{'s' if effort > 1 else ''}"
            if family == "hnsw":
                setting = f", efSearch {effort}"
            name, find = f"{line} ({kept}){setting}", _dense_search(index, effort)
            costs = (index.item_bytes, index.fixed_bytes, index.build_seconds)
            yield Method(name, line, family, find, *costs)


def _dense_search(index: FaissIndex, effort: int | None) -> Callable[[Queries], Found]:
    return lambda queries: index.search(queries.numpy(), HITS, effort=effort).items


def _id_methods(  # noqa: C901  every way of ranking
    families: Sequence[str], searcher: Searcher, model: Genius, pool: PaddedPool, build_seconds: float
) -> Iterator[Method]:
    """Yield our IDs found by the generator, or by the nearest code vectors alone, and ranked in every way."""
    parts = [Part(pool.table)]
    halves = pool.vectors.astype(np.float16)
    rounded = quantize(halves)

    def exact_vectors(rows: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows dim"]:
        return torch.from_numpy(halves[rows]).float()

    def rounded_vectors(rows: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows dim"]:
        return torch.from_numpy(rounded.values[rows] * rounded.scales[rows, None].astype(np.float32))

    by_codes = Evidence(searcher.ranker)
    by_vectors = {
        "16-bit": (Evidence(searcher.ranker, [exact_vectors]), 2.0 * model.dim),
        "8-bit": (Evidence(searcher.ranker, [rounded_vectors]), model.dim + 2.0),  # with a scale each
    }
    table_bytes = _table_facts(pool.table)["bytes_per_item"]
    routing_bytes = 4.0 * model.dim * sum(searcher.decoder.sizes)

    def decode(config: SearchConfig) -> Callable[[Queries], Beams]:
        return lambda queries: search(searcher.decoder, parts, queries, config)

    def method(
        name: str, setting: str, find: Callable[[Queries], Beams], config: SearchConfig, stored: str = ""
    ) -> Method:
        evidence, vector_bytes = by_vectors[stored] if stored else (by_codes, 0.0)
        family = "routing" if name.startswith("nearest") else "ours"
        return Method(
            f"{name} ({stored}), {setting}" if stored else f"{name}, {setting}",
            name,
            family,
            lambda queries: _rank(parts, find(queries), queries, config, evidence),
            table_bytes + vector_bytes,
            routing_bytes if family == "routing" else searcher.fixed_bytes(),
            build_seconds,
        )

    def ranked(
        who: str, setting: str, find: Callable[[Queries], Beams], config: SearchConfig
    ) -> Iterator[Method]:
        yield method(f"{who}, by codes", setting, find, replace(config, rerank="codes"))
        for stored in by_vectors:
            yield method(f"{who}, by vectors", setting, find, replace(config, rerank="embeddings"), stored)

    if "routing" in families:
        quantizer = model.quantizer
        router = CodeRouter(parts, quantizer.tables(), has_modality_level=quantizer.has_modality_level)
        for beam in ROUTES:
            route = partial(router.route, beam=beam)
            yield from ranked("nearest code vectors", f"{beam} codes", route, SearchConfig(beam=beam))
    if "ours" in families:
        config = SearchConfig(beam=50)
        setting = "beam 50, all levels"
        yield method("ours, by probability", setting, decode(config), config)
        for beam, candidates in ((50, 0), *BUDGETS):
            if candidates:
                config = SearchConfig(beam=beam, candidates=candidates, shortlist=SHORTLIST)
                setting = f"beam {beam}, {candidates:,} leaves"
            # Decoding stops alike whichever of the two ranks afterwards.
            yield from ranked("ours", setting, decode(replace(config, rerank="codes")), config)


# Both


def _time(
    settings: SpeedSettings,
    methods: Sequence[Method],
    queries: Queries,
    items: int,
    *,
    with_batch: bool = True,
) -> list[Row]:
    """Time methods side by side: single queries, then a batch."""

    def single(method: Method) -> Callable[[int], object]:
        return lambda number: method.search(queries[number : number + 1])

    alone: dict[str, Latency] = {}
    for repeats in sorted({method.repeats for method in methods}):
        group = {method.name: single(method) for method in methods if method.repeats == repeats}
        alone |= time_queries(group, min(repeats * settings.timed, len(queries)))
    together = queries[: settings.batch]
    batched: dict[str, float] = {}
    if with_batch and methods:
        calls = {method.name: partial(method.search, together) for method in methods}
        batched = time_rounds(calls, rounds=settings.rounds, per=len(together))
    rows: list[Row] = []
    for method in methods:
        row: Row = {
            "method": method.name,
            "line": method.line,
            "family": method.family,
            "items": items,
            "batch": 1,
            **alone[method.name]._asdict(),
            "bytes_per_item": method.item_bytes,
            "fixed_mib": method.fixed_bytes / 2**20,
            "build_cpu_seconds": method.build_seconds,
            "calculated": False,
        }
        rows.append(row)
        if method.name in batched:
            cpu_ms = batched[method.name]
            rows.append({**row, "batch": len(together), "cpu_ms": cpu_ms, "p50_ms": None, "p99_ms": None})
    return rows


QUERY_COLUMNS: Final = {
    "method": "method",
    "items": "items",
    "batch": "batch",
    "recall_1": "R@1",
    "recall_5": "R@5",
    "recall_10": "R@10",
    "cpu_ms": "CPU-ms",
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "bytes_per_item": "bytes an item",
    "fixed_mib": "fixed, MiB",
    "build_cpu_seconds": "build, CPU-s",
    "calculated": "calculated",
}
ONLY_WITH_RECALL: Final = ("recall_1", "recall_5", "recall_10", "fixed_mib", "build_cpu_seconds")
BUILD_COLUMNS: Final = {
    "structure": "structure",
    "items": "items",
    "ids": "distinct IDs",
    "build_cpu_seconds": "build, CPU-s",
    "peak_mib": "peak, MiB",
    "open_ms": "open, ms",
    "bytes_per_id": "bytes an ID",
    "bytes_per_item": "bytes an item, all",
}


def _tables(bench: _Bench, description: str, *, has_recall: bool) -> list[Table]:
    hidden = ("calculated",) if has_recall else ONLY_WITH_RECALL
    rows = bench.queries
    if not has_recall:
        rows = sorted(rows, key=lambda row: (row["method"], row["batch"], row["items"]))
    tables = [
        table(
            rows,
            {name: heading for name, heading in QUERY_COLUMNS.items() if name not in hidden},
            name="queries",
            title="Searching",
            note="CPU-milliseconds of a query on one core, alone or in a batch; the encoder is in no figure. "
            f"Bytes that grow with the pool{', and those that do not' if has_recall else ''}. {description}"
            f"{'' if has_recall else ' Weights were drawn: this is speed, not recall.'}",
        ),
        table(
            bench.builds,
            BUILD_COLUMNS,
            name="builds",
            title="What keeps generation to IDs that exist",
            note="The peak is that of a process of its own, beyond an idle one; it counts the drawn codes "
            "and mapped files too. The pointer trie, dictionaries in dictionaries, is built from sorted IDs.",
        ),
    ]
    if bench.agreement:
        agreement = table(
            bench.agreement,
            {name: name for name in bench.agreement[0]},
            name="agreement",
            title="The same ranking as Hugging Face's generate",
            note=f"Queries of {VOCABULARY} whose IDs are the same in the same order; tied: different "
            "only among IDs whose scores differ by 1e-4 or less.",
        )
        tables.append(agreement)
    return tables


def _size_figures(bench: _Bench) -> list[Drawing]:
    """Draw time, bytes and memory against the size of the pool."""
    drawn = [
        (
            "cpu_ms",
            "CPU time of one query",
            "CPU-milliseconds a query",
            lines_by_size(bench.queries, "cpu_ms"),
        ),
        ("bytes", "Bytes an item", "bytes an item", lines_by_size(bench.queries, "bytes_per_item")),
    ]
    ours = [row for row in bench.builds if row["structure"] == "our IDs"]
    if all(row["peak_mib"] for row in ours):
        peaks = tuple((float(row["items"]), float(row["peak_mib"])) for row in ours)
        drawn.append(("peak", "Memory to build the ID table", "peak, MiB", [Line("our IDs", peaks)]))
    return [
        Drawing(
            name=name,
            title=f"{title} against the size of the pool",
            alt=f"{title} against pool size on logarithmic axes: {', '.join(line.name for line in lines)}",
            figure=draw_lines(lines, x="items in the pool", y=label),
        )
        for name, title, label, lines in drawn
    ]


def _recall_figures(rows: Sequence[Row]) -> list[Drawing]:
    """Draw recall in the largest pool against time and against bytes."""
    largest = max(row["items"] for row in rows)
    shown = [
        row for row in rows if row["items"] == largest and row["batch"] == 1 and row["recall_5"] is not None
    ]
    return [
        draw_fronts(
            [(row["line"], row[column], row["recall_5"]) for row in shown if row["recall_5"] is not None],
            name=column,
            title=f"R@5 against {label}: of each kind, the settings that no cheaper one of it reaches",
            x=label,
        )
        for column, label in (
            ("cpu_ms", "CPU-milliseconds of a single query"),
            ("bytes_per_item", "bytes an item"),
        )
    ]
