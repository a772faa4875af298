"""``genius bench speed``: time and memory of a search as the pool grows, beside the usual ways to search.

Without a data set, pools of drawn codes show speed alone. With one, every method searches the same embeddings
of one row, and recall is measured too.
"""

from __future__ import annotations

import math
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from genius_search.config import SearchConfig, checked
from genius_search.data.mbeir import EvaluationRow, MBeir, read_judgements
from genius_search.errors import UsageError
from genius_search.index.store import quantize
from genius_search.lab.baselines.faiss_index import FaissIndex
from genius_search.lab.baselines.generate import HfGenerate, PointerTrie
from genius_search.lab.baselines.routing import CodeRouter
from genius_search.lab.bench.measure import (
    Latency,
    Timed,
    available_bytes,
    peak_bytes,
    resident_bytes,
    time_queries,
    time_rounds,
)
from genius_search.lab.bench.pools import (
    DIM,
    NumberedPool,
    PaddedPool,
    Pool,
    Searcher,
    SyntheticPool,
    padded,
    random_queries,
    searcher_of,
    synthetic_searcher,
)
from genius_search.lab.bench.results import Measurements, Row, table
from genius_search.lab.bench.settings import SpeedSettings, parse_counts
from genius_search.lab.evaluate import (
    EvaluationConfig,
    EvaluationPools,
    embed_queries,
)
from genius_search.lab.figure import Drawing, Line, draw_lines
from genius_search.lab.methods import RowQueries
from genius_search.lab.runs import Hit, Qrels, Run, evaluate, filter_to_pool
from genius_search.lab.table import Table, pareto_front
from genius_search.model import Genius
from genius_search.nn.density import NUM_EXTRA_COLUMNS
from genius_search.progress import Progress
from genius_search.records import did_of
from genius_search.search.beam import Beams, search
from genius_search.search.decoder import Decoder
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
Stored = Literal["float16", "int8"]
BITS: Final[Mapping[Stored, str]] = {"float16": "16-bit", "int8": "8-bit"}


class Method(NamedTuple):
    """A way of searching, ready to answer."""

    name: str
    line: str
    """Its name in figures, which all settings of a method share."""
    family: str
    search: Callable[[Float[Tensor, "queries dim"]], Found | None]
    """Returns None where items are not ranked."""
    item_bytes: float
    """Bytes that grow with the pool, for each item."""
    fixed_bytes: float = 0.0
    """Bytes that do not: weights, centroids, code vectors. The encoder, which all need, is in none."""
    build_seconds: float | None = None
    repeats: int = 1
    """So many times the usual number of queries is timed one by one."""


class _Found(NamedTuple):
    queries: list[Row]
    builds: list[Row]
    agreement: list[Row]


def bench_speed(
    settings: SpeedSettings,
    folder: Path,
    *,
    data: MBeir | None = None,
    model: Genius | None = None,
    progress: Progress,
) -> Measurements:
    """Measure every method at every size.

    Parameters
    ----------
    folder
        Tables are built in it and removed again; features of a data set stay.
    data, model
        A data set needs a model. A model without a data set decodes in place of drawn weights.

    Raises
    ------
    UsageError
        A setting is out of range, or the data set has several rows and none is named.
    """
    settings = checked(settings)
    known = SYNTHETIC_FAMILIES if data is None else REAL_FAMILIES
    families = known if settings.methods == "all" else tuple(map(str.strip, settings.methods.split(",")))
    if not set(families) <= set(known):
        raise UsageError(f"--methods {settings.methods!r}: choose from {', '.join(known)}")
    sizes = parse_counts("--sizes", settings.sizes or ("0" if data else SYNTHETIC_SIZES))
    if min(sizes) < (0 if data else 1):
        raise UsageError(f"--sizes {settings.sizes}: a pool needs an item or more")
    found = _Found([], [], [])
    if data is not None:
        if model is None:
            raise UsageError("a data set needs a --model to embed it")
        description = _measure_real(settings, families, sizes, data, model, folder, found, progress)
    else:
        if "exact" in families and settings.rival_items < min(sizes):
            raise UsageError(
                f"exact search is measured up to {settings.rival_items:,} items and all pools are larger, so "
                "that nothing could be calculated from; add a smaller size, or leave exact out of --methods"
            )
        description = _measure_synthetic(settings, families, sizes, model, folder, found, progress)
    tables = _tables(found, description, has_recall=data is not None)
    figures = _recall_figures(found.queries) if data is not None else _size_figures(found)
    rows = {name: rows for name, rows in found._asdict().items() if rows or name != "agreement"}
    return Measurements(rows=rows, tables=tables, figures=figures)


