"""``genius bench scale``: what building, opening and searching cost as the pool grows."""

from __future__ import annotations

import dataclasses
import multiprocessing
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from genius_search.config import Count, Natural, SearchConfig, checked
from genius_search.errors import UsageError
from genius_search.lab.baselines.dense import Flat
from genius_search.lab.baselines.dense import build as build_dense
from genius_search.lab.bench.results import Figure, Table, draw
from genius_search.lab.bench.stand_ins import (
    DIM,
    LEVELS,
    NumberedPool,
    Pool,
    PoolKind,
    Subject,
    SyntheticPool,
    random_queries,
    stand_in,
)
from genius_search.lab.bench.timing import available_bytes, interleaved, latencies, peak_bytes, resident_bytes
from genius_search.lab.figure import Line
from genius_search.nn.quantizer import NUM_MODALITIES
from genius_search.progress import Progress
from genius_search.search.beam import search
from genius_search.search.rank import Evidence, rank_items
from genius_search.search.table import IdTable, Part


class Built(NamedTuple):
    """What building a table took."""

    seconds: float
    """Of wall time; drawing the pool is not in it."""
    cpu_seconds: float
    peak_bytes: int | None
    """The most memory beyond what an idle process has, mapped files that were read included; None where the
    system does not say."""


def build_apart(pool: Pool, folder: Path) -> Built:
    """Build a pool's table in a folder, in a process of its own; open it afterwards."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(build_here, pool, folder).result()


def build_here(pool: Pool, folder: Path) -> Built:
    """The same in this process."""
    next(pool.blocks())  # what drawing needs stays out of the count
    before = resident_bytes()
    blocks = list(pool.blocks())
    codes = np.concatenate([block.codes for block in blocks])
    typicality = np.concatenate([block.typicality for block in blocks])
    del blocks
    began, began_cpu = time.perf_counter(), time.process_time()
    IdTable.build(codes, typicality).save(folder)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    peak = peak_bytes()
    grown = None if peak is None or before is None else max(0, peak - before)
    return Built(seconds, cpu_seconds, grown)


FULL: Final = "full search"
LEAF_STOP: Final = "leaf stop"
SHALLOW: Final = "small decoder, leaf budget"
NUMBERS: Final = "numbers as IDs (GRACE)"
EXACT: Final = "exact search (32-bit vectors)"


@dataclass(frozen=True, kw_only=True)
class BuildRow:
    """One pool's ID table."""

    items: int
    ids: int
    """Distinct ones."""
    build_seconds: float
    build_cpu_seconds: float
    peak_mib: float | None
    """While building, beyond an idle process."""
    open_ms: float
    bytes_per_id: float
    """The IDs alone, on disk and, where they are read, in memory."""
    bytes_per_item: float
    """With the lists of items under each ID."""


@dataclass(frozen=True, kw_only=True)
class QueryRow:
    """One way of searching a pool of one size."""

    method: str
    items: int
    batch: int
    cpu_ms: float
    """A query."""
    p50_ms: float | None
    p99_ms: float | None
    """Of single queries."""
    bytes_per_item: float
    """That the method needs in memory or mapped."""
    calculated: bool
    """From a smaller pool, not measured."""


def build_table(rows: Sequence[BuildRow], *, pool: str) -> Table:
    """What the ID table takes."""
    return Table(
        name="builds",
        title="The ID table",
        note=f"Of {pool} pools of invented items, nine levels; built in a process of its own. "
        "The peak counts the drawn codes and mapped files too.",
        columns=(
            ("items", "items"),
            ("ids", "distinct IDs"),
            ("build_seconds", "build, s"),
            ("build_cpu_seconds", "CPU-s"),
            ("peak_mib", "peak, MiB"),
            ("open_ms", "open, ms"),
            ("bytes_per_id", "bytes an ID"),
            ("bytes_per_item", "bytes an item, all"),
        ),
        brief=(
            ("items", "items"),
            ("ids", "distinct IDs"),
            ("build_cpu_seconds", "build, CPU-s"),
            ("peak_mib", "peak, MiB"),
            ("open_ms", "open, ms"),
            ("bytes_per_item", "bytes an item"),
        ),
        rows=rows,
    )


