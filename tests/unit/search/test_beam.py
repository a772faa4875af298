from __future__ import annotations

import numpy as np
import pytest
import torch

from genius_search.config import GeneratorConfig, SearchConfig
from genius_search.nn.generator import Generator
from genius_search.search.beam import Frontier, choose_all, choose_best, search
from genius_search.search.beams import Beams, topk
from genius_search.search.decoder import T5Decoder
from genius_search.search.table import Allowed, Children, IdTable, SearchSegment

SIZES = (3, 4, 4)


@pytest.fixture
def generator() -> Generator:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = GeneratorConfig(layers=1, width=8, feedforward=8, heads=2, head_width=4, prefixes=2)
        return Generator(6, SIZES, config).eval()


@pytest.fixture
def decoder(generator) -> T5Decoder:
    return T5Decoder(generator)


@pytest.fixture
def indifferent(generator) -> T5Decoder:
    """Gives all codes of a level the same probability."""
    with torch.no_grad():
        generator.embedding.weight.zero_()
    return T5Decoder(generator)


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


@pytest.mark.parametrize("scores", ["level", "vocabulary", "children"])
def test_equal_scores_keep_the_order_of_the_table(indifferent, scores):
    beams = search(indifferent, [EVERYTHING], torch.randn(3, 6), SearchConfig(beam=7, scores=scores))
    assert rows_of(beams) == [list(range(7))] * 3


def test_the_same_query_finds_the_same_twice_in_one_batch_and_in_the_next(decoder):
    query = queries_of(1)
    first = search(decoder, [EVERYTHING], query.expand(4, -1), SearchConfig(beam=9))
    second = search(decoder, [EVERYTHING], query.expand(4, -1), SearchConfig(beam=9))
    for values, again in zip(first, second, strict=True):
        assert (values == values[0]).all()
        assert (values == again).all()


def test_a_pool_smaller_than_the_beam_gives_each_id_once(decoder):
    segments = [SearchSegment(table_of([[0, 1, 2], [2, 1, 0], [2, 1, 0]]))]
    beams = search(decoder, segments, queries_of(2), SearchConfig())
    assert [sorted(rows) for rows in rows_of(beams)] == [[0, 1], [0, 1]]


def test_queries_of_one_batch_may_find_different_numbers_of_ids(decoder):
    segments = [SearchSegment(table_of([[0, 0, 0], [1, 0, 0], [1, 0, 1], [1, 2, 1]]))]
    level0 = [frozenset({0}), frozenset({1}), frozenset({2}), frozenset()]
    beams = search(decoder, segments, queries_of(4), SearchConfig(beam=10), level0=level0)
    assert [sorted(rows) for rows in rows_of(beams)] == [[0], [1, 2, 3], [], [0, 1, 2, 3]]
    assert np.isneginf(beams.scores()[~beams.filled()]).all()
    assert np.isfinite(beams.scores()[beams.filled()]).all()


@pytest.mark.parametrize("rerank", RERANKS)
def test_each_query_may_have_a_width_of_its_own(decoder, rerank):
    config = SearchConfig(beam=50, rerank=rerank)
    beams = search(decoder, [EVERYTHING], queries_of(3), config, widths=[1, 6, 3])
    assert [len(rows) for rows in rows_of(beams)] == [1, 6, 3]
    alone = search(decoder, [EVERYTHING], queries_of(3)[1:2], SearchConfig(beam=6))
    assert rows_of(beams)[1] == rows_of(alone)[0]


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


def test_what_a_query_may_find_replaces_what_is_alive(decoder):
    table = table_of([[0, 0, 0], [1, 0, 0], [2, 0, 0]])
    segment = SearchSegment(table, Allowed.of(table, np.array([True, True, False])))
    own = (Allowed.of(table, np.array([False, True, False])),)
    beams = search(decoder, [segment], queries_of(2), SearchConfig(), restrictions=[None, own])
    assert [sorted(rows) for rows in rows_of(beams)] == [[0, 1], [1]]


