from __future__ import annotations

import numpy as np
import pytest

BLOCKS = 10
"""Of the drawn cases, so that several processes may share them."""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_search_finds_what_the_plain_one_finds(plain, block):
    for seed in range(block, plain.POOLS, BLOCKS):
        model = plain.model(seed % plain.NUM_MODELS)
        case = plain.draw_case(seed, model.sizes)
        beams = case.search(model)
        foretold = plain.teacher_forced(model, case.queries, case.pool.ids(), case.config.scores)
        for query in range(len(case.queries)):
            found = case.pool.found(beams, query)
            outcomes = plain.plain_search(foretold[query], case.ids(query), case.width(query))
            assert any(plain.agrees(found, expected) for expected in outcomes), (seed, query)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_scores_without_rounding_are_searched_to_the_letter_equal_ones_included(plain, block):
    for seed in range(block, plain.POOLS, BLOCKS):
        sizes = plain.sizes_of(seed % plain.NUM_MODELS)
        case = plain.draw_case(seed, sizes, scores="level")
        decoder = plain.ExactDecoder(sizes, seed, impossible=(0.0, 0.2)[seed % 2])
        beams = case.search(decoder)
        for query in range(len(case.queries)):
            outcomes = plain.plain_search(
                decoder.foretold(query), case.ids(query), case.width(query), tolerance=None
            )
            assert case.pool.found(beams, query) == next(outcomes), (seed, query)


def test_a_query_finds_the_same_alone_and_in_any_company(plain):
    for seed in range(plain.SOME_POOLS):
        sizes = plain.sizes_of(seed % plain.NUM_MODELS)
        rerank = ("none", "codes")[seed % 2]
        case = plain.draw_case(seed, sizes, scores="level", rerank=rerank, candidates=seed % 7)
        decoder = plain.ExactDecoder(sizes, seed)
        together = case.search(decoder)
        for query in range(len(case.queries)):
            alone = case.only(query).search(decoder)
            width = alone.low.shape[1]
            for whole, segment in zip(together, alone, strict=True):
                np.testing.assert_array_equal(whole[query, :width], segment[0])
            assert not (together.high > together.low)[query, width:].any()
