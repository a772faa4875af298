"""Results as rows beside each other: JSON for scripts, Markdown for documents, a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from genius.data.mbeir import PAPER_ROWS
from genius.evaluation.published import Reference, is_comparable, references

METHODS: Final = (
    "exact-raw",
    "exact-fused",
    "exact-fused+hubness",
    "exact-codes",
    "routing+codes",
    "routing+embeddings",
    "generative",
    "generative+codes",
    "generative+embeddings",
    "generative+raw",
)
"""The methods in the order in which tables show them."""
BASELINE: Final = "exact-fused"
"""What ``of exact`` compares with."""
HEADLINE: Final = "R@5"
"""The measure that a page emphasises; a row's own is :attr:`ResultRow.headline`."""
FIRST: Final = ("R@1", "R@5", "R@10")
"""Measures that every JSON row begins with and every short table shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultRow:
    """One method on one task and pool."""

    name: str
    """As in file names: ``mscoco_task0``."""
    dataset: str
    task: str
    """Its name: ``text -> image``."""
    task_id: int
    pool: Literal["local", "global"]
    method: str
    queries: int
    pool_size: int
    headline_k: int
    """The papers' cut-off for this row: 10 for Fashion200K and FashionIQ, else 5."""
    measures: Mapping[str, float]
    """``R@5``, ``recall@5``, ``MRR``, ``nDCG@10``, …"""
    bytes_per_item: float
    """What the method keeps of each candidate."""
    candidates_touched: float
    """How many candidates it scored for a query, on average."""

    @property
    def headline(self) -> str:
        """The measure that the papers print for this row (M-BEIR, section 2.9)."""
        return f"R@{self.headline_k}"

    @property
    def score(self) -> float | None:
        """The headline measure's value, if it was measured."""
        return self.measures.get(self.headline)


class AverageRow(NamedTuple):
    """One method over all tasks of a pool, every task counting the same."""

    pool: str
    method: str
    tasks: int
    measures: dict[str, float]
    """Those that every task has."""
    score: float | None
    """The mean of every row's own headline measure: the papers' average."""
    bytes_per_item: float
    candidates_touched: float


class _Line(NamedTuple):
    """One line of a table meant for reading."""

    group: tuple[str, ...]
    """What the lines of a block share: task, pool and data set, number of queries."""
    method: str
    cells: tuple[str, ...]


