from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from genius_search.config import SearchConfig
from genius_search.errors import UsageError
from genius_search.search.rank import Beams, CodeRanker, Evidence, Ranking, rank_items
from genius_search.search.table import IdTable, SearchSegment

SIZES = (2, 4, 3)
DIM = 6


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.fixture
def tables(random) -> list[torch.Tensor]:
    return [torch.randn(size, DIM, generator=random) for size in SIZES]


@pytest.fixture
def segment() -> SearchSegment:
    """IDs 0 (items 2, 0), 1 (item 1), 2 (items 4, 3)."""
    codes = np.array([[0, 1, 1], [0, 2, 0], [0, 1, 1], [1, 0, 2], [1, 0, 2]])
    return SearchSegment(IdTable.build(codes, np.array([0.2, 0.5, 0.9, 0.3, 0.4], dtype=np.float32)))


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


def ranked(
    segments: list[SearchSegment],
    beams: Beams,
    *,
    k=10,
    query=None,
    evidence=None,
    **config,
) -> Ranking:
    return rank_items(
        segments,
        beams,
        0,
        torch.zeros(DIM) if query is None else query,
        config=SearchConfig(**config),
        evidence=evidence or Evidence(),
        k=k,
    )


def rows_of(stored: np.ndarray) -> Callable[[np.ndarray], torch.Tensor]:
    return lambda items: torch.from_numpy(stored[items]).float()


BEAMS = beams_of([[(2, 3)], [(0, 1)], [(1, 2)]], [-1.0, -2.0, -3.0])
PREFIXES = beams_of([[(2, 3)], [(0, 2)]], [-1.0, -2.0])
SHARED = beams_of([[(0, 0), (1, 2)], [(0, 1), (0, 1)], [(2, 3), (1, 1)]], [-1.0, -2.0, -3.0])


def test_without_re_ranking_the_generators_order_stays_and_the_typical_come_first_inside_an_id(segment):
    answer = ranked([segment], BEAMS)
    assert answer.items.tolist() == [4, 3, 2, 0, 1]
    assert answer.rows.tolist() == [2, 2, 0, 0, 1]
    assert answer.scores.tolist() == [-1.0, -1.0, -2.0, -2.0, -3.0]
    assert answer.beams.tolist() == [0, 0, 1, 1, 2]
    assert answer.segments.tolist() == [0] * 5
    assert answer.touched == 5


def test_items_of_an_id_in_several_parts_stand_together_part_after_part(segment, other):
    answer = ranked([segment, other], SHARED)
    assert answer.segments.tolist() == [1, 0, 0, 1, 1, 0, 0]
    assert answer.items.tolist() == [1, 2, 0, 0, 2, 4, 3]
    assert answer.rows.tolist() == [1, 0, 0, 0, 0, 2, 2]
    assert answer.beams.tolist() == [0, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("rerank", ["none", "codes", "embeddings"])
def test_equal_scores_keep_the_order_of_the_beams(segment, tables, rerank):
    evidence = Evidence(CodeRanker(tables), [rows_of(np.zeros((5, DIM), dtype=np.float32))])
    level = beams_of([[(2, 3)], [(0, 1)], [(1, 2)]], [-1.0, -1.0, -1.0])
    answer = ranked([segment], level, rerank=rerank, evidence=evidence)
    assert answer.items.tolist() == [4, 3, 2, 0, 1]


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        ({"rerank": "codes"}, "codebooks"),
        ({"rerank": "embeddings"}, "embeddings='fused'"),
    ],
)
def test_re_ranking_without_its_evidence_is_refused_with_advice(segment, config, advice):
    with pytest.raises(UsageError, match=advice):
        ranked([segment], BEAMS, **config)
