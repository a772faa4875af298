"""The ``genius`` command. Flags come from the commands' fields; nothing heavy is imported for ``--help``."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tyro

from genius_search import __version__
from genius_search.cli.terminal import print_text
from genius_search.errors import EXTRAS, GeniusError, UsageError, missing_extra

# A parser of all commands at once, which tyro offers, takes .4 CPU-seconds to print its help.
COMMANDS: Final = {
    "search": "search:Search",
    "serve": "serve:Serve",
    "mcp": "serve:Mcp",
    "index create": "index:Create",
    "index add": "index:Add",
    "index sync": "index:Sync",
    "index delete": "index:Delete",
    "index learn": "index:Learn",
    "index refit": "index:Refit",
    "index info": "index:Info",
    "calibrate": "train:Calibrate",
    "cluster build": "cluster:BuildCluster",
    "cluster serve": "cluster:ServeCluster",
    "fit": "train:Fit",
    "pull": "hub:Pull",
    "push": "hub:Push",
    "data check": "train:Check",
    "evaluate": "train:Evaluate",
}
"""Command -> module and class, in the order in which help lists them."""

MACHINE_ERRORS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}
    | {errno.EEXIST, errno.ENOTDIR}
)
"""Errors that a user can fix: disk full, read-only, not permitted, a long name, a file for a folder."""
ARGUMENT: Final = re.compile(r"`(\w+)=(?:True|'?(\w+)'?)`")
"""How messages name an argument of Python, which is a flag here: `download=True`, `device='cpu'`."""
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Errors that a user can fix are one line on stderr."""
    # Threads of PyTorch that wait for others would keep cores busy that other processes need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # None if the caller closed them
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # escape what a terminal or a file of cp1252 cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return follow(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except (GeniusError, KeyboardInterrupt, ModuleNotFoundError, OSError) as error:
        return report(error)


def follow(words: Sequence[str]) -> int:
    """Do what the words of a command line say, and return the exit status."""
    if words in (["--version"], ["-V"]):
        print(f"genius {__version__}")
    elif words in ([], ["help"], ["--help"], ["-h"]):
        print_overview()
    elif "" in words:  # a path would be this folder
        raise UsageError(
            "an argument is empty; is a variable of the shell not set? '.' is this folder"
        )
    else:
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)
        # Threads of NumPy's BLAS wait busily: longer than a search takes, and beside PyTorch's threads.
        if name in ("search", "serve", "fit"):
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        return refuse(words) if name is None else run(name, words[len(name.split()) :])
    return 0


def find(name: str) -> Any:
    """Return the class of a command, a dataclass of its flags; its ``run`` may return an exit status."""
    module, _, kind = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), kind)


def run(name: str, arguments: Sequence[str]) -> int:
    """Parse the flags of one command and run it."""
    config = (tyro.conf.FlagCreatePairsOff,)
    words = join_match(arguments)
    parsed: Any = tyro.cli(find(name), prog=f"genius {name}", args=words, config=config)
    return expand_paths(parsed).run() or 0


def expand_paths(command: Any) -> Any:
    """Return a command whose paths have the home folder for ``~``.

    A shell does that itself, but not in quotes or after ``=``.
    """
    from genius_search.border import as_path

    changes: dict[str, Any] = {}
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if isinstance(value, Path):
            changes[field.name] = as_path(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Path):
            changes[field.name] = tuple(map(as_path, value))
    return dataclasses.replace(command, **changes)


def join_match(arguments: Sequence[str]) -> list[str]:
    """Return arguments with ``--match -people`` as one: the parser takes ``-people`` for a flag."""
    joined: list[str] = []
    for word in arguments:
        if joined[-1:] == ["--match"] and re.match(r"-[^-]", word):
            joined[-1] = f"--match={word}"
        else:
            joined.append(word)
    return joined


def report(error: BaseException) -> int:
    """Print an error that a user can fix, and return its exit status; raise a bug again."""
    if (
        isinstance(error, ModuleNotFoundError)
        and (package := str(error.name).partition(".")[0]) in EXTRAS
    ):
        error = missing_extra(f"this command needs {package}", EXTRAS[package])
    match error:
        case GeniusError():
            message, status = str(error), error.exit_code
        case KeyboardInterrupt():
            message, status = "interrupted; run the same command again to continue", INTERRUPTED
        case BrokenPipeError():  # `head` has read enough; what is left is not written
            sys.stdout = io.StringIO()
            return 0
        case OSError() if error.errno in MACHINE_ERRORS:
            message, status = (
                f"{error.strerror}{f': {error.filename}' if error.filename else ''}",
                1,
            )
        case _:
            raise error
    print_text(f"genius: {ARGUMENT.sub(_name_flag, message)}", error=True)
    return status


def _name_flag(argument: re.Match[str]) -> str:
    value = "" if argument[2] is None else f" {argument[2]}"
    return f"`--{argument[1].removesuffix('_seconds')}{value}`"


def print_overview() -> None:
    """Print the commands, each with the first line of its help."""
    print("Generative multimodal search: a model generates the ID of what matches.\n")
    for name in COMMANDS:
        print(f"  genius {name:<16} {(inspect.getdoc(find(name)) or '').splitlines()[0]}")
    print("\n`genius COMMAND --help` describes a command. Most commands take --json.")


def refuse(words: Sequence[str]) -> int:
    """Say that there is no such command, and which ones are near."""
    typed = " ".join(words[:2])
    among = [name for name in COMMANDS if words[0] in name.split()]
    near = difflib.get_close_matches(typed, COMMANDS, n=1, cutoff=0.8 if among else 0.4) or among
    names = " or ".join(f"`genius {name}`" for name in near)
    advice = f"did you mean {names}?" if near else "see `genius --help`"
    print_text(f"genius: {(typed if among else words[0])!r} is not a command; {advice}", error=True)
    return 2
