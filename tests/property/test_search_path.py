"""The way of an ID through the levels says what the search itself does."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.search.tree import CodeTree, score_path


def steps_of(plain, case, model, query, codes, scores):
    return score_path(
        CodeTree(case.pool.segments),
        model,
        case.queries[query : query + 1],
        codes,
        scores,
        level0=frozenset() if case.level0 is None else case.level0[query],
        restriction=case.pool.restricted(case.masks[query]),
    )


def cases(plain, **settings):
    for seed in range(plain.SOME_POOLS):
        model = plain.model(seed % plain.NUM_MODELS)
        case = plain.draw_case(seed, model.sizes, **settings)
        for query in (0, 5):
            yield case, model, query, sorted(case.ids(query))


@pytest.mark.parametrize("scores", ["level", "vocabulary"])
def test_log_probabilities_are_those_of_the_beam(plain, scores):
    compared = 0
    for case, model, query, ids in cases(plain, beam=50, scores=scores):
        wide = case.only(query)._replace(widths=[1000])
        for found in case.pool.found(wide.search(model), 0):
            assert found.id in ids
            steps = steps_of(plain, case, model, query, found.id, scores)
            said = [float(step.log_probabilities[step.own]) for step in steps]
            assert np.allclose(said, found.gained, atol=1e-4)
            for step in steps:
                assert step.probabilities.sum() == pytest.approx(1, abs=1e-4)
                assert 1 <= step.rank <= len(step.items)
            assert steps[-1].items[steps[-1].own] >= 1
            compared += 1
    assert compared > 50
