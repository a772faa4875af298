"""What every program of the laboratory does with its command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from genius_search.cli.terminal import print_text
from genius_search.errors import GeniusError

INTERRUPTED = 130


def limit_threads() -> None:
    """Keep libraries to one thread; they read this when they are imported."""
    for name in ("OMP", "OPENBLAS", "MKL", "RAYON"):
        os.environ[f"{name}_NUM_THREADS"] = "1"
    os.environ["TOKIO_WORKER_THREADS"] = "1"
    os.environ["LANCE_CPU_THREADS"] = "2"  # with one, building an index of LanceDB never ends


def run(kind: Any, name: str, arguments: Sequence[str] | None = None) -> int:
    """Parse the flags of a program, run it, and return its exit status; an error of the user is one line.

    Parameters
    ----------
    kind
        a dataclass whose fields are the flags, with a method ``run``.
    name
        what follows ``python -m research.``.
    """
    # Threads of PyTorch that wait for others would keep cores busy that other processes need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parsed: Any = tyro.cli(
            kind,
            prog=f"python -m research.{name}",
            args=words,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        return parsed.run() or 0
    except GeniusError as error:
        print_text(f"research.{name}: {error}", error=True)
        return error.exit_code
    except KeyboardInterrupt:
        print_text("interrupted; run the same command again to continue", error=True)
        return INTERRUPTED