# Drawn pools


def _measure_synthetic(
    settings: SpeedSettings,
    families: Sequence[str],
    sizes: Sequence[int],
    model: Genius | None,
    folder: Path,
    found: _Found,
    progress: Progress,
) -> str:
    """Measure pools of drawn codes, the smallest first; return how the methods search."""
    large = synthetic_searcher("reference", seed=settings.seed) if model is None else searcher_of(model)
    small = large
    if model is None:
        small = synthetic_searcher("tiny", seed=settings.seed, sizes=large.decoder.sizes)
    count = max(10 * settings.timed, settings.batch, settings.compared)
    queries = random_queries(count, large.dim, seed=settings.seed + 1)
    stopped = SearchConfig(beam=settings.beam, candidates=4 * settings.beam, rerank="codes")
    budget = SearchConfig(beam=settings.small_beam, candidates=settings.small_candidates, rerank="codes")
    place = folder / "tables"
    progress.begin("speed", len(set(sizes)))
    for number, items in enumerate(sorted(set(sizes)), start=1):
        pool = SyntheticPool(items=items, sizes=large.decoder.sizes, kind=settings.codes, seed=settings.seed)
        build = build_apart(pool, place)
        ids = IdTable.open(place)
        found.builds.append({"structure": "our IDs", **build})
        methods = [
            _our_method(FULL, large, ids, SearchConfig(beam=settings.beam)),
            _our_method(LEAF_STOP, large, ids, stopped),
            _our_method(SHALLOW, small, ids, budget)._replace(repeats=10),
        ]
        methods = methods if "ours" in families else []
        if "generate" in families and items <= settings.rival_items:
            methods += _generate_methods(settings, large, ids, queries, found, progress)
        found.queries.extend(_time(settings, methods, queries, items))
        del ids, methods
        if "numbers" in families:
            numbered = NumberedPool(items=items)
            build_apart(numbered, place)
            digits = synthetic_searcher("reference", seed=settings.seed, sizes=numbered.sizes)
            ids = IdTable.open(place)
            method = _our_method(NUMBERS, digits, ids, SearchConfig(beam=settings.beam))
            drawn = random_queries(count, DIM, seed=settings.seed + 1)
            found.queries.extend(_time(settings, [method], drawn, items))
            del ids, method
        if "exact" in families:
            found.queries.append(_exact_row(settings, items, found.queries))
        shutil.rmtree(place)
        progress.advance(number, {})
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


def build_apart(pool: Pool, folder: Path) -> Row:
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


def build_table(pool: Pool, folder: Path) -> Row:
    """Build a pool's ID table in a folder; drawing the codes is not in the times."""
    next(pool.blocks())  # what drawing needs stays out of the peak
    before = resident_bytes()
    blocks = list(pool.blocks())
    codes = np.concatenate([block.codes for block in blocks])
    cosines = np.concatenate([block.typicality for block in blocks])
    del blocks
    began, began_cpu = time.perf_counter(), time.process_time()
    IdTable.build(codes, cosines).save(folder)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    peak = peak_bytes()
    grown = None if peak is None or before is None else max(0, peak - before) / 2**20
    return {"build_seconds": seconds, "build_cpu_seconds": cpu_seconds, "peak_mib": grown}


def _table_facts(ids: IdTable) -> Row:
    return {
        "items": ids.num_items,
        "ids": len(ids),
        "bytes_per_id": ids.nbytes / len(ids),
        "bytes_per_item": _bytes_per_item(ids),
    }


def _bytes_per_item(ids: IdTable) -> float:
    return (ids.nbytes + ids.bucket_starts.nbytes + ids.items.nbytes) / ids.num_items


def _our_method(name: str, searcher: Searcher, ids: IdTable, config: SearchConfig) -> Method:
    parts, evidence = [Part(ids)], Evidence(searcher.ranker)

    def answer(queries: Float[Tensor, "queries dim"]) -> Found:
        beams = search(searcher.decoder, parts, queries, config)
        return _rank(parts, beams, queries, config, evidence)

    return Method(name, name, "ours", answer, _bytes_per_item(ids))


