"""What it costs: bytes of an item, queries per second as the pool grows, recall against time.

Times are read from what ``genius bench scale`` and ``genius bench quality`` wrote; bytes from evaluations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from genius.errors import BadData
from genius.report.curves import Line, best_points, curves
from genius.report.drawing import Drawing
from genius.report.evaluated import Pool, System
from genius.report.table import Cell, Table

PUBLISHED_BYTES: Final = (("GENIUS, published (supplement, table 2)", "generative", 12.25),
                          ("CLIP, published (supplement, table 2)", "exact-raw", 3072.0))  # fmt: skip

LATENCIES: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
"""CPU-milliseconds that a query may take."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark's ``results.json``."""

    kind: str
    """``scale`` or ``quality``."""
    rows: Sequence[Mapping[str, Any]]
    machine: str
    command: str


def read_benchmark(folder: Path) -> Benchmark | None:
    """What a benchmark left in a folder; nothing where it is another than these two.

    Raises
    ------
    BadData
        the file cannot be read.
    """
    path = folder / "results.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kinds = {"scale": ("builds", "queries"), "quality": ("methods", "leaves")}
        for kind, names in kinds.items():
            if all(isinstance(found.get(name), list) for name in names):
                rows = found["queries"] if kind == "scale" else found.get("curves") or found["methods"]
                return Benchmark(kind=kind, rows=rows, machine=rows[0]["machine"], command=rows[0]["command"])
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise BadData(f"{path} is not what `genius bench` writes: {error!r}") from None
    return None


def storage_table(systems: Sequence[System], pool: Pool) -> Table | None:
    """Bytes of an item, for each way of searching."""
    lines: list[tuple[Cell, ...]] = []
    for system in systems:
        for method in system.methods(pool):
            rows = [
                row for one in system.seeds for row in one.rows if (row.pool, row.method) == (pool, method)
            ]
            size = sum(row.bytes_per_item for row in rows) / len(rows)
            touched = sum(row.candidates_touched / row.pool_size for row in rows) / len(rows)
            lines.append((system.title, method, size, 100 * touched))
    if not lines:
        return None
    lines += [(title, method, size, None) for title, method, size in PUBLISHED_BYTES]
    return Table(
        name="storage",
        title="Storage",
        note=f"Bytes kept of an item in the {pool} pool (codes and where each ID's items begin; their "
        "numbers, eight bytes each, are apart; vectors in 16 bits), and candidates scored for a query, in "
        "percent of the pool. The published count the bits of an ID, and a vector of 768 numbers in 32 bits.",
        headings=("system", "method", "bytes an item", "touched, %"),
        lines=lines,
        decimals=2,
        text_columns=2,
    )


def speed_table(benchmark: Benchmark) -> Table:
    """Queries per second as the pool grows: the paper's figure 4 as numbers."""
    rows = sorted(benchmark.rows, key=lambda row: (row["method"], row["batch"], row["items"]))
    return Table(
        name="speed",
        title="Queries per second against the size of the pool",
        note="Queries a second of CPU time on one core, asked one by one (batch 1) or together. Weights are "
        "drawn and pools invented: this is speed, not recall; the encoder is not in it. Calculated: in "
        f"proportion to the largest pool that was measured. {benchmark.machine}; `{benchmark.command}`",
        headings=("method", "batch", "items", "queries a second", "bytes an item", "calculated"),
        lines=[
            (
                row["method"],
                row["batch"],
                row["items"],
                1000.0 / row["cpu_ms"],
                row["bytes_per_item"],
                "yes" if row["calculated"] else "no",
            )
            for row in rows
        ],
        decimals=2,
    )


def speed_figure(benchmark: Benchmark) -> Drawing:
    """The same drawn, one query at a time."""
    single = [row for row in benchmark.rows if row["batch"] == 1]

    def points(method: str, *, calculated: bool) -> tuple[tuple[float, float], ...]:
        return tuple(
            (float(row["items"]), 1000.0 / row["cpu_ms"])
            for row in single
            if row["method"] == method and bool(row["calculated"]) is calculated
        )

    methods = list(dict.fromkeys(str(row["method"]) for row in single))
    lines = [
        Line(method, points(method, calculated=False), points(method, calculated=True)) for method in methods
    ]
    return Drawing(
        name="speed",
        title="Queries per second against the size of the pool",
        alt=f"Queries per second of {', '.join(methods)} against pool size on logarithmic axes",
        figure=curves(lines, x="items in the pool", y="queries a second, one at a time, one core"),
    )


