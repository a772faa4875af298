"""How far probabilities can be believed."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.lab.report.reliability import Predictions, calibration_error, reliability


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
