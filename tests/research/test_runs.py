from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given
from hypothesis import strategies as st

from genius_search.errors import BadRecord
from research.runs import Hit, Run, measure, read_run, strictly_decreasing, write_qrels, write_run

RUN = Run(
    "generative", {"9:2": [Hit("9:7", -0.1), Hit("9:1", -0.1), Hit("9:3", -4.0)], "9:1": [Hit("9:3", 1e-9)]}
)


def test_a_written_run_has_trecs_six_columns(tmp_path: Path):
    write_run(tmp_path / "run.txt", RUN)
    assert (tmp_path / "run.txt").read_text().splitlines() == [
        "9:2 Q0 9:7 1 -0.1 generative",
        "9:2 Q0 9:1 2 -0.10000001 generative",
        "9:2 Q0 9:3 3 -4.0 generative",
        "9:1 Q0 9:3 1 1e-09 generative",
    ]


single = st.floats(width=32, allow_nan=False, min_value=-(2.0**126), max_value=2.0**126)


@given(scores=st.lists(single, max_size=20))
def test_scores_strictly_decrease_and_are_lowered_as_little_as_possible(scores):
    scores.sort(reverse=True)
    lowered = strictly_decreasing(scores)
    assert all(after < before for before, after in pairwise(lowered))
    for place, score in enumerate(np.array(scores, dtype=np.float32)):
        least = np.nextafter(lowered[place - 1], np.float32(-np.inf)) if place else np.float32(np.inf)
        assert lowered[place] == min(score, least)


@given(scores=st.lists(single, min_size=1, max_size=6), queries=st.integers(1, 3))
def test_a_run_reads_back_in_the_same_order_and_is_then_written_alike(tmp_path_factory, scores, queries):
    ranking = [Hit(f"9:{place}", score) for place, score in enumerate(sorted(scores, reverse=True))]
    run = Run("exact", {f"9:{query}": ranking for query in range(queries)})
    path = tmp_path_factory.mktemp("run") / "run.txt"
    write_run(path, run)
    again = read_run(path)
    for qid, hits in run.hits.items():
        assert [hit.did for hit in again.hits[qid]] == [hit.did for hit in hits]
        np.testing.assert_array_equal(
            np.float32([hit.score for hit in again.hits[qid]]),
            strictly_decreasing([hit.score for hit in hits]),
        )
    before = path.read_bytes()
    write_run(path, again)
    assert path.read_bytes() == before


@given(
    tied=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=4),
    right=st.integers(0, 7),
)
def test_pytrec_eval_measures_the_written_files_as_we_measure_the_run(tmp_path_factory, tied, right):
    hits = {
        f"9:{query}": [
            # ids rise, so whoever breaks ties by candidate id turns them round
            Hit(f"9:{place + 10}", -float(score))
            for place, score in enumerate(sorted(scores))
        ]
        for query, scores in enumerate(tied)
    }
    run = Run("generative", hits)
    qrels = {qid: {f"9:{right + 10}": 1, "9:99": 2} for qid in hits}
    folder = tmp_path_factory.mktemp("trec")
    write_run(folder / "run.txt", run)
    write_qrels(folder / "qrels.txt", qrels)
    with (folder / "run.txt").open() as file:
        theirs = pytrec_eval.parse_run(file)
    with (folder / "qrels.txt").open() as file:
        judged = pytrec_eval.parse_qrel(file)
    assert judged == qrels
    names = {"success_1": "R@1", "success_5": "R@5", "recall_5": "recall@5", "recip_rank": "MRR"}
    names["ndcg_cut_10"] = "nDCG@10"
    found = pytrec_eval.RelevanceEvaluator(judged, {"success", "recall", "recip_rank", "ndcg_cut"})
    for qid, values in found.evaluate(theirs).items():
        ours = measure(qrels, run, ks=(1, 5)).per_query[qid]
        assert {name: values[key] for key, name in names.items()} == pytest.approx(
            {name: ours[name] for name in names.values()}
        )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("9:1 Q0 9:8 2 0.5", "5 columns"),
        ("9:1 Q0 9:8 2 0.5 exact 0 0", "8 columns"),
        ("9:1 Q0 9:7 2 0.5 exact", "candidate 9:7 is twice"),
        ("9:1 Q0 9:8 2 high exact", "score 'high' is not a finite number"),
        ("9:1 Q0 9:8 2 nan exact", "score 'nan' is not a finite number"),
        ("9:1 Q0 9:8 2 -inf exact", "score '-inf' is not a finite number"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path: Path, line: str, problem: str):
    path = tmp_path / "run.txt"
    path.write_text(f"9:1 Q0 9:7 1 0.8 exact\n{line}\n")
    with pytest.raises(BadRecord, match=problem) as error:
        read_run(path)
    assert str(error.value).startswith(f"{path}:2: ")


def test_a_run_is_what_trec_eval_makes_of_it(tmp_path: Path):
    path = tmp_path / "run.txt"
    rows = [("a", 0, "0.25"), ("b", 0, "0.5"), ("c", 0, "0.5"), ("aa", 0, "0.50000000001"), ("d", 9, "1")]
    path.write_text("".join(f"q Q0 {did} {rank} {score} bm25\n" for did, rank, score in rows))
    found = [hit.did for hit in read_run(path).hits["q"]]
    assert found == ["d", "c", "b", "aa", "a"]
    with path.open() as file:
        theirs = pytrec_eval.parse_run(file)
    ranks = {
        did: pytrec_eval.RelevanceEvaluator({"q": {did: 1}}, {"recip_rank"}).evaluate(theirs)["q"]
        for did in found
    }
    assert [ranks[did]["recip_rank"] for did in found] == pytest.approx([1 / n for n in range(1, 6)])
