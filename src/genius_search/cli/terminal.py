"""Output of the command line: progress and messages on stderr, results on stdout."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from unicodedata import combining, east_asian_width

QUIET_SECONDS: Final = 15.0
"""Seconds between lines of progress when stderr is not a terminal."""
FIRST_SECONDS: Final = 2.0
"""Seconds until the first of them."""
MEASURES: Final = ("loss", "validation", "purity", "collision_rate", "reconstruction")
"""Measures that are shown beside the progress."""
MAX_TEXT: Final = 240
"""Characters of a text that are printed where a line has no end, unless all are wanted."""
_CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that a terminal obeys, that change the direction of text, or that cannot be printed because a
file's name is not UTF-8; not tab and newline."""


def escape_controls(text: str) -> str:
    """Replace control characters by their JSON escapes, so that a text cannot steer a terminal."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class TerminalProgress:
    """Progress bars on a terminal, occasional lines elsewhere.

    While items are encoded, the first Ctrl-C lets those at hand be finished, so that they can be saved; a
    second one ends at once.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._is_quiet = quiet
        self._bar: Any = None
        self._stage = ""
        self._total = 0
        self._done = -1
        self._began = 0.0
        self._printed = 0.0
        self._latest: dict[str, float] = {}
        self._usual = signal.getsignal(signal.SIGINT)
        self._is_ending = False

    def __enter__(self) -> TerminalProgress:  # noqa: PYI034  beartype cannot check Self
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, stage: str, total: int) -> None:
        """Begin a stage of ``total`` steps."""
        self.close()
        self._stage, self._total, self._done, self._latest = stage, total, -1, {}
        self._began = time.monotonic()
        self._printed = self._began - QUIET_SECONDS + FIRST_SECONDS
        if (
            stage == "encode" and self._usual is signal.default_int_handler
        ):  # not one that ignores it
            signal.signal(signal.SIGINT, self._end_soon)
        if self._is_quiet or not sys.stderr.isatty():
            return
        from tqdm import tqdm  # help is quick without it

        self._bar = tqdm(total=total, desc=stage, dynamic_ncols=True, miniters=0)

    def advance(self, done: int, measures: Mapping[str, float]) -> None:
        """Show that ``done`` steps are done, with the latest measures; end here if that was asked for."""
        if self._is_ending:
            raise KeyboardInterrupt
        self._latest.update({name: measures[name] for name in MEASURES if name in measures})
        text = "  ".join(f"{name} {value:.4g}" for name, value in self._latest.items())
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
            if done >= self._total:
                self.close()
        elif done != self._done and (done >= self._total or now - self._printed >= QUIET_SECONDS):
            self._printed, self._done = now, done
            spent = now - self._began
            left = spent / done * (self._total - done) if done else 0.0
            expected = f", about {left:.0f} s left" if left else ""
            self.say(f"{self._stage}: {done}/{self._total} in {spent:.1f} s{expected}  {text}")

    def say(self, message: str) -> None:
        """Print a line on stderr."""
        if self._bar is not None:
            self._bar.write(escape_controls(message), file=sys.stderr)
        elif not self._is_quiet:
            print_text(message, error=True)

    def say_next(self, *words: object) -> None:
        """Print the command to run next, so that it can be pasted into a shell."""
        self.say(f"next: {shlex.join(map(str, words))}")

    def close(self) -> None:
        """End the bar, so that nothing is printed over it, and the stage."""
        if signal.getsignal(signal.SIGINT) == self._end_soon:
            signal.signal(signal.SIGINT, self._usual)
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _end_soon(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._usual)
        self._is_ending = True
        self.say("ending after the items that are being encoded; Ctrl-C again ends at once")


def width_of(text: str) -> int:
    """Return how many columns of a terminal a text takes: two for wide characters, none for accents."""
    return sum(1 + (east_asian_width(one) in "WF") for one in text if not combining(one))


def shorten(text: str) -> str:
    """Return the beginning of a long text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT else f"{line[:MAX_TEXT]}…"


def print_text(text: str, *, error: bool = False) -> None:
    """Print a line on stdout or stderr."""
    print(escape_controls(text), file=sys.stderr if error else sys.stdout)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, indented; see :func:`to_json`."""
    print_text(to_json(value, indent=2))


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a JSON document that stdout can print: ASCII if it is not UTF-8. Paths become strings."""
    is_utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
    return json.dumps(value, indent=indent, ensure_ascii=not is_utf8, default=str)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[str] = (),
    fill: bool = False,
    cut: bool = True,
) -> None:
    """Print a table on stdout whose cells are never wrapped.

    Parameters
    ----------
    columns
        Headings; if all are empty, none are printed.
    left
        Headings of the columns that are aligned left; the others are aligned right.
    fill
        Align the last column left, and cut it at the end of a terminal's line, if ``cut``. In a file or a
        pipe, nothing is cut.
    """
    headed = [columns, *rows] if any(columns) else list(rows)
    lines = [list(map(escape_controls, row)) for row in headed]
    widths = [max(map(width_of, column)) for column in zip(*lines, strict=True)]
    is_left = [name in left or (fill and name == columns[-1]) for name in columns]
    room = shutil.get_terminal_size().columns - sum(widths[:-1]) - 2 * len(widths)
    for cells in lines:
        if fill and cut and sys.stdout.isatty() and width_of(cells[-1]) > room:
            while cells[-1] and width_of(cells[-1]) >= room:
                cells[-1] = cells[-1][:-1]
            cells[-1] += "…"
        padding = [
            " " * (width - width_of(cell)) for cell, width in zip(cells, widths, strict=True)
        ]
        padded = [
            a + b if first else b + a for a, b, first in zip(cells, padding, is_left, strict=True)
        ]
        print("  ".join(padded).rstrip())


def print_facts(facts: Mapping[str, Any], *, as_json: bool = False) -> None:
    """Print a line for each fact that is known, or one JSON document of all."""
    if as_json:
        print_json(facts)
    else:
        rows = [
            (name.replace("_", " "), _format(fact))
            for name, fact in facts.items()
            if fact is not None
        ]
        print_table(("", ""), rows, left=("",))


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
