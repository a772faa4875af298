"""Build the table of an invented pool in a process of its own, so that its memory is known."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from genius.bench.memory import peak_bytes, resident_bytes
from genius.bench.pools import Pool
from genius.search.merge import TableWriter


class Built(NamedTuple):
    """What building a table took."""

    seconds: float
    """Of wall time; drawing the pool is not in it."""
    cpu_seconds: float
    peak_bytes: int | None
    """The most memory beyond what an idle process has, mapped files that were read included; None where the
    system does not say."""


def build_apart(pool: Pool, folder: Path, *, memory_bytes: int) -> Built:
    """Build a pool's table in a folder, within a memory budget; open it afterwards."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(build_here, pool, folder, memory_bytes=memory_bytes).result()


def build_here(pool: Pool, folder: Path, *, memory_bytes: int) -> Built:
    """The same in this process."""
    next(pool.blocks())  # what drawing needs stays out of the count
    before = resident_bytes()
    watch = _Watch()
    with watch:
        writer = TableWriter(folder, levels=len(pool.sizes), memory_bytes=memory_bytes)
    for block in pool.blocks():
        with watch:
            writer.add(block.codes, block.typicality)
    with watch:
        writer.finish()
    peak = peak_bytes()
    grown = None if peak is None or before is None else max(0, peak - before)
    return Built(watch.seconds, watch.cpu_seconds, grown)


class _Watch:
    """Adds up what happens inside ``with``."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self._began = (0.0, 0.0)

    def __enter__(self) -> None:
        self._began = (time.perf_counter(), time.process_time())

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began[0]
        self.cpu_seconds += time.process_time() - self._began[1]
