"""Results of an evaluation: rows, averages, and their tables.

A published number stands beside ours only where queries and pool are as many as those it was measured on.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import pandas as pd

from genius_search.cli.terminal import print_text
from genius_search.records import TASKS
from research.published.numbers import (
    AVERAGE,
    CAPTION_SIZES,
    PAPER_BEAM,
    SIZES,
    Reference,
    caption_references,
    expected_size,
    references,
)
from research.settings import METHODS, Pool
from research.table import Cell, Table

BASELINE: Final = "exact-fused"
"""The method that ``of exact`` compares with."""
FIRST: Final = ("R@1", "R@5", "R@10")
"""Measures that every short table shows."""
PAPER_NOTE: Final = (
    f"percent; published with a beam of {PAPER_BEAM}, scores='vocabulary', --instructions first; 'released': "
    "weights that were published later"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultRow:
    """Results of one method on one task and pool, or their mean over all tasks of a pool."""

    dataset: str
    task: str
    """Its name: ``text -> image``."""
    pool: Pool
    method: str
    queries: int
    name: str
    """As in file names: ``mscoco_task0``; ``average`` for the mean."""
    task_id: int
    headline: str
    """The measure that the papers print (M-BEIR, section 2.9): R@10 for Fashion200K and FashionIQ, else R@5;
    for the mean ``headline``, each task's own."""
    pool_size: int
    measures: Mapping[str, float]
    """``R@5``, ``recall@5``, ``MRR``, ``R-precision``, ``nDCG@10``, …"""
    bytes_per_item: float
    """Bytes that the method keeps of each candidate."""
    num_ranked: float
    """Candidates that it scored for a query, on average."""

    @property
    def score(self) -> float | None:
        """The headline measure's value, if it was measured."""
        return self.measures.get(self.headline)

    def flat(self) -> dict[str, Any]:
        """Return the row as a flat dict, measures unrounded."""
        fields = asdict(self)
        measures = fields.pop("measures")
        return {**fields, **measures, "headline": self.headline}  # a mean has such a measure too


def in_order(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """Sort rows by pool (local first), task, data set, then method in the order of :data:`METHODS`.

    M-BEIR's data sets come as the papers print them, others by name.
    """
    places = {name: place for names in (list(SIZES), METHODS) for place, name in enumerate(names)}

    def key(row: ResultRow) -> tuple[object, ...]:
        of_names = ((places.get(name, len(places)), name) for name in (row.name, row.method))
        return row.pool != "local", row.task_id, *of_names

    return sorted(rows, key=key)


def averages(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the unweighted mean over tasks for each pool and method (M-BEIR, section 2.9).

    Only for methods that were run on every task of the pool: other means cannot be compared.
    """
    found: list[ResultRow] = []
    for pool in {row.pool for row in rows}:
        inside = [row for row in rows if row.pool == pool]
        tasks = len({row.name for row in inside})
        for method in {row.method for row in inside}:
            own = [row for row in inside if row.method == method]
            if tasks > 1 and len(own) == tasks:
                scores = pd.DataFrame([{**row.measures, "headline": row.score} for row in own])
                found.append(
                    replace(
                        own[0],
                        name=AVERAGE,
                        dataset=f"{tasks} tasks",
                        task=AVERAGE,
                        task_id=1 + max(TASKS),
                        queries=sum(row.queries for row in own),
                        pool_size=max(row.pool_size for row in own),
                        headline="headline",
                        measures=scores.dropna(axis=1).mean().to_dict(),
                        bytes_per_item=sum(row.bytes_per_item for row in own) / tasks,
                        num_ranked=sum(row.num_ranked for row in own) / tasks,
                    )
                )
    return in_order(found)


def of_exact(row: ResultRow, rows: Iterable[ResultRow]) -> float | None:
    """Return a row's headline measure over that of exact search on fused embeddings, where there is one."""
    same = (row.name, row.pool, BASELINE)
    exact = next(
        (other.score for other in rows if (other.name, other.pool, other.method) == same), None
    )
    return row.score / exact if row.score is not None and exact else None


def to_json(rows: Sequence[ResultRow]) -> dict[str, Any]:
    """Return ``{"rows": [...], "averages": [...]}``: flat rows for scripts, numbers unrounded."""
    return {
        name: [
            {
                **row.flat(),
                "of_exact": of_exact(row, own),
                "published": [one._asdict() for one in published_beside(row)],
            }
            for row in own
        ]
        for name, own in (("rows", in_order(rows)), ("averages", averages(rows)))
    }


def task_tables(rows: Sequence[ResultRow]) -> list[Table]:
    """Return a table for each task and pool and for their averages, a line for each method.

    What a narrow terminal has no room for stands last.
    """
    names = list(dict.fromkeys([*FIRST, *(name for row in rows for name in row.measures)]))
    groups: dict[str, list[tuple[Cell, ...]]] = {}
    ordered = [*in_order(rows), *averages(rows)]
    for row in ordered:
        costs = (row.bytes_per_item, row.num_ranked)
        whole = (
            round(cost) if cost >= 100 or abs(cost - round(cost)) < 0.01 else cost for cost in costs
        )
        values = [row.measures.get(name) for name in names]
        title = f"{row.task}, {row.pool} {row.dataset}, {row.queries:,} queries"
        line = (
            row.method,
            *values[: len(FIRST)],
            of_exact(row, ordered),
            *whole,
            *values[len(FIRST) :],
        )
        groups.setdefault(title, []).append(line)
    headings = ("method", *FIRST, "of exact", "bytes", "ranked", *names[len(FIRST) :])
    return [
        Table(name="results", title=title, headings=headings, lines=lines, decimals=3)
        for title, lines in groups.items()
    ]


def published_beside(row: ResultRow) -> list[Reference]:
    """Return the published numbers that a row may be compared with: same task, method and sizes."""
    size = (row.queries, row.pool_size)
    if size == CAPTION_SIZES.get(row.name):
        return caption_references(row.name, row.method)
    return (
        references(row.name, row.pool, row.method)
        if size == expected_size(row.name, row.pool)
        else []
    )


def published_tables(rows: Sequence[ResultRow]) -> list[Table]:
    """Return a table of our headline measures beside published ones, if any may be compared."""
    lines: list[tuple[Cell, ...]] = []
    for row in in_order(rows):
        for one in published_beside(row) if row.score is not None else ():
            ours = 100 * (row.score or 0.0)
            name = f"{row.name} {row.headline}, {row.pool}"
            published = f"{one.system}, {one.weights}"
            lines.append((name, row.method, published, ours, one.value, ours - one.value))
    headings = ("row", "method", "published", "ours", "theirs", "difference")
    title = "Beside published numbers"
    table = Table(
        name="published",
        title=title,
        note=PAPER_NOTE,
        headings=headings,
        lines=lines,
        text_columns=3,
    )
    return [table] if lines else []


def print_results(rows: Sequence[ResultRow]) -> None:
    """Print a block for each task, and what was published on M-BEIR's rows beside ours.

    They have as many columns as the terminal has room for.
    """
    for table in (*task_tables(rows), *published_tables(rows)):
        print_text(table.text(shutil.get_terminal_size().columns))
    print_text("all columns: in a wider terminal, or with --json", error=True)
