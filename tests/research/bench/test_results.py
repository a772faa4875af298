from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from genius_search.errors import UsageError
from research.bench.__main__ import Search, format_command
from research.bench.measure import about
from research.bench.results import Measurements, table, write
from research.bench.settings import SearchSettings

COLUMNS = {"name": "name", "cpu_ms": "ms"}
ABOUT = {"machine": "a machine", "date": "2026-01-01", "command": "python -m research.bench x", "seed": 3}


def measurements(*rows: dict) -> Measurements:
    return Measurements(
        rows={"things": rows},
        tables=[table(rows, COLUMNS, name="things", title="Things <fast>", note="Less is better.")],
    )


def test_every_row_says_what_it_was_measured_on(tmp_path):
    found = measurements({"name": "a", "cpu_ms": 1.0}, {"name": "b", "cpu_ms": 2.0, "speedup": None})
    document = write(tmp_path / "out", "Speed", found, about("python -m research.bench things", seed=7))
    assert document == json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["name"] for row in document["things"]] == ["a", "b"]
    for row in document["things"]:
        assert (row["command"], row["seed"]) == ("python -m research.bench things", 7)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
        assert "torch 2" in row["machine"]
        assert "threads used" in row["machine"]


def test_what_is_no_number_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cpu_ms is not a number"):
        write(tmp_path, "Speed", measurements({"name": "a", "cpu_ms": float("nan")}), ABOUT)
    assert not list(tmp_path.iterdir())


def test_a_command_is_shown_without_folders_and_defaults():
    command = Search(data=Path("/somewhere/v.npy"), out=Path("x"), options=SearchSettings(quick=True))
    assert format_command(command) == "python -m research.bench v.npy --quick"
