"""``python -m research.bench`` at the smallest sizes: what is left behind, not how fast it was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from research.bench.__main__ import main

pytestmark = pytest.mark.usefixtures("one_thread")


def measured(capsys, out: Path, *words: str | Path) -> dict[str, Any]:
    """What a benchmark says, which is what it wrote."""
    assert main([*map(str, words), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((out / "results.json").read_text())
    assert (out / "results.md").read_text().startswith("# ")
    for name, rows in found.items():
        for row in rows if name != "title" else ():
            assert {"machine", "date", "command", "seed"} <= set(row)
            numbers = [value for value in row.values() if isinstance(value, float)]
            assert all(math.isfinite(value) and value >= 0 for value in numbers)
    return found


def test_a_quick_run_measures_every_part_of_search(tmp_path, capsys):
    random = np.random.default_rng(0)
    centres = random.standard_normal((40, 32))
    np.save(
        tmp_path / "vectors.npy", centres[random.integers(0, 40, 700)] + random.standard_normal((700, 32))
    )
    found = measured(capsys, tmp_path / "out", tmp_path / "vectors.npy", "--quick")
    assert set(found) == {"title", "plain", "filtered"}
    pools = {(row["items"], row["invented"]) for row in found["plain"]}
    assert pools == {(630, 0), (4000, 3370)}
    for row in found["plain"]:
        shares = [row["of_exact_5"], row["of_exact_10"]]
        assert 0 < min(shares) <= max(shares) <= 1
        assert row["recall_5"] is None  # right answers are not known
        assert shares == [1, 1] or "exact" not in row["method"]
    assert {row["allowed"] for row in found["filtered"]} == {"50.0%", "10.0%", "1.0%", "0.1%"}
    copied = [row for row in found["filtered"] if "copy of the allowed" in row["method"]]
    assert all(row["of_exact_10"] == 1 for row in copied)
    text = (tmp_path / "out" / "results.md").read_text()
    assert "| **ours, codes** " in text
    assert "its figures mean nothing" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "results.md"}


def test_search_is_measured_with_a_trained_model_on_its_data(trained, tmp_path, capsys):
    words = [trained.data, "--model", trained.model, "--parts", "plain", "--items", "0"]
    words += ["--queries", "30", "--timed", "2", "--rounds", "1", "--batch", "4"]
    found = measured(capsys, tmp_path, *words)
    rows = {row["method"]: row for row in found["plain"]}
    assert rows["ours, codes, found by the generator"]["recall_10"] > 0
    assert rows["exact search (faiss Flat)"]["recall_10"] > 0
    assert rows["faiss HNSW32, ef 32"]["times_reference"] == 1
