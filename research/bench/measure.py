"""Time and memory, and the machine that they were measured on: what it is, never whose."""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import faiss
import numpy as np
import torch

from research.bench.given import Queries, Search

TURN: Final = 20
"""Queries that a method answers before it is another's turn; one at a time, each would find the caches full
of what the others left."""
WARM: Final = 10
"""Calls at the start of a turn that do not count: in use, a method finds its own tables in the caches."""


READ_BYTES: Final = 2**30
"""Read to measure a bandwidth; several times what the last cache holds for one core."""


def use_one_thread() -> None:
    """Compute with one thread from now on, in the whole process."""
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)


def time_queries(methods: Mapping[str, Search], queries: Queries, number: int) -> dict[str, float]:
    """Return the median CPU-milliseconds of a query alone, in turns of :data:`TURN`."""
    asked = [queries[place % len(queries)][None] for place in range(number)]
    times: dict[str, list[float]] = {name: [] for name in methods}
    for start in range(0, number, TURN):
        for name, search in methods.items():
            for query in range(start + TURN, start + TURN + WARM):
                search(asked[query % number])
            for query in asked[start : start + TURN]:
                began = time.process_time_ns()
                search(query)
                times[name].append((time.process_time_ns() - began) / 1e6)
    return {name: float(np.median(found)) for name, found in times.items()}


def read_bandwidth(num_bytes: float) -> float:
    """Return how many bytes a second one thread reads from so much memory, at best.

    The buffer is read over and over: a small one is read from the caches, one of many times
    their size from memory.
    """
    buffer = np.ones(max(1, round(num_bytes / 4)), dtype=np.float32)
    rounds = max(5, round(READ_BYTES / buffer.nbytes))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        np.dot(buffer, buffer)
        times.append(time.perf_counter() - began)
    return buffer.nbytes / min(times)


def about(words: Sequence[str]) -> dict[str, Any]:
    """Return the facts beside every number: machine, date, and the command, of paths the last name."""
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    command = " ".join(["python -m research.bench", *(Path(word).name for word in words)])
    return {"machine": describe_machine(), "date": date, "command": command}


def describe_machine() -> str:
    """Return the machine in one line: processor, cores and memory, threads used, versions."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    processor = named[1] if named else platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB; "
        f"threads used: {torch.get_num_threads()}; Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {np.__version__}"
    )
