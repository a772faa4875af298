"""``genius bench rivals``: recall, time and bytes of every way to search one real pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from genius_search.config import Count, Natural, checked
from genius_search.data.mbeir import EvaluationRow, MBeir, read_judgements
from genius_search.errors import UsageError
from genius_search.lab.baselines.generate import PointerTrie
from genius_search.lab.bench.methods import FAMILIES, Found, Method, methods
from genius_search.lab.bench.results import Figure, Table, draw
from genius_search.lab.bench.stand_ins import PaddedPool, padded, subject_of
from genius_search.lab.bench.timing import interleaved, latencies
from genius_search.lab.evaluate import (
    EvaluationConfig,
    EvaluationPools,
    Pool,
    RowQueries,
    embed_queries,
)
from genius_search.lab.figure import Line
from genius_search.lab.runs import Hit, Qrels, Run, filter_to_pool
from genius_search.lab.runs import evaluate as measure
from genius_search.lab.table import pareto_front as best_points
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.records import did_of
from genius_search.search.table import IdTable


@dataclass(frozen=True, kw_only=True)
class RivalRow:
    """One method."""

    method: str
    line: str
    """Its name in drawings."""
    family: str
    recall_1: float
    recall_5: float
    recall_10: float
    """Share of queries with any right answer among the first hits (M-BEIR's R@k)."""
    cpu_ms: float
    """A query asked alone, the median."""
    p50_ms: float
    p99_ms: float
    batch_cpu_ms: float
    """A query asked with others."""
    item_bytes: float
    """That grow with the pool, for each item."""
    fixed_mib: float
    """That do not."""
    build_seconds: float
    """CPU time; of ours, of the table from the codes."""


@dataclass(frozen=True, kw_only=True)
class TrieRow:
    """The pool's IDs as dictionaries of Python, beside our table."""

    structure: str
    ids: int
    bytes_per_id: float
    build_seconds: float


def rival_table(rows: Sequence[RivalRow], *, title: str, measured: str, batch: int) -> Table:
    """Every method."""
    return Table(
        name="rivals",
        title=title,
        note=f"{measured} R@k: share of queries with a right answer among the first k. CPU-milliseconds of "
        f"one core, {batch} queries together or one alone; bytes that grow with the pool, and those that do "
        "not (weights, centroids, code vectors). The encoder is in no figure. IVF-PQ refined ranks 200 items "
        "anew by vectors kept beside the codes, ours by vectors those that the codes put first: 100, or with "
        "all levels decoded every item found.",
        columns=(
            ("method", "method"),
            ("recall_1", "R@1"),
            ("recall_5", "R@5"),
            ("recall_10", "R@10"),
            ("cpu_ms", "CPU-ms, alone"),
            ("batch_cpu_ms", f"{batch} together"),
            ("p50_ms", "p50, ms"),
            ("p99_ms", "p99, ms"),
            ("item_bytes", "bytes an item"),
            ("fixed_mib", "fixed, MiB"),
            ("build_seconds", "build, CPU-s"),
        ),
        brief=(
            ("method", "method"),
            ("recall_5", "R@5"),
            ("cpu_ms", "CPU-ms"),
            ("batch_cpu_ms", "together"),
            ("item_bytes", "bytes"),
            ("build_seconds", "build, s"),
        ),
        rows=rows,
    )


def trie_table(rows: Sequence[TrieRow]) -> Table:
    """Our table beside a pointer trie."""
    return Table(
        name="structures",
        title="What keeps generation to IDs that exist",
        note="Our sorted table, and the dictionaries in dictionaries of the usual way; the trie is built "
        "from IDs that are sorted already.",
        columns=(
            ("structure", "structure"),
            ("ids", "IDs"),
            ("bytes_per_id", "bytes an ID"),
            ("build_seconds", "build, CPU-s"),
        ),
        rows=rows,
    )


def rival_figures(rows: Sequence[RivalRow]) -> list[Figure]:
    """Recall against time and against bytes."""
    kinds: dict[str, list[RivalRow]] = {}
    for row in rows:
        kinds.setdefault(row.line, []).append(row)
    figures = []
    for field, label in (("cpu_ms", "CPU-milliseconds of a single query"), ("item_bytes", "bytes an item")):
        lines = [
            Line(kind, best_points([(float(getattr(row, field)), row.recall_5) for row in own]), ())
            for kind, own in kinds.items()
        ]
        figures.append(
            Figure(
                title=f"R@5 against {label}: of each kind, the settings that no cheaper one of it reaches",
                alt=f"R@5 of {', '.join(kinds)} against {label}",
                image=draw(lines, x=label, y="R@5", log_y=False),
            )
        )
    return figures


FEATURES: Final = "features"
KS: Final = (1, 5, 10)


@dataclass(frozen=True, kw_only=True)
class RivalSettings:
    """What is compared, on what."""

    split: str = "test"
    row: str = ""
    """Of the data set, named as in its files; needed where it has several."""
    pool: Pool = "global"
    families: tuple[str, ...] = FAMILIES
    """Kinds of methods to compare."""
    grow: Natural = 0
    """Pad the pool to so many items with invented neighbours of the real ones; 0 leaves it as it is."""
    queries: Natural = 0
    """At most so many, spread evenly; 0 means all."""
    timed: Count = 200
    """Asked one by one, for latency."""
    batch: Count = 64
    """Asked together, for throughput."""
    rounds: Count = 3
    """Times that a batch is timed."""
    trie: bool = True
    """Also build the pointer trie, for its bytes."""
    seed: Natural = 0


class Rivals(NamedTuple):
    """What was found."""

    tables: list[Table]
    figures: list[Figure]


def bench_rivals(
    data: MBeir, model: Genius, settings: RivalSettings, folder: Path, *, progress: Progress
) -> Rivals:
    """Build every method over the same embeddings, and ask all of them the same queries."""
    settings = checked(settings)
    unknown = [name for name in settings.families if name not in FAMILIES]
    if unknown or not settings.families:
        raise UsageError(f"methods {list(settings.families)}: choose from {', '.join(FAMILIES)}")
    asked = _asked(data, model, settings, folder / FEATURES, progress)
    pool = asked.pool
    progress.say(f"{len(pool):,} items, {len(pool.table):,} IDs, {len(asked.queries.qids):,} queries")
    built = time.process_time()
    IdTable.build(pool.codes, np.zeros(len(pool), dtype=np.float16))
    table_seconds = time.process_time() - built
    subject = subject_of(model)
    every = list(
        methods(
            model,
            subject,
            pool,
            settings.families,
            table_seconds,
            seed=settings.seed,
            progress=progress,
        )
    )
    rows = _rows(settings, asked, every, progress)
    real = len(pool.names)
    padding = (
        f", padded to {len(pool):,} with noisy copies of theirs, which are never right answers"
        if len(pool) > real
        else ""
    )
    measured = (
        f"{real:,} candidates{padding}; {len(asked.queries.qids):,} queries, all methods over the same "
        f"embeddings of {model.dim} numbers."
    )
    tables = [
        rival_table(rows, title=f"{data.name}: {asked.row.name}", measured=measured, batch=settings.batch)
    ]
    if settings.trie:
        tables.append(trie_table(_structures(pool, len(subject.sizes), table_seconds)))
    return Rivals(tables, rival_figures(rows))


class _Asked(NamedTuple):
    """Queries, where to look, and what is right."""

    row: EvaluationRow
    queries: RowQueries
    qrels: Qrels
    pool: PaddedPool


def _asked(data: MBeir, model: Genius, settings: RivalSettings, folder: Path, progress: Progress) -> _Asked:
    rows = data.rows(settings.split, names=(settings.row,) if settings.row else ())
    if len(rows) != 1:
        names = ", ".join(row.name for row in rows)
        raise UsageError(f"{data.name} has {len(rows)} rows in split {settings.split} ({names}); name one")
    row = rows[0]
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
        rows,
        folder,
        split=settings.split,
        pools=config.pools,
        methods=config.methods,
        progress=progress,
    )
    (queries,) = embed_queries(data, model, row, config, folder, progress)
    candidates = pools.of(row, settings.pool)
    pool = padded(
        model,
        [did_of(int(number)) for number in candidates.dids],
        candidates.fused(slice(None)).numpy(),
        candidates.codes,
        candidates.typicality,
        candidates.modality,
        items=settings.grow,
        seed=settings.seed,
    )
    return _Asked(row, queries, filter_to_pool(read_judgements(row, queries.qids), candidates), pool)


