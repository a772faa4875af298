from __future__ import annotations

import numpy as np
import pytest

from genius_search.search.rank import Beams, topk


def test_scores_are_the_sums_over_the_levels_that_were_decoded():
    segments = np.array([[[-1, -2], [-3, np.nan], [-np.inf, -np.inf]]], dtype=np.float32)
    rows = np.array([[[0, 1], [2, 2], [0, 0]]])
    beams = Beams(rows, rows + np.array([[[1, 0], [0, 5], [0, 0]]]), segments)
    assert beams.scores().tolist() == [[-3.0, -3.0, -np.inf]]
    assert beams.filled().tolist() == [[True, True, False]]


def by_sorting(scores: np.ndarray, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:count]


@pytest.mark.parametrize("seed", range(30))
def test_the_highest_are_those_of_a_stable_sort(seed):
    random = np.random.default_rng(seed)
    scores = random.integers(-3, 3, random.integers(0, 60)).astype(np.float32)
    scores[random.random(len(scores)) < (0, 0.3, 0.9)[seed % 3]] = (-np.inf, np.inf)[seed % 2]
    for count in (0, 1, 2, len(scores) // 2, len(scores), len(scores) + 3):
        assert topk(scores, count).tolist() == by_sorting(scores, count)
