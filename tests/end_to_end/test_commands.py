"""Commands that work for seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from genius_search.cli import main


def run(capsys, *words: str | Path, status: int = 0) -> tuple[str, str]:
    """Run a command; what it wrote to stdout and stderr."""
    assert main([str(word) for word in words]) == status
    said = capsys.readouterr()
    return said.out, said.err


def run_json(capsys, *words: str | Path) -> dict[str, Any]:
    """The JSON document that a command writes, the whole of its stdout."""
    found = json.loads(run(capsys, *words, "--json")[0])
    assert isinstance(found, dict)
    return found


def test_evaluate_measures_a_model_and_the_index_that_is_made_of_it(trained, tmp_path, capsys):
    words = ("evaluate", trained.data)
    found = run_json(capsys, *words, "--model", trained.model, "--out", tmp_path / "index")
    assert found["items"] == 1_000
    methods = {row["method"] for row in found["rows"]}
    assert methods == {"search", "generator", "exact"}
    assert len(found["rows"]) == (8 + 1) * len(methods)
    exact = [row for row in found["rows"] if row["method"] == "exact"]
    assert all(row["num_ranked"] == 1_000 for row in exact)
    average = {
        row["method"]: row["measures"]["R@10"] for row in found["rows"] if row["row"] == "average"
    }
    assert 0 < average["search"] <= average["exact"] + 0.1
    out, _ = run(capsys, *words, "--index", tmp_path / "index")
    printed = [line.split() for line in out.splitlines()]
    assert next(row for row in printed if row[0] == "average")[5] == f"{average['search']:.3f}"
