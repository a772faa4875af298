"""Results of an evaluation: rows, averages, and their tables.

Results are compared with a published number only if the numbers of queries and of candidates match.
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
MAIN_MEASURES: Final = ("R@1", "R@5", "R@10")
"""Measures in the first columns of a table, which a narrow terminal shows, too."""
PAPER_NOTE: Final = (
    f"percent; published with a beam of {PAPER_BEAM}, scores='vocabulary', --instructions first; "
    "'released': weights that were published later"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultRow:
    """Results of one method on one task and pool, or their mean over all tasks of a pool."""

    dataset: str
    task: str
    """Name of the task, such as ``text -> image``."""
    pool: Pool
    method: str
    queries: int
    name: str
    """Name of the row in file names, such as ``mscoco_task0``; ``average`` for the mean."""
    task_id: int
    headline: str
    """The measure that the papers print (M-BEIR, section 2.9): R@10 for Fashion200K and FashionIQ,
    else R@5; ``headline`` for their mean over the tasks."""
    pool_size: int
    measures: Mapping[str, float]
    """``R@5``, ``recall@5``, ``MRR``, ``R-precision``, ``nDCG@10``, …"""
    bytes_per_item: float
    """Bytes that the method stores for each candidate."""
    num_ranked: float
    """Mean number of candidates that the method scores for a query."""

    @property
    def score(self) -> float | None:
        """The headline measure's value, if it was measured."""
        return self.measures.get(self.headline)

    def to_record(self) -> dict[str, Any]:
        """Return the row as a flat dict, measures unrounded."""
        fields = asdict(self)
        measures = fields.pop("measures")
        # The measures of a mean have the key "headline", too.
        return {**fields, **measures, "headline": self.headline}


def sort_rows(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """Sort rows by pool (local first), task, data set, then method in the order of :data:`METHODS`.

    M-BEIR's data sets are in the order of the papers, other data sets are sorted by name.
    """
    positions = {name: position for position, name in enumerate(SIZES)}
    positions |= {name: position for position, name in enumerate(METHODS)}

    def key(row: ResultRow) -> tuple[object, ...]:
        names = ((positions.get(name, len(positions)), name) for name in (row.name, row.method))
        return row.pool != "local", row.task_id, *names

    return sorted(rows, key=key)


def average_rows(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the unweighted mean over tasks for each pool and method (M-BEIR, section 2.9).

    A method that was not run on every task of a pool has no mean, as it could not be compared.
    """
    means: list[ResultRow] = []
    for pool in {row.pool for row in rows}:
        pool_rows = [row for row in rows if row.pool == pool]
        num_tasks = len({row.name for row in pool_rows})
        for method in {row.method for row in pool_rows}:
            method_rows = [row for row in pool_rows if row.method == method]
            if num_tasks > 1 and len(method_rows) == num_tasks:
                means.append(_average(method_rows))
    return sort_rows(means)


def _average(rows: Sequence[ResultRow]) -> ResultRow:
    """Return the mean of one method's rows."""
    scores = pd.DataFrame([{**row.measures, "headline": row.score} for row in rows])
    return replace(
        rows[0],
        name=AVERAGE,
        dataset=f"{len(rows)} tasks",
        task=AVERAGE,
        task_id=1 + max(TASKS),
        queries=sum(row.queries for row in rows),
        pool_size=max(row.pool_size for row in rows),
        headline="headline",
        measures=scores.dropna(axis=1).mean().to_dict(),
        bytes_per_item=sum(row.bytes_per_item for row in rows) / len(rows),
        num_ranked=sum(row.num_ranked for row in rows) / len(rows),
    )


def divide_by_exact(row: ResultRow, rows: Iterable[ResultRow]) -> float | None:
    """Return a row's headline measure divided by that of exact search on fused embeddings.

    None if exact search was not measured, or found nothing.
    """
    baseline = (row.name, row.pool, BASELINE)
    scores = (other.score for other in rows if (other.name, other.pool, other.method) == baseline)
    exact = next(scores, None)
    return row.score / exact if row.score is not None and exact else None


def to_json(rows: Sequence[ResultRow]) -> dict[str, Any]:
    """Return ``{"rows": [...], "averages": [...]}``: flat rows for scripts, numbers unrounded."""
    return {"rows": _to_records(sort_rows(rows)), "averages": _to_records(average_rows(rows))}


def _to_records(rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    return [
        {
            **row.to_record(),
            "of_exact": divide_by_exact(row, rows),
            "published": [reference._asdict() for reference in comparable_references(row)],
        }
        for row in rows
    ]


def comparable_references(row: ResultRow) -> list[Reference]:
    """Return published numbers of the row's task, method, and numbers of queries and candidates."""
    size = (row.queries, row.pool_size)
    if size == CAPTION_SIZES.get(row.name):
        return caption_references(row.name, row.method)
    if size == expected_size(row.name, row.pool):
        return references(row.name, row.pool, row.method)
    return []


def task_tables(rows: Sequence[ResultRow]) -> list[Table]:
    """Return a table for each task and pool, and for their averages, with a line for each method.

    A narrow terminal omits the last columns.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.measures))
    more_measures = [name for name in names if name not in MAIN_MEASURES]
    groups: dict[str, list[tuple[Cell, ...]]] = {}
    sorted_rows = [*sort_rows(rows), *average_rows(rows)]
    for row in sorted_rows:
        title = f"{row.task}, {row.pool} {row.dataset}, {row.queries:,} queries"
        line = (
            row.method,
            *(row.measures.get(name) for name in MAIN_MEASURES),
            divide_by_exact(row, sorted_rows),
            _round_cost(row.bytes_per_item),
            _round_cost(row.num_ranked),
            *(row.measures.get(name) for name in more_measures),
        )
        groups.setdefault(title, []).append(line)
    headings = ("method", *MAIN_MEASURES, "of exact", "bytes", "ranked", *more_measures)
    return [
        Table(name="results", title=title, headings=headings, lines=lines, decimals=3)
        for title, lines in groups.items()
    ]


def _round_cost(cost: float) -> float:
    """Return a whole number if a cost is large or nearly whole."""
    return round(cost) if cost >= 100 or abs(cost - round(cost)) < 0.01 else cost


def published_tables(rows: Sequence[ResultRow]) -> list[Table]:
    """Return a table that compares headline measures with published ones; empty if none can be."""
    lines: list[tuple[Cell, ...]] = []
    for row in sort_rows(rows):
        if row.score is None:
            continue
        ours = 100 * row.score
        name = f"{row.name} {row.headline}, {row.pool}"
        for reference in comparable_references(row):
            theirs, source = reference.value, f"{reference.system}, {reference.weights}"
            lines.append((name, row.method, source, ours, theirs, ours - theirs))
    if not lines:
        return []
    table = Table(
        name="published",
        title="Comparison with published numbers",
        note=PAPER_NOTE,
        headings=("row", "method", "published", "ours", "theirs", "difference"),
        lines=lines,
        text_columns=3,
    )
    return [table]


def print_results(rows: Sequence[ResultRow]) -> None:
    """Print a table for each task, and the comparison with published numbers, to the terminal."""
    for table in (*task_tables(rows), *published_tables(rows)):
        print_text(table.text(shutil.get_terminal_size().columns))
    print_text("for all columns, use a wider terminal or --json", error=True)
