"""The way of an ID through the levels says what the search itself does."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.index.explain import MAX_SIBLINGS, decode_scores, follow_id


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
            level0 = frozenset() if case.level0 is None else case.level0[query]
            vector = case.queries[query].numpy()
            steps = follow_id(
                case.pool.segments,
                found.id,
                decode_scores(model, vector, found.id, scores, level0),
                level0=level0,
                restriction=case.pool.restricted(case.masks[query]),
            )
            assert tuple(step.code for step in steps) == found.id
            assert np.allclose([step.log_probability for step in steps], found.gained, atol=1e-4)
            for level, step in enumerate(steps):
                probabilities = [sibling.probability for sibling in step.siblings]
                assert len(probabilities) == min(step.num_siblings, MAX_SIBLINGS)
                assert probabilities == sorted(probabilities, reverse=True)
                if step.num_siblings <= MAX_SIBLINGS:
                    assert sum(probabilities) == pytest.approx(1, abs=1e-4)
                assert step.rank > MAX_SIBLINGS or step.siblings[step.rank - 1].code == step.code
                prefix = np.array(found.id[: level + 1])
                assert step.items == sum(
                    int(
                        (
                            (codes[:, : level + 1] == prefix).all(axis=1)
                            & (True if alive is None else alive)
                        ).sum()
                    )
                    for codes, alive in zip(case.pool.codes, case.pool.alive, strict=True)
                )
            compared += 1
    assert compared > 50
