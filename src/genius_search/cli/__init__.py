"""The ``genius`` command. Flags come from the commands' fields; nothing heavy is imported for ``--help``."""

from __future__ import annotations

import difflib
import errno
import importlib
import inspect
import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, Final, Protocol, runtime_checkable

import tyro

from genius_search import __version__
from genius_search.cli.options import readers
from genius_search.errors import EXTRAS, GeniusError, MissingExtra, UsageError, missing_extra

COMMANDS: Final[dict[str, dict[str, str]]] = {
    "Search": {
        "search": "genius_search.cli.search:Search",
        "explain": "genius_search.cli.explain:Explain",
        "serve": "genius_search.cli.serve:Serve",
        "keys add": "genius_search.cli.serve:AddKey",
    },
    "Index": {
        "index create": "genius_search.cli.index:Create",
        "index add": "genius_search.cli.index:Add",
        "index sync": "genius_search.cli.index:Sync",
        "index delete": "genius_search.cli.index:Delete",
        "index refit": "genius_search.cli.index:Refit",
        "index compact": "genius_search.cli.index:Compact",
        "index verify": "genius_search.cli.index:Verify",
        "index info": "genius_search.cli.index:Info",
        "calibrate": "genius_search.cli.adapt:Calibrate",
    },
    "Cluster": {
        "cluster build": "genius_search.cli.cluster:Build",
        "cluster serve": "genius_search.cli.cluster:Serve",
        "cluster search": "genius_search.cli.cluster:Search",
        "cluster add": "genius_search.cli.cluster:Add",
        "cluster delete": "genius_search.cli.cluster:Delete",
    },
    "Model": {
        "fit": "genius_search.cli.train:Fit",
        "pull": "genius_search.cli.hub:Pull",
        "push": "genius_search.cli.hub:Push",
    },
    "Data": {
        "data check": "genius_search.cli.data:Check",
        "evaluate": "genius_search.cli.evaluate:Evaluate",
    },
}
"""Group -> command -> module and class, in the order in which help lists them."""

MACHINE_ERRORS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}
    | {errno.EEXIST, errno.ENOTDIR}
)
"""Errors that a user can fix: disk full, read-only, not permitted, a long name, a file for a folder."""
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C."""


@runtime_checkable
class Command(Protocol):
    """A command: a dataclass whose fields are its flags."""

    def __init__(self, **fields: Any) -> None: ...

    def run(self) -> int | None:
        """Run the command and return its exit status, if it is not 0."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Errors that a user can fix are one line on stderr."""
    # Threads of PyTorch that wait for others would keep cores busy that other processes need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["--version"], ["-V"]):
        print(f"genius {__version__}")
        return 0
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    name = _command_name(words)
    if name is None:
        return _print_overview(words)
    try:
        return run(name, words[len(name.split()) :])
    except ModuleNotFoundError as error:
        return _report(_missing_extra(name, error))
    except (GeniusError, OSError, KeyboardInterrupt) as error:
        return _report(error)


def all_commands() -> dict[str, str]:
    """Return every command's module and class by its name."""
    return {name: place for commands in COMMANDS.values() for name, place in commands.items()}


def find(name: str) -> type[Command]:
    """Return the class of a command."""
    module, _, kind = all_commands()[name].partition(":")
    found: type[Command] = getattr(importlib.import_module(module), kind)
    return found


def run(name: str, arguments: Sequence[str]) -> int:
    """Parse the flags of one command and run it."""
    bare = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if name in ("search", "explain") and len(bare) > len(("INDEX", "TEXT")):
        raise UsageError(f"put a query of several words in quotes: {shlex.quote(' '.join(bare[1:]))}")
    parsed: Any = tyro.cli(
        find(name),
        prog=f"genius {name}",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
        registry=readers(),
    )
    return parsed.run() or 0


def _command_name(words: Sequence[str]) -> str | None:
    names = [" ".join(words[:size]) for size in (2, 1)]
    return next((name for name in names if name in all_commands()), None)


def _print_overview(words: Sequence[str]) -> int:
    """Print the commands in groups; an unknown command is an error that names the nearest."""
    groups = COMMANDS
    is_help = not words or any(word in ("-h", "--help") for word in words)
    start = " ".join(word for word in words[:2] if not word.startswith("-"))
    if start:
        groups = {
            group: {name: place for name, place in commands.items() if name.startswith(f"{start} ")}
            for group, commands in COMMANDS.items()
        }
        groups = {group: commands for group, commands in groups.items() if commands}
        if not groups:
            is_group = any(name.startswith(f"{words[0]} ") for name in all_commands())
            start = start if is_group else words[0]
            near = [name for name in all_commands() if name.split()[-1] == start]
            near = near or difflib.get_close_matches(start, all_commands(), n=1, cutoff=0.4)
            advice = f"; did you mean {' or '.join(f'`genius {name}`' for name in near)}?" if near else ""
            print(f"genius: {start!r} is not a command{advice}; see `genius --help`", file=sys.stderr)
            return 2
    lines = ["Generative multimodal search: a model generates the ID of what matches."]
    if groups is COMMANDS:
        lines += [
            "",
            "  genius index create photos.index --pool Pictures --encoder siglip:NAME",
            '  genius search photos.index "a red kite"     search',
        ]
    for group, commands in groups.items():
        lines += ["", f"{group}:"]
        lines += [f"  genius {name:<18} {summary(name)}" for name in commands]
    lines += ["", "`genius COMMAND --help` describes a command. Most commands take --json."]
    print("\n".join(lines), file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


def summary(name: str) -> str:
    """Return the first line of a command's help."""
    return (inspect.getdoc(find(name)) or "").splitlines()[0]


def _missing_extra(name: str, error: ModuleNotFoundError) -> MissingExtra:
    """Return the error that names the extra to install; anything else missing is a bug."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        raise error
    return missing_extra(f"`genius {name}` needs {package}", EXTRAS[package])


def _report(error: GeniusError | OSError | KeyboardInterrupt) -> int:
    """Print an error as one line and return its exit status; raise a bug again."""
    match error:
        case GeniusError():
            message, status = str(error), error.exit_code
        case KeyboardInterrupt():
            message, status = "interrupted; run the same command again to continue", INTERRUPTED
        case BrokenPipeError():
            return 0
        case OSError() if error.errno in MACHINE_ERRORS:
            message, status = f"{error.strerror}{f': {error.filename}' if error.filename else ''}", 1
        case _:
            raise error
    from genius_search.cli.terminal import print_text

    print_text(f"genius: {message}", error=True)
    return status
