import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.runs import Hit, measure_run

KS = (1, 2, 5, 10)
POOL = [f"9:{number}" for number in range(14)]


@st.composite
def judged_runs(draw):
    """Qrels and hits over the same queries; the run is made in the test, since beartype, which draws
    random items to check, may not run inside a strategy.
    """
    qrels, hits = {}, {}
    for number in range(draw(st.integers(1, 4))):
        answers = draw(st.lists(st.sampled_from(POOL), min_size=1, max_size=5, unique=True))
        qrels[f"1:{number}"] = {did: draw(st.integers(1, 3)) for did in answers}
        ranking = draw(st.lists(st.sampled_from(POOL), max_size=len(POOL), unique=True))
        scores = sorted(
            draw(st.lists(st.integers(-20, 0), min_size=len(ranking), max_size=len(ranking))),
            reverse=True,
        )
        hits[f"1:{number}"] = [Hit(did, float(score)) for did, score in zip(ranking, scores, strict=True)]
    return qrels, hits


def plain(qrels, run):
    """The definitions, word for word."""
    always = ["recall@100", "MRR", "R-precision", "nDCG@10", "nDCG@50"]
    total = dict.fromkeys([*(f"R@{k}" for k in KS), *(f"recall@{k}" for k in KS), *always], 0.0)
    for qid, judged in qrels.items():
        gains = [judged.get(hit.did, 0) for hit in run[qid]]
        for k in KS:
            total[f"R@{k}"] += float(any(gains[:k]))
        for k in (*KS, 100):
            total[f"recall@{k}"] += sum(gain > 0 for gain in gains[:k]) / len(judged)
        total["MRR"] += next((1 / rank for rank, gain in enumerate(gains, 1) if gain), 0.0)
        ideal = sorted(judged.values(), reverse=True)
        total["R-precision"] += sum(gain > 0 for gain in gains[: len(judged)]) / len(judged)
        for k in (10, 50):
            total[f"nDCG@{k}"] += discounted(gains, k) / discounted(ideal, k)
    return {name: value / len(qrels) for name, value in total.items()}


def discounted(gains, k):
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains[:k], 1))


@given(judged=judged_runs())
def test_measures_equal_their_definitions_even_with_equal_scores(judged):
    qrels, run = judged
    assert measure_run(qrels, run, ks=KS).means == pytest.approx(plain(qrels, run))
