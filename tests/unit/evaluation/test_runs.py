import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius.errors import BadData, BadRecord
from genius.evaluation.runs import Hit, Run, read_run, write_run

RUN = Run(
    "generative", {"9:2": [Hit("9:7", -0.1), Hit("9:1", -0.1), Hit("9:3", -4.0)], "9:1": [Hit("9:3", 1e-9)]}
)


def test_a_written_run_has_trecs_six_columns(tmp_path: Path):
    write_run(tmp_path / "run.txt", RUN)
    assert (tmp_path / "run.txt").read_text().splitlines() == [
        "9:2 Q0 9:7 1 -0.1 generative",
        "9:2 Q0 9:1 2 -0.1 generative",
        "9:2 Q0 9:3 3 -4.0 generative",
        "9:1 Q0 9:3 1 1e-09 generative",
    ]


@given(
    scores=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6),
    queries=st.integers(1, 3),
)
def test_a_run_reads_back_with_the_very_same_order_and_scores(tmp_path_factory, scores, queries):
    ranking = [Hit(f"9:{place}", score) for place, score in enumerate(sorted(scores, reverse=True))]
    run = Run("exact", {f"9:{query}": ranking for query in range(queries)})
    path = tmp_path_factory.mktemp("run") / "run.txt"
    write_run(path, run)
    assert read_run(path) == run


def test_an_empty_ranking_has_no_line(tmp_path: Path):
    write_run(tmp_path / "run.txt", Run("exact", {"9:1": [], "9:2": [Hit("9:7", 1.0)]}))
    assert list(read_run(tmp_path / "run.txt").hits) == ["9:2"]


@pytest.mark.parametrize(
    ("ranking", "problem"),
    [
        ([Hit("9:1", 1.0), Hit("9:1", 0.5)], "candidate 9:1 is twice"),
        ([Hit("9:1", 0.5), Hit("9:2", 1.0)], "9:2 scores 1.0, above 0.5"),
        ([Hit("9:1", math.nan)], "expected a finite number"),
        ([Hit("9:1", math.inf)], "expected a finite number"),
    ],
)
def test_what_cannot_be_a_ranking_is_not_a_run(ranking: list[Hit], problem: str):
    with pytest.raises(BadData, match=f"run 'exact', query 9:5: .*{problem}"):
        Run("exact", {"9:5": ranking})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("9:1 Q0 9:8 2 0.5", "5 columns"),
        ("9:1 Q0 9:8 2 0.5 exact 0", "7 columns"),
        ("9:1 Q0 9:8 3 0.5 exact", "rank 3 of query 9:1, expected 2"),
        ("9:1 Q0 9:8 1 0.5 exact", "rank 1 of query 9:1, expected 2"),
        ("9:2 Q0 9:8 2 0.5 exact", "rank 2 of query 9:2, expected 1"),
        ("9:1 Q0 9:7 2 0.5 exact", "candidate 9:7 is twice"),
        ("9:1 Q0 9:8 2 high exact", "score 'high' is not a finite number"),
        ("9:1 Q0 9:8 2 nan exact", "score 'nan' is not a finite number"),
        ("9:1 Q0 9:8 2 -inf exact", "score '-inf' is not a finite number"),
        ("9:1 Q0 9:8 2 0.9 exact", "score 0.9 of query 9:1 is above"),
        ("9:1 Q0 9:8 2 0.5 other", "run name 'other'"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path: Path, line: str, problem: str):
    path = tmp_path / "run.txt"
    path.write_text(f"9:1 Q0 9:7 1 0.8 exact\n{line}\n")
    with pytest.raises(BadRecord, match=problem) as error:
        read_run(path)
    assert str(error.value).startswith(f"{path}:2: ")


def test_a_file_without_rankings_is_refused(tmp_path: Path):
    (tmp_path / "run.txt").write_text("\n")
    with pytest.raises(BadData, match="holds no ranking"):
        read_run(tmp_path / "run.txt")


def test_a_name_with_a_blank_cannot_be_written(tmp_path: Path):
    with pytest.raises(BadData, match="'my run'"):
        write_run(tmp_path / "run.txt", Run("my run", RUN.hits))