def _rank(
    parts: Sequence[Part],
    beams: Beams,
    queries: Float[Tensor, "queries dim"],
    config: SearchConfig,
    evidence: Evidence,
) -> Found:
    return [
        rank_items(parts, beams, number, query, config=config, evidence=evidence, k=HITS).items
        for number, query in enumerate(queries)
    ]


def _generate_methods(
    settings: SpeedSettings,
    searcher: Searcher,
    ids: IdTable,
    queries: Float[Tensor, "queries dim"],
    found: _Found,
    progress: Progress,
) -> Iterator[Method]:
    """Yield the search that generate does and generate itself; compare their rankings, and add its trie."""
    progress.say("the pointer trie that generate needs")
    codes = ids.ids[:, : len(searcher.generator.sizes)]
    began, began_cpu = time.perf_counter(), time.process_time()
    PointerTrie(codes)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    hf = HfGenerate(searcher.generator, codes)
    trie_bytes = hf.trie.num_bytes()
    found.builds.append(
        {
            "structure": "pointer trie",
            "items": ids.num_items,
            "ids": len(hf.trie),
            "bytes_per_id": trie_bytes / len(hf.trie),
            "bytes_per_item": trie_bytes / ids.num_items,
            "build_seconds": seconds,
            "build_cpu_seconds": cpu_seconds,
            "peak_mib": None,
            "open_ms": None,
        }
    )
    config = SearchConfig(beam=settings.beam, scores="vocabulary")
    compared = queries[: settings.compared]
    if len(compared):
        ours, theirs = [], []
        for start in range(0, len(compared), settings.batch):
            some = compared[start : start + settings.batch]
            ours += rankings_of(ids, search(searcher.decoder, [Part(ids)], some, config))
            generated = hf.search(some, beam=settings.beam)
            theirs += [
                Ranking(codes[np.isfinite(scores)], scores[np.isfinite(scores)])
                for codes, scores in zip(generated.codes, generated.scores, strict=True)
            ]
        found.agreement.append({"items": ids.num_items, **compare_rankings(ours, theirs)})
    yield _our_method(VOCABULARY, searcher, ids, config)

    def answer(some: Float[Tensor, "queries dim"]) -> None:
        hf.codes(some, beam=settings.beam)

    yield Method(GENERATE, GENERATE, "generate", answer, trie_bytes / ids.num_items)


class Ranking(NamedTuple):
    """The IDs of one query, best first."""

    ids: Int64[np.ndarray, "beams levels"]
    scores: Float32[np.ndarray, " beams"]


def rankings_of(ids: IdTable, beams: Beams) -> list[Ranking]:
    """Return the rankings of a search of one table, all levels decoded; norms and densities are left out."""
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
    free = available_bytes()
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
        return {
            **largest,
            "items": items,
            "cpu_ms": cpu_ms,
            "p50_ms": None,
            "p99_ms": None,
            "calculated": True,
        }
    random = np.random.default_rng(settings.seed)
    some = random.standard_normal((min(items, 65_536), DIM), dtype=np.float32).astype(np.float16)
    index = FaissIndex("Flat", np.resize(some, (items, DIM)))
    queries = random_queries(EXACT_QUERIES, DIM, seed=settings.seed + 1)
    method = Method(EXACT, EXACT, "exact", _dense_search(index, None), 4.0 * DIM)
    return _time(replace(settings, timed=EXACT_QUERIES), [method], queries, items, with_batch=False)[0]


# Real pools


