from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from genius_search.cli import main

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
    assert main(["score", *map(str, words)]) == status
    printed = capsys.readouterr()
    return printed.out, printed.err


def run_json(capsys, *words: str | Path) -> dict[str, Any]:
    found = json.loads(score(capsys, *words, "--json")[0])
    assert isinstance(found, dict)
    return found


def test_any_run_is_measured_against_any_qrels(files, capsys):
    assert run_json(capsys, *files, "--ks", "1,5") == {
        "run": "bm25",
        "queries": 2,
        "missing": 0,
        "short_rankings": 2,
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


def test_measures_are_on_stdout_and_remarks_on_stderr(files, capsys):
    out, err = score(capsys, *files, "--ks", "1")
    assert out.splitlines() == [
        "R@1         0.5000",
        "recall@1    0.5000",
        "recall@100  0.7500",
        "MRR         0.7500",
        "R-precision 0.7500",
        "nDCG@10     0.6934",
        "nDCG@50     0.6934",
    ]
    assert err.splitlines() == ["run bm25: 2 queries"]


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
    assert "1 of them are not in the run and count as 0" in score(capsys, *files, "--missing", "zero")[1]


def test_uniirs_numbers_are_thought_of_where_queries_lack(files, capsys):
    files[1].write_text("9:1 0 9:7 1 0\n")
    err = score(capsys, *files, status=6)[1]
    assert "--hashed" in err


def test_the_authors_run_files_are_measured_by_their_numbers(files, capsys):
    run, qrels = files
    run.write_text("4500001 Q0 90000007 1 1.0 mbeir_single_pool_test_k50 0\n")
    qrels.write_text("9:1 0 9:7 1 0\n")
    assert run_json(capsys, *files, "--hashed")["measures"]["R@1"] == 1.0


def test_a_pool_cuts_the_qrels_and_refuses_hits_outside(files, tmp_path, capsys):
    pool = tmp_path / "pool.txt"
    pool.write_text("".join(f"photos/{number}.jpg\n" for number in (1, 2, 3)))
    assert run_json(capsys, *files, "--pool", pool)["measures"]["recall@5"] == 1.0
    pool.write_text("photos/2.jpg\nphotos/3.jpg\n")
    assert (
        "1 candidates that the pool lacks: photos/1.jpg" in score(capsys, *files, "--pool", pool, status=6)[1]
    )
    pool.write_text("photos/1.jpg\n")
    assert "no right answer in the pool" in score(capsys, *files, "--pool", pool, status=6)[1]
    pool.write_text("photos/1.jpg cat\n")
    assert f"{pool}:1: 2 words" in score(capsys, *files, "--pool", pool, status=6)[1]


def test_a_pool_may_be_m_beirs(files, tmp_path, capsys):
    run, qrels = files
    run.write_text("9:1 Q0 9:7 1 1.0 exact\n")
    qrels.write_text("9:1 0 9:7 1 0\n9:1 0 9:8 1 0\n")
    pool = tmp_path / "pool.jsonl"
    pool.write_text('{"did": "9:7", "modality": "text", "txt": "a"}\n')
    assert run_json(capsys, *files)["measures"]["recall@5"] == 0.5
    assert run_json(capsys, *files, "--pool", pool)["measures"]["recall@5"] == 1.0


def test_runs_whose_ranks_mean_nothing_are_ordered_by_score_when_asked(files, capsys):
    files[0].write_text(
        "cat Q0 photos/1.jpg 0 0.1 x\ncat Q0 photos/2.jpg 0 0.2 x\ndog Q0 photos/3.jpg 0 1 x\n"
    )
    assert f"{files[0]}:1: rank 0" in score(capsys, *files, status=6)[1]
    assert run_json(capsys, *files, "--order", "scores")["measures"]["R@1"] == 1.0


@pytest.mark.parametrize("ks", ["", "0", "5,x", "-1", "²"])
def test_impossible_depths_are_refused(files, capsys, ks):
    assert "expected numbers from 1 up" in score(capsys, *files, f"--ks={ks}", status=2)[1]
