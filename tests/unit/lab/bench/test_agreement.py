from __future__ import annotations

import numpy as np
import pytest

from genius_search.lab.bench.speed import Ranking, compare_rankings

IDS = np.array([[0, 1], [0, 2], [1, 1]])


def ranking(order, scores) -> Ranking:
    return Ranking(IDS[list(order)].astype(np.int64), np.array(scores, dtype=np.float32))


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (((0, 1, 2), [-1, -2, -3]), ((0, 1, 2), [-1.1, -2, -3]), "identical"),  # whatever the scores
        (((0, 1, 2), [-1, -2, -2]), ((0, 2, 1), [-1, -2, -2.00005]), "tied"),
        (((0, 1, 2), [-1, -2, -3]), ((0, 2, 1), [-1, -2, -3]), "different"),
        (((0, 1), [-1, -2]), ((0, 2), [-1, -2]), "tied"),  # the last may tie with what was cut off
        (((1, 0), [-1, -2]), ((2, 0), [-1, -2]), "different"),
        (((0, 1), [-1, -2]), ((0,), [-1]), "different"),
    ],
)
def test_rankings_agree_up_to_ties(left, right, expected):
    found = compare_rankings([ranking(*left)], [ranking(*right)])
    assert found == {
        "compared": 1,
        "identical": expected == "identical",
        "tied": expected == "tied",
        "share": expected != "different",
    }


def test_the_share_excuses_ties():
    left = [ranking((0, 1, 2), [-1, -2, -2])] * 3
    right = [left[0], ranking((0, 2, 1), [-1, -2, -2]), ranking((0,), [-1])]
    assert compare_rankings(left, right) == {"compared": 3, "identical": 1, "tied": 1, "share": 2 / 3}
