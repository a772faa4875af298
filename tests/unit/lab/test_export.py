from __future__ import annotations

import json
from pathlib import Path

import pytest

from genius_search.cli import main


def run(capsys, *words: str | Path, status: int = 0) -> tuple[str, str]:
    assert main(["export", "onnx", *(str(word) for word in words)]) == status
    printed = capsys.readouterr()
    return printed.out, printed.err


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "model.onnx"
    words = ["export", "onnx", str(trained.model), "--out", str(folder), "--int8", "--queries", "0"]
    assert main(words) == 0
    return folder


def test_files_and_measurements_are_printed_as_json(trained, written, capsys):
    words = (trained.model, "--out", written, "--int8", "--queries", "4", "--beam", "5", "--json")
    out, err = run(capsys, *words)
    printed = json.loads(out)
    assert printed["encoder"] == {"kind": "small", "why_not": None}
    assert printed["queries"] == "drawn"
    names = {"fusion.onnx", "image.onnx", "special.onnx", "start.onnx", "step.onnx", "text.onnx"}
    names |= {f"level_{level}.onnx" for level in range(4)}
    assert {file["path"] for file in printed["files"]} == {
        f"{precision}/{name}" for precision in ("fp32", "int8") for name in names
    }
    assert [row["name"] for row in printed["measured"]] == ["PyTorch", "ONNX fp32", "ONNX int8"]
    assert printed["measured"][1]["overlap_10"] > 0.99
    assert "random vectors" in err


def test_real_queries_are_measured_where_features_are_given(trained, written, capsys):
    features = trained.model / "features"
    words = (trained.model, "--out", written, "--int8", "--check", features, "--queries", "6", "--beam", "5")
    out, err = run(capsys, *words)
    header, *rows = out.splitlines()
    assert header.split() == ["decoder", "same", "best", "of", "10", "of", "50", "CPU-ms", "per", "query"]
    assert [row[:9].strip() for row in rows] == ["PyTorch", "ONNX fp32", "ONNX int8"]
    assert f"6 queries of {features}" in err


def test_a_folder_without_features_is_refused(trained, written, tmp_path, capsys):
    words = (trained.model, "--out", written, "--int8", "--check", tmp_path)
    assert "features" in run(capsys, *words, status=4)[1]


def test_impossible_numbers_are_refused_before_anything_is_written(trained, tmp_path, capsys):
    for flag, value in (("--queries", "-1"), ("--beam", "0")):
        words = (trained.model, "--out", tmp_path / "none", f"{flag}={value}")
        assert f"{flag} {value}" in run(capsys, *words, status=2)[1]
    assert not (tmp_path / "none").exists()
