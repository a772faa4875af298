from __future__ import annotations

import numpy as np
import pytest
import torch

from genius_search.config import GeneratorConfig, SearchConfig
from genius_search.nn.generator import Generator
from genius_search.search.beam import search
from genius_search.search.rank import Beams, topk
from genius_search.search.table import Allowed, IdTable, SearchSegment

SIZES = (3, 4, 4)


@pytest.fixture
def generator() -> Generator:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = GeneratorConfig(layers=1, width=8, feedforward=8, heads=2, head_width=4, prefixes=2)
        return Generator(6, SIZES, config).eval()


@pytest.fixture
def decoder(generator) -> Generator:
    return generator


@pytest.fixture
def indifferent(generator) -> Generator:
    """Gives all codes of a level the same probability."""
    with torch.no_grad():
        generator.embedding.weight.zero_()
    return generator


def table_of(codes: list[list[int]]) -> IdTable:
    shaped = np.array(codes, dtype=np.int64).reshape(len(codes), 3)
    return IdTable.build(shaped, np.zeros(len(codes), dtype=np.float32))


def queries_of(count: int) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(count))


EVERYTHING = SearchSegment(table_of([[a, b, c] for a in range(3) for b in range(4) for c in range(4)]))
RERANKS = ["none", "codes"]


def rows_of(beams: Beams) -> list[list[int]]:
    """The row of each filled place, which must be a whole ID of the only part."""
    filled = beams.filled()
    assert (beams.high - beams.low)[filled].tolist() == [[1]] * int(filled.sum())
    return [low[is_filled, 0].tolist() for low, is_filled in zip(beams.low, filled, strict=True)]


@pytest.mark.parametrize("scores", ["level", "vocabulary"])
def test_equal_scores_keep_the_order_of_the_table(indifferent, scores):
    beams = search(indifferent, [EVERYTHING], torch.randn(3, 6), SearchConfig(beam=7, scores=scores))
    assert rows_of(beams) == [list(range(7))] * 3


def test_a_pool_smaller_than_the_beam_gives_each_id_once(decoder):
    segments = [SearchSegment(table_of([[0, 1, 2], [2, 1, 0], [2, 1, 0]]))]
    beams = search(decoder, segments, queries_of(2), SearchConfig())
    assert [sorted(rows) for rows in rows_of(beams)] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("rerank", RERANKS)
def test_an_empty_pool_finds_nothing(decoder, rerank):
    config = SearchConfig(beam=5, rerank=rerank)
    for segments in (
        [SearchSegment(table_of([]))],
        [SearchSegment(table_of([])), SearchSegment(table_of([]))],
    ):
        assert not search(decoder, segments, queries_of(2), config).filled().any()


@pytest.mark.parametrize("rerank", RERANKS)
def test_where_everything_was_deleted_nothing_is_found(decoder, rerank):
    table = EVERYTHING.table
    segment = SearchSegment(table, Allowed.of(table, np.zeros(table.num_items, dtype=bool)))
    assert not search(decoder, [segment], queries_of(2), SearchConfig(rerank=rerank)).filled().any()


@pytest.mark.parametrize("rerank", RERANKS)
def test_no_queries_have_no_beams(decoder, rerank):
    beams = search(decoder, [EVERYTHING], queries_of(0), SearchConfig(rerank=rerank))
    assert len(beams.low) == len(beams.filled()) == len(beams.scores()) == 0


def test_a_leaf_stop_leaves_levels_unsaid(decoder):
    config = SearchConfig(beam=2, rerank="codes", candidates=10)
    beams = search(decoder, [EVERYTHING], queries_of(2), config)
    assert (beams.high - beams.low)[..., 0].tolist() == [[4, 4]] * 2
    assert (np.isnan(beams.log_probabilities) == [False, False, True]).all()
    full = search(decoder, [EVERYTHING], queries_of(2), SearchConfig(beam=2))
    for query, rows in enumerate(rows_of(full)):
        ranges = [
            range(low, high)
            for low, high in zip(beams.low[query, :, 0], beams.high[query, :, 0], strict=True)
        ]
        assert all(any(row in below for below in ranges) for row in rows)


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
