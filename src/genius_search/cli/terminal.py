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
"""Seconds between two lines of progress if stderr is not a terminal."""
FIRST_SECONDS: Final = 2.0
"""Seconds until the first line of progress."""
MEASURES: Final = ("loss", "validation", "purity", "collision_rate", "reconstruction")
"""Measures to show next to the progress."""
MAX_TEXT: Final = 240
"""Maximum number of characters of a text that is printed in part."""
_CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that control a terminal (except tab and newline), characters that change the direction
of text, and lone surrogates, which stand for bytes of file names that are not UTF-8."""


def escape_controls(text: str) -> str:
    """Replace control characters by JSON escapes, so that a text cannot control a terminal."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class TerminalProgress:
    """Show progress as a bar on a terminal, and as occasional lines elsewhere.

    While items are encoded, the first Ctrl-C ends the command after the current batch, so that the
    batch is saved. The second Ctrl-C ends the command immediately.
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
        self._original_handler = signal.getsignal(signal.SIGINT)
        self._is_ending = False

    def __enter__(self) -> TerminalProgress:  # noqa: PYI034  beartype cannot check Self
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, stage: str, total: int) -> None:
        """Begin a stage of ``total`` steps."""
        self.close()
        self._stage = stage
        self._total = total
        self._done = -1
        self._latest = {}
        self._began = time.monotonic()
        self._printed = self._began - QUIET_SECONDS + FIRST_SECONDS
        # A handler that the caller installed, such as one that ignores Ctrl-C, is kept.
        if stage == "encode" and self._original_handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._end_soon)
        if self._is_quiet or not sys.stderr.isatty():
            return
        from tqdm import tqdm  # imported here to keep --help fast

        self._bar = tqdm(total=total, desc=stage, dynamic_ncols=True, miniters=0)

    def advance(self, done: int, measures: Mapping[str, float]) -> None:
        """Show the number of finished steps and the latest measures.

        Raises
        ------
        KeyboardInterrupt
            The user has pressed Ctrl-C since the last call.
        """
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
            self._printed = now
            self._done = done
            elapsed = now - self._began
            remaining = elapsed / done * (self._total - done) if done else 0.0
            estimate = f", about {remaining:.0f} s left" if remaining else ""
            self.say(f"{self._stage}: {done}/{self._total} in {elapsed:.1f} s{estimate}  {text}")

    def say(self, message: str) -> None:
        """Print a line on stderr."""
        if self._bar is not None:
            self._bar.write(escape_controls(message), file=sys.stderr)
        elif not self._is_quiet:
            print_text(message, error=True)

    def say_next(self, *words: object) -> None:
        """Print the next command to run, quoted for a shell."""
        self.say(f"next: {shlex.join(map(str, words))}")

    def close(self) -> None:
        """End the stage: remove the bar, and restore the handler of Ctrl-C."""
        if signal.getsignal(signal.SIGINT) == self._end_soon:
            signal.signal(signal.SIGINT, self._original_handler)
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _end_soon(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._original_handler)
        self._is_ending = True
        self.say("stopping after the current batch of items; press Ctrl-C again to stop now")


def display_width(text: str) -> int:
    """Return the number of terminal columns of a text.

    Wide characters, such as Chinese ones, take two columns; combining accents take none.
    """
    return sum(
        1 + (east_asian_width(character) in "WF") for character in text if not combining(character)
    )


def shorten(text: str) -> str:
    """Return a text on one line, cut after :data:`MAX_TEXT` characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT else f"{line[:MAX_TEXT]}…"


def print_text(text: str, *, error: bool = False) -> None:
    """Print a line on stdout or stderr."""
    print(escape_controls(text), file=sys.stderr if error else sys.stdout)


def print_json(value: Any) -> None:
    """Print an indented JSON document on stdout; see :func:`to_json`."""
    print_text(to_json(value, indent=2))


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a JSON document that stdout can encode: ASCII unless stdout is UTF-8.

    Paths and other values that JSON lacks are converted to strings.
    """
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
        the headings. No headings are printed if all are empty.
    left
        the headings of columns to align left; other columns are aligned right.
    fill
        whether to align the last column left and let it fill the line.
    cut
        with ``fill``, whether to cut the last column at the end of a terminal's line. Nothing is
        cut in a file or a pipe.
    """
    table = [columns, *rows] if any(columns) else list(rows)
    lines = [list(map(escape_controls, row)) for row in table]
    widths = [max(map(display_width, column)) for column in zip(*lines, strict=True)]
    is_left = [name in left or (fill and name == columns[-1]) for name in columns]
    # Columns are separated by two spaces; the last one has the remaining width.
    last_width = shutil.get_terminal_size().columns - sum(widths[:-1]) - 2 * len(widths)
    for cells in lines:
        if fill and cut and sys.stdout.isatty() and display_width(cells[-1]) > last_width:
            while cells[-1] and display_width(cells[-1]) >= last_width:
                cells[-1] = cells[-1][:-1]
            cells[-1] += "…"
        padded = []
        for cell, width, aligned_left in zip(cells, widths, is_left, strict=True):
            padding = " " * (width - display_width(cell))
            padded.append(cell + padding if aligned_left else padding + cell)
        print("  ".join(padded).rstrip())


def print_facts(facts: Mapping[str, Any], *, as_json: bool = False) -> None:
    """Print a line for each fact that is not None, or all facts as a JSON document."""
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
