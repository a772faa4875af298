from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given
from hypothesis import strategies as st

from genius_search.errors import BadData
from research.runs import (
    Hit,
    filter_to_pool,
    measure_run,
    read_run,
    strictly_decreasing,
    write_qrels,
    write_run,
)

ANSWERS = {"9:1": {"9:7": 1, "9:3": 2}, "9:2": {"4:0": 1}}

single_floats = st.floats(width=32, allow_nan=False, min_value=-(2.0**126), max_value=2.0**126)


@given(scores=st.lists(single_floats, max_size=20))
def test_scores_strictly_decrease_and_are_lowered_as_little_as_possible(scores):
    scores.sort(reverse=True)
    lowered = strictly_decreasing(scores)
    assert all(after < before for before, after in pairwise(lowered))
    limit = np.float32(np.inf)
    for score, lowered_score in zip(np.array(scores, dtype=np.float32), lowered, strict=True):
        assert lowered_score == min(score, limit)
        limit = np.nextafter(lowered_score, np.float32(-np.inf))


@given(
    tied=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=4),
    right=st.integers(0, 7),
)
def test_pytrec_eval_measures_the_written_files_as_we_measure_the_run(
    tmp_path_factory, tied, right
):
    run = {
        f"9:{query}": [
            # Ids ascend, so that a tool that breaks ties by descending ids changes the order.
            Hit(f"9:{row + 10}", -float(score))
            for row, score in enumerate(sorted(scores))
        ]
        for query, scores in enumerate(tied)
    }
    qrels = {qid: {f"9:{right + 10}": 1, "9:99": 2} for qid in run}
    folder = tmp_path_factory.mktemp("trec")
    write_run(folder / "run.txt", "generative", run)
    write_qrels(folder / "qrels.txt", qrels)
    with (folder / "run.txt").open() as file:
        parsed_run = pytrec_eval.parse_run(file)
    with (folder / "qrels.txt").open() as file:
        parsed_qrels = pytrec_eval.parse_qrel(file)
    assert parsed_qrels == qrels
    names = {"success_1": "R@1", "success_5": "R@5", "recall_5": "recall@5", "recip_rank": "MRR"}
    names["ndcg_cut_10"] = "nDCG@10"
    measures = {"success", "recall", "recip_rank", "ndcg_cut"}
    evaluator = pytrec_eval.RelevanceEvaluator(parsed_qrels, measures)
    for qid, theirs in evaluator.evaluate(parsed_run).items():
        ours = measure_run(qrels, run, ks=(1, 5)).per_query[qid]
        for their_name, name in names.items():
            assert theirs[their_name] == pytest.approx(ours[name])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("9:1 Q0 9:8 2 0.5", "expected TREC's 6 columns"),
        ("9:1 Q0 9:8 2 0.5 exact 0 0", "not a run: .* saw 8"),
        ("9:1 Q0 9:7 2 0.5 exact", "9:7 .* twice"),
        ("9:1 Q0 9:8 2 high exact", "9:8 .* not a finite number"),
        ("9:1 Q0 9:8 2 nan exact", "9:8 .* not a finite number"),
    ],
)
def test_a_file_that_is_not_a_run_is_refused(tmp_path: Path, line: str, problem: str):
    path = tmp_path / "run.txt"
    path.write_text(f"9:1 Q0 9:7 1 0.8 exact\n{line}\n")
    with pytest.raises(BadData, match=problem):
        read_run(path)


def test_answers_outside_the_pool_are_removed():
    assert filter_to_pool(ANSWERS, {"9:7", "4:0"}) == {"9:1": {"9:7": 1}, "9:2": {"4:0": 1}}