@pytest.mark.parametrize("codes", [[[2, 1, 0]], [[2, 1, 0], [2, 1, 3]], [[2, 0, 0], [2, 1, 3], [2, 3, 1]]])
def test_a_modality_that_leaves_no_choice_is_scored_like_any_other(decoder, generator, codes):
    segments = [SearchSegment(table_of([*codes, [0, 0, 0]]))]
    free = search(decoder, segments, queries_of(2), SearchConfig())
    forced = search(decoder, segments, queries_of(2), SearchConfig(), level0=[frozenset({2})] * 2)
    for query in range(2):
        scores = dict(zip(rows_of(free)[query], free.log_probabilities[query], strict=True))
        assert len(rows_of(forced)[query]) == len(codes)
        for row, gained in zip(rows_of(forced)[query], forced.log_probabilities[query], strict=True):
            np.testing.assert_allclose(gained, scores[row], atol=1e-5)


def test_codes_without_a_choice_add_nothing_when_only_those_that_exist_count(decoder):
    segments = [SearchSegment(table_of([[0, 1, 2], [0, 3, 1], [0, 3, 2]]))]
    beams = search(decoder, segments, queries_of(3), SearchConfig(scores="children"))
    total = np.exp(beams.scores()).sum(axis=1)
    np.testing.assert_allclose(total, 1, atol=1e-5)
    assert (beams.log_probabilities[:, :, 0] == 0).all()


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


OWNER = np.array([0, 0, 0, 2, 2])
SCORES = np.array([-3, -1, -3, -np.inf, -5], dtype=np.float32)


def test_the_best_of_each_query_come_in_their_slots_and_the_impossible_nowhere():
    chosen = choose_best(OWNER, SCORES, np.array([2, 9, 9]))
    assert chosen.query.tolist() == [0, 0, 2]
    assert chosen.slot.tolist() == [0, 1, 0]
    assert chosen.child.tolist() == [1, 0, 4]


def test_everything_keeps_its_order():
    chosen = choose_all(OWNER, 3)
    assert chosen.query.tolist() == OWNER.tolist()
    assert chosen.slot.tolist() == [0, 1, 2, 0, 1]
    assert chosen.child.tolist() == [0, 1, 2, 3, 4]


def test_a_frontier_grows_by_a_level_and_knows_where_each_place_came_from():
    root = Frontier.root(2, [10], 2)
    children = Children(
        np.array([0, 0, 1]), np.array([4, 7, 5]), np.array([[0], [6], [0]]), np.array([[6], [10], [2]])
    )
    assert root.owners(children).tolist() == [0, 0, 1]
    gained = np.array([-2, -1, -4], dtype=np.float32)
    frontier = root.extend(children, choose_best(root.owners(children), gained, np.array([5, 5])), gained, 0)
    assert frontier.rows.tolist() == [[0, 0], [1, 1]]
    assert frontier.is_filled().tolist() == [[True, True], [True, False]]
    assert frontier.codes[:, :, 0][frontier.is_filled()].tolist() == [7, 4, 5]
    assert frontier.low[..., 0].tolist() == [[6, 0], [0, 0]]
    assert frontier.high[..., 0].tolist() == [[10, 6], [2, 0]]
    assert frontier.total.tolist() == [[-1, -2], [-4, -np.inf]]
    np.testing.assert_array_equal(
        frontier.history, [[[-1, np.nan], [-2, np.nan]], [[-4, np.nan], [-np.inf, -np.inf]]]
    )
    second = frontier.take(np.array([1]))
    assert (second.queries.tolist(), second.low.shape) == ([1], (1, 2, 1))
    turned = frontier.slots(np.array([1, 0]))
    assert turned.total.tolist() == [[-2, -1], [-np.inf, -4]]


def test_growing_by_nothing_leaves_places_without_ids():
    root = Frontier.root(2, [10, 4], 3)
    nothing = np.zeros(0, dtype=np.int64)
    children = Children(nothing, nothing, nothing.reshape(0, 2), nothing.reshape(0, 2))
    frontier = root.extend(children, choose_all(nothing, 2), None, 0)
    assert frontier.is_filled().tolist() == [[False], [False]]
    assert np.isneginf(frontier.history).all()


def by_sorting(scores: np.ndarray, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:count]


@pytest.mark.parametrize("seed", range(30))
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