def _measure_real(
    settings: SpeedSettings,
    families: Sequence[str],
    sizes: Sequence[int],
    data: MBeir,
    model: Genius,
    folder: Path,
    found: _Found,
    progress: Progress,
) -> str:
    """Measure one row of a data set at each size; return what was searched."""
    rows = data.rows(settings.split, names=(settings.row,) if settings.row else ())
    if len(rows) != 1:
        names = ", ".join(row.name for row in rows)
        raise UsageError(f"{data.name} has {len(rows)} rows in split {settings.split} ({names}); name one")
    ground = _Ground.open(settings, rows[0], data, model, folder / "features", progress)
    searcher = searcher_of(model)
    for items in sorted(set(sizes)):
        pool = ground.pool(model, items, settings.seed)
        progress.say(f"{len(pool):,} items, {len(pool.table):,} IDs, {len(ground.queries.qids):,} queries")
        began, began_cpu = time.perf_counter(), time.process_time()
        ids = IdTable.build(pool.codes, np.zeros(len(pool), dtype=np.float16))
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        row: Row = {"structure": "our IDs", "build_seconds": seconds, "build_cpu_seconds": cpu_seconds}
        found.builds.append({**row, **_table_facts(ids), "peak_mib": None, "open_ms": None})
        queries = ground.queries.fused
        methods = list(_dense_methods(families, model, pool, settings.seed, progress))
        methods += _id_methods(families, searcher, model, pool, cpu_seconds)
        if "generate" in families:
            methods += _generate_methods(settings, searcher, pool.table, queries, found, progress)
        recall = {method.name: ground.recall(method, pool, settings.batch) for method in methods}
        for timed in _time(settings, methods, queries, len(pool)):
            found.queries.append({**timed, **recall[timed["method"]]})
    padding = ", padded with noisy copies of theirs, which are never right answers" if any(sizes) else ""
    return (
        f"{data.name}, {rows[0].name}: {len(ground.names):,} candidates{padding}; "
        f"{len(ground.queries.qids):,} queries, all methods over the same embeddings of {model.dim} numbers. "
        "R@k: share of queries with a right answer among the first k. IVF-PQ refined re-ranks 200 items by "
        "vectors kept beside the codes; ours by vectors those that the codes put first: 100, or with all "
        "levels decoded every item found."
    )


class _Ground(NamedTuple):
    """The queries, candidates and right answers of one row."""

    queries: RowQueries
    qrels: Qrels
    names: list[str]
    vectors: Float32[np.ndarray, "items dim"]
    codes: np.ndarray
    typicality: np.ndarray
    modality: np.ndarray

    @staticmethod
    def open(
        settings: SpeedSettings,
        row: EvaluationRow,
        data: MBeir,
        model: Genius,
        folder: Path,
        progress: Progress,
    ) -> _Ground:
        config = EvaluationConfig(
            split=settings.split,
            pools=(settings.pool,),
            methods=("exact-fused",),
            max_queries=settings.queries,
            seed=settings.seed,
        )
        pools = EvaluationPools(
            data,
            model,
            [row],
            folder,
            split=settings.split,
            pools=config.pools,
            methods=config.methods,
            progress=progress,
        )
        (queries,) = embed_queries(data, model, row, config, folder, progress)
        candidates = pools.of(row, settings.pool)
        return _Ground(
            queries,
            filter_to_pool(read_judgements(row, queries.qids), candidates),
            [did_of(int(number)) for number in candidates.dids],
            candidates.fused(slice(None)).numpy(),
            candidates.codes,
            candidates.typicality,
            candidates.modality,
        )

    def pool(self, model: Genius, items: int, seed: int) -> PaddedPool:
        return padded(
            model,
            self.names,
            self.vectors,
            self.codes,
            self.typicality,
            self.modality,
            items=items,
            seed=seed,
        )

    def recall(self, method: Method, pool: PaddedPool, batch: int) -> Row:
        """Measure M-BEIR's R@k; ranks serve as scores, since only the order counts."""
        hits: dict[str, list[Hit]] = {}
        for start in range(0, len(self.queries.qids), batch):
            found = method.search(self.queries.fused[start : start + batch])
            if found is None:
                return {"recall_1": None, "recall_5": None, "recall_10": None}
            for qid, items in zip(self.queries.qids[start : start + batch], found, strict=True):
                hits[qid] = [Hit(pool.id_of(int(item)), -float(rank)) for rank, item in enumerate(items)]
        rates = evaluate(self.qrels, Run(method.name, hits), ks=(1, 5, 10)).hit_rate
        return {f"recall_{k}": rates[k] for k in (1, 5, 10)}


def _dense_methods(
    families: Sequence[str], model: Genius, pool: PaddedPool, seed: int, progress: Progress
) -> Iterator[Method]:
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
        if family not in families:
            continue
        progress.say(f"building {line} ({kept})")
        index = FaissIndex(factory, pool.vectors, seed=seed)
        for effort in efforts:
            setting = "" if effort is None else f", {effort} list{'s' if effort > 1 else ''}"
            if family == "hnsw":
                setting = f", efSearch {effort}"
            yield Method(
                f"{line} ({kept}){setting}",
                line,
                family,
                _dense_search(index, effort),
                index.item_bytes,
                index.fixed_bytes,
                index.build_seconds,
            )


