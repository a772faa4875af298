"""A tiny stand-in for M-BEIR, trained on and evaluated as the real one would be."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from genius.data.mbeir import PAPER_ROWS, MBeir, read_queries

QUICK = (
    "--preset=tiny",
    "--encoder.training.epochs=6",
    "--quantizer.training.epochs=6",
    "--generator.training.epochs=12",
)
METHODS = ("exact-fused", "generative", "generative+embeddings")
K = 10


_RUN = """
import contextlib, json, sys
from genius.cli import main

*first, last = json.loads(sys.argv[1])
with contextlib.redirect_stdout(sys.stderr):
    for words in first:
        assert main(words) == 0, words
raise SystemExit(main(last))
"""


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The data set, and its results by pool, method and row; in a process of its own, unchecked types."""
    folder = tmp_path_factory.mktemp("rehearsal")
    data, model = str(folder / "mbeir"), str(folder / "model")
    commands = [
        ["data", "rehearsal", "--share=0.0002", "--out", data],
        ["fit", data, "--encoder=small", "--out", model, *QUICK],
        ["evaluate", data, "--model", model, "--methods", ",".join(METHODS), "--json"],
    ]
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", _RUN, json.dumps(commands)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    results = {(row["pool"], row["method"], row["name"]): row for row in found["rows"]}
    return MBeir(folder / "mbeir"), results


def chance(data: MBeir, name: str, pool_size: int) -> float:
    """The share of queries that have a right answer among K picked blindly."""
    (row,) = [row for row in data.rows("test") if row.name == name]
    misses = [(1 - len(query.positives) / pool_size) ** K for query in read_queries(row.queries)]
    return 1 - sum(misses) / len(misses)


def test_every_row_is_there_in_both_pools_in_the_order_of_the_papers(rehearsed):
    _, results = rehearsed
    for pool in ("local", "global"):
        for method in METHODS:
            names = [name for where, how, name in results if (where, how) == (pool, method)]
            assert tuple(names) == PAPER_ROWS
    local = {row["pool_size"] for row in results.values() if row["pool"] == "local"}
    whole = {row["pool_size"] for row in results.values() if row["pool"] == "global"}
    assert len(whole) == 1
    assert max(local) < min(whole)


def test_every_row_is_found_well_above_chance_in_the_union_of_all_pools(rehearsed):
    data, results = rehearsed
    for name in PAPER_ROWS:
        for method in ("exact-fused", "generative+embeddings"):
            row = results["global", method, name]
            assert row[f"R@{K}"] > 4 * chance(data, name, row["pool_size"]), (method, name)


def test_generated_ids_find_something_in_nearly_every_row(rehearsed):
    data, results = rehearsed
    rows = [results["global", "generative", name] for name in PAPER_ROWS]
    above = [row[f"R@{K}"] > 2 * chance(data, row["name"], row["pool_size"]) for row in rows]
    assert sum(above) >= 13
