"""The results of a benchmark: JSON for scripts, Markdown for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genius_search.errors import UsageError
from genius_search.writing import write_file, write_json
from research.table import Table

Row = dict[str, Any]
"""One measurement."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Everything one benchmark measured."""

    rows: Mapping[str, Sequence[Row]]
    """Name of a kind of measurement -> its rows, as the JSON has them."""
    tables: Sequence[Table]
    """For people, each short enough for a terminal or a document."""


def table(rows: Sequence[Row], columns: Mapping[str, str], *, name: str, title: str, note: str = "") -> Table:
    """Return some columns of measurements as a table; ``columns`` maps fields to their headings."""
    lines = [[row.get(column) for column in columns] for row in rows]
    headings = tuple(columns.values())
    return Table(name=name, title=title, note=note, headings=headings, lines=lines, decimals=None)


def write(folder: Path, title: str, found: Measurements, about: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``results.json`` and the tables as ``results.md``; return the JSON.

    Raises UsageError for a NaN or infinity.
    """
    for name, rows in found.rows.items():
        for row in rows:
            bad = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
            if bad:
                raise UsageError(
                    f"{name}: {', '.join(bad)} is not a number in {row}; measure with more queries"
                )
    document: dict[str, Any] = {"title": title}
    document |= {name: [{**row, **about} for row in rows] for name, rows in found.rows.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "results.json", document)
    facts = "{machine}; {date}; `{command}`; seed {seed}".format_map(about)
    text = "\n\n".join([f"# {title}", *(one.markdown() for one in found.tables), facts]) + "\n"
    write_file(folder / "results.md", text.encode())
    return document
