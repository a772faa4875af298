"""Measure what a warm search takes in Python beyond the compiled library.

Usage: python benchmarks/python_overhead.py INDEX QUERIES.npy [--queries 2000] [--hits 10]

Each query is searched in four ways, one after the other: by the library alone, with the arguments
of its search; by ``index.search``, without a look at the hits; with ids and scores of all hits; and
with their texts, pictures and fields, too. Then all queries are searched in one batch. Prints
medians in microseconds of the process's CPU time; each row shows what comes on top of the library,
query by query.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from time import process_time_ns
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from genius_search import Hits, Index
from genius_search.index.index import current_state
from genius_search.search.kernel import CompiledSearch

WARM_QUERIES = 50
"""Queries that are searched before the measurement."""


def read_scores(hits: Hits) -> list[Any]:
    """Read ids and scores."""
    return [(hit.id, hit.score) for hit in hits]


def read_all(hits: Hits) -> list[Any]:
    """Read ids, scores, texts, pictures and fields."""
    return [(hit.id, hit.score, hit.text, hit.image, hit.fields) for hit in hits]


def capture_library(index: Index, vector: np.ndarray, k: int) -> Callable[[], Any]:
    """Return the library's part of a search as a function without arguments."""
    calls: list[Callable[[], Any]] = []
    call_library = CompiledSearch._call_library  # noqa: SLF001

    def remember(self: CompiledSearch, *arguments: Any) -> Any:
        calls.append(lambda: call_library(self, *arguments))
        return call_library(self, *arguments)

    with patch.object(CompiledSearch, "_call_library", remember):
        index.search(vector=vector, k=k)
    return calls[0]


def measure(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the microseconds of a call, and its result."""
    start = process_time_ns()
    result = call()
    return (process_time_ns() - start) / 1000, result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("index")
    parser.add_argument("vectors", help="a .npy file with a query in each row")
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--hits", type=int, default=10)
    options = parser.parse_args()
    index = Index.open(options.index)
    vectors = np.load(options.vectors)[: options.queries].astype(np.float32)
    current_state(index).snapshot.check_files()
    rows: dict[str, list[float]] = {name: [] for name in ("library", "search", "scores", "all")}
    for number, vector in enumerate([*vectors[:WARM_QUERIES], *vectors]):
        library = capture_library(index, vector, options.hits)

        def search(vector: np.ndarray = vector) -> Hits:
            return index.search(vector=vector, k=options.hits)

        library()
        times = {
            "library": measure(library)[0],
            "search": measure(search)[0],
            "scores": measure(lambda: read_scores(search()))[0],
            "all": measure(lambda: read_all(search()))[0],
        }
        for name, microseconds in times.items() if number >= WARM_QUERIES else ():
            rows[name].append(microseconds)
    batch, _ = measure(lambda: index.search_vectors(vectors, k=options.hits))
    library_time = statistics.median(rows["library"])
    print(f"{len(index):,} items, {len(vectors):,} queries, {options.hits} hits")
    print(f"library alone                {library_time:8.1f} µs")
    labels = {"search": "search", "scores": "with ids and scores", "all": "with texts and fields"}
    for name, label in labels.items():
        beyond = [time - base for time, base in zip(rows[name], rows["library"], strict=True)]
        print(f"{label:<28} {statistics.median(beyond):+8.1f} µs")
    beyond_batch = batch / len(vectors) - statistics.fmean(rows["library"])
    print(f"search_vectors, per query    {beyond_batch:+8.1f} µs")


if __name__ == "__main__":
    main()