def query_table(rows: Sequence[QueryRow], *, ways: str) -> Table:
    """What a search takes."""
    return Table(
        name="queries",
        title="Searching",
        note=f"CPU-milliseconds a query on one core. {ways} Weights were drawn: this is speed, not recall. "
        "What is marked was not measured but calculated, in proportion to the largest pool that was.",
        columns=(
            ("method", "method"),
            ("items", "items"),
            ("batch", "batch"),
            ("cpu_ms", "CPU-ms a query"),
            ("p50_ms", "p50, ms"),
            ("p99_ms", "p99, ms"),
            ("bytes_per_item", "bytes an item"),
            ("calculated", "calculated"),
        ),
        brief=(
            ("method", "method"),
            ("items", "items"),
            ("batch", "batch"),
            ("cpu_ms", "CPU-ms"),
            ("bytes_per_item", "bytes an item"),
            ("calculated", "calculated"),
        ),
        rows=sorted(rows, key=lambda row: (row.method, row.batch, row.items)),
    )


def scale_figures(builds: Sequence[BuildRow], rows: Sequence[QueryRow]) -> list[Figure]:
    """Time, bytes and memory against the size of the pool."""
    single = [row for row in rows if row.batch == 1]
    methods = list(dict.fromkeys(row.method for row in single))

    def lines(field: str) -> list[Line]:
        return [
            Line(
                method,
                tuple((float(row.items), float(getattr(row, field))) for row in own if not row.calculated),
                tuple((float(row.items), float(getattr(row, field))) for row in own if row.calculated),
            )
            for method in methods
            for own in [[row for row in single if row.method == method]]
        ]

    peaks = [(float(row.items), row.peak_mib) for row in builds if row.peak_mib]
    ours = Line("IDs and items", tuple((float(row.items), row.bytes_per_item) for row in builds), ())
    ids = Line("IDs alone", tuple((float(row.items), row.bytes_per_id) for row in builds), ())
    exact = [line for line in lines("bytes_per_item") if line.name == EXACT]
    figures = [
        Figure(
            title="CPU time of one query against the size of the pool",
            alt="Latency against pool size on logarithmic axes: " + ", ".join(methods),
            image=draw(lines("cpu_ms"), x="items in the pool", y="CPU-milliseconds a query"),
        ),
        Figure(
            title="Bytes an item against the size of the pool",
            alt="Bytes an item against pool size on logarithmic axes: ID table and vectors",
            image=draw([ids, ours, *exact], x="items in the pool", y="bytes an item"),
        ),
    ]
    if peaks:
        figures.append(
            Figure(
                title="Memory to build the ID table",
                alt="Peak memory against pool size on logarithmic axes",
                image=draw(
                    [Line("peak", tuple((items, float(size)) for items, size in peaks), ())],
                    x="items in the pool",
                    y="peak, MiB",
                ),
            )
        )
    return figures


HITS: Final = 50
TABLES: Final = "tables"
OPENINGS: Final = 5
FLAT_QUERIES: Final = 8
SHARE_OF_MEMORY: Final = 0.6
"""Of what is free, that the vectors of exact search may take."""


@dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """What is measured, at which sizes."""

    sizes: tuple[int, ...] = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
    """Items in the pools, which are invented; each begins with the one before."""
    pool: PoolKind = "skewed"
    codes: Count = 4096
    """At each of the eight semantic levels."""
    beam: Count = 50
    """Of the full search and of the leaf stop."""
    small_beam: Count = 10
    small_candidates: Count = 1000
    """Of the small decoder: beam, and leaf budget."""
    queries: Count = 20
    """Asked one by one with the large decoder."""
    small_queries: Count = 200
    """Asked one by one with the small one."""
    batch: Count = 64
    """Queries asked together."""
    rounds: Count = 3
    """Times that a batch is timed."""
    flat_items: Natural = 1_000_000
    """Exact search is measured up to so many vectors, as far as they fit into memory; beyond, it is
    calculated from the largest that was measured, and marked so. 0 leaves it out."""
    seed: Natural = 0

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise UsageError(f"sizes {list(self.sizes)}; expected one size or more, none below 1")
        if 0 < self.flat_items < min(self.sizes):
            raise UsageError(
                f"exact search is measured up to {self.flat_items:,} items and all pools are larger, so that "
                "nothing could be calculated from; add a smaller size, or leave exact search out (0)"
            )


