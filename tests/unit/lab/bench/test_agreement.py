from __future__ import annotations

import numpy as np

from genius_search.lab.bench.speed import Ranking, compare_rankings

IDS = np.array([[0, 1], [0, 2], [1, 1]])


def ranking(order, scores) -> Ranking:
    return Ranking(IDS[list(order)].astype(np.int64), np.array(scores, dtype=np.float32))


def compared(left: Ranking, right: Ranking) -> str:
    found = compare_rankings([left], [right])
    assert found["compared"] == 1
    return "identical" if found["identical"] else "tied" if found["tied"] else "different"


def test_the_same_order_is_identical_whatever_the_scores():
    assert compared(ranking((0, 1, 2), [-1, -2, -3]), ranking((0, 1, 2), [-1.1, -2, -3])) == "identical"


def test_equal_scores_excuse_another_order():
    assert compared(ranking((0, 1, 2), [-1, -2, -2]), ranking((0, 2, 1), [-1, -2, -2.00005])) == "tied"


def test_another_order_of_different_scores_is_different():
    assert compared(ranking((0, 1, 2), [-1, -2, -3]), ranking((0, 2, 1), [-1, -2, -3])) == "different"


def test_ids_that_tie_with_the_last_may_be_exchanged():
    assert compared(ranking((0, 1), [-1, -2]), ranking((0, 2), [-1, -2])) == "tied"
    assert compared(ranking((1, 0), [-1, -2]), ranking((2, 0), [-1, -2])) == "different"


def test_rankings_of_other_lengths_are_different():
    assert compared(ranking((0, 1), [-1, -2]), ranking((0,), [-1])) == "different"


def test_the_share_excuses_ties():
    left = [ranking((0, 1, 2), [-1, -2, -2])] * 3
    right = [left[0], ranking((0, 2, 1), [-1, -2, -2]), ranking((0,), [-1])]
    assert compare_rankings(left, right) == {"compared": 3, "identical": 1, "tied": 1, "share": 2 / 3}
