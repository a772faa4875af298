"""M-BEIR's rows in the papers' layout: percent, a column for each method, published numbers below ours.

A published number stands only where the queries and the pool are as many as those it was measured on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from genius_search.data.mbeir import PAPER_ROWS
from genius_search.lab.published_numbers import (
    AVERAGE,
    COMPARABLE,
    PAPER_BEAM,
    SIZES,
    UNION_SIZE,
    Reference,
    is_comparable,
    references,
)

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


HEADINGS: Final = {
    "exact-raw": "exact\nraw",
    "exact-fused": "exact\nfused",
    "exact-fused+hubness": "\n+hubness",
    "exact-codes": "exact\ncodes",
    "routing+codes": "routing\n+codes",
    "routing+embeddings": "+embed-\ndings",
    "generative": "generative",
    "generative+codes": "\n+codes",
    "generative+embeddings": "+embed-\ndings",
    "generative+raw": "\n+raw",
}
"""Methods as narrow columns."""
WIDE: Final = 126
"""Columns of a terminal from which on no word is broken, no number shortened and no method left out."""
ONLY_WIDE: Final = ("exact-fused+hubness", "routing+codes", "routing+embeddings")
"""Methods for which a narrower one has no room; nothing is published beside them."""
LABELS: Final[dict[Literal["released", "paper"], str]] = {"released": "  released", "paper": "  paper"}
"""Lines of published numbers: the authors' released weights, the paper."""
LABEL_WIDTH: Final = 17
LEGEND: Final = (
    "percent; below ours the published numbers and our difference: exact-raw beside UniIR's CLIP_SF, "
    "generative beside GENIUS, generative+raw beside GENIUS^R; 'released': weights that were published later"
)


class PaperLine(NamedTuple):
    """One line of the table: our numbers, or published ones."""

    label: str
    cells: tuple[str, ...]
    """One for each method."""


class PaperBlock(NamedTuple):
    """One row of the papers: ours, then what is published."""

    task: str
    lines: tuple[PaperLine, ...]


class PaperTable(NamedTuple):
    """All rows of one pool."""

    pool: Literal["local", "global"]
    methods: tuple[str, ...]
    blocks: tuple[PaperBlock, ...]
    above: tuple[str, ...]
    """What has to be known before comparing."""
    below: tuple[str, ...]
    """Legend and misprints."""


class _Asked(NamedTuple):
    """How queries were asked and scored."""

    beam: int
    scores: str
    instructions: str


def applies_to(rows: Sequence[ResultRow]) -> bool:
    """Whether all rows are M-BEIR's."""
    return all(row.name in PAPER_ROWS for row in rows)


def paper_tables(
    rows: Sequence[ResultRow], *, beam: int, scores: str = "vocabulary", instructions: str = "first"
) -> list[PaperTable]:
    """A table for each pool, local first; all rows have to be M-BEIR's.

    What was asked otherwise than by default here stands above, if published numbers stand beside ours.
    """
    asked = _Asked(beam, scores, instructions)
    return [
        _table(pool, list(inside), asked)
        for pool, inside in groupby(in_order(rows), key=lambda row: row.pool)
    ]


def paper_to_rich(table: PaperTable, *, width: int = 80) -> Table:
    """The table for the terminal, at least 80 columns wide."""
    wide = width >= WIDE
    places = [place for place, method in enumerate(table.methods) if wide or method not in ONLY_WIDE]
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0, title=f"{table.pool} pool")
    if len(places) < len(table.methods):
        shown.caption = f"more methods are shown from {WIDE} columns on, with --markdown and with --json"
    shown.add_column("task, data set", width=LABEL_WIDTH)
    for method in (table.methods[place] for place in places):
        heading = HEADINGS[method]
        shown.add_column(heading.replace("-\n", "") if wide else heading, no_wrap=True)
    for task, blocks in groupby(table.blocks, key=lambda block: block.task):
        shown.add_row(Text(task, style="bold"))
        for block in blocks:
            ours, *published = block.lines
            shown.add_row(ours.label, *_narrow([ours.cells[place] for place in places], wide=wide))
            for line in published:
                cells = [line.cells[place] for place in places]
                shown.add_row(line.label, *_narrow(cells, wide=wide), style="dim")
        shown.add_section()
    return shown


def paper_to_markdown(table: PaperTable) -> str:
    """The table for a document."""
    header = ["task", f"{table.pool} pool", *table.methods]
    lines = [
        *(f"{note}\n" for note in table.above),
        "| " + " | ".join(header) + " |",
        "|---|---|" + "---|" * len(table.methods),
        *(
            "| " + " | ".join([block.task, line.label.strip(), *line.cells]) + " |"
            for block in table.blocks
            for line in block.lines
        ),
        "",
        *(f"{note}\n" for note in table.below),
    ]
    return "\n".join(lines)


def _table(pool: Literal["local", "global"], rows: list[ResultRow], asked: _Asked) -> PaperTable:
    present = {row.method for row in rows}
    methods = tuple(method for method in METHODS if method in present)
    by_name = {name: list(group) for name, group in groupby(rows, key=lambda row: row.name)}
    beside = {
        name: {row.method: published_beside(row) for row in group if row.score is not None}
        for name, group in by_name.items()
    }
    means = {row.method: row for row in averages(rows)}
    published_means = _means(beside, pool) if means else {}
    blocks = [
        PaperBlock(
            group[0].task,
            _paper_lines(
                f"{group[0].dataset} {group[0].headline}",
                {row.method: row.score for row in group},
                beside[name],
                methods,
            ),
        )
        for name, group in by_name.items()
    ]
    if means:
        blocks.append(
            PaperBlock(
                "average",
                _paper_lines(
                    f"{len(by_name)} rows",
                    {method: row.score for method, row in means.items()},
                    published_means,
                    methods,
                ),
            )
        )
    blocks.append(_costs(rows, methods))
    shown = [one for found in (*beside.values(), published_means) for some in found.values() for one in some]
    above = (*_unpublished(rows, beside), *(_otherwise(rows, asked) if shown else ()))
    return PaperTable(pool, methods, tuple(blocks), above, _below(shown) if shown else ())