def _dense_search(index: FaissIndex, effort: int | None) -> Callable[[Float[Tensor, "queries dim"]], Found]:
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

    evidence = {
        None: Evidence(searcher.ranker),
        "float16": Evidence(searcher.ranker, [exact_vectors]),
        "int8": Evidence(searcher.ranker, [rounded_vectors]),
    }
    vector_bytes = {None: 0.0, "float16": 2.0 * model.dim, "int8": model.dim + 2.0}  # with a scale each

    def method(
        line: str, setting: str, stored: Stored | None, find: Callable[[Tensor], Beams], config: SearchConfig
    ) -> Method:
        is_routed = line.startswith("nearest")
        name = f"{line}, {setting}" if stored is None else f"{line} ({BITS[stored]}), {setting}"
        return Method(
            name,
            line,
            "routing" if is_routed else "ours",
            lambda queries: _rank(parts, find(queries), queries, config, evidence[stored]),
            _bytes_per_item(pool.table) + vector_bytes[stored],
            4.0 * model.dim * sum(searcher.decoder.sizes) if is_routed else searcher.fixed_bytes(),
            build_seconds,
        )

    def ranked(
        who: str, setting: str, find: Callable[[Tensor], Beams], config: SearchConfig
    ) -> Iterator[Method]:
        yield method(f"{who}, by codes", setting, None, find, replace(config, rerank="codes"))
        for stored in BITS:
            yield method(f"{who}, by vectors", setting, stored, find, replace(config, rerank="embeddings"))

    if "routing" in families:
        router = CodeRouter(
            parts, model.quantizer.tables(), has_modality_level=model.quantizer.has_modality_level
        )
        for beam in ROUTES:
            route = partial(router.route, beam=beam)
            yield from ranked("nearest code vectors", f"{beam} codes", route, SearchConfig(beam=beam))
    if "ours" in families:
        config = SearchConfig(beam=50)
        setting = "beam 50, all levels"
        yield method("ours, by probability", setting, None, _decode(searcher.decoder, parts, config), config)
        for beam, candidates in ((50, 0), *BUDGETS):
            config = SearchConfig(beam=50)
            if candidates:
                config = SearchConfig(beam=beam, candidates=candidates, shortlist=SHORTLIST)
                setting = f"beam {beam}, {candidates:,} leaves"
            # Decoding stops alike whichever of the two ranks afterwards.
            find = _decode(searcher.decoder, parts, replace(config, rerank="codes"))
            yield from ranked("ours", setting, find, config)


def _decode(decoder: Decoder, parts: Sequence[Part], config: SearchConfig) -> Callable[[Tensor], Beams]:
    return lambda queries: search(decoder, parts, queries, config)


# Both


