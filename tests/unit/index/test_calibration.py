"""Scores of a query's hits as probabilities."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius_search.config import SearchConfig
from genius_search.index.settings import (
    DEPTH,
    Bin,
    Calibration,
    Outcome,
    Weights,
    from_dict,
    hit_features,
    to_dict,
)

CALIBRATION = Calibration(
    search=SearchConfig(rerank="codes", candidates=1000),
    intercept=-4.0,
    weights=Weights(score=20.0, ahead=-6.0, behind=-12.0, contrast=9.0),
    alone=(0.3, 0.4),
    lowest=-6.0,
    highest=4.0,
    threshold=0.5,
    wanted_precision=0.8,
    absent=0.2,
    data="photos val",
    queries=40,
    items=300,
    held_out=Outcome(40, 0.03, 0.1, 0.2, 0.7, 0.85, 0.6, (Bin(0.1, 0.05, 12.5), Bin(0.9, 1.0, 27.5))),
)
SCORES = st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=15)


def probabilities(scores) -> np.ndarray:
    return CALIBRATION.probabilities(np.array(scores, dtype=np.float32))


@given(scores=SCORES)
def test_probabilities_are_bounded_and_never_rise_down_the_list(scores):
    found = probabilities(sorted(scores, reverse=True))
    assert ((found >= 1 / (1 + np.exp(6.0)) - 1e-12) & (found <= 1 / (1 + np.exp(-4.0)) + 1e-12)).all()
    assert (np.diff(found) <= 1e-9).all()


@given(scores=SCORES, place=st.integers(0, 14), more=st.floats(0, 0.5, width=16))
def test_a_hit_of_a_higher_score_beside_the_same_others_is_never_less_likely(scores, place, more):
    scores = sorted(scores, reverse=True)[:DEPTH]
    own = scores[place % len(scores)]
    before = probabilities(scores)[scores.index(own)]
    raised = sorted(
        [*scores[: scores.index(own)], *scores[scores.index(own) + 1 :], own + more], reverse=True
    )
    assert probabilities(raised)[raised.index(own + more)] >= before - 1e-9


def test_the_numbers_of_hits():
    found = hit_features(np.array([0.9, 0.5, 0.1], dtype=np.float32), (0.0, 0.0))
    assert found == pytest.approx(
        np.array([[0.9, 0.4, 0, 0.6], [0.5, 0, -0.4, 0.0], [0.1, 0, -0.8, -0.6]]), abs=1e-6
    )


def test_a_hit_beyond_the_tenth_is_compared_with_the_nine_best():
    scores = np.linspace(1, 0, 12, dtype=np.float32)
    found = hit_features(scores, (0.0, 0.0))
    assert found[11, 3] == pytest.approx(-scores[:9].mean(), abs=1e-6)
    assert hit_features(scores[:10], (0.0, 0.0)) == pytest.approx(found[:10])


def test_a_hit_that_is_alone_leads_by_as_much_as_was_ever_seen():
    assert hit_features(np.array([0.2], dtype=np.float32), (0.3, 0.4))[0] == pytest.approx([0.2, 0.3, 0, 0.4])
    assert len(probabilities([])) == 0


def test_it_is_read_as_it_was_written():
    told = json.loads(json.dumps(to_dict(CALIBRATION)))
    assert told["search"] == {"rerank": "codes", "candidates": 1000}
    assert from_dict(Calibration, told) == CALIBRATION
    without = dataclasses.replace(CALIBRATION, threshold=None)
    assert from_dict(Calibration, json.loads(json.dumps(to_dict(without)))) == without


@pytest.mark.parametrize(
    "odd",
    [
        "likely",
        {},
        {**to_dict(CALIBRATION), "more": 1},
        {**to_dict(CALIBRATION), "weights": {"score": 1.0}},
        {**to_dict(CALIBRATION), "intercept": float("nan")},
        {**to_dict(CALIBRATION), "alone": [1.0]},
        {**to_dict(CALIBRATION), "held_out": None},
    ],
)
def test_what_is_no_calibration_is_refused(odd):
    with pytest.raises(ValueError):
        from_dict(Calibration, odd)


@pytest.mark.parametrize(
    ("changed", "applies"),
    [
        ({"beam": 200, "candidates": 50}, True),
        ({"scores": "children"}, True),
        ({"rerank": "embeddings"}, False),
        ({"rerank": "none"}, False),
        ({"generator_weight": 0.1}, False),
        ({"density_weight": 0.0}, False),
    ],
)
def test_it_applies_to_hits_that_are_ordered_alike(changed, applies):
    assert CALIBRATION.applies_to(dataclasses.replace(CALIBRATION.search, **changed)) is applies
