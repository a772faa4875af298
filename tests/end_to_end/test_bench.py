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
    assert (out / "results.md").read_text().startswith("# ")
    for name, rows in found.items():
        for row in rows if name != "title" else ():
            assert {"machine", "date", "command", "seed"} <= set(row)
            numbers = [value for value in row.values() if isinstance(value, float)]
            assert all(math.isfinite(value) and value >= 0 for value in numbers)
    return found


def test_decoding_is_measured_with_a_trained_model(trained, tmp_path, capsys):
    words = ("speed", "--model", trained.model, "--sizes", "300", "--methods", "ours,generate", "--beam", "4")
    found = measured(
        capsys, tmp_path, *words, "--timed", "2", "--batch", "2", "--rounds", "1", "--compared", "4"
    )
    assert len(found["queries"]) == 2 * 5
    (row,) = found["agreement"]
    assert (row["compared"], row["share"]) == (4, 1)
