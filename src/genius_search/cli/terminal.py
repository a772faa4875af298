"""What a person sees: progress and messages on stderr, results on stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

QUIET_SECONDS: Final = 15.0
"""Between lines of progress when stderr is not a terminal."""
SHOWN: Final = ("loss", "purity", "collision_rate", "reconstruction")
"""Measures worth a place on the line."""


class TerminalProgress:
    """Bars on a terminal, a line now and then elsewhere. Honours NO_COLOR through rich."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars: Progress | None = None
        self._stage = ""
        self._total = 0
        self._told = 0.0
        self._began = 0.0
        self._latest: dict[str, float] = {}

    def __enter__(self) -> TerminalProgress:  # noqa: PYI034  beartype cannot check Self
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, stage: str, total: int) -> None:
        """A stage starts."""
        self.close()
        self._stage, self._total, self._latest = stage, total, {}
        self._began = self._told = time.monotonic()
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description:<18}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[measures]}"),
                console=self._console,
            )
            self._bars.start()
            self._bars.add_task(stage, total=total, measures="")

    def advance(self, done: int, measures: Mapping[str, float]) -> None:
        """Show how far it is."""
        self._latest.update({name: measures[name] for name in SHOWN if name in measures})
        text = "  ".join(f"{name} {value:.4g}" for name, value in self._latest.items())
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=done, measures=text)
            if done >= self._total:
                self.close()
            return
        now = time.monotonic()
        if done >= self._total or now - self._told >= QUIET_SECONDS:
            self._told = now
            self._console.print(
                f"{self._stage}: {done}/{self._total} in {now - self._began:.1f} s  {text}",
                highlight=False,
                soft_wrap=True,
            )

    def say(self, message: str) -> None:
        """A line on stderr."""
        self._console.print(message, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def close(self) -> None:
        """Take the bar away, so that nothing prints over it."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def print_facts(facts: Mapping[str, Any], *, as_json: bool) -> None:
    """What was found or made: a line for each fact, or one JSON document."""
    if as_json:
        print_json({name: str(value) if isinstance(value, Path) else value for name, value in facts.items()})
        return
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), Text(_shown(value)))
    Console().print(table)


def _shown(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.4g}"
        case dict():
            return ", ".join(f"{name} {_shown(count)}" for name, count in value.items())
        case _:
            return str(value)
