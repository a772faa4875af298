"""Commands that work for seconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

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


def test_the_stages_one_by_one_give_the_model_that_fit_gives(trained, tmp_path, capsys):
    out = tmp_path / "model"
    shutil.copytree(trained.model / "encoder", out / "encoder")
    words = (trained.data, "--out", out)
    run(capsys, "embed", *words, "--encoder", f"small:{out / 'encoder'}")
    run(capsys, "train", "quantizer", *words, "--preset", "tiny")
    run(capsys, "train", "generator", *words, "--preset", "tiny")
    found, expected = (json.loads((place / "model.json").read_text()) for place in (out, trained.model))
    assert found["encoder"] == expected["encoder"]
    assert found["instructions"] == expected["instructions"]
    losses = [
        [
            json.loads(line)["loss"]
            for line in (place / "quantizer" / "metrics.jsonl").read_text().splitlines()
        ]
        for place in (out, trained.model)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
