"""The command line of the research programs: parse flags, run, and report errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from genius_search.cli import unwrap_help
from genius_search.cli.terminal import print_text
from genius_search.errors import GeniusError

INTERRUPTED_STATUS = 130
"""Exit status after Ctrl-C."""


def limit_threads() -> None:
    """Limit libraries to one thread; call this before they are imported."""
    for name in ("OMP", "OPENBLAS", "MKL", "RAYON"):
        os.environ[f"{name}_NUM_THREADS"] = "1"
    os.environ["TOKIO_WORKER_THREADS"] = "1"
    os.environ["LANCE_CPU_THREADS"] = "2"  # with one, building an index of LanceDB never ends


def run(command_class: Any, name: str, arguments: Sequence[str] | None = None) -> int:
    """Parse the flags of a program, run it, and return its exit status.

    An error that a user can fix is printed in one line.

    Parameters
    ----------
    command_class
        a dataclass whose fields are the flags, with a method ``run``.
    name
        the program's module, without ``research.``.
    arguments
        the command line; default: ``sys.argv[1:]``.
    """
    # PyTorch's waiting threads would otherwise keep cores busy that other processes need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "-h" in words or "--help" in words:
        unwrap_help(command_class)
    try:
        program: Any = tyro.cli(
            command_class,
            prog=f"python -m research.{name}",
            args=words,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        return program.run() or 0
    except GeniusError as error:
        print_text(f"research.{name}: {error}", error=True)
        return error.exit_code
    except KeyboardInterrupt:
        print_text("interrupted; run the same command again to continue", error=True)
        return INTERRUPTED_STATUS
