"""What ``genius bench rivals`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genius.bench.results import Figure, Table
from genius.report.curves import Line, best_points, draw


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
