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
    new = search.run_in_new_process  # three more processes would show nothing new
    monkeypatch.setattr(
        search,
        "run_in_new_process",
        lambda call, *given: new(call, *given) if call is measure_changes else call(*given),
    )
    assert main([str(pool), "--out", str(out), "--timed", "2"]) == 0
    found = json.loads((out / "results.json").read_text())
    assert {"machine", "date", "command"} < found.keys()
    by_name = {}
    for row in found["curves"]:
        by_name.setdefault(row["method"], []).append(row)
        assert all(
            math.isfinite(value) and value >= 0
            for value in row.values()
            if isinstance(value, float)
        )
    assert {
        "exact",
        "GENIUS, codes",
        "GENIUS, 1 bit",
        "GENIUS, 2 bits",
        "GENIUS, 4 bits",
    } < by_name.keys()
    assert by_name["exact"][0]["of the ten, near"] == by_name["exact"][0]["of the ten, far"] == 1
    for name, rows in by_name.items():
        most = max(rows, key=lambda row: row["of the ten, near"])
        assert most["of the ten, near"] > 0.4, name
        assert most["R@5, near"] > 0.4, name
        assert most["bytes"] > 4, name
    assert [row["allowed"] for row in found["filtered"] if row["condition"] == "source=a"] == [
        "50.00%"
    ]
    assert all(row["of the ten, near"] > 0.5 for row in found["filtered"])
    assert {row["method"] for row in found["built"]} > {
        "GENIUS, 2 bits",
        "GENIUS, 4 bits and two fields",
    }
    assert found["changes"][0]["add, s"] > 0
    assert "Rivals: " in (out / "results.md").read_text()
    drawn = [(out / f"recall-{name}.svg").read_text() for name in ("time", "bytes")]
    assert all("GENIUS, 4 bits" in text for text in drawn)
