"""What ``genius bench scale`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from genius.bench.results import Figure, Table
from genius.report.curves import Line, draw

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


def build_table(rows: Sequence[BuildRow], *, pool: str, memory_gib: float) -> Table:
    """What the ID table takes."""
    return Table(
        name="builds",
        title="The ID table",
        note=f"Of {pool} pools of invented items, nine levels; built from a stream of codes within "
        f"{memory_gib:g} GiB, in a process of its own. The peak counts mapped files too.",
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
