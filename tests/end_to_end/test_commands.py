"""Commands that take seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from genius_search.cli import main


def run(capsys, *words: str | Path, status: int = 0) -> tuple[str, str]:
    """Run a command, and return its stdout and stderr."""
    assert main([str(word) for word in words]) == status
    output = capsys.readouterr()
    return output.out, output.err


def run_json(capsys, *words: str | Path) -> dict[str, Any]:
    """Run a command, and return the JSON document that is its whole stdout."""
    document = json.loads(run(capsys, *words, "--json")[0])
    assert isinstance(document, dict)
    return document


def test_evaluate_measures_a_model_and_an_index_with_its_items(trained, tmp_path, capsys):
    words = ("evaluate", trained.data)
    evaluation = run_json(capsys, *words, "--model", trained.model, "--out", tmp_path / "index")
    assert evaluation["items"] == 1_000
    rows = evaluation["rows"]
    methods = {row["method"] for row in rows}
    assert methods == {"search", "generator", "exact"}
    assert len(rows) == (8 + 1) * len(methods)
    assert all(row["num_ranked"] == 1_000 for row in rows if row["method"] == "exact")
    average = {row["method"]: row["measures"]["R@10"] for row in rows if row["row"] == "average"}
    assert 0 < average["search"] <= average["exact"] + 0.1
    out, _ = run(capsys, *words, "--index", tmp_path / "index")
    table = [line.split() for line in out.splitlines()]
    assert next(row for row in table if row[0] == "average")[5] == f"{average['search']:.3f}"
