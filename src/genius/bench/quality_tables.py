"""What ``genius bench quality`` shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from genius.bench.results import Figure, Table
from genius.evaluation.health import Health
from genius.report.curves import Line, best_points, draw

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
