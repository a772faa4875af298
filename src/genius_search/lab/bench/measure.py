"""Time and memory, and the machine that they were measured on: what it is, never whose."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch

from genius_search.errors import UsageError

TURN: Final = 20
"""Queries that a method answers before it is another's turn; one at a time, each would find the caches full
of what the others left."""
PACKAGES: Final = ("torch", "numpy", "faiss-cpu", "transformers")


class Timed(NamedTuple):
    """The time that a method took."""

    cpu_ms: float
    """CPU-milliseconds, the median of the rounds."""
    wall_ms: float
    """Milliseconds, the median of the rounds."""
    rounds_cpu_ms: tuple[float, ...]


class Latency(NamedTuple):
    """The time that single queries took."""

    cpu_ms: float
    """CPU-milliseconds of a query, the median."""
    p50_ms: float
    """Half of the queries were answered within so many milliseconds of wall time."""
    p99_ms: float
    """99 of 100 were; with fewer than 100 queries nearly the slowest."""
    queries: int


def use_one_thread() -> None:
    """Compute with one thread from now on, in the whole process."""
    torch.set_num_threads(1)
    if importlib.util.find_spec("faiss") is not None:
        import faiss  # noqa: PLC0415  not in every installation

        faiss.omp_set_num_threads(1)


def time_rounds(
    methods: Mapping[str, Callable[[], object]], *, rounds: int, per: int = 1
) -> dict[str, Timed]:
    """Time methods in turns, after one turn each that does not count.

    Parameters
    ----------
    per
        What a call's time is divided by: queries in a batch.
    """
    _check_positive(rounds, "rounds")
    cpu: dict[str, list[float]] = {name: [] for name in methods}
    wall: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(rounds + 1):
        for name, call in methods.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            call()
            if turn:
                cpu[name].append(1000 * (time.process_time() - began_cpu) / per)
                wall[name].append(1000 * (time.perf_counter() - began) / per)
    return {
        name: Timed(float(np.median(cpu[name])), float(np.median(wall[name])), tuple(cpu[name]))
        for name in methods
    }


def time_queries(methods: Mapping[str, Callable[[int], object]], num_queries: int) -> dict[str, Latency]:
    """Time each query by itself, in turns of :data:`TURN`; each turn's first call does not count."""
    _check_positive(num_queries, "queries")
    cpu: dict[str, list[float]] = {name: [] for name in methods}
    wall: dict[str, list[float]] = {name: [] for name in methods}
    for start in range(0, num_queries, TURN):
        for name, answer in methods.items():
            answer(start)
            for query in range(start, min(start + TURN, num_queries)):
                began, began_cpu = time.perf_counter_ns(), time.process_time_ns()
                answer(query)
                cpu[name].append((time.process_time_ns() - began_cpu) / 1e6)
                wall[name].append((time.perf_counter_ns() - began) / 1e6)
    found = {}
    for name in methods:
        median, slowest = np.percentile(wall[name], (50, 99))
        found[name] = Latency(float(np.median(cpu[name])), float(median), float(slowest), num_queries)
    return found


def _check_positive(count: int, what: str) -> None:
    if count < 1:
        raise UsageError(f"{what} is {count}; nothing can be measured without one")


def total_bytes() -> int | None:
    """Return the memory of the machine; None where the system does not say, as below."""
    return _read_size("/proc/meminfo", "MemTotal")


def available_bytes() -> int | None:
    """Return the memory that can be taken without swapping."""
    return _read_size("/proc/meminfo", "MemAvailable")


def peak_bytes() -> int | None:
    """Return the most memory this process ever had, mapped files that it read included."""
    return _read_size("/proc/self/status", "VmHWM")


def resident_bytes() -> int | None:
    """Return the memory this process has now."""
    return _read_size("/proc/self/status", "VmRSS")


def _read_size(file: str, name: str) -> int | None:
    value = _read_field(file, name)
    return None if value is None else 1024 * int(value.split()[0])


def _read_field(file: str, name: str) -> str | None:
    """Return a field of one of Linux's files of ``name: value``."""
    if Path(file).exists():
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            found, _, value = line.partition(":")
            if found.strip() == name:
                return value.strip()
    return None


@dataclass(frozen=True, kw_only=True)
class About:
    """What stands beside every number."""

    machine: str
    """Model of the processor, cores and memory, threads used, versions."""
    date: str
    command: str
    """The command that measured it; of folders only the last name."""
    seed: int


def about(command: str, *, seed: int) -> About:
    """Return what is measured now, on this machine."""
    return About(
        machine=describe_machine(),
        date=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        command=command,
        seed=seed,
    )


def describe_machine() -> str:
    """Return the machine in one line."""
    memory = total_bytes()
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    processor = _read_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    return (
        f"{processor}, {os.cpu_count()} cores{f', {memory / 2**30:.0f} GiB' if memory else ''}; "
        f"threads used: {torch.get_num_threads()}; Python {platform.python_version()}, {', '.join(versions)}"
    )
