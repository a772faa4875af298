"""How far probabilities can be believed."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.calibrate import Predictions, brier, calibration_error, reliability, threshold_for


def told(probability, is_right, weight=None) -> Predictions:
    ones = np.ones(len(probability)) if weight is None else np.array(weight, dtype=np.float64)
    return Predictions(np.array(probability, dtype=np.float64), np.array(is_right, dtype=bool), ones)


def test_tenths_hold_what_is_said_and_what_is_so():
    found = reliability(told([0.11, 0.19, 0.95, 1.0], [0, 1, 1, 1], [1, 3, 1, 1]))
    assert [one.queries for one in found] == [4, 2]
    assert found[0].predicted == pytest.approx(0.17)
    assert found[0].observed == pytest.approx(0.75)
    assert found[1].observed == 1
    assert calibration_error(found) == pytest.approx((4 * 0.58 + 2 * 0.025) / 6)


def test_probabilities_that_are_right_have_no_error():
    random = np.random.default_rng(0)
    probability = random.random(20_000)
    drawn = told(probability, random.random(20_000) < probability)
    assert calibration_error(reliability(drawn)) < 0.02
    assert brier(drawn) == pytest.approx(1 / 6, abs=0.01)


def test_brier_weighs_squares():
    assert brier(told([1.0, 0.5], [1, 0], [1, 3])) == pytest.approx(0.1875)


def test_the_threshold_accepts_as_much_as_it_may():
    many = told(np.repeat([0.9, 0.6, 0.3], 30), np.repeat([True, True, False], 30))
    assert threshold_for(many, 0.9, at_least=0.5) == 0.6
    assert threshold_for(many, 0.6, at_least=0.0) == 0.3
    assert threshold_for(many, 0.6, at_least=0.5) == 0.6
    few = told([0.9] * 5 + [0.3] * 40, [True] * 5 + [False] * 40)
    assert threshold_for(few, 0.9, at_least=0.5) is None
