from __future__ import annotations

import numpy as np
import pytest

from genius_search.search.beam import topk


def by_sorting(scores: np.ndarray, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:count]


@pytest.mark.parametrize("seed", range(200))
def test_the_highest_are_those_of_a_stable_sort(seed):
    random = np.random.default_rng(seed)
    scores = random.integers(-3, 3, random.integers(0, 60)).astype(np.float32)
    scores[random.random(len(scores)) < (0, 0.3, 0.9)[seed % 3]] = (-np.inf, np.inf)[seed % 2]
    for count in (0, 1, 2, len(scores) // 2, len(scores), len(scores) + 3):
        assert topk(scores, count).tolist() == by_sorting(scores, count)


def test_equal_scores_keep_their_order():
    assert topk(np.array([1, 2, 1, 2], dtype=np.float32), 3).tolist() == [1, 3, 0]


def test_of_no_scores_none_is_highest():
    assert topk(np.zeros(0, dtype=np.float32), 5).tolist() == []
