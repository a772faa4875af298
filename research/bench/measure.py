"""Times of queries, bandwidth of memory, and a description of the machine."""

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

from research.bench.data import Queries, Search

QUERIES_PER_TURN: Final = 20
"""Queries that a method answers before the next method's turn.

With turns of one query, each method would find the caches filled by the others.
"""
WARM_UP_CALLS: Final = 10
"""Calls at the start of a turn that are not measured: they load the method's tables into caches."""
READ_BYTES: Final = 2**30
"""Bytes read to measure a bandwidth; several times the share of the last cache of one core."""


def use_one_thread() -> None:
    """Compute with one thread from now on, in the whole process."""
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)


def time_queries(methods: Mapping[str, Search], queries: Queries, count: int) -> dict[str, float]:
    """Return the median CPU-milliseconds of a single query by method; methods take turns."""
    singles = [queries[number % len(queries)][None] for number in range(count)]
    times: dict[str, list[float]] = {name: [] for name in methods}
    for start in range(0, count, QUERIES_PER_TURN):
        stop = start + QUERIES_PER_TURN
        for name, search in methods.items():
            for number in range(stop, stop + WARM_UP_CALLS):
                search(singles[number % count])
            for query in singles[start:stop]:
                began = time.process_time_ns()
                search(query)
                times[name].append((time.process_time_ns() - began) / 1e6)
    return {name: float(np.median(milliseconds)) for name, milliseconds in times.items()}


def measure_bandwidth(num_bytes: float) -> float:
    """Return the best rate, in bytes per second, at which one thread reads a buffer of this size.

    The buffer is read repeatedly: a small one from the caches, and one of many times their size
    from memory.
    """
    buffer = np.ones(max(1, round(num_bytes / 4)), dtype=np.float32)
    rounds = max(5, round(READ_BYTES / buffer.nbytes))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        np.dot(buffer, buffer)
        times.append(time.perf_counter() - began)
    return buffer.nbytes / min(times)


def describe_run(arguments: Sequence[str]) -> dict[str, Any]:
    """Return machine, date and command; of paths in the command, only the last part is kept."""
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    words = ["python -m research.bench", *(Path(argument).name for argument in arguments)]
    return {"machine": describe_machine(), "date": date, "command": " ".join(words)}


def describe_machine() -> str:
    """Return processor, number of cores, memory, threads in use, and versions, in one line."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    processor = model[1] if model else platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB; "
        f"threads used: {torch.get_num_threads()}; Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {np.__version__}"
    )
