"""``genius bench`` at the smallest sizes: what is left behind, not how fast it was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from genius_search.cli import main


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    """The command sets these for its own process."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")


def measured(capsys, out: Path, *words: str | Path) -> dict[str, Any]:
    """What a benchmark says, which is what it wrote."""
    assert main(["bench", *map(str, words), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((out / "results.json").read_text())
    assert '<table class="bench">' in (out / "index.html").read_text()
    for name, rows in found.items():
        for row in rows if name != "title" else ():
            assert {"machine", "date", "command", "seed"} <= set(row)
            numbers = [value for value in row.values() if isinstance(value, float)]
            assert all(math.isfinite(value) and value >= 0 for value in numbers)
    return found


def test_rivals_answer_the_same_queries_beside_ours(trained, tmp_path, capsys):
    words = ("speed", trained.data, "--model", trained.model, "--row", "catalogue_task0", "--queries", "6")
    found = measured(
        capsys, tmp_path, *words, "--timed", "2", "--batch", "4", "--rounds", "1", "--sizes", "1200"
    )
    rows = {row["method"]: row for row in found["queries"] if row["batch"] == 1}
    assert {row["family"] for row in rows.values()} == {
        "exact", "hnsw", "ivf", "ivf-pq", "residual", "routing", "ours", "generate",
    }  # fmt: skip
    dim = 48
    exact = rows["exact search (32-bit vectors)"]
    assert exact["bytes_per_item"] == pytest.approx(4 * dim, rel=0.01)
    assert rows["exact search (8-bit vectors)"]["bytes_per_item"] == pytest.approx(dim, rel=0.01)
    for name, row in rows.items():
        assert row["cpu_ms"] > 0
        assert row["items"] == 1200
        if row["family"] == "generate":
            assert row["recall_1"] is None  # its IDs are compared, not its items
            continue
        assert 0 <= row["recall_1"] <= row["recall_5"] <= row["recall_10"] <= 1
        assert row["command"].startswith("genius bench speed data --model model ")
        assert "--sizes 1200" in row["command"]
        if name.startswith("ours"):
            stored = 2 * dim if "(16-bit)" in name else dim + 2 if "(8-bit)" in name else 0
            assert 8 < row["bytes_per_item"] - stored < 24
    for name in ("HNSW (32-bit vectors), efSearch 256", "IVF-PQ refined (16-bit vectors), 64 lists"):
        assert rows[name]["recall_10"] >= exact["recall_10"] - 0.2
    table, trie = found["builds"]
    assert trie["bytes_per_id"] > 10 * (table["bytes_per_id"] - 4)  # the trie holds no norms and densities
    (agreement,) = found["agreement"]
    assert (agreement["compared"], agreement["share"]) == (6, 1)
    assert "padded with noisy copies" in (tmp_path / "index.html").read_text()


def test_a_pool_that_is_larger_already_is_not_padded(trained, tmp_path, capsys):
    words = [
        "bench",
        "speed",
        trained.data,
        "--model",
        trained.model,
        "--out",
        tmp_path / "out",
        "--queries",
        "2",
    ]
    assert main([*map(str, words), "--row", "catalogue_task0", "--sizes", "10"]) == 2
    assert "cannot be padded to 10" in capsys.readouterr().err
    assert main([str(word) for word in words]) == 2
    assert "name one" in capsys.readouterr().err


def test_decoding_is_measured_with_a_trained_model(trained, tmp_path, capsys):
    words = ("speed", "--model", trained.model, "--sizes", "300", "--methods", "ours,generate", "--beam", "4")
    found = measured(
        capsys, tmp_path, *words, "--timed", "2", "--batch", "2", "--rounds", "1", "--compared", "4"
    )
    assert len(found["queries"]) == 2 * 5
    (row,) = found["agreement"]
    assert (row["compared"], row["share"]) == (4, 1)
