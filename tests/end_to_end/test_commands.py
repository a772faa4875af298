"""Commands that work for seconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from genius_search.cli import main


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


def test_evaluate_measures_a_model_and_the_index_that_is_made_of_it(trained, tmp_path, capsys):
    words = ("evaluate", trained.data, "--max-queries", "4")
    found = told(capsys, *words, "--model", trained.model, "--out", tmp_path / "index")
    assert found["items"] == 1_000
    methods = {row["method"] for row in found["rows"]}
    assert methods == {"search", "generator", "exact"}
    assert len(found["rows"]) == (8 + 1) * len(methods)
    assert told(capsys, *words, "--index", tmp_path / "index") == found
    exact = [row for row in found["rows"] if row["method"] == "exact"]
    assert all(row["touched"] == 1_000 for row in exact)
    average = {row["method"]: row["measures"]["R@10"] for row in found["rows"] if row["row"] == "average"}
    assert 0 < average["search"] <= average["exact"] + 0.1
    out, _ = run(capsys, *words, "--index", tmp_path / "index", "--rows", "catalogue_task0")
    assert "R@5" in out
    assert "catalogue_task3" not in out


def test_evaluate_takes_an_index_or_a_model(trained, capsys):
    _, err = run(capsys, "evaluate", trained.data, status=2)
    assert "either --index or --model" in err
