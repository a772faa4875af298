"""Commands that work for seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from genius_search.cli import main
from genius_search.lab.settings import METHODS


def run(capsys, *words: str | Path, status: int = 0) -> tuple[str, str]:
    """Run a command; what it wrote to stdout and stderr."""
    assert main([str(word) for word in words]) == status
    said = capsys.readouterr()
    return said.out, said.err


def told(capsys, *words: str | Path) -> dict[str, Any]:
    """The JSON document that a command writes, the whole of its stdout."""
    found = json.loads(run(capsys, *words, "--json")[0])
    assert isinstance(found, dict)
    return found


def test_evaluate_prints_the_promised_rows(trained, tmp_path, capsys):
    words = ("evaluate", trained.data, "--model", trained.model, "--split", "test", "--out", tmp_path / "out")
    found = told(capsys, *words, "--pools", "local,global", "--max-queries", "2")
    rows = found["rows"]
    assert len(rows) == 8 * 2 * len(METHODS)
    assert {row["method"] for row in rows} == set(METHODS)
    assert {row["pool"] for row in rows} == {"local", "global"}
    for row in rows:
        first = ["dataset", "task", "pool", "method", "queries", "R@1", "R@5", "R@10"]
        assert list(row)[: len(first)] == first
        assert row["queries"] == 2
    assert found["health"]["candidates"] == 1_000
    out, err = run(capsys, *words, "--pools", "local", "--max-queries", "2", "--methods", "exact-raw")
    assert "exact-raw" in out
    assert "IDs of the candidates" in err
    assert "IDs of the candidates" not in out


def test_a_checked_data_set_is_said_to_be_good(trained, capsys):
    found = told(capsys, "data", "check", trained.data, "--skip-images")
    assert found["ok"] is True
    out, _ = run(capsys, "data", "check", trained.data, "--skip-images")
    assert "no errors" in out
