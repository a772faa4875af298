from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from research.score import main

RUN = """\
cat Q0 photos/1.jpg 1 -0.5 bm25
cat Q0 photos/2.jpg 2 -0.7 bm25
dog Q0 photos/3.jpg 1 -0.1 bm25
"""
QRELS = """\
cat 0 photos/2.jpg 1
cat 0 photos/9.jpg 1
dog 0 photos/3.jpg 1
"""


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    run, qrels = tmp_path / "run.trec", tmp_path / "qrels.txt"
    run.write_text(RUN)
    qrels.write_text(QRELS)
    return run, qrels


def score(capsys, *words: str | Path, status: int = 0) -> tuple[str, str]:
    """Score; return stdout and stderr."""
    assert main([*map(str, words)]) == status
    printed = capsys.readouterr()
    return printed.out, printed.err


def run_json(capsys, *words: str | Path) -> dict[str, Any]:
    found = json.loads(score(capsys, *words, "--json")[0])
    assert isinstance(found, dict)
    return found


def test_any_run_is_measured_against_any_qrels(files, capsys):
    assert run_json(capsys, *files, "--ks", "1", "5") == {
        "run": "bm25",
        "queries": 2,
        "missing": 0,
        "measures": {
            "R@1": 0.5,
            "R@5": 1.0,
            "recall@1": 0.5,
            "recall@5": 0.75,
            "recall@100": 0.75,
            "MRR": 0.75,
            "R-precision": 0.75,
            "nDCG@10": pytest.approx((1 + 0.63093 / (1 + 0.63093)) / 2, abs=1e-5),
            "nDCG@50": pytest.approx((1 + 0.63093 / (1 + 0.63093)) / 2, abs=1e-5),
        },
    }


def test_a_missing_query_is_an_error_unless_it_counts_as_0(files, capsys):
    files[1].write_text(QRELS + "fox 0 photos/4.jpg 1\n")
    out, err = score(capsys, *files, status=6)
    assert not out
    assert "lacks 1 of the 3 queries" in err
    assert "fox" in err
    assert "--missing zero" in err
    found = run_json(capsys, *files, "--missing", "zero")
    assert (found["queries"], found["missing"]) == (3, 1)
    assert found["measures"]["R@5"] == pytest.approx(2 / 3)


def test_the_authors_run_files_are_measured_by_their_numbers(files, capsys):
    run, qrels = files
    run.write_text("4500001 Q0 90000007 1 1.0 mbeir_single_pool_test_k50 0\n")
    qrels.write_text("9:1 0 9:7 1 0\n")
    assert run_json(capsys, *files, "--hashed")["measures"]["R@1"] == 1.0


def test_runs_whose_ranks_mean_nothing_are_ordered_by_score_when_asked(files, capsys):
    files[0].write_text(
        "cat Q0 photos/1.jpg 0 0.1 x\ncat Q0 photos/2.jpg 0 0.2 x\ndog Q0 photos/3.jpg 0 1 x\n"
    )
    assert f"{files[0]}:1: rank 0" in score(capsys, *files, status=6)[1]
    assert run_json(capsys, *files, "--order", "scores")["measures"]["R@1"] == 1.0
