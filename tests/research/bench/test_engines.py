"""turbovec, scalable-vs, zvec and LanceDB on a tiny pool, where they are installed."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.errors import UsageError
from genius_search.progress import Silent
from research.bench import search
from research.bench.data import exact_search
from research.bench.engines import ENGINES, engine_builders
from research.bench.rivals import is_installed
from research.command import limit_threads

ITEMS, DIM = 1500, 64
LEAST_BYTES = {"2 bits": DIM / 4, "4 bits": DIM / 2, "4 + 8 bits": DIM * 1.5, "8 bits": DIM}
"""An item's codes take at least these bytes."""


def draw(count, seed):
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((40, DIM))
    vectors = centres[random.integers(0, 40, count)] + random.standard_normal((count, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype("f4")


@pytest.mark.parametrize("module", ENGINES)
def test_an_engine_finds_the_nearest_and_is_read_back_from_its_folder(module, tmp_path):
    if not is_installed(module):
        pytest.skip(f"{module} is not installed")
    limit_threads()
    if reason := search.find_obstacle(module):
        pytest.skip(reason)
    items, queries = draw(ITEMS, 0), draw(40, 1)
    truth = exact_search(items, queries)
    for build in dict(engine_builders(items, tmp_path))[module]:
        engine = build()
        rows = engine.search(256)(queries)
        assert rows.dtype == np.int64, engine.name
        assert rows.shape == truth.shape, engine.name
        shared = [len({*row} & {*true}) for row, true in zip(rows, truth, strict=True)]
        assert np.mean(shared) > 6, engine.name
        bits = engine.name.rpartition(", ")[2]
        assert LEAST_BYTES[bits] <= engine.item_bytes < 4 * DIM + 300, engine.name
        assert engine.build_seconds > 0
        again = build()
        assert again.item_bytes == engine.item_bytes
        assert np.array_equal(again.search(256)(queries), rows), engine.name


def test_an_engine_that_cannot_run_here_says_why(monkeypatch):
    monkeypatch.setattr(search, "try_engine", exec)  # a module's name is now what is run
    assert "it ended its process" in search.find_obstacle("import os; os.abort()")
    assert search.find_obstacle("raise ValueError('too narrow')") == "ValueError: too narrow"


def test_rivals_that_cannot_be_built_are_left_out_with_the_reason(tmp_path, monkeypatch):
    def reject_vectors():
        raise UsageError("faiss cannot be built of 3 vectors")

    items = draw(3, 0)
    monkeypatch.setattr(search, "find_obstacle", lambda module: f"{module} needs AVX-512")
    monkeypatch.setattr(search, "engine_builders", lambda *_: [("svs", [reject_vectors])])
    monkeypatch.setattr(search, "rival_builders", lambda *_: [("faiss", reject_vectors)])
    built = []
    assert list(search.build_rivals(items, tmp_path, built, (), progress=Silent())) == []
    assert built == [
        {"method": "scalable-vs", "left out": "svs needs AVX-512"},
        {"method": "faiss-cpu", "left out": "faiss cannot be built of 3 vectors"},
    ]
    built.clear()
    assert list(search.build_rivals(items, tmp_path, built, ("zvec",), progress=Silent())) == []
    assert built == []


def test_the_physical_limit_is_the_bytes_at_the_measured_bandwidth(monkeypatch):
    monkeypatch.setattr(search, "measure_bandwidth", lambda size: 1e10 if size > 1e9 else 4e10)
    methods = [
        search.Method(search.EXACT, "", lambda queries: queries, 1024.0),
        search.Method("GENIUS, 2 bits", "100 candidates", lambda queries: queries, 94.0),
        search.Method("zvec IVF, 4 bits", "8 lists", lambda queries: queries, 150.0),
    ]
    exact, ours = search.measure_limits(1_000_000, methods)
    assert exact["us, from memory"] == pytest.approx(102_400)
    assert ours["MB"] == pytest.approx(94)
    assert ours["us, from memory"] == pytest.approx(9_400)
    assert ours["us, read again and again"] == pytest.approx(2_350)
