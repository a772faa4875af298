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


def test_a_restriction_finds_what_a_table_of_the_allowed_items_alone_would_give(plain):
    for seed in range(plain.SOME_POOLS):
        sizes = plain.sizes_of(seed % plain.NUM_MODELS)
        case = plain.draw_case(seed, sizes, scores="level")
        decoder = plain.ExactDecoder(sizes, seed)
        beams = case.search(decoder)
        for query in range(len(case.queries)):
            masks = case.pool.alive if case.masks[query] is None else case.masks[query]
            remaining = plain.Pool.of(
                [own if mask is None else own[mask] for own, mask in zip(case.pool.codes, masks, strict=True)]
            )
            alone = plain.search(
                decoder,
                remaining.segments,
                case.queries[query : query + 1],
                case.config,
                level0=case.level0 and case.level0[query : query + 1],
                widths=[case.width(query)],
            )
            assert case.pool.found(beams, query) == remaining.found(alone, 0), (seed, query)


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
            assert not together.filled()[query, width:].any()


def test_unfilled_places_are_impossible_and_filled_ones_are_scored_throughout(plain):
    for seed in range(plain.SOME_POOLS):
        model = plain.model(seed % plain.NUM_MODELS)
        case = plain.draw_case(seed, model.sizes)
        beams = case.search(model)
        filled = beams.filled()
        assert np.isneginf(beams.log_probabilities[~filled]).all()
        assert np.isfinite(beams.log_probabilities[filled]).all()
        assert (beams.log_probabilities[filled] <= 0).all()
        for query, (scores, is_filled) in enumerate(zip(beams.scores(), filled, strict=True)):
            count = int(is_filled.sum())
            assert is_filled[:count].all()
            assert count <= case.width(query)
            assert (np.diff(scores[:count]) <= 1e-5).all()