def _time(
    settings: SpeedSettings,
    methods: Sequence[Method],
    queries: Float[Tensor, "queries dim"],
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
    batched: dict[str, Timed] = {}
    if with_batch and methods:
        calls = {method.name: partial(method.search, together) for method in methods}
        batched = time_rounds(calls, rounds=settings.rounds, per=len(together))
    rows: list[Row] = []
    for method in methods:
        one = alone[method.name]
        row: Row = {
            "method": method.name,
            "line": method.line,
            "family": method.family,
            "items": items,
            "batch": 1,
            "cpu_ms": one.cpu_ms,
            "p50_ms": one.p50_ms,
            "p99_ms": one.p99_ms,
            "bytes_per_item": method.item_bytes,
            "fixed_mib": method.fixed_bytes / 2**20,
            "build_cpu_seconds": method.build_seconds,
            "calculated": False,
        }
        rows.append(row)
        if method.name in batched:
            cpu_ms = batched[method.name].cpu_ms
            rows.append({**row, "batch": len(together), "cpu_ms": cpu_ms, "p50_ms": None, "p99_ms": None})
    return rows


def _tables(found: _Found, description: str, *, has_recall: bool) -> list[Table]:
    columns = {"method": "method", "items": "items", "batch": "batch"}
    if has_recall:
        columns |= {"recall_1": "R@1", "recall_5": "R@5", "recall_10": "R@10"}
    columns |= {
        "cpu_ms": "CPU-ms",
        "p50_ms": "p50, ms",
        "p99_ms": "p99, ms",
        "bytes_per_item": "bytes an item",
    }
    columns |= (
        {"fixed_mib": "fixed, MiB", "build_cpu_seconds": "build, CPU-s"}
        if has_recall
        else {"calculated": "calculated"}
    )
    speed = "" if has_recall else " Weights were drawn: this is speed, not recall."
    rows = found.queries
    if not has_recall:
        rows = sorted(rows, key=lambda row: (row["method"], row["batch"], row["items"]))
    tables = [
        table(
            rows,
            columns,
            name="queries",
            title="Searching",
            note="CPU-milliseconds of a query on one core, alone or in a batch; the encoder is in no figure. "
            f"Bytes that grow with the pool{', and those that do not' if has_recall else ''}. "
            f"{description}{speed}",
        ),
        table(
            found.builds,
            {
                "structure": "structure",
                "items": "items",
                "ids": "distinct IDs",
                "build_cpu_seconds": "build, CPU-s",
                "peak_mib": "peak, MiB",
                "open_ms": "open, ms",
                "bytes_per_id": "bytes an ID",
                "bytes_per_item": "bytes an item, all",
            },
            name="builds",
            title="What keeps generation to IDs that exist",
            note="The peak is that of a process of its own, beyond an idle one; it counts the drawn codes "
            "and mapped files too. The pointer trie, dictionaries in dictionaries, is built from sorted IDs.",
        ),
    ]
    if found.agreement:
        tables.append(
            table(
                found.agreement,
                {name: name for name in ("items", "compared", "identical", "tied", "share")},
                name="agreement",
                title="The same ranking as Hugging Face's generate",
                note=f"Queries of {VOCABULARY} whose IDs are the same in the same order; tied: different "
                "only among IDs whose scores differ by 1e-4 or less.",
            )
        )
    return tables


def _size_figures(found: _Found) -> list[Drawing]:
    """Draw time, bytes and memory against the size of the pool."""
    single = [row for row in found.queries if row["batch"] == 1]
    names = list(dict.fromkeys(row["method"] for row in single))

    def lines(field: str) -> list[Line]:
        def points(name: str, *, calculated: bool) -> tuple[tuple[float, float], ...]:
            own = [row for row in single if row["method"] == name and row["calculated"] is calculated]
            return tuple((float(row["items"]), float(row[field])) for row in own)

        return [Line(name, points(name, calculated=False), points(name, calculated=True)) for name in names]

    ours = [row for row in found.builds if row["structure"] == "our IDs"]
    drawn = [
        ("cpu_ms", "CPU time of one query", "CPU-milliseconds a query", lines("cpu_ms")),
        ("bytes", "Bytes an item", "bytes an item", lines("bytes_per_item")),
    ]
    if all(row["peak_mib"] for row in ours):
        peaks = tuple((float(row["items"]), float(row["peak_mib"])) for row in ours)
        drawn.append(("peak", "Memory to build the ID table", "peak, MiB", [Line("our IDs", peaks)]))
    return [
        Drawing(
            name=name,
            title=f"{title} against the size of the pool",
            alt=f"{title} against pool size on logarithmic axes: {', '.join(line.name for line in shown)}",
            figure=draw_lines(shown, x="items in the pool", y=label),
        )
        for name, title, label, shown in drawn
    ]


def _recall_figures(rows: Sequence[Row]) -> list[Drawing]:
    """Draw recall in the largest pool against time and against bytes."""
    largest = max(row["items"] for row in rows)
    by_line: dict[str, list[Row]] = {}
    for row in rows:
        if row["items"] == largest and row["batch"] == 1 and row["recall_5"] is not None:
            by_line.setdefault(row["line"], []).append(row)
    return [
        Drawing(
            name=field,
            title=f"R@5 against {label}: of each kind, the settings that no cheaper one of it reaches",
            alt=f"R@5 of {', '.join(by_line)} against {label}",
            figure=draw_lines(
                [
                    Line(line, pareto_front([(float(row[field]), row["recall_5"]) for row in own]))
                    for line, own in by_line.items()
                ],
                x=label,
                y="R@5",
                log_y=False,
            ),
        )
        for field, label in (
            ("cpu_ms", "CPU-milliseconds of a single query"),
            ("bytes_per_item", "bytes an item"),
        )
    ]
