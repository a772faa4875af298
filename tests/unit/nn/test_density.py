from __future__ import annotations

import math

import numpy as np
import pytest

from genius_search.nn import density
from genius_search.nn.codebooks import normalize, sum_codes
from genius_search.nn.density import NormAndDensity
from genius_search.nn.spread import (
    DENSITY_STEPS,
    HALF_NORM_STEPS,
    MAX_BYTE,
    decode_densities,
    decode_half_norms,
)

DIM = 5
SIZES = (3, 9, 7)


def draw_tables(seed: int, sizes=SIZES, dim=DIM) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [
        (random.standard_normal((size, dim)) * 0.5**level).astype(np.float32)
        for level, size in enumerate(sizes)
    ]


def drawn_codes(seed: int, count: int, sizes=SIZES) -> np.ndarray:
    return np.random.default_rng(seed).integers(sizes, size=(count, len(sizes)))


def cosine(one, other) -> float:
    return float(normalize(np.float64(one)) @ normalize(np.float64(other)))


def plainly(
    tables: list[np.ndarray], code: list[int], *, has_modality_level: bool
) -> tuple[float, float]:
    """One ID, number by number."""
    levels = [table.tolist() for table in tables]
    vector = [
        sum(level[at][axis] for level, at in zip(levels, code, strict=True)) for axis in range(DIM)
    ]
    cosines = []
    for first in levels[1] if has_modality_level else levels[0]:
        near = first
        if has_modality_level:
            near = [one + other for one, other in zip(first, levels[0][code[0]], strict=True)]
        product = math.fsum(one * other for one, other in zip(vector, near, strict=True))
        cosines.append(product / (math.hypot(*vector) * math.hypot(*near)))
    return math.fsum(one * one for one in vector) / 2, max(cosines)


@pytest.mark.parametrize("has_modality_level", [True, False])
def test_half_norm_and_density_equal_a_plain_computation(has_modality_level, monkeypatch):
    tables, codes = draw_tables(1), drawn_codes(2, 40)
    expected = np.array(
        [plainly(tables, code, has_modality_level=has_modality_level) for code in codes.tolist()]
    )
    for block in (density.COSINES_PER_BLOCK, 20):  # all together, and a few at a time
        monkeypatch.setattr(density, "COSINES_PER_BLOCK", block)
        measurer = NormAndDensity(tables, has_modality_level=has_modality_level)
        found = measurer.densities(sum_codes(tables, codes), codes)
        np.testing.assert_allclose(found, expected[:, 1], rtol=1e-5, atol=1e-6)
        half_norms = measurer.columns(sum_codes(tables, codes), codes)[:, 0]
        np.testing.assert_allclose(
            half_norms, (expected[:, 0] * HALF_NORM_STEPS).clip(max=MAX_BYTE), atol=0.51
        )


@pytest.mark.parametrize("has_modality_level", [True, False])
def test_with_a_sample_of_the_pool_density_is_the_cosine_to_the_nearest_other(has_modality_level):
    tables, codes, sample = (
        draw_tables(1),
        drawn_codes(2, 60),
        np.unique(drawn_codes(3, 80), axis=0),
    )
    measurer = NormAndDensity(
        tables, has_modality_level=has_modality_level, sample=sample.astype(np.int16)
    )
    found = measurer.densities(sum_codes(tables, codes), codes)
    vectors = {
        tuple(one): sum(t[c] for t, c in zip(tables, one, strict=True)) for one in sample.tolist()
    }
    for code, value in zip(codes.tolist(), found.tolist(), strict=True):
        own = sum(table[at] for table, at in zip(tables, code, strict=True))
        cosines = [
            cosine(own, other)
            for one, other in vectors.items()
            if one != tuple(code) and (not has_modality_level or one[0] == code[0])
        ]
        assert value == pytest.approx(max(cosines), abs=1e-5)
    assert any(
        tuple(code) in vectors for code in codes.tolist()
    )  # an ID is no neighbour of its own


BASELINE = np.array([[0.7, 0.9], [0.9, 0.3], [0.85, 0.0]])
"""Mean and reliability of the densities of each modality."""


def expected_byte(nearest: float, mean: float, reliability: float) -> float:
    """Return the byte of a density before rounding: 128 + 800 ρ (r − mean r), within a byte."""
    return min(max(128 + 800 * reliability * (nearest - mean), 0), 255)


