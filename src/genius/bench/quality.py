"""``genius bench quality``: how much of exact search the IDs keep, beside geometry and faiss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from jaxtyping import Float
from torch import Tensor

from genius.bench.quality_faiss import Rival, rivals
from genius.bench.quality_ground import Ground, Task
from genius.bench.quality_leaves import compare_leaves
from genius.bench.quality_measure import measure
from genius.bench.quality_tables import (
    LeafRow,
    MethodRow,
    beside_exact,
    curve_table,
    gains,
    health_table,
    leaf_mean,
    leaf_table,
    method_mean,
    method_tables,
    quality_figure,
)
from genius.bench.quality_ways import (
    EXACT_FUSED,
    GENERATOR,
    GEOMETRY,
    Direct,
    Routed,
    by_beam,
    direct,
    routed,
)
from genius.bench.results import Figure, Table
from genius.config import Count, Natural, NonNegative, SearchConfig, checked
from genius.data.mbeir import EvaluationRow, MBeir
from genius.errors import UsageError
from genius.evaluation.qrels import filter_to_pool
from genius.model import Genius
from genius.search.decoding import Decoding
from genius.stages.evaluate import EvaluationConfig, embed_queries, judgements
from genius.stages.pools import EvaluationPools, Pool
from genius.stages.progress import Progress

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
    leaves: Count = 500
    """Of the search within a leaf budget."""
    mix: NonNegative = 0.0
    """Also rank by codes with so many times the log-probability; 0 leaves that out."""
    budgets: tuple[Count, ...] = (150, 300, 600, 1200, 2000)
    """Leaves for which the generator and geometry are compared."""
    grid_beams: tuple[Count, ...] = (1, 2, 5, 10, 20, 50, 100)
    grid_leaves: tuple[Natural, ...] = (0, 150, 500, 1500, 5000)
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
    if not settings.budgets or not settings.grid_beams or not settings.grid_leaves:
        raise UsageError("leaf budgets, beams and leaves of the grid: name at least one of each")
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
    return Task(row, queries, filter_to_pool(judgements(row, queries.qids), ground.candidates))


def _measure(
    ground: Ground, tasks: Sequence[Task], settings: QualitySettings, found: _Found, progress: Progress
) -> None:
    built = list(rivals(ground, seed=settings.seed, progress=progress)) if settings.faiss else []
    ways = list(routed(ground, beam=settings.beam, leaves=settings.leaves, mix=settings.mix))
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
    route = by_beam(ground, ground.model.decoder, beam=settings.beam, leaves=settings.leaves)
    beams, starts = route(queries), ground.table.bucket_starts
    return float((starts[beams.high] - starts[beams.low]).sum()) / len(queries)


def _grid(ground: Ground, settings: QualitySettings) -> Iterator[Routed]:
    """Both routers at every setting."""
    orders = (SearchConfig(rerank="codes"), SearchConfig(rerank="embeddings"))
    routers: dict[str, Decoding] = {GENERATOR: ground.model.decoder, GEOMETRY: ground.model.router}
    for router, decoder in routers.items():
        for beam in settings.grid_beams:
            for leaves in settings.grid_leaves:
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
