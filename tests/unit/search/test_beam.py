from __future__ import annotations

import numpy as np
import pytest
import torch

from genius.config import GeneratorConfig, SearchConfig
from genius.models.generator import Generator
from genius.search.beam import NOTHING, Beams, search
from genius.search.table import IdTable

SIZES = (3, 4, 4)


@pytest.fixture
def generator() -> Generator:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = GeneratorConfig(layers=1, width=8, feedforward=8, heads=2, head_width=4, prefixes=2)
        return Generator(6, SIZES, config).eval()


@pytest.fixture
def indifferent(generator) -> Generator:
    """Gives all codes of a level the same probability."""
    with torch.no_grad():
        generator.embedding.weight.zero_()
    return generator


def table_of(codes: list[list[int]]) -> IdTable:
    return IdTable.build(np.array(codes, dtype=np.int64), np.zeros(len(codes), dtype=np.float32))


EVERYTHING = table_of([[a, b, c] for a in range(3) for b in range(4) for c in range(4)])


def test_equal_scores_keep_the_order_of_the_table(indifferent):
    beams = search(indifferent, EVERYTHING, torch.randn(3, 6), SearchConfig(beam=7))
    assert beams.rows.tolist() == [list(range(7))] * 3


def test_the_same_query_finds_the_same_twice_in_one_batch_and_in_the_next(generator):
    query = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    first = search(generator, EVERYTHING, query.expand(4, -1), SearchConfig(beam=9))
    second = search(generator, EVERYTHING, query.expand(4, -1), SearchConfig(beam=9))
    assert (first.rows == first.rows[0]).all()
    assert (first.rows == second.rows).all()
    assert (first.log_probabilities == second.log_probabilities).all()


def test_a_pool_smaller_than_the_beam_gives_each_id_once(generator):
    beams = search(generator, table_of([[0, 1, 2], [2, 1, 0], [2, 1, 0]]), torch.randn(2, 6), SearchConfig())
    assert [sorted(rows) for rows in beams.rows.tolist()] == [[0, 1], [0, 1]]


def test_queries_of_one_batch_may_find_different_numbers_of_ids(generator):
    table = table_of([[0, 0, 0], [1, 0, 0], [1, 0, 1], [1, 2, 1]])
    level0 = [frozenset({0}), frozenset({1}), frozenset({2}), frozenset()]
    beams = search(generator, table, torch.randn(4, 6), SearchConfig(beam=10), level0=level0)
    found = [sorted(row for row in rows if row != NOTHING) for rows in beams.rows.tolist()]
    assert found == [[0], [1, 2, 3], [], [0, 1, 2, 3]]
    unfilled = beams.rows == NOTHING
    assert np.isneginf(beams.scores()[unfilled]).all()
    assert np.isfinite(beams.scores()[~unfilled]).all()


def test_an_empty_pool_finds_nothing(generator):
    empty = IdTable.build(np.zeros((0, 3), dtype=np.int64), np.zeros(0, dtype=np.float32))
    beams = search(generator, empty, torch.randn(2, 6), SearchConfig(beam=5))
    assert (beams.rows == NOTHING).all()


def test_scores_are_the_sums_over_levels():
    beams = Beams(np.zeros((1, 2), dtype=np.int64), np.array([[[-1, -2], [-3, -0.5]]], dtype=np.float32))
    assert beams.scores().tolist() == [[-3.0, -3.5]]