def in_order(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Rows by pool (local first), task, data set, then method in the order of :data:`METHODS`.

    M-BEIR's data sets come as the papers print them, others by name.
    """
    return sorted(
        rows,
        key=lambda row: (
            row.pool != "local",
            row.task_id,
            *_place(row.name, PAPER_ROWS),
            row.dataset,
            *_place(row.method, METHODS),
        ),
    )


def averages(rows: Sequence[ResultRow]) -> list[AverageRow]:
    """The unweighted mean over tasks for each pool and method (M-BEIR, section 2.9).

    Only for methods that were run on every task of the pool: other means cannot be compared.
    """
    found: list[AverageRow] = []
    for pool in ("local", "global"):
        inside = [row for row in in_order(rows) if row.pool == pool]
        tasks = {row.name for row in inside}
        for method in sorted({row.method for row in inside}, key=lambda method: _place(method, METHODS)):
            own = [row for row in inside if row.method == method]
            if len(tasks) < 2 or len(own) != len(tasks):
                continue
            scores = [row.score for row in own if row.score is not None]
            shared = [name for name in own[0].measures if all(name in row.measures for row in own)]
            found.append(
                AverageRow(
                    pool,
                    method,
                    len(own),
                    {name: _mean([row.measures[name] for row in own]) for name in shared},
                    _mean(scores) if len(scores) == len(own) else None,
                    _mean([row.bytes_per_item for row in own]),
                    _mean([row.candidates_touched for row in own]),
                )
            )
    return found


def to_json(rows: Sequence[ResultRow]) -> dict[str, Any]:
    """``{"rows": [...], "averages": [...]}``: flat rows for scripts, numbers unrounded."""
    ordered, means = in_order(rows), averages(rows)
    return {
        "rows": [
            {
                "dataset": row.dataset,
                "task": row.task,
                "pool": row.pool,
                "method": row.method,
                "queries": row.queries,
                **_first_first(row.measures),
                "task_id": row.task_id,
                "name": row.name,
                "headline": row.headline,
                "pool_size": row.pool_size,
                "bytes_per_item": row.bytes_per_item,
                "candidates_touched": row.candidates_touched,
                "of_exact": of_exact(row, ordered),
                **_published_json(row),
            }
            for row in ordered
        ],
        "averages": [
            {
                "pool": row.pool,
                "method": row.method,
                "tasks": row.tasks,
                **_first_first(row.measures),
                "headline": row.score,
                "bytes_per_item": row.bytes_per_item,
                "candidates_touched": row.candidates_touched,
                "of_exact": _average_of_exact(row, means),
            }
            for row in means
        ],
    }


def to_markdown(rows: Sequence[ResultRow]) -> str:
    """The table for a document."""
    names = _shown(rows)
    header = ["task", "method", *names, "of exact", "bytes/item", "touched"]
    lines = [
        "| " + " | ".join(header) + " |",
        "|---|---|" + "---:|" * (len(header) - 2),
    ]
    lines += [
        "| " + " | ".join([", ".join(line.group).replace("|", "\\|"), line.method, *line.cells]) + " |"
        for line in _lines(rows, names, digits=4)
    ]
    return "\n".join(lines) + "\n"


def to_rich(rows: Sequence[ResultRow]) -> Table:
    """The table for the terminal, 80 columns wide: a block for each task, a line for each method."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("task, method", min_width=23, overflow="fold")
    names = [name for name in FIRST if any(name in row.measures for row in rows)]
    for name in (*names, "of exact", "bytes", "touched"):
        table.add_column(name, justify="right", no_wrap=True, min_width=max(5, len(name)))
    for group, block in groupby(_lines(rows, names, digits=3), key=lambda line: line.group):
        task, *details = group
        table.add_row(Text(task, style="bold"))
        table.add_row(Text(", ".join(details), style="dim"))
        for line in block:
            table.add_row(f"  {line.method}", *line.cells)
        table.add_section()
    return table


def of_exact(row: ResultRow, rows: Sequence[ResultRow]) -> float | None:
    """A row's headline measure over that of exact search on fused embeddings; nothing where there is none."""
    for other in rows:
        if (other.name, other.pool, other.method) == (row.name, row.pool, BASELINE):
            return _ratio(row.score, other.score)
    return None


def published_beside(row: ResultRow) -> list[Reference]:
    """The published numbers that this row may be compared with: same task, method, and sizes."""
    if not is_comparable(row.name, row.pool, row.queries, row.pool_size):
        return []
    return references(row.name, row.pool, row.method)


def _published_json(row: ResultRow) -> dict[str, Any]:
    """Published numbers in percent, and the difference in points; nothing where none may be compared."""
    found = published_beside(row)
    if not found or row.score is None:
        return {}
    return {
        "published": [
            {
                "system": one.system,
                "weights": one.weights,
                "value": one.value,
                "difference": 100 * row.score - one.value,
                "source": one.source,
                **({"misprint": one.misprint} if one.misprint else {}),
            }
            for one in found
        ]
    }


def _average_of_exact(row: AverageRow, rows: Sequence[AverageRow]) -> float | None:
    for other in rows:
        if (other.pool, other.method) == (row.pool, BASELINE):
            return _ratio(row.score, other.score)
    return None


def _ratio(score: float | None, exact: float | None) -> float | None:
    return None if score is None or not exact else score / exact


def _lines(rows: Sequence[ResultRow], names: Sequence[str], *, digits: int) -> list[_Line]:
    ordered, means = in_order(rows), averages(rows)
    lines = [
        _Line(
            (row.task, f"{row.pool} {row.dataset}", f"{row.queries:,} queries"),
            row.method,
            _cells(row, names, digits, of_exact(row, ordered)),
        )
        for row in ordered
    ]
    return lines + [
        _Line(
            ("average", row.pool, f"{row.tasks} tasks"),
            row.method,
            _cells(row, names, digits, _average_of_exact(row, means)),
        )
        for row in means
    ]


def _cells(
    row: ResultRow | AverageRow, names: Sequence[str], digits: int, ratio: float | None
) -> tuple[str, ...]:
    scores = [f"{row.measures[name]:.{digits}f}" if name in row.measures else "-" for name in names]
    return (
        *scores,
        "-" if ratio is None else f"{ratio:.3f}",
        f"{row.bytes_per_item:,.2f}".removesuffix(".00"),
        f"{row.candidates_touched:,.0f}",
    )


def _shown(rows: Sequence[ResultRow]) -> list[str]:
    """Hit rates, MRR and nDCG; recall, which differs only where answers are many, stays in the JSON."""
    found = {name: None for row in rows for name in _first_first(row.measures)}
    return [name for name in found if not name.startswith("recall@")]


def _first_first(measures: Mapping[str, float]) -> dict[str, float]:
    return {name: measures[name] for name in FIRST if name in measures} | dict(measures)


def _place(name: str, names: Sequence[str]) -> tuple[int, str]:
    """For sorting: known names in their order, then the others."""
    return (names.index(name) if name in names else len(names), name)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
