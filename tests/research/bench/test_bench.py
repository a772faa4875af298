"""``python -m research.bench`` at the smallest sizes: its files, not its speed."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from research.bench import search
from research.bench.__main__ import main
from research.bench.costs import measure_changes


def draw(count, seed):
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((40, 64))
    return (
        centres[random.integers(0, 40, count)] + 0.5 * random.standard_normal((count, 64))
    ).astype("f4")


@pytest.mark.slow
def test_a_pool_of_texts_is_measured_by_kind_of_query_with_filters_and_changes(
    tmp_path, monkeypatch
):
    pool, out = tmp_path / "pool", tmp_path / "out"
    pool.mkdir()
    items = draw(1500, 0)
    arrays = {
        "items": items,
        "queries": items[:60] + 0.1 * draw(60, 1),
        "answers": np.arange(60)[:, None],
    }
    arrays |= {"kinds": np.repeat(["near", "far"], 30), "sources": np.repeat(["a", "b"], 750)}
    for name, array in arrays.items():
        np.save(pool / f"{name}.npy", array)
    run_in_new_process = search.run_in_new_process

    def run_in_this_process(function, *arguments):
        """Run measurements except one in this process, because starting another takes seconds."""
        if function is measure_changes:
            return run_in_new_process(function, *arguments)
        return function(*arguments)

    monkeypatch.setattr(search, "run_in_new_process", run_in_this_process)
    assert main([str(pool), "--out", str(out), "--timed", "2"]) == 0
    results = json.loads((out / "results.json").read_text())
    assert {"machine", "date", "command"} < results.keys()
    by_name = {}
    for row in results["curves"]:
        by_name.setdefault(row["method"], []).append(row)
        assert all(
            math.isfinite(value) and value >= 0
            for value in row.values()
            if isinstance(value, float)
        )
    assert {"exact", "GENIUS, codes"} < by_name.keys()
    assert {"GENIUS, 1 bit", "GENIUS, 2 bits", "GENIUS, 4 bits"} < by_name.keys()
    assert by_name["exact"][0]["of the ten, near"] == by_name["exact"][0]["of the ten, far"] == 1
    for name, rows in by_name.items():
        best = max(rows, key=lambda row: row["of the ten, near"])
        assert best["of the ten, near"] > 0.4, name
        assert best["R@5, near"] > 0.4, name
        assert best["bytes"] > 4, name
    filtered = results["filtered"]
    assert [row["allowed"] for row in filtered if row["condition"] == "source=a"] == ["50.00%"]
    assert all(row["of the ten, near"] > 0.5 for row in filtered)
    built = {row["method"] for row in results["built"]}
    assert {"GENIUS, 2 bits", "GENIUS, 4 bits and two fields"} < built
    assert results["changes"][0]["add, s"] > 0
    assert "Rivals: " in (out / "results.md").read_text()
    figures = [(out / f"recall-{name}.svg").read_text() for name in ("time", "bytes")]
    assert all("GENIUS, 4 bits" in figure for figure in figures)
