"""What it costs to create and to change an index; only this is imported where its memory is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from genius_search import Index
from genius_search.search.vectors import EmbeddingBits


def cost_of_creating(
    items: Path, folder: Path, bits: EmbeddingBits, fields: Sequence[Mapping[str, object]] | None
) -> dict[str, float]:
    """Create an index of a ``.npy`` file; return CPU-seconds and the process's largest memory."""
    began = time.process_time()
    Index.from_vectors(folder, np.load(items, mmap_mode="r"), embedding_bits=bits, fields=fields)
    return {"CPU-s": time.process_time() - began, "peak, MB": _peak_megabytes()}


def cost_of_changes(folder: Path, new: np.ndarray) -> dict[str, float]:
    """Add items to an index, search, delete as many, compact a little and all; return the seconds of each."""
    spent: dict[str, float] = {}
    index = Index.open(folder)
    index.search_vectors(new[:1])

    def spend(name: str, call: Callable[[], object]) -> None:
        began, wall = time.process_time(), time.perf_counter()
        call()
        spent[f"{name}, CPU-s"] = time.process_time() - began
        spent[f"{name}, s"] = time.perf_counter() - wall

    spend("add", lambda: index.add_vectors(new, ids=[f"new{row}" for row in range(len(new))]))
    spend("first search", lambda: index.search_vectors(new[:1]))
    spend(
        "add again", lambda: index.add_vectors(-new, ids=[f"more{row}" for row in range(len(new))])
    )
    spend("delete", lambda: index.delete([str(row) for row in range(len(new))]))
    spend("compact", index.compact)
    spend("compact all", lambda: index.compact(min_deleted=0))
    return {**spent, "peak, MB": _peak_megabytes()}


def _peak_megabytes() -> float:
    """Return this process's largest memory; ``getrusage`` returns that of its parent if that is more."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024