def _paper_lines(
    label: str,
    scores: Mapping[str, float | None],
    published: Mapping[str, Sequence[Reference]],
    methods: Sequence[str],
) -> tuple[PaperLine, ...]:
    values = {method: 100 * score for method, score in scores.items() if score is not None}
    ours = [f"{values[method]:.1f}" if method in values else "-" for method in methods]
    lines = [PaperLine(label, tuple(ours))]
    for weights, name in LABELS.items():
        cells = []
        for method in methods:
            one = next((one for one in published.get(method, ()) if one.weights == weights), None)
            cells.append(_beside(one, values[method]) if one is not None and method in values else "")
        if any(cells):
            lines.append(PaperLine(name, tuple(cells)))
    return tuple(lines)


def _beside(one: Reference, ours: float) -> str:
    """``92.0 +0.1``; a star where a misprint was corrected."""
    difference = round(ours - one.value, 1) + 0.0  # no -0.0
    return f"{one.value:.1f}{'*' if one.misprint else ''} {difference:+.1f}"


def _means(
    beside: Mapping[str, Mapping[str, Sequence[Reference]]], pool: Literal["local", "global"]
) -> dict[str, list[Reference]]:
    """Published averages over the very rows that are here, where all of them may be compared."""
    found: dict[str, list[Reference]] = {}
    for method in COMPARABLE:
        by_row = [published.get(method, ()) for published in beside.values()]
        misprints = {one.weights: one.misprint for one in references(AVERAGE, pool, method)}
        for weights in LABELS:
            same = [one for published in by_row for one in published if one.weights == weights]
            if not same or len(same) != len(by_row):
                continue
            mean = math.fsum(one.value for one in same) / len(same)
            misprint = misprints[weights] if len(same) == len(PAPER_ROWS) else ""
            found.setdefault(method, []).append(same[0]._replace(value=mean, misprint=misprint))
    return found


def _costs(rows: Sequence[ResultRow], methods: Sequence[str]) -> PaperBlock:
    """A re-ranked number means little without how many candidates were touched for it."""
    stored, touched = [], []
    for method in methods:
        own = [row for row in rows if row.method == method]
        stored.append(_short(math.fsum(row.bytes_per_item for row in own) / len(own)))
        touched.append(_short(math.fsum(row.candidates_touched for row in own) / len(own)))
    return PaperBlock(
        "cost", (PaperLine("bytes/candidate", tuple(stored)), PaperLine("touched/query", tuple(touched)))
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 or value == 0 else f"{value:.1f}"


def _narrow(cells: Sequence[str], *, wide: bool) -> list[str]:
    """Seven characters at most for a large number: ``5.6M``."""
    numbers = [cell.replace(",", "") for cell in cells]
    return [
        f"{int(number) / 1e6:.1f}M" if not wide and number.isdigit() and int(number) >= 1e6 else cell
        for cell, number in zip(cells, numbers, strict=True)
    ]


def _unpublished(
    rows: Sequence[ResultRow], beside: Mapping[str, Mapping[str, Sequence[Reference]]]
) -> list[str]:
    """Which rows have other sizes than the published numbers are for."""
    others = [row for row in rows if row.method in COMPARABLE and not beside[row.name].get(row.method)]
    differing = list({row.name: row for row in others}.values())
    if not differing:
        return []
    first, count = differing[0], len(differing)
    size = SIZES[first.name]
    which = f"{count} row has" if count == 1 else f"{count} rows have"
    begin = "No published numbers shown" if count == len(beside) else "Not all published numbers shown"
    note = (
        f"{begin}: {which} other sizes than M-BEIR's ({first.name}: {first.queries:,} of "
        f"{size.queries:,} queries, pool {first.pool_size:,} of "
        f"{size.pool if first.pool == 'local' else UNION_SIZE:,})"
    )
    return [note]


def _otherwise(rows: Sequence[ResultRow], asked: _Asked) -> list[str]:
    """What differs from how the published numbers were measured."""
    notes = []
    generated = any(row.method.startswith("generative") for row in rows)
    if generated and asked.beam != PAPER_BEAM:
        notes.append(f"generated with a beam of {asked.beam}; the published numbers are for {PAPER_BEAM}")
    ours, theirs = [], []
    if asked.instructions != "first":
        ours.append(f"--instructions {asked.instructions}")
        theirs.append("always the first")
    if generated and asked.scores != "vocabulary":
        ours.append(f"--scores {asked.scores}")
        theirs.append("scores over the whole vocabulary")
    if ours:
        notes.append(
            f"asked with {', '.join(ours)}; the authors' code: {', '.join(theirs)} (as `genius repro` asks)"
        )
    return notes


def _below(shown: Sequence[Reference]) -> tuple[str, ...]:
    return (LEGEND, *dict.fromkeys(f"* {one.misprint}" for one in shown if one.misprint))
