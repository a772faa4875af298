"""What every ``genius bench`` does around its measuring: one thread before, files and tables after."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from genius_search.cli.terminal import print_json

if TYPE_CHECKING:
    from genius_search.lab.bench.results import Figure, Result
    from genius_search.lab.bench.results import Table as Figures

WIDEST: Final = 124
"""Columns of the widest table."""


def keep_to_one_thread() -> None:
    """Libraries read this when they are imported; what follows in this process is the measuring alone."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"


def counts(flag: str, text: str) -> tuple[int, ...]:
    """Numbers with commas between.

    Raises
    ------
    UsageError
        they are none.
    """
    from genius_search.errors import UsageError

    try:
        return tuple(int(float(size)) for size in text.split(","))
    except (ValueError, OverflowError):
        raise UsageError(f"{flag} {text!r}: expected numbers with commas between, such as 1e4,1e6") from None


def command_of(command: Any, name: str) -> str:
    """What was typed, of paths only the last name, defaults left out."""
    words = ["genius", "bench", name]
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        if value == field.default or field.name in ("out", "json"):
            continue
        match value:
            case bool():
                words.append(flag if value else f"--no-{flag[2:]}")
            case Path():
                words += [value.name] if field.name == "data" else [flag, value.name]
            case _:
                words += [flag, str(value)]
    return " ".join(words)


def finish(
    command: Any,
    name: str,
    folder: Path,
    title: str,
    tables: list[Figures],
    figures: list[Figure],
    *,
    as_json: bool,
) -> Result:
    """Write the files, and print the tables.

    Parameters
    ----------
    command
        the benchmark's flags.
    name
        as it is typed.
    """
    from genius_search.lab.bench.results import Result, write
    from genius_search.lab.bench.timing import about

    typed = command_of(command, name)
    result = Result(
        title=title, about=about(typed, seed=command.seed), tables=tuple(tables), figures=tuple(figures)
    )
    write(folder, result)
    if as_json:
        print_json(result.to_json())
    else:
        _print(result)
        print(f"all columns: index.html and results.json in {folder}", file=sys.stderr)
    return result


def _print(result: Result) -> None:
    console = Console()
    for full in result.tables:
        if full.is_long:
            continue
        table = full.in_brief()
        shown = Table(title=table.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for number, (_, heading) in enumerate(table.columns):
            shown.add_column(heading, justify="right" if number else "left", no_wrap=True)
        for line in table.lines():
            shown.add_row(*line)
        Console(width=max(console.width, WIDEST)).print(shown)  # a cell cut short is no figure
        console.print(table.note, highlight=False)
        console.print()
    console.print(f"{result.about.machine}; {result.about.date}; {result.about.command}", highlight=False)
