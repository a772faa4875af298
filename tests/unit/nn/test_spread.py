"""The spread of products: what queries are scaled by."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.nn.codebooks import sum_codes
from genius_search.nn.spread import Residuals, Spread
from genius_search.training.codebooks import measure_spread


def draw(seed=0, items=500, dim=8):
    random = np.random.default_rng(seed)
    tables = [random.standard_normal((size, dim)).astype(np.float32) for size in (3, 16, 16)]
    ids = np.stack([random.integers(0, size, items) for size in (2, 16, 16)], axis=1)
    return tables, ids, random.random(items)


def test_items_as_queries_have_a_scale_of_one_on_average():
    tables, ids, densities = draw()
    spread = Spread(*measure_spread(tables, ids, densities, has_modality_level=True))
    vectors = sum_codes(tables, ids)
    scales = spread.scales(vectors @ tables[1].T, [frozenset([code]) for code in ids[:, 0].tolist()])
    assert np.median(scales) == pytest.approx(1, abs=0.05)


def test_a_scale_is_that_of_the_plain_formula():
    tables, ids, densities = draw(1)
    among = Spread(*measure_spread(tables, ids, densities, has_modality_level=True)).among(frozenset([0]))
    query = np.random.default_rng(2).standard_normal(8).astype(np.float32)
    products = np.array([query @ tables[1][code] for code in ids[ids[:, 0] == 0, 1]])
    assert among.scale((query @ tables[1].T)[None])[0] == pytest.approx(
        among.first / products.std(), rel=1e-4
    )
    assert among.densities == pytest.approx(densities[ids[:, 0] == 0].std(), rel=1e-4)


def test_modalities_have_spreads_of_their_own():
    tables, ids, densities = draw(5)
    tables[2][:] *= np.linspace(0.1, 3, 16)[:, None].astype(np.float32)
    ids[:, 2] = np.where(ids[:, 0] == 0, 0, 15)
    spread = Spread(*measure_spread(tables, ids, densities, has_modality_level=True))
    assert spread.among(frozenset([1])).first > 1.5 * spread.among(frozenset([0])).first


def test_what_cannot_differ_is_left_as_it_is():
    tables, ids, densities = draw(6)
    nothing = Spread(*measure_spread(tables, ids[:1], densities[:1], has_modality_level=True)).among()
    assert nothing.density_unit == 0
    assert nothing.scale(np.ones((2, 16))).tolist() == [1, 1]


def test_residuals_lose_constant_directions():
    plain = Residuals.plain(8)
    residuals = np.random.default_rng(7).standard_normal((5, 8)).astype(np.float32)
    np.testing.assert_array_equal(plain.apply(residuals, 1), residuals)
    direction = np.full((1, 8), 8**-0.5, dtype=np.float32)
    left = plain._replace(constant=direction).apply(residuals, 4)
    np.testing.assert_allclose(left.mean(axis=1), 0, atol=1e-6)