class Scale(NamedTuple):
    """What was found."""

    tables: list[Table]
    figures: list[Figure]


def bench_scale(settings: ScaleSettings, folder: Path, *, progress: Progress) -> Scale:
    """Measure every size; tables are built in a folder and removed again."""
    settings = checked(settings)
    codes = (NUM_MODALITIES, *[settings.codes] * LEVELS)
    large = stand_in("reference", seed=settings.seed, sizes=codes)
    small = stand_in("tiny", seed=settings.seed, sizes=codes)
    builds: list[BuildRow] = []
    rows: list[QueryRow] = []
    progress.begin("scale", len(settings.sizes))
    for number, items in enumerate(sorted(set(settings.sizes)), start=1):
        place = folder / TABLES / str(items)
        shutil.rmtree(place, ignore_errors=True)
        pool = SyntheticPool(items=items, sizes=codes, kind=settings.pool, seed=settings.seed)
        built = build_apart(pool, place)
        open_ms = _opening(place)
        table = IdTable.open(place)
        build = _build_row(table, items, built, open_ms)
        builds.append(build)
        rows += _search_rows(settings, _ways(settings, table, large, small), items)
        del table
        shutil.rmtree(place)
        numbered = NumberedPool(items=items)
        build_apart(numbered, place)
        digits = _Way(
            stand_in("reference", seed=settings.seed, sizes=numbered.sizes),
            IdTable.open(place),
            SearchConfig(beam=settings.beam),
        )
        rows += _search_rows(settings, {NUMBERS: digits}, items)
        del digits
        shutil.rmtree(place)
        if settings.flat_items:
            rows.append(_exact(settings, items, [row for row in rows if row.method == EXACT]))
        progress.advance(number, {})
    shutil.rmtree(folder / TABLES, ignore_errors=True)
    ways = (
        f"{FULL}: decoder of the paper's size, beam {settings.beam}, all levels. {LEAF_STOP}: the same, "
        f"until {_at_stop(settings)} IDs are left, ranked by codes. {SHALLOW}: one layer of width 128, beam "
        f"{settings.small_beam}, until {settings.small_candidates:,} IDs are left, ranked by codes. "
        f"{NUMBERS}: {FULL} for the items' numbers, a level for each digit. {EXACT}: "
        f"faiss, all vectors of {DIM} numbers."
    )
    tables = [
        build_table(builds, pool=settings.pool),
        query_table(rows, ways=ways),
    ]
    return Scale(tables, scale_figures(builds, rows))


def _at_stop(settings: ScaleSettings) -> int:
    """Leaves at which the large decoder stops."""
    return 4 * settings.beam


def _opening(folder: Path) -> float:
    """Milliseconds, the median."""
    took = []
    for _ in range(OPENINGS):
        began = time.perf_counter()
        IdTable.open(folder)
        took.append(1000 * (time.perf_counter() - began))
    return float(np.median(took))


def _bytes_per_item(table: IdTable, items: int) -> float:
    return (table.nbytes + table.bucket_starts.nbytes + table.items.nbytes) / items


def _build_row(table: IdTable, items: int, built: Built, open_ms: float) -> BuildRow:
    return BuildRow(
        items=items,
        ids=len(table),
        build_seconds=built.seconds,
        build_cpu_seconds=built.cpu_seconds,
        peak_mib=None if built.peak_bytes is None else built.peak_bytes / 2**20,
        open_ms=open_ms,
        bytes_per_id=table.nbytes / len(table),
        bytes_per_item=_bytes_per_item(table, items),
    )


class _Way(NamedTuple):
    subject: Subject
    table: IdTable
    config: SearchConfig


