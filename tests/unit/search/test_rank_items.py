from __future__ import annotations

import numpy as np
import pytest
import torch

from genius_search.config import PAPER_SEARCH
from genius_search.search.beam import Beams, rank_items
from genius_search.search.rank import Candidates, Evidence
from genius_search.search.table import IdTable, SearchSegment

DIM = 6


@pytest.fixture
def segment() -> SearchSegment:
    """IDs 0 (items 2, 0), 1 (item 1), 2 (items 4, 3)."""
    codes = np.array([[0, 1, 1], [0, 2, 0], [0, 1, 1], [1, 0, 2], [1, 0, 2]])
    return SearchSegment(
        IdTable.build(codes, np.array([0.2, 0.5, 0.9, 0.3, 0.4], dtype=np.float32))
    )


@pytest.fixture
def other() -> SearchSegment:
    """IDs 0 (items 0, 2), which is the first of ``segment``, and 1 (item 1), which is new."""
    codes = np.array([[0, 1, 1], [1, 3, 0], [0, 1, 1]])
    return SearchSegment(IdTable.build(codes, np.array([0.8, 0.1, 0.7], dtype=np.float32)))


def beams_of(ranges: list[list[tuple[int, int]]], scores: list[float]) -> Beams:
    """One query's beams: for each the range in every part."""
    bounds = np.array([ranges])
    gained = np.array([[[score / 2, score / 4, score / 4] for score in scores]], dtype=np.float32)
    return Beams(bounds[..., 0], bounds[..., 1], gained)


def ranked(segments: list[SearchSegment], beams: Beams) -> Candidates:
    return rank_items(
        segments, beams, 0, torch.zeros(DIM), config=PAPER_SEARCH, evidence=Evidence(), k=10
    )


BEAMS = beams_of([[(2, 3)], [(0, 1)], [(1, 2)]], [-1.0, -2.0, -3.0])
SHARED = beams_of([[(0, 0), (1, 2)], [(0, 1), (0, 1)], [(2, 3), (1, 1)]], [-1.0, -2.0, -3.0])


def test_without_re_ranking_the_generators_order_stays_and_the_typical_come_first_inside_an_id(
    segment,
):
    answer = ranked([segment], BEAMS)
    assert answer.items.tolist() == [4, 3, 2, 0, 1]
    assert answer.id_rows.tolist() == [2, 2, 0, 0, 1]
    assert answer.scores.tolist() == [-1.0, -1.0, -2.0, -2.0, -3.0]
    assert answer.beams.tolist() == [0, 0, 1, 1, 2]
    assert answer.segments.tolist() == [0] * 5
    assert answer.num_ranked == 5


def test_items_of_an_id_in_several_parts_stand_together_part_after_part(segment, other):
    answer = ranked([segment, other], SHARED)
    assert answer.segments.tolist() == [1, 0, 0, 1, 1, 0, 0]
    assert answer.items.tolist() == [1, 2, 0, 0, 2, 4, 3]
    assert answer.id_rows.tolist() == [1, 0, 0, 0, 0, 2, 2]
    assert answer.beams.tolist() == [0, 1, 1, 1, 1, 2, 2]
