"""Write ``docs/cli.md``: ``python -m genius_search.cli.document`` prints the page.

The page has the help of every command and a table of the presets, the same on every terminal; a test compares
it with the file.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final, get_args

from genius_search.cli import all_commands, run, summary
from genius_search.presets import PresetName, preset

WIDTH: Final = 80
"""Columns of the captured help."""

INTRODUCTION: Final = """\
# Commands

Written by `make docs` from the commands themselves; a test fails when it is stale. Below is what
`genius COMMAND --help-all` prints.

Results go to stdout, progress and messages to stderr, so `genius ... --json > file` leaves only JSON in the
file. Exit status: 0 success, 1 a check found a problem or training failed, 2 wrong usage, 3 a search found
nothing, 4 a model, index or other folder is missing or does not fit, 5 the network is needed, 6 the data
cannot be used, 130 interrupted.

"""

PRESETS: Final = """\
## Presets

`--preset` chooses the settings to start from; every other flag changes one of them. These are the settings
in which the presets differ; the others are listed with their flags under `genius fit` below. `tiny` is for
tests, `small` for laptops; `paper` follows the paper's text, `reference` the authors' released code. Why they
differ is in [the notes on deviations](lab/deviations.md).

"""


def page() -> str:
    """Return the document."""
    contents = "".join(
        f"- [`genius {name}`](#genius-{name.replace(' ', '-')}): {summary(name)}\n" for name in all_commands()
    )
    sections = "\n".join(f"## genius {name}\n\n```text\n{help_of(name)}\n```\n" for name in all_commands())
    return f"{INTRODUCTION}{contents}\n{PRESETS}{_preset_table()}\n{sections}"


def help_of(name: str) -> str:
    """Return what ``genius NAME --help-all`` prints on a plain terminal of :data:`WIDTH` columns."""
    printed = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            run(name, ["--help-all"])
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return "\n".join(_wrap(printed.getvalue())).strip("\n")


def _wrap(text: str) -> Iterator[str]:
    """Yield lines without trailing blanks; wrap running text, which tyro does not."""
    for line in text.splitlines():
        bare = line.rstrip()
        if len(bare) <= WIDTH:
            yield bare
        else:
            hanging = "    " if bare.startswith("usage:") else ""
            yield from textwrap.wrap(bare, WIDTH, subsequent_indent=hanging, break_on_hyphens=False)


def _preset_table() -> str:
    names: tuple[str, ...] = get_args(PresetName)
    columns = {name: dict(_flat(asdict(preset(name)))) for name in names}
    rows = [f"| flag | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for field in columns[names[0]]:
        values = [columns[name][field] for name in names]
        if len(set(values)) > 1:
            flag = field.replace("_", "-")
            rows.append(f"| `--{flag}` | {' | '.join(str(value) for value in values)} |")
    return "\n".join(rows) + "\n"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings with dotted names, such as ``quantizer.levels``."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


if __name__ == "__main__":
    sys.stdout.write(page())
