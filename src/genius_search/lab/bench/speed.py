"""``genius bench speed``: time and memory of a search as the pool grows, beside the usual ways to search.

Pools are drawn codes of any size, and the decoder's weights are drawn unless there is a model: this is speed
alone. What is found is measured by ``genius bench quality``.
"""

from __future__ import annotations

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
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from genius_search.config import SearchConfig, checked
from genius_search.errors import UsageError
from genius_search.lab.baselines.faiss_index import FaissIndex
from genius_search.lab.baselines.generate import HfGenerate, PointerTrie
from genius_search.lab.bench.measure import Latency, read_memory, time_build, time_queries, time_rounds
from genius_search.lab.bench.pools import (
    DIM,
    NumberedPool,
    Searcher,
    SyntheticPool,
    random_queries,
    searcher_of,
    synthetic_searcher,
)
from genius_search.lab.bench.results import Measurements, Row, table
from genius_search.lab.bench.settings import SpeedSettings, parse_counts
from genius_search.lab.settings import choose
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.search.beam import search
from genius_search.search.beams import Beams
from genius_search.search.rank import Evidence, rank_items
from genius_search.search.table import IdTable, SearchSegment

HITS: Final = 50
FULL: Final = "full search"
LEAF_STOP: Final = "leaf stop"
SHALLOW: Final = "small decoder, leaf budget"
NUMBERS: Final = "numbers as IDs (GRACE)"
VOCABULARY: Final = "full search, vocabulary scores"
GENERATE: Final = "HF generate, prefix callback"
EXACT: Final = "exact search (32-bit vectors)"
FAMILIES: Final = ("ours", "numbers", "exact", "generate")
EXACT_QUERIES: Final = 8
TOLERANCE: Final = 1e-4
"""Scores that differ by no more may stand in either order: the two sum in different orders."""

Found = list[Int64[np.ndarray, " _"]]
"""Item rows of each query, best first."""
Queries = Float[Tensor, "queries dim"]


class Method(NamedTuple):
    """A way of searching, ready to answer."""

    name: str
    family: str
    search: Callable[[Queries], Found | None]
    """Returns None where items are not ranked."""
    item_bytes: float
    """Bytes that grow with the pool, for each item."""
    repeats: int = 1
    """So many times the usual number of queries is timed one by one."""


@dataclass(frozen=True)
class _Bench:
    """Settings of a run, and the rows measured so far."""

    settings: SpeedSettings
    families: Sequence[str]
    progress: Progress
    queries: list[Row] = field(default_factory=list)
    builds: list[Row] = field(default_factory=list)
    agreement: list[Row] = field(default_factory=list)


def bench_speed(
    settings: SpeedSettings, folder: Path, *, model: Genius | None = None, progress: Progress
) -> Measurements:
    """Measure every method at every size, the smallest first.

    Tables are built in ``folder`` and removed again; a model decodes in place of drawn weights. Raises
    UsageError where a setting is out of range.
    """
    settings = checked(settings)
    families = choose("--methods", settings.methods, FAMILIES)
    sizes = sorted(set(parse_counts("--sizes", settings.sizes)))
    if min(sizes) < 1:
        raise UsageError(f"--sizes {settings.sizes}: a pool needs an item or more")
    bench = _Bench(settings, families, progress)
    large = synthetic_searcher("reference", seed=settings.seed) if model is None else searcher_of(model)
    small = large
    if model is None:
        small = synthetic_searcher("tiny", seed=settings.seed, sizes=large.decoder.sizes)
    progress.begin("speed", len(sizes))
    for number, items in enumerate(sizes, start=1):
        _measure_size(bench, items, large, small, folder / "tables")
        progress.advance(number, {})
    decoder = "decoder of the paper's size" if model is None else large.name
    description = (
        f"Pools of skewed drawn codes, {len(large.decoder.sizes)} levels. {FULL}: {decoder}, beam "
        f"{settings.beam}, all levels. {LEAF_STOP}: the same, until {4 * settings.beam} IDs are left, ranked "
        f"by codes. {SHALLOW}: {'one layer of width 128' if model is None else 'the same decoder'}, beam "
        f"{settings.small_beam}, until {settings.small_candidates:,} IDs are left, ranked by codes. "
        f"{NUMBERS}: {FULL} for the items' numbers, a level for each digit. {EXACT}: faiss, all vectors "
        f"of {DIM} numbers."
    )
    return _measurements(bench, description)


