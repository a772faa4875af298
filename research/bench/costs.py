"""Costs of creating and changing an index, measured in a process that imports only this module.

A process that imports more would use more memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from genius_search import Index
from genius_search.search.vectors import EmbeddingBits


def measure_creation(
    items: Path, folder: Path, bits: EmbeddingBits, fields: Sequence[Mapping[str, object]] | None
) -> dict[str, float]:
    """Create an index of a ``.npy`` file; return CPU-seconds and the process's peak memory."""
    began = time.process_time()
    Index.from_vectors(folder, np.load(items, mmap_mode="r"), embedding_bits=bits, fields=fields)
    return {"CPU-s": time.process_time() - began, "peak, MB": _read_peak_megabytes()}


def measure_changes(folder: Path, new: np.ndarray) -> dict[str, float]:
    """Add items, search, delete as many items, and compact; return the seconds of each change."""
    costs: dict[str, float] = {}
    index = Index.open(folder)
    index.search_vectors(new[:1])

    def measure(name: str, call: Callable[[], object]) -> None:
        cpu_began, began = time.process_time(), time.perf_counter()
        call()
        costs[f"{name}, CPU-s"] = time.process_time() - cpu_began
        costs[f"{name}, s"] = time.perf_counter() - began

    new_ids = [f"new{row}" for row in range(len(new))]
    more_ids = [f"more{row}" for row in range(len(new))]
    old_ids = [str(row) for row in range(len(new))]
    measure("add", lambda: index.add_vectors(new, ids=new_ids))
    measure("first search", lambda: index.search_vectors(new[:1]))
    measure("add again", lambda: index.add_vectors(-new, ids=more_ids))
    measure("delete", lambda: index.delete(old_ids))
    measure("compact", index.compact)
    measure("compact all", lambda: index.compact(min_deleted=0))
    return {**costs, "peak, MB": _read_peak_megabytes()}


def _read_peak_megabytes() -> float:
    """Return this process's peak memory; ``getrusage`` returns its parent's if that is more."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024
