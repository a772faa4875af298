"""The spread of products: what queries are scaled by."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.nn.codebooks import normalize, sum_codes
from genius_search.nn.spread import (
    Residuals,
    Spread,
    decode_densities,
    encode_densities,
    fade,
    fade_width,
    limit_densities,
)
from genius_search.training.codebooks import measure_reliability, measure_spread


def draw(seed=0, items=500, dim=8):
    random = np.random.default_rng(seed)
    tables = [random.standard_normal((size, dim)).astype(np.float32) for size in (3, 16, 16)]
    ids = np.stack([random.integers(0, size, items) for size in (2, 16, 16)], axis=1)
    embeddings = normalize(random.standard_normal((items, dim)).astype(np.float32))
    return tables, ids, embeddings, random.random(items)


def test_items_as_queries_have_a_scale_of_one_on_average():
    tables, ids, embeddings, densities = draw()
    spread = Spread(*measure_spread(tables, ids, embeddings, densities, has_modality_level=True))
    vectors = sum_codes(tables, ids)
    scales = spread.scales(
        vectors @ tables[1].T, [frozenset([code]) for code in ids[:, 0].tolist()]
    )
    assert np.median(scales) == pytest.approx(1, abs=0.05)


def test_a_scale_is_that_of_the_plain_formula():
    tables, ids, embeddings, densities = draw(1)
    among = Spread(
        *measure_spread(tables, ids, embeddings, densities, has_modality_level=True)
    ).target_spread(frozenset([0]))
    query = np.random.default_rng(2).standard_normal(8).astype(np.float32)
    products = np.array([query @ tables[1][code] for code in ids[ids[:, 0] == 0, 1]])
    assert among.scale((query @ tables[1].T)[None])[0] == pytest.approx(
        among.deviation / products.std(), rel=1e-4
    )


def test_modalities_have_spreads_of_their_own():
    tables, ids, embeddings, densities = draw(5)
    tables[2][:] *= np.linspace(0.1, 3, 16)[:, None].astype(np.float32)
    ids[:, 2] = np.where(ids[:, 0] == 0, 0, 15)
    spread = Spread(*measure_spread(tables, ids, embeddings, densities, has_modality_level=True))
    assert (
        spread.target_spread(frozenset([1])).deviation
        > 1.5 * spread.target_spread(frozenset([0])).deviation
    )


def test_what_cannot_differ_is_left_as_it_is():
    tables, ids, embeddings, densities = draw(6)
    usage, spreads = measure_spread(
        tables, ids[:1], embeddings[:1], densities[:1], has_modality_level=True
    )
    [modality] = ids[:1, 0]
    assert spreads[modality] == pytest.approx([0, densities[0], 0])  # of no reliability
    nothing = Spread(usage, spreads).target_spread()
    assert nothing.scale(np.ones((2, 16))).tolist() == [1, 1]


@pytest.mark.parametrize("has_modality_level", [True, False])
def test_the_columns_are_spread_and_mean_and_reliability_of_densities(has_modality_level):
    tables, ids, embeddings, densities = draw(8)
    if not has_modality_level:
        tables, ids = tables[1:], ids[:, 1:]
    usage, spreads = measure_spread(
        tables, ids, embeddings, densities, has_modality_level=has_modality_level
    )
    for modality in range(3 if has_modality_level else 1):
        own = ids[:, 0] == modality if has_modality_level else np.ones(len(ids), dtype=bool)
        if not own.any():
            assert spreads[modality].tolist() == [0, 0, 0]
            continue
        first = tables[int(has_modality_level)]
        chosen = first[ids[own, int(has_modality_level)]]
        items = sum_codes(tables, ids[own])
        spread = np.mean([(chosen @ item).std() for item in items])
        assert spreads[modality, 0] == pytest.approx(spread, rel=1e-4)
        assert spreads[modality, 1] == pytest.approx(densities[own].mean(), rel=1e-4)
        assert spreads[modality, 2] == pytest.approx(measure_reliability(embeddings[own]))
    assert usage.sum() == len(ids)


def test_densities_fade_with_the_third_power_over_the_last_part_of_a_cosine():
    assert fade(np.float32([-1, 0, 0.75])).tolist() == pytest.approx([1, 1, 1])
    assert fade(np.float32([0.8, 0.875, 0.95])) == pytest.approx([0.8**3, 0.5**3, 0.2**3], rel=1e-5)
    assert fade(np.float32([1, 1.001])).tolist() == [0, 0]  # rounding may leave more than 1


@pytest.mark.parametrize(
    ("items", "width", "least", "greatest"),
    [(1, 0.25, 48, 208), (100_000, 0.25, 48, 208), (316_228, 0.2, 24, 232), (10**6, 0.15, 0, 255)],
)
def test_densities_are_limited_and_fade_early_in_small_pools(items, width, least, greatest):
    assert fade_width(items) == pytest.approx(width, abs=1e-4)
    limited = limit_densities(np.array([0, 100, 128, 255], dtype=np.uint8), items)
    assert limited.tolist() == [least, 100, 128, greatest]
    assert limited.dtype == np.uint8


def test_a_byte_is_a_density_of_a_step_around_zero():
    bytes_ = encode_densities(np.float32([-1, -0.16, -0.0016, 0, 0.00125, 0.01, 0.15875, 1]))
    assert bytes_.tolist() == [0, 0, 127, 128, 129, 136, 255, 255]
    assert decode_densities(bytes_) == pytest.approx(
        [-0.16, -0.16, -0.00125, 0, 0.00125, 0.01, 0.15875, 0.15875]
    )


def test_residuals_lose_constant_directions():
    plain = Residuals.unweighted(8)
    residuals = np.random.default_rng(7).standard_normal((5, 8)).astype(np.float32)
    np.testing.assert_array_equal(plain.apply(residuals, 1), residuals)
    direction = np.full((1, 8), 8**-0.5, dtype=np.float32)
    left = plain._replace(constant=direction).apply(residuals, 4)
    np.testing.assert_allclose(left.mean(axis=1), 0, atol=1e-6)
