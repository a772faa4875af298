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

from genius.baselines.pointer_trie import PointerTrie
from genius.bench.methods import FAMILIES, Found, Method, methods
from genius.bench.padding import PaddedPool, padded
from genius.bench.results import Figure, Table
from genius.bench.rival_tables import RivalRow, TrieRow, rival_figures, rival_table, trie_table
from genius.bench.stand_ins import subject_of
from genius.bench.timing import interleaved, latencies
from genius.config import Count, Natural, checked
from genius.data.mbeir import EvaluationRow, MBeir
from genius.data.records import did_of
from genius.errors import UsageError
from genius.evaluation.measures import evaluate as measure
from genius.evaluation.qrels import Qrels, filter_to_pool
from genius.evaluation.runs import Hit, Run
from genius.model import Genius
from genius.search.table import IdTable
from genius.stages.evaluate import EvaluationConfig, embed_queries, judgements
from genius.stages.methods import RowQueries
from genius.stages.pools import EvaluationPools, Pool
from genius.stages.progress import Progress

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
    return _Asked(row, queries, filter_to_pool(judgements(row, queries.qids), candidates), pool)


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