def _ways(settings: ScaleSettings, table: IdTable, large: Subject, small: Subject) -> dict[str, _Way]:
    """Of searching one table."""
    stopped = SearchConfig(beam=settings.beam, candidates=_at_stop(settings), rerank="codes")
    budget = SearchConfig(beam=settings.small_beam, candidates=settings.small_candidates, rerank="codes")
    return {
        FULL: _Way(large, table, SearchConfig(beam=settings.beam)),
        LEAF_STOP: _Way(large, table, stopped),
        SHALLOW: _Way(small, table, budget),
    }


def _search_rows(settings: ScaleSettings, ways: Mapping[str, _Way], items: int) -> list[QueryRow]:
    """Time ways side by side, the small decoder's with more queries."""
    count = max(settings.queries, settings.small_queries, settings.batch)
    queries = random_queries(count, DIM, seed=settings.seed + 1)

    def answer(way: _Way, asked: Float[Tensor, "queries dim"]) -> None:
        parts = [Part(way.table)]
        beams = search(way.subject.decoder, parts, asked, way.config)
        evidence = Evidence(way.subject.ranker)
        for number, query in enumerate(asked):
            rank_items(parts, beams, number, query, config=way.config, evidence=evidence, k=HITS)

    def single(way: _Way) -> Callable[[int], None]:
        return lambda number: answer(way, queries[number : number + 1])

    small = {name: single(way) for name, way in ways.items() if name == SHALLOW}
    large = {name: single(way) for name, way in ways.items() if name != SHALLOW}
    by_one = {**latencies(large, settings.queries), **latencies(small, settings.small_queries)}
    together = queries[: settings.batch]
    by_batch = interleaved(
        {name: partial(answer, way, together) for name, way in ways.items()},
        rounds=settings.rounds,
        per=len(together),
    )
    rows = []
    for name in ways:
        one, many = by_one[name], by_batch[name]
        alone = QueryRow(
            method=name,
            items=items,
            batch=1,
            cpu_ms=one.cpu_ms,
            p50_ms=one.p50_ms,
            p99_ms=one.p99_ms,
            bytes_per_item=_bytes_per_item(ways[name].table, items),
            calculated=False,
        )
        rows.append(alone)
        rows.append(
            dataclasses.replace(
                alone,
                batch=len(together),
                cpu_ms=many.cpu_ms,
                p50_ms=None,
                p99_ms=None,
            )
        )
    return rows


def _exact(settings: ScaleSettings, items: int, measured: Sequence[QueryRow]) -> QueryRow:
    """Exact search over so many vectors: measured if they fit, else calculated from the largest that did."""
    free = available_bytes()
    fits = items <= settings.flat_items and (free is None or items * DIM * (4 + 2) < SHARE_OF_MEMORY * free)
    if not fits:
        known = [row for row in measured if not row.calculated]
        if not known:
            raise UsageError(
                f"the vectors of {items} items do not fit, and no smaller pool was measured to calculate "
                "exact search from; free some memory, add a smaller size, or leave exact search out (0)"
            )
        largest = max(known, key=lambda row: row.items)
        times = items / largest.items
        return dataclasses.replace(
            largest,
            items=items,
            cpu_ms=largest.cpu_ms * times,
            p50_ms=None,
            p99_ms=None,
            calculated=True,
        )
    random = np.random.default_rng(settings.seed)
    some = random.standard_normal((min(items, 65_536), DIM), dtype=np.float32).astype(np.float16)
    index = build_dense(np.resize(some, (items, DIM)), Flat())
    asked = random_queries(FLAT_QUERIES, DIM, seed=settings.seed + 1).numpy()
    one = latencies({EXACT: lambda number: index.search(asked[number : number + 1], HITS)}, FLAT_QUERIES)[
        EXACT
    ]
    return QueryRow(
        method=EXACT,
        items=items,
        batch=1,
        cpu_ms=one.cpu_ms,
        p50_ms=one.p50_ms,
        p99_ms=one.p99_ms,
        bytes_per_item=4.0 * DIM,
        calculated=False,
    )