def _rows(
    settings: RivalSettings, asked: _Asked, every: Sequence[Method], progress: Progress
) -> list[RivalRow]:
    queries = asked.queries.fused
    timed = min(settings.timed, len(queries))
    together = queries[: settings.batch]
    progress.begin("rivals", 3)
    one = latencies({method.name: _single(method, queries) for method in every}, timed)
    progress.advance(1, {})
    many = interleaved(
        {method.name: partial(method.search, together) for method in every},
        rounds=settings.rounds,
        per=len(together),
    )
    progress.advance(2, {})
    rows = []
    for method in every:
        found: Found = []
        for start in range(0, len(queries), settings.batch):
            found += method.search(queries[start : start + settings.batch])
        rates = measure(asked.qrels, _run(method, asked, found), ks=KS).hit_rate
        rows.append(
            RivalRow(
                method=method.name,
                line=method.line,
                family=method.family,
                recall_1=rates[1],
                recall_5=rates[5],
                recall_10=rates[10],
                cpu_ms=one[method.name].cpu_ms,
                p50_ms=one[method.name].p50_ms,
                p99_ms=one[method.name].p99_ms,
                batch_cpu_ms=many[method.name].cpu_ms,
                item_bytes=method.item_bytes,
                fixed_mib=method.fixed_bytes / 2**20,
                build_seconds=method.build_seconds,
            )
        )
    progress.advance(3, {})
    return rows


def _single(method: Method, queries: Float[Tensor, "queries dim"]) -> Callable[[int], Found]:
    return lambda number: method.search(queries[number : number + 1])


def _run(method: Method, asked: _Asked, found: Found) -> Run:
    """Ranks for scores: what counts is the order."""
    return Run(
        method.name,
        {
            qid: [Hit(asked.pool.name(int(item)), -float(rank)) for rank, item in enumerate(items)]
            for qid, items in zip(asked.queries.qids, found, strict=True)
        },
    )


def _structures(pool: PaddedPool, num_levels: int, table_seconds: float) -> list[TrieRow]:
    began = time.process_time()
    trie = PointerTrie.build(pool.table.ids[:, :num_levels])
    took = time.process_time() - began
    return [
        TrieRow(
            structure="our table",
            ids=len(pool.table),
            bytes_per_id=pool.table.nbytes / len(pool.table),
            build_seconds=table_seconds,
        ),
        TrieRow(
            structure="pointer trie", ids=len(trie), bytes_per_id=trie.bytes_per_id(), build_seconds=took
        ),
    ]