def quality_table(benchmark: Benchmark) -> Table:
    """Of each kind of search the settings that nothing cheaper of it reaches."""
    lines: list[tuple[Cell, ...]] = []
    for task, line in _kinds(benchmark):
        own = [row for row in benchmark.rows if (row["task"], row["line"]) == (task, line)]
        best = set(best_points([(_milliseconds(row), row["recall_5"]) for row in own]))
        lines += [
            (task, row["method"], 100 * row["recall_1"], 100 * row["recall_5"], row["code_bytes"],
             row["stored_bytes"], 100 * row["touched_share"], _milliseconds(row))
            for row in sorted(own, key=_milliseconds)
            if (_milliseconds(row), row["recall_5"]) in best
        ]  # fmt: skip
    return Table(
        name="quality",
        title="Recall against cost",
        note="Of each kind of search, settings whose R@5 no cheaper one of it reaches. CPU-milliseconds of "
        f"a query among 64, one core, without the encoder. {benchmark.machine}; `{benchmark.command}`",
        headings=("task", "method", "R@1", "R@5", "bytes of the ID", "bytes stored", "touched, %", "CPU-ms"),
        lines=lines,
        decimals=2,
        text_columns=2,
    )


def latency_table(benchmark: Benchmark) -> Table | None:
    """Of each kind of search the best R@5 that so much time buys, side by side."""
    kinds = list(dict.fromkeys(line for _, line in _kinds(benchmark) if line))
    if not kinds:
        return None
    tasks = dict.fromkeys(task for task, _ in _kinds(benchmark))
    found = [
        (
            task,
            limit,
            *(
                max((100 * row["recall_5"] for row in benchmark.rows
                     if (row["task"], row["line"]) == (task, kind) and _milliseconds(row) <= limit),
                    default=None)
                for kind in kinds
            ),
        )
        for task in tasks
        for limit in LATENCIES
    ]  # fmt: skip
    return Table(
        name="latency",
        title="Recall at equal time",
        note="The best R@5, in percent, of the settings that take at most so many CPU-milliseconds a query "
        "(among 64, one core, without the encoder); nothing where none does. "
        f"{benchmark.machine}; `{benchmark.command}`",
        headings=("task", "CPU-ms", *kinds),
        lines=[line for line in found if any(cell is not None for cell in line[2:])],
        decimals=2,
        text_columns=1,
    )


def quality_figure(benchmark: Benchmark) -> Drawing:
    """The same drawn, the mean of the tasks where there is one."""
    tasks = list(dict.fromkeys(str(row["task"]) for row in benchmark.rows))
    task = "mean" if "mean" in tasks else tasks[0]
    points = {
        line: [
            (_milliseconds(row), 100 * row["recall_5"])
            for row in benchmark.rows
            if (row["task"], row["line"]) == (task, line)
        ]
        for _, line in _kinds(benchmark)
        if line
    }
    lines = [Line(line, best_points(found), ()) for line, found in points.items() if found]
    return Drawing(
        name="quality",
        title=f"Recall against cost ({task})",
        alt=f"R@5 of {', '.join(line.name for line in lines)} against CPU-milliseconds of a query",
        figure=curves(lines, x="CPU-milliseconds of a query among 64", y="R@5, %", log_y=False),
    )


def _kinds(benchmark: Benchmark) -> list[tuple[str, str]]:
    """Tasks and kinds of search, as drawings name them; a mean over tasks stands for the tasks."""
    found = list(dict.fromkeys((str(row["task"]), str(row["line"])) for row in benchmark.rows))
    means = [one for one in found if one[0] == "mean"]
    return means or found


def _milliseconds(row: Mapping[str, Any]) -> float:
    return float(row["route_ms"] + row["rank_ms"])