def _measure_size(bench: _Bench, items: int, large: Searcher, small: Searcher, place: Path) -> None:
    """Measure every method in one pool, whose tables are built at ``place``."""
    settings = bench.settings
    count = max(10 * settings.timed, settings.batch, settings.compared)
    queries = random_queries(count, large.dim, seed=settings.seed + 1)
    full = SearchConfig(beam=settings.beam)
    stopped = SearchConfig(beam=settings.beam, candidates=4 * settings.beam, rerank="codes")
    budget = SearchConfig(beam=settings.small_beam, candidates=settings.small_candidates, rerank="codes")
    pool = SyntheticPool(items=items, sizes=large.decoder.sizes, seed=settings.seed)
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
    if "exact" in bench.families and items <= settings.rival_items:
        bench.queries.append(_exact_row(settings, items))
    shutil.rmtree(place)


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
    cosines = np.concatenate([block.code_cosine for block in blocks])
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
    segments, evidence = [SearchSegment(ids)], Evidence(searcher.ranker)

    def answer(queries: Queries) -> Found:
        beams = search(searcher.decoder, segments, queries, config)
        return [
            rank_items(segments, beams, number, query, config=config, evidence=evidence, k=HITS).items
            for number, query in enumerate(queries)
        ]

    return Method(name, "ours", answer, _table_facts(ids)["bytes_per_item"])


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
            ours += rankings_of(ids, search(searcher.decoder, [SearchSegment(ids)], some, config))
            generated = hf.search(some, beam=settings.beam)
            theirs += [
                Ranking(codes[np.isfinite(scores)], scores[np.isfinite(scores)])
                for codes, scores in zip(generated.codes, generated.scores, strict=True)
            ]
        bench.agreement.append({"items": ids.num_items, **compare_rankings(ours, theirs)})
    yield _our_method(VOCABULARY, searcher, ids, config)

    def answer(some: Queries) -> None:
        hf.codes(some, beam=settings.beam)

    yield Method(GENERATE, "generate", answer, item_bytes)


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


def _exact_row(settings: SpeedSettings, items: int) -> Row:
    """Return the time of exact search over drawn vectors."""
    random = np.random.default_rng(settings.seed)
    some = random.standard_normal((min(items, 65_536), DIM), dtype=np.float32).astype(np.float16)
    index = FaissIndex("Flat", np.resize(some, (items, DIM)))
    queries = random_queries(EXACT_QUERIES, DIM, seed=settings.seed + 1)
    method = Method(EXACT, "exact", lambda queries: index.search(queries.numpy(), HITS).items, 4.0 * DIM)
    return _time(replace(settings, timed=EXACT_QUERIES), [method], queries, items, with_batch=False)[0]


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
            "family": method.family,
            "items": items,
            "batch": 1,
            **alone[method.name]._asdict(),
            "bytes_per_item": method.item_bytes,
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
    "cpu_ms": "CPU-ms",
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "bytes_per_item": "bytes an item",
}
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


def _measurements(bench: _Bench, description: str) -> Measurements:
    rows = {"queries": bench.queries, "builds": bench.builds}
    tables = [
        table(
            sorted(bench.queries, key=lambda row: (row["method"], row["batch"], row["items"])),
            QUERY_COLUMNS,
            name="queries",
            title="Searching",
            note="CPU-milliseconds of a query on one core, alone or in a batch; the encoder is in no figure. "
            f"Bytes that grow with the pool. {description} This is speed, not recall.",
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
        rows["agreement"] = bench.agreement
        agreement = table(
            bench.agreement,
            {name: name for name in bench.agreement[0]},
            name="agreement",
            title="The same ranking as Hugging Face's generate",
            note=f"Queries of {VOCABULARY} whose IDs are the same in the same order; tied: different "
            "only among IDs whose scores differ by 1e-4 or less.",
        )
        tables.append(agreement)
    return Measurements(rows=rows, tables=tables)
