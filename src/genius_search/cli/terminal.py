"""Output of the command line: progress and messages on stderr, results on stdout."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.cells import cell_len
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
"""Seconds between lines of progress when stderr is not a terminal."""
MEASURES: Final = ("loss", "validation", "purity", "collision_rate", "reconstruction")
"""Measures that are shown beside the progress."""
_CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that a terminal obeys, that change the direction of text, or that cannot be printed because a
file's name is not UTF-8; not tab and newline."""


def escape_controls(text: str) -> str:
    """Replace control characters by their JSON escapes, so that a text cannot steer a terminal."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class TerminalProgress:
    """Progress bars on a terminal, occasional lines elsewhere. NO_COLOR is respected."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._bars: Progress | None = None
        self._stage = ""
        self._total = 0
        self._done = -1
        self._began = 0.0
        self._printed = 0.0
        self._latest: dict[str, float] = {}

    def __enter__(self) -> TerminalProgress:  # noqa: PYI034  beartype cannot check Self
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, stage: str, total: int) -> None:
        """Begin a stage of ``total`` steps."""
        self.close()
        self._stage, self._total, self._done, self._latest = stage, total, -1, {}
        self._began = self._printed = time.monotonic()
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
        """Show that ``done`` steps are done, with the latest measures."""
        self._latest.update({name: measures[name] for name in MEASURES if name in measures})
        text = "  ".join(f"{name} {value:.4g}" for name, value in self._latest.items())
        now = time.monotonic()
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=done, measures=text)
            if done >= self._total:
                self.close()
        elif done != self._done and (done >= self._total or now - self._printed >= QUIET_SECONDS):
            self._printed, self._done = now, done
            spent = now - self._began
            left = (
                f", about {spent / done * (self._total - done):.0f} s left" if 0 < done < self._total else ""
            )
            self.say(f"{self._stage}: {done}/{self._total} in {spent:.1f} s{left}  {text}")

    def say(self, message: str) -> None:
        """Print a line on stderr."""
        shown = escape_controls(message)
        self._console.print(shown, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def say_next(self, *words: object) -> None:
        """Print the command to run next, so that it can be pasted into a shell."""
        self.say(f"next: {shlex.join(map(str, words))}")

    def close(self) -> None:
        """Remove the bar, so that nothing is printed over it."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def print_text(text: str, *, error: bool = False) -> None:
    """Print a line on stdout or stderr."""
    print(escape_controls(text), file=sys.stderr if error else sys.stdout)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout; paths become strings."""
    print_text(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = (), fill: bool = False
) -> None:
    """Print a table on stdout whose cells are never wrapped.

    Parameters
    ----------
    columns
        Headings; if all are empty, none are printed.
    left
        Headings of the columns that are aligned left; the others are aligned right.
    fill
        Let the last column, aligned left, take the rest of a terminal's line, and cut it there. In a file or
        a pipe, nothing is cut.
    """
    rows = [tuple(map(escape_controls, row)) for row in rows]
    console = Console()
    if fill and not console.is_terminal:
        widths = (max(map(cell_len, column)) + 2 for column in zip(columns, *rows, strict=True))
        console = Console(width=sum(widths))
    table = Table(box=None, padding=(0, 2, 0, 0), expand=fill, show_header=any(columns))
    for place, heading in enumerate(columns):
        if fill and place == len(columns) - 1:
            table.add_column(heading, no_wrap=True, overflow="ellipsis", ratio=1)
        else:
            width = max(map(len, [heading, *(row[place] for row in rows)]))
            table.add_column(
                heading, justify="left" if heading in left else "right", no_wrap=True, min_width=width
            )
    for row in rows:
        table.add_row(*map(Text, row))
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def print_facts(facts: Mapping[str, Any], *, as_json: bool = False) -> None:
    """Print a line for each fact, or one JSON document."""
    if as_json:
        print_json(facts)
        return
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), Text(escape_controls(_format(value))))
    Console().print(table)


def format_bytes(count: int) -> str:
    """Format a number of bytes.

    >>> format_bytes(5_130_000_000)
    '5.13 GB'
    """
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= power:
            return f"{count / power:.2f} {unit}"
    return f"{count} bytes"


def _format(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.4g}"
        case dict():
            return ", ".join(f"{name} {_format(count)}" for name, count in value.items())
        case _:
            return str(value)
