import math

import pytest

from genius_search.errors import BadData, UsageError
from genius_search.lab.runs import Hit, Run, evaluate

QRELS = {"9:1": {"9:7": 1, "9:8": 1}, "9:2": {"9:5": 1}}


def run_of(**rankings: list[str]) -> Run:
    return Run(
        "exact",
        {
            f"9:{qid[1:]}": [Hit(did, -float(place)) for place, did in enumerate(dids)]
            for qid, dids in rankings.items()
        },
    )


def test_measures_worked_out_by_hand():
    found = evaluate(QRELS, run_of(q1=["9:0", "9:7", "9:8"], q2=["9:0", "9:1"]), ks=(1, 2, 5))
    assert found.queries == 2
    assert [found.means[f"R@{k}"] for k in (1, 2, 5)] == [0.0, 0.5, 0.5]
    assert [found.means[f"recall@{k}"] for k in (1, 2, 5)] == [0.0, 0.25, 0.5]
    assert found.means["MRR"] == 0.25
    gain = (1 / math.log2(3) + 1 / math.log2(4)) / (1 + 1 / math.log2(3))
    assert found.means["nDCG@10"] == found.means["nDCG@50"] == pytest.approx(gain / 2)
    assert found.means["R-precision"] == 0.25
    assert found.means["recall@100"] == 0.5
    assert found.short_rankings == 2
    assert found.per_query["9:1"]["recall@2"] == 0.5
    always = ["recall@100", "MRR", "R-precision", "nDCG@10", "nDCG@50"]
    assert list(found.means) == ["R@1", "R@2", "R@5", "recall@1", "recall@2", "recall@5", *always]
    assert found.means["R@5"] == 0.5


def test_equal_scores_are_measured_in_the_runs_order():
    """trec_eval alone would put 9:9 before 9:1."""
    tied = {"9:1": [Hit("9:1", 0.5), Hit("9:9", 0.5)]}
    assert evaluate({"9:1": {"9:1": 1}}, Run("exact", tied)).means["MRR"] == 1.0
    assert evaluate({"9:1": {"9:9": 1}}, Run("exact", tied)).means["MRR"] == 0.5


def test_scores_equal_in_single_precision_are_measured_in_the_runs_order():
    close = {"9:1": [Hit("9:1", 1.0 + 1e-12), Hit("9:9", 1.0)]}
    assert evaluate({"9:1": {"9:1": 1}}, Run("exact", close)).means["R@1"] == 1.0


def test_queries_missing_from_the_run_are_an_error_and_never_zero():
    with pytest.raises(BadData, match=r"run 'exact' lacks 1 of the qrels' 2 queries: 9:2\."):
        evaluate(QRELS, run_of(q1=["9:7"]))


def test_queries_that_the_qrels_lack_are_an_error():
    with pytest.raises(BadData, match="answers 1 queries that the qrels lack: 9:3"):
        evaluate(QRELS, run_of(q1=["9:7"], q2=["9:5"], q3=["9:1"]))


def test_an_explicitly_empty_ranking_counts_zero():
    found = evaluate(QRELS, run_of(q1=["9:7"], q2=[]))
    assert [found.means[f"R@{k}"] for k in (1, 5, 10)] == [0.5, 0.5, 0.5]
    assert found.per_query["9:2"] == dict.fromkeys(found.means, 0.0)
    assert evaluate({"9:2": {"9:5": 1}}, run_of(q2=[])).means["MRR"] == 0.0


def test_a_candidate_that_the_pool_lacks_is_an_error():
    run = run_of(q1=["9:7"], q2=["9:99"])
    assert evaluate(QRELS, run).queries == 2
    with pytest.raises(BadData, match="names 1 candidates that the pool lacks: 9:99"):
        evaluate(QRELS, run, known={"9:5", "9:7", "9:8"})


def test_full_rankings_are_not_short():
    assert evaluate(QRELS, run_of(q1=["9:1", "9:2"], q2=["9:1", "9:2"]), ks=(1, 2)).short_rankings == 0


@pytest.mark.parametrize("qrels", [{"9:1": {}}, {"9:1": {"9:7": 0}}])
def test_a_query_that_nothing_answers_cannot_be_measured(qrels):
    with pytest.raises(BadData, match="1 queries of the qrels have no right answer: 9:1"):
        evaluate(qrels, run_of(q1=["9:7"]))


def test_no_queries_cannot_be_measured():
    with pytest.raises(BadData, match="hold no query"):
        evaluate({}, Run("exact", {}))


@pytest.mark.parametrize("ks", [(), (0, 5)])
def test_impossible_ks_are_refused(ks):
    with pytest.raises(UsageError, match="expected one or more numbers from 1 up"):
        evaluate(QRELS, run_of(q1=[], q2=[]), ks=ks)