@pytest.mark.parametrize("has_modality_level", [True, False])
@pytest.mark.parametrize("sampled", [0, 80])
def test_item_density_is_relative_to_the_mean_of_the_modality_times_its_reliability(
    has_modality_level, sampled, monkeypatch
):
    tables, codes = draw_tables(1), drawn_codes(2, 60)
    sample = np.unique([*codes[:20], *drawn_codes(3, sampled)], axis=0) if sampled else codes[:0]
    embeddings = normalize(np.random.default_rng(9).standard_normal((60, DIM)))
    baseline = BASELINE if has_modality_level else BASELINE[:1]
    expected = []
    for embedding, code in zip(embeddings, codes.tolist(), strict=True):
        if sampled:
            others = [
                one
                for one in sample.tolist()
                if one != code and one[: int(has_modality_level)] == code[: int(has_modality_level)]
            ]
            near = [sum(t[c] for t, c in zip(tables, one, strict=True)) for one in others]
        else:
            near = (
                [tables[0][code[0]] + first for first in tables[1]]
                if has_modality_level
                else list(tables[0])
            )
        nearest = max(cosine(embedding, one) for one in near)
        expected.append(expected_byte(nearest, *baseline[code[0] if has_modality_level else 0]))
    assert min(expected) < 100 < 150 < max(expected)
    for block in (density.COSINES_PER_BLOCK, 20):
        monkeypatch.setattr(density, "COSINES_PER_BLOCK", block)
        measurer = NormAndDensity(
            tables, has_modality_level=has_modality_level, sample=sample, baseline=baseline
        )
        kept = measurer.item_density(embeddings, codes)
        assert kept.dtype == np.uint8
        np.testing.assert_allclose(kept, expected, atol=0.51)


def test_without_a_baseline_no_item_is_denser_than_another():
    tables, codes = draw_tables(1), drawn_codes(2, 60)
    measurer = NormAndDensity(tables, has_modality_level=True)
    assert set(measurer.columns(sum_codes(tables, codes), codes)[:, 1].tolist()) == {128}
    assert not decode_densities(measurer.item_density(sum_codes(tables, codes), codes)).any()


def test_what_is_kept_is_within_half_a_step_of_what_was_measured():
    tables, codes = [table / 3 for table in draw_tables(3)], drawn_codes(4, 200)
    mean, reliability = 0.9, 0.8
    measurer = NormAndDensity(
        tables, has_modality_level=True, baseline=np.array([[mean, reliability]] * SIZES[0])
    )
    vectors = sum_codes(tables, codes)
    kept = measurer.columns(vectors, codes)
    assert kept.dtype == np.int16
    assert kept[:, 0].max() < 255  # no half norm was cut off
    half_norms, densities = decode_half_norms(kept[:, 0]), decode_densities(kept[:, 1])
    assert (
        np.abs(half_norms - np.square(vectors).sum(axis=1) / 2).max()
        <= 0.5 / HALF_NORM_STEPS + 1e-6
    )
    relative = reliability * (measurer.densities(vectors, codes) - mean)
    # The lowest and the highest byte stand for what is beyond them: -128/800 and 127/800.
    expected = relative.clip(-0.16, 0.15875)
    assert len(np.unique(kept[:, 1])) > 20
    assert np.abs(densities - expected).max() <= 0.5 / DENSITY_STEPS + 1e-6


@pytest.mark.parametrize("sampled", [0, 300])
def test_equal_ids_get_equal_columns_whatever_they_are_computed_with(sampled):
    tables = draw_tables(5, (3, 200, 60), 64)
    codes = drawn_codes(6, 500, (3, 200, 60))
    baseline = np.array([[0.5, 0.7], [0.8, 0.7], [0.9, 0.7]])
    measurer = NormAndDensity(
        tables, has_modality_level=True, sample=codes[:sampled], baseline=baseline
    )

    def columns_of(codes):
        return measurer.columns(sum_codes(tables, codes), codes)

    together = columns_of(codes)
    alone = np.concatenate([columns_of(code[None]) for code in codes[:100]])
    assert np.array_equal(alone, together[:100])
    assert len(np.unique(together[:, 1])) > 20
    backwards = columns_of(codes[::-1])
    assert np.array_equal(backwards[::-1], together)
