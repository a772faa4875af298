"""Write ``docs/cli.md``: ``python -m genius_search.cli.document`` prints the page.

It holds the help of every command and a table of the presets, the same on every terminal; a test compares it
with the file.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

from genius_search.cli import all_commands, find, run
from genius_search.config import PresetName, preset, to_json

WIDTH: Final = 80
"""Columns of the captured help, whatever the terminal has."""

INTRODUCTION: Final = """\
# Commands

Written by `make docs` from the commands themselves; a test fails when it is stale. What stands below is what
`genius COMMAND --help` prints.

Results go to stdout, progress and messages to stderr, so `genius ... --json > file` leaves only JSON in the
file. Exit status: 0 done, 1 an examination found something wrong or training failed, 2 wrong use, 3 a
search found nothing, 4 a model, index or other folder is missing or does not fit, 5 the network would be
needed, 6 the data cannot be used as it is, 130 interrupted.

"""

PRESETS: Final = """\
## Presets

`--preset` chooses where the settings begin; every flag beside it changes one of them. These are the settings
in which the presets differ; the others stand with their flags under `genius fit` below. `tiny` is for tests,
`small` for laptops; `paper` follows the paper's text, `reference` the authors' released code. Why they differ
is in [deviations.md](deviations.md).

"""


def page() -> str:
    """The whole document."""
    contents = "".join(
        f"- [`genius {name}`](#{_anchor(name)}): {_summary(name)}\n" for name in all_commands()
    )
    sections = "\n".join(f"## genius {name}\n\n```text\n{help_of(name)}\n```\n" for name in all_commands())
    return f"{INTRODUCTION}{contents}\n{PRESETS}{_preset_table()}\n{sections}"


def help_of(name: str) -> str:
    """What ``genius NAME --help`` prints on a plain terminal of :data:`WIDTH` columns."""
    printed = io.StringIO()
    with _columns(WIDTH), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        run(name, ["--help-all"])
    return "\n".join(_lines(printed.getvalue())).strip("\n")


def _lines(text: str) -> Iterator[str]:
    """Lines without blanks at their end; running text, which tyro leaves as long as it is, is wrapped."""
    for line in text.splitlines():
        bare = line.rstrip()
        if len(bare) <= WIDTH:
            yield bare
        else:
            hanging = "    " if bare.startswith("usage:") else ""
            yield from textwrap.wrap(bare, WIDTH, subsequent_indent=hanging, break_on_hyphens=False)


def _preset_table() -> str:
    names: tuple[str, ...] = get_args(PresetName)
    columns = {name: dict(_flat(to_json(preset(name)))) for name in names}
    rows = [f"| flag | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for field in columns[names[0]]:
        values = [columns[name][field] for name in names]
        if len(set(values)) > 1:
            flag = field.replace("_", "-")
            rows.append(f"| `--{flag}` | {' | '.join(str(value) for value in values)} |")
    return "\n".join(rows) + "\n"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``quantizer.levels`` -> 8, and so on."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _summary(name: str) -> str:
    return (inspect.getdoc(find(name)) or "").splitlines()[0]


def _anchor(name: str) -> str:
    return f"genius-{name.replace(' ', '-')}"


@contextlib.contextmanager
def _columns(width: int) -> Iterator[None]:
    """Let a terminal of so many columns be found, as long as it lasts."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


if __name__ == "__main__":
    sys.stdout.write(page())
