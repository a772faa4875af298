"""The ``genius`` command.

Each command is a dataclass whose fields are its flags. Modules that are slow to import are imported
when a command runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import contextlib
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
from typing import Any, Final, get_type_hints

import tyro

from genius_search import __version__
from genius_search.cli.terminal import print_text
from genius_search.errors import EXTRAS, GeniusError, UsageError, missing_extra

# One tyro parser with all commands as subcommands would take .4 CPU-seconds to print its help.
COMMANDS: Final = {
    "search": "search:Search",
    "serve": "serve:Serve",
    "mcp": "serve:Mcp",
    "index create": "index:Create",
    "index add": "index:Add",
    "index sync": "index:Sync",
    "index update": "items:Update",
    "index delete": "index:Delete",
    "index count": "items:Count",
    "index scroll": "items:Scroll",
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
"""Command -> ``module:Class`` in this package, in the order of the help."""

GROUPS: Final = frozenset(name.split()[0] for name in COMMANDS if " " in name)
"""First words of commands with two words: ``index``, ``cluster``, ``data``."""
MACHINE_ERRORS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}
    | {errno.EEXIST, errno.ENOTDIR}
)
"""Operating system errors that a user can fix: the disk is full or read-only, a permission is
missing, a name is too long, or there is a file instead of a folder."""
PYTHON_ARGUMENT: Final = re.compile(r"`(\w+)=(?:True|'?(\w+)'?)`")
"""A Python argument in an error message, such as `download=True` or `device='cpu'`."""
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    An error that a user can fix is printed as one line on stderr.
    """
    # By default, idle threads of PyTorch spin, and occupy cores that other processes need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The streams are None if the calling process closed them.
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    # Escape characters that the encoding of a terminal or a file, such as cp1252, lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return run_command_line(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except (GeniusError, KeyboardInterrupt, ModuleNotFoundError, OSError) as error:
        return report_error(error)


def run_command_line(words: Sequence[str]) -> int:
    """Run the command that a list of arguments names, and return its exit status."""
    if words in (["--version"], ["-V"]):
        print(f"genius {__version__}")
    elif words in ([], ["help"], ["--help"], ["-h"]):
        print_overview()
    elif len(words) == 2 and words[0] in GROUPS and words[1] in ("--help", "-h"):
        print_overview(words[0])
    elif "" in words:  # as a path, it would mean the current folder
        raise UsageError(
            "an argument is empty; is a shell variable not set? '.' means the current folder"
        )
    else:
        # Commands have one or two words: "search", "index create".
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)
        if name is None:
            return report_unknown_command(words)
        # Idle threads of NumPy's BLAS spin for longer than a search takes, and compete with the
        # threads of PyTorch.
        if name in ("search", "serve", "mcp", "fit"):
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        return run_command(name, words[len(name.split()) :])
    return 0


def command_class(name: str) -> Any:
    """Import and return the class of a command.

    The class is a dataclass of flags, with a method ``run`` that may return an exit status.
    """
    module, _, class_name = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), class_name)


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Parse the flags of one command and run it."""
    flags = command_class(name)
    if "-h" in arguments or "--help" in arguments:
        unwrap_help(flags)
    parsed: Any = tyro.cli(
        flags,
        prog=f"genius {name}",
        args=join_match_values(arguments),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return expand_paths(parsed).run() or 0


def unwrap_help(flags: type) -> None:
    """Join the lines of each flag's description; tyro would keep line breaks of the source.

    Fields that are dataclasses are groups of flags.
    """
    with contextlib.suppress(ImportError):  # a private module of tyro; its cache is edited in place
        from tyro._docstrings import parse_docstring_from_object

        for base in flags.__mro__[:-1]:
            descriptions = parse_docstring_from_object(base)
            descriptions.update(
                {name: " ".join(text.split()) for name, text in descriptions.items()}
            )
        for field_type in get_type_hints(flags).values():
            if isinstance(field_type, type) and dataclasses.is_dataclass(field_type):
                unwrap_help(field_type)


def expand_paths(command: Any) -> Any:
    """Return a command in whose paths ``~`` is replaced by the home folder.

    A shell expands ``~`` itself, but not inside quotes or after ``=``.
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


def join_match_values(arguments: Sequence[str]) -> list[str]:
    """Join ``--match -people`` to ``--match=-people``.

    Otherwise, the parser would take ``-people`` for a flag.
    """
    joined: list[str] = []
    for word in arguments:
        if joined[-1:] == ["--match"] and re.match(r"-[^-]", word):
            joined[-1] = f"--match={word}"
        else:
            joined.append(word)
    return joined


def report_error(error: BaseException) -> int:
    """Print an error that a user can fix, and return its exit status; raise any other error."""
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
        case BrokenPipeError():  # the reader, such as `head`, has closed the pipe
            sys.stdout = io.StringIO()
            return 0
        case OSError() if error.errno in MACHINE_ERRORS:
            message = f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
            status = 1
        case _:
            raise error
    print_text(f"genius: {PYTHON_ARGUMENT.sub(_argument_to_flag, message)}", error=True)
    return status


def _argument_to_flag(argument: re.Match[str]) -> str:
    # `download=True` -> `--download`, `device='cpu'` -> `--device cpu`
    value = "" if argument[2] is None else f" {argument[2]}"
    return f"`--{argument[1].removesuffix('_seconds')}{value}`"


def print_overview(group: str | None = None) -> None:
    """Print all commands, or those of a group, each with the first line of its help."""
    print("Search images, texts and pairs of both with a text, an image, or both.\n")
    names = [name for name in COMMANDS if group in (None, name.split()[0])]
    for name in names:
        summary = (inspect.getdoc(command_class(name)) or "").splitlines()[0]
        print(f"  genius {name:<16} {summary}")
    print("\nRun `genius COMMAND --help` for the options of a command. Most commands take --json.")


def report_unknown_command(words: Sequence[str]) -> int:
    """Print that a command does not exist, suggest similar ones, and return the exit status."""
    typed = " ".join(words[:2])
    related = [name for name in COMMANDS if words[0] in name.split()]
    similar = difflib.get_close_matches(typed, COMMANDS, n=1, cutoff=0.8 if related else 0.4)
    names = " or ".join(f"`genius {name}`" for name in similar or related)
    advice = f"did you mean {names}?" if names else "see `genius --help`"
    unknown = typed if related else words[0]
    print_text(f"genius: {unknown!r} is not a command; {advice}", error=True)
    return 2
