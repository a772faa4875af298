"""A benchmark's tables as a document that can be read, compared and committed as text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from genius_search.artifact import write_json
from genius_search.errors import UsageError
from genius_search.lab.bench.timing import About
from genius_search.lab.figure import Drawing, Line, draw_lines
from genius_search.lab.html import write_html
from genius_search.lab.table import Table as MarkdownTable


def draw(lines: Sequence[Line], *, x: str, y: str, log_y: bool = True) -> bytes:
    """Return the drawing as a PNG file."""
    return Drawing(name="", title="", alt="", figure=draw_lines(lines, x=x, y=y, log_y=log_y)).save("png")


RESULTS: Final = "results.json"
PAGE: Final = "index.html"
MOST_DECIMALS: Final = 4


@dataclass(frozen=True, kw_only=True)
class Table:
    """Figures of one kind."""

    name: str
    """In the JSON, where rows of several tables of one name stand together."""
    title: str
    note: str
    """How to read it."""
    columns: tuple[tuple[str, str], ...]
    """Fields that people see, and their headings; the rest stands in the JSON."""
    rows: Sequence[Any]
    """Dataclasses."""
    brief: tuple[tuple[str, str], ...] = ()
    """What a terminal has room for, where that is less than all columns."""
    is_long: bool = False
    """Too long to be read: on the page and in the JSON only."""

    def lines(self) -> list[list[str]]:
        """The columns, as they are shown."""
        return [[shown(getattr(row, field)) for field, _ in self.columns] for row in self.rows]

    def in_brief(self) -> Table:
        """The table for a terminal."""
        return dataclasses.replace(self, columns=self.brief or self.columns)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawing."""

    title: str
    alt: str
    """What it shows, for those who cannot see it."""
    image: bytes
    """PNG."""

    def save(self, kind: str) -> bytes:
        """Return the PNG file."""
        return self.image


@dataclass(frozen=True, kw_only=True)
class Result:
    """Everything one benchmark found."""

    title: str
    about: About
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Every row with what it was measured on.

        Raises
        ------
        UsageError
            a figure is NaN or infinite: something was divided by nothing.
        """
        about = dataclasses.asdict(self.about)
        found: dict[str, list[dict[str, Any]]] = {}
        for table in self.tables:
            rows = [{**dataclasses.asdict(row), **about} for row in table.rows]
            found.setdefault(table.name, []).extend(rows)
        for name, rows in found.items():
            for row in rows:
                bad = [
                    field
                    for field, value in row.items()
                    if isinstance(value, float) and not math.isfinite(value)
                ]
                if bad:
                    raise UsageError(
                        f"{name}: {', '.join(bad)} is not a number in {row}; measure with more queries"
                    )
        return {"title": self.title, **found}


def write(folder: Path, result: Result) -> None:
    """Write ``results.json`` and ``index.html``."""
    found = result.to_json()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RESULTS, found)
    write_html(
        folder / PAGE,
        "bench.html",
        {
            "title": result.title,
            "about": dataclasses.asdict(result.about),
            "figures": result.figures,
            "tables": [
                MarkdownTable(
                    name=table.name,
                    title=table.title,
                    note=table.note,
                    headings=tuple(heading for _, heading in table.columns),
                    lines=table.lines(),
                )
                for table in result.tables
            ],
        },
    )


def shown(value: object) -> str:
    """A figure with three digits, which is what a measurement is worth; counts with all of theirs."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            digits = 2 - math.floor(math.log10(abs(value))) if value else 0
            rounded = round(value, digits)
            return f"{rounded:,.{min(max(digits, 0), MOST_DECIMALS)}f}"
        case _:
            return str(value)


def markdown(result: Result) -> str:
    """Every table that can be read, with its note, and what it was measured on."""
    about = result.about
    tables = [
        MarkdownTable(
            name=table.name,
            title=table.title,
            note=table.note,
            headings=tuple(heading for _, heading in table.columns),
            lines=table.lines(),
        )
        for table in result.tables
        if not table.is_long
    ]
    parts = [f"# {result.title}", *(table.markdown() for table in tables)]
    parts.append(f"{about.machine}; {about.date}; `{about.command}`; seed {about.seed}")
    return "\n\n".join(parts) + "\n"
