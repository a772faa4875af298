"""Results of an evaluation: rows, averages, and their tables.

A published number stands beside ours only where queries and pool are as many as those it was measured on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any, Final, NamedTuple

import pandas as pd
from rich.console import Console

from genius_search.cli.terminal import print_text
from research.published.numbers import (
    AVERAGE,
    PAPER_BEAM,
    SIZES,
    Reference,
    expected_size,
    references,
)
from research.settings import METHODS, Pool
from research.table import Cell, Table

BASELINE: Final = "exact-fused"
"""The method that ``of exact`` compares with."""
HEADLINE: Final = "R@5"
"""The measure that a page emphasises; a row's own is :attr:`ResultRow.headline`."""
FIRST: Final = ("R@1", "R@5", "R@10")
"""Measures that every JSON row begins with and every short table shows."""
PAPER_NOTE: Final = (
    f"percent; published with a beam of {PAPER_BEAM}, scores='vocabulary', --instructions first; 'released': "
    "weights that were published later"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultRow:
    """Results of one method on one task and pool."""

    name: str
    """As in file names: ``mscoco_task0``."""
    dataset: str
    task: str
    """Its name: ``text -> image``."""
    task_id: int
    pool: Pool
    method: str
    queries: int
    pool_size: int
    headline_k: int
    """The papers' cut-off for this row: 10 for Fashion200K and FashionIQ, else 5."""
    measures: Mapping[str, float]
    """``R@5``, ``recall@5``, ``MRR``, ``R-precision``, ``nDCG@10``, …"""
    bytes_per_item: float
    """Bytes that the method keeps of each candidate."""
    candidates_touched: float
    """Candidates that it scored for a query, on average."""

    @property
    def headline(self) -> str:
        """The measure that the papers print for this row (M-BEIR, section 2.9)."""
        return f"R@{self.headline_k}"

    @property
    def score(self) -> float | None:
        """The headline measure's value, if it was measured."""
        return self.measures.get(self.headline)


class AverageRow(NamedTuple):
    """Means of one method over all tasks of a pool, every task counting the same."""

    pool: Pool
    method: str
    tasks: int
    measures: dict[str, float]
    """Those that every task has."""
    score: float | None
    """The mean of every row's own headline measure: the papers' average."""
    bytes_per_item: float
    candidates_touched: float
    name: str = AVERAGE


def in_order(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Sort rows by pool (local first), task, data set, then method in the order of :data:`METHODS`.

    M-BEIR's data sets come as the papers print them, others by name.
    """
    return sorted(
        rows,
        key=lambda row: (
            row.pool != "local",
            row.task_id,
            *_place(row.name, list(SIZES)),
            row.dataset,
            *_place(row.method, METHODS),
        ),
    )


def _place(name: str, names: Sequence[str]) -> tuple[int, str]:
    """Return a sorting key: known names in their order, then the others."""
    return (names.index(name) if name in names else len(names), name)


def averages(rows: Sequence[ResultRow]) -> list[AverageRow]:
    """Return the unweighted mean over tasks for each pool and method (M-BEIR, section 2.9).

    Only for methods that were run on every task of the pool: other means cannot be compared.
    """
    found: list[AverageRow] = []
    for pool, group in groupby(in_order(rows), key=lambda row: row.pool):
        inside = list(group)
        num_tasks = len({row.name for row in inside})
        for method in sorted({row.method for row in inside}, key=lambda method: _place(method, METHODS)):
            own = [row for row in inside if row.method == method]
            if num_tasks < 2 or len(own) != num_tasks:
                continue
            scores = [row.score for row in own if row.score is not None]
            measures = pd.DataFrame([row.measures for row in own]).dropna(axis=1)
            found.append(
                AverageRow(
                    pool=pool,
                    method=method,
                    tasks=num_tasks,
                    measures={str(name): fmean(values) for name, values in measures.items()},
                    score=fmean(scores) if len(scores) == num_tasks else None,
                    bytes_per_item=fmean(row.bytes_per_item for row in own),
                    candidates_touched=fmean(row.candidates_touched for row in own),
                )
            )
    return found


def of_exact(row: ResultRow | AverageRow, rows: Sequence[ResultRow] | Sequence[AverageRow]) -> float | None:
    """Return a row's headline measure over that of exact search on fused embeddings, where there is one."""
    same = (row.name, row.pool, BASELINE)
    exact = next((other.score for other in rows if (other.name, other.pool, other.method) == same), None)
    return row.score / exact if row.score is not None and exact else None


def to_json(rows: Sequence[ResultRow]) -> dict[str, Any]:
    """Return ``{"rows": [...], "averages": [...]}``: flat rows for scripts, numbers unrounded."""
    ordered, means = in_order(rows), averages(rows)

    def flat(row: ResultRow | AverageRow, first: Sequence[str], last: Sequence[str]) -> dict[str, Any]:
        return {
            **{name: getattr(row, name) for name in first},
            **_first_first(row.measures),
            **{name: getattr(row, name) for name in (*last, "bytes_per_item", "candidates_touched")},
            "of_exact": of_exact(row, ordered if isinstance(row, ResultRow) else means),
        }

    return {
        "rows": [
            {
                **flat(
                    row,
                    ("dataset", "task", "pool", "method", "queries"),
                    ("task_id", "name", "headline", "pool_size"),
                ),
                "published": [one._asdict() for one in published_beside(row)],
            }
            for row in ordered
        ],
        "averages": [flat(row, ("pool", "method", "tasks"), ("score",)) for row in means],
    }


def _first_first(measures: Mapping[str, float]) -> dict[str, float]:
    """Return the measures, those of :data:`FIRST` in front."""
    return {name: measures[name] for name in FIRST if name in measures} | dict(measures)


def task_tables(rows: Sequence[ResultRow]) -> list[Table]:
    """Return a table for each task and pool and for their averages, a line for each method.

    What a narrow terminal has no room for stands last.
    """
    ordered, means = in_order(rows), averages(rows)
    found = {name: None for row in rows for name in _first_first(row.measures)}
    first = [name for name in FIRST if name in found]
    others = [name for name in found if name not in FIRST]
    groups: dict[str, list[tuple[Cell, ...]]] = {}

    def add(title: str, row: ResultRow | AverageRow, ratio: float | None) -> None:
        costs = (row.bytes_per_item, row.candidates_touched)
        whole = (round(cost) if cost >= 100 or abs(cost - round(cost)) < 0.01 else cost for cost in costs)
        head, tail = (map(row.measures.get, names) for names in (first, others))
        groups.setdefault(title, []).append((row.method, *head, ratio, *whole, *tail))

    for row in ordered:
        add(f"{row.task}, {row.pool} {row.dataset}, {row.queries:,} queries", row, of_exact(row, ordered))
    for mean in means:
        add(f"{AVERAGE}, {mean.pool}, {mean.tasks} tasks", mean, of_exact(mean, means))
    headings = ("method", *first, "of exact", "bytes", "touched", *others)
    return [
        Table(name="results", title=title, headings=headings, lines=lines, decimals=3)
        for title, lines in groups.items()
    ]


def published_beside(row: ResultRow) -> list[Reference]:
    """Return the published numbers that a row may be compared with: same task, method and sizes."""
    is_comparable = (row.queries, row.pool_size) == expected_size(row.name, row.pool)
    return references(row.name, row.pool, row.method) if is_comparable else []


def published_tables(rows: Sequence[ResultRow]) -> list[Table]:
    """Return a table of our headline measures beside published ones, if any may be compared."""
    lines: list[tuple[Cell, ...]] = []
    for row in in_order(rows):
        for one in published_beside(row) if row.score is not None else ():
            ours = 100 * (row.score or 0.0)
            name = f"{row.name} {row.headline}, {row.pool}"
            lines.append(
                (name, row.method, f"{one.system}, {one.weights}", ours, one.value, ours - one.value)
            )
    if not lines:
        return []
    headings = ("row", "method", "published", "ours", "theirs", "difference")
    title = "Beside published numbers"
    return [
        Table(name="published", title=title, note=PAPER_NOTE, headings=headings, lines=lines, text_columns=3)
    ]


def print_results(rows: Sequence[ResultRow]) -> None:
    """Print a block for each task, and what was published on M-BEIR's rows beside ours."""
    print_tables([*task_tables(rows), *published_tables(rows)])


def print_tables(tables: Sequence[Table]) -> None:
    """Print tables with as many columns as the terminal has room for."""
    for table in tables:
        print_text(table.text(Console().width))
    print_text("all columns: in a wider terminal, or with --json", error=True)
