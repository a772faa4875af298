"""What a benchmark leaves: figures for scripts, tables for people, a page to open."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from genius.artifact import write_file, write_json
from genius.bench.machine import About
from genius.bench.page import page
from genius.errors import UsageError

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
    html = page(
        result.title,
        dataclasses.asdict(result.about),
        [(figure.title, figure.alt, figure.image) for figure in result.figures],
        [
            (table.title, table.note, [heading for _, heading in table.columns], table.lines())
            for table in result.tables
        ],
    )
    write_file(folder / PAGE, html.encode())


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
