"""How long something takes: CPU time of one thread, and what one query waits.

CPU time counts every thread of the process, so a library that does not keep to one is not flattered, and
other work on the machine hardly counts. Variants take turns in one process: what slows the machine down for
a while slows all of them, so ratios are better than the figures they are made of.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
import torch

from genius.baselines.dense import use_threads
from genius.errors import UsageError

TURN: Final = 20
"""Queries that a variant answers before it is another's turn: one at a time, each would find the caches
full of what the others left."""


class Timed(NamedTuple):
    """What a variant took."""

    cpu_ms: float
    """CPU-milliseconds, the median of the rounds."""
    wall_ms: float
    """Milliseconds, the median of the rounds."""
    rounds_cpu_ms: tuple[float, ...]


class Latency(NamedTuple):
    """What single queries took."""

    cpu_ms: float
    """CPU-milliseconds of a query, the median."""
    mean_cpu_ms: float
    p50_ms: float
    """Half of the queries had their answer after so many milliseconds of wall time."""
    p99_ms: float
    """99 of 100 had; with fewer than 100 queries nearly the slowest."""
    queries: int


def one_thread() -> None:
    """Compute with one thread from now on, in the whole process."""
    torch.set_num_threads(1)
    if importlib.util.find_spec("faiss") is not None:
        use_threads(1)


def interleaved(
    variants: Mapping[str, Callable[[], object]], *, rounds: int, per: int = 1
) -> dict[str, Timed]:
    """Time variants in turns, after one turn each that does not count.

    Parameters
    ----------
    per
        what a call's time is divided by: queries in a batch.
    """
    _check(rounds, "rounds")
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    wall: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, call in variants.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            call()
            if turn:
                cpu[name].append(1000 * (time.process_time() - began_cpu) / per)
                wall[name].append(1000 * (time.perf_counter() - began) / per)
    return {
        name: Timed(float(np.median(cpu[name])), float(np.median(wall[name])), tuple(cpu[name]))
        for name in variants
    }


def latencies(variants: Mapping[str, Callable[[int], object]], num_queries: int) -> dict[str, Latency]:
    """Time each query by itself, in turns of :data:`TURN`; each turn's first call does not count."""
    _check(num_queries, "queries")
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    wall: dict[str, list[float]] = {name: [] for name in variants}
    for start in range(0, num_queries, TURN):
        for name, answer in variants.items():
            answer(start)
            for query in range(start, min(start + TURN, num_queries)):
                began, began_cpu = time.perf_counter_ns(), time.process_time_ns()
                answer(query)
                cpu[name].append((time.process_time_ns() - began_cpu) / 1e6)
                wall[name].append((time.perf_counter_ns() - began) / 1e6)
    return {name: _latency(cpu[name], wall[name]) for name in variants}


def _latency(cpu: list[float], wall: list[float]) -> Latency:
    median, slowest = np.percentile(wall, (50, 99))
    return Latency(float(np.median(cpu)), float(np.mean(cpu)), float(median), float(slowest), len(cpu))


def _check(count: int, what: str) -> None:
    if count < 1:
        raise UsageError(f"{what} is {count}; nothing can be measured without one")
