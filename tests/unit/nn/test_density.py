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
    LARGEST,
    decode_densities,
    decode_half_norms,
)

DIM = 5
SIZES = (3, 9, 7)


def drawn(seed: int, sizes=SIZES, dim=DIM) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [
        (random.standard_normal((size, dim)) * 0.5**level).astype(np.float32)
        for level, size in enumerate(sizes)
    ]


def drawn_codes(seed: int, count: int, sizes=SIZES) -> np.ndarray:
    return np.random.default_rng(seed).integers(sizes, size=(count, len(sizes)))


def cosine(one, other) -> float:
    return float(normalize(np.float64(one)) @ normalize(np.float64(other)))


def plainly(tables: list[np.ndarray], code: list[int], *, has_modality_level: bool) -> tuple[float, float]:
    """One ID, number by number."""
    levels = [table.tolist() for table in tables]
    vector = [sum(level[at][axis] for level, at in zip(levels, code, strict=True)) for axis in range(DIM)]
    cosines = []
    for first in levels[1] if has_modality_level else levels[0]:
        near = first
        if has_modality_level:
            near = [one + other for one, other in zip(first, levels[0][code[0]], strict=True)]
        product = math.fsum(one * other for one, other in zip(vector, near, strict=True))
        cosines.append(product / (math.hypot(*vector) * math.hypot(*near)))
    return math.fsum(one * one for one in vector) / 2, float(np.mean(sorted(cosines)[-4:]))


@pytest.mark.parametrize("has_modality_level", [True, False])
def test_half_norm_and_density_equal_a_plain_computation(has_modality_level, monkeypatch):
    tables, codes = drawn(1), drawn_codes(2, 40)
    expected = np.array(
        [plainly(tables, code, has_modality_level=has_modality_level) for code in codes.tolist()]
    )
    for at_once in (density.SCORES_AT_ONCE, 20):  # all together, and a few at a time
        monkeypatch.setattr(density, "SCORES_AT_ONCE", at_once)
        measurer = NormAndDensity(tables, has_modality_level=has_modality_level)
        found = measurer.densities(sum_codes(tables, codes), codes)
        np.testing.assert_allclose(found, expected[:, 1], rtol=1e-5, atol=1e-6)
        half_norms = measurer.columns(sum_codes(tables, codes), codes)[:, 0]
        np.testing.assert_allclose(
            half_norms, (expected[:, 0] * HALF_NORM_STEPS).clip(max=LARGEST), atol=0.51
        )


@pytest.mark.parametrize("has_modality_level", [True, False])
def test_with_a_sample_of_the_pool_density_is_the_mean_cosine_to_the_four_nearest_others(has_modality_level):
    tables, codes, sample = drawn(1), drawn_codes(2, 60), np.unique(drawn_codes(3, 80), axis=0)
    measurer = NormAndDensity(tables, has_modality_level=has_modality_level, sample=sample.astype(np.int16))
    found = measurer.densities(sum_codes(tables, codes), codes)
    vectors = {tuple(one): sum(t[c] for t, c in zip(tables, one, strict=True)) for one in sample.tolist()}
    for code, value in zip(codes.tolist(), found.tolist(), strict=True):
        own = sum(table[at] for table, at in zip(tables, code, strict=True))
        cosines = [
            cosine(own, other)
            for one, other in vectors.items()
            if one != tuple(code) and (not has_modality_level or one[0] == code[0])
        ]
        assert value == pytest.approx(np.mean(sorted(cosines)[-4:]), abs=1e-5)
    assert any(tuple(code) in vectors for code in codes.tolist())  # an ID is no neighbour of its own


@pytest.mark.parametrize("has_modality_level", [True, False])
@pytest.mark.parametrize("sampled", [0, 80])
def test_item_density_is_the_mean_cosine_of_an_embedding_to_what_its_id_is_compared_with(
    has_modality_level, sampled, monkeypatch
):
    tables, codes = drawn(1), drawn_codes(2, 60)
    sample = np.unique([*codes[:20], *drawn_codes(3, sampled)], axis=0) if sampled else codes[:0]
    embeddings = normalize(np.random.default_rng(9).standard_normal((60, DIM)))
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
                [tables[0][code[0]] + first for first in tables[1]] if has_modality_level else list(tables[0])
            )
        cosines = sorted(cosine(embedding, one) for one in near)
        expected.append(min(max(np.mean(cosines[-4:]), 0), 1) * DENSITY_STEPS)
    for at_once in (density.SCORES_AT_ONCE, 20):
        monkeypatch.setattr(density, "SCORES_AT_ONCE", at_once)
        measurer = NormAndDensity(tables, has_modality_level=has_modality_level, sample=sample)
        kept = measurer.item_density(embeddings, codes)
        assert kept.dtype == np.uint8
        np.testing.assert_allclose(kept, expected, atol=0.51)


def test_what_is_kept_is_within_half_a_step_of_what_was_measured():
    tables, codes = [table / 3 for table in drawn(3)], drawn_codes(4, 200)
    measurer, vectors = NormAndDensity(tables, has_modality_level=True), sum_codes(tables, codes)
    kept = measurer.columns(vectors, codes)
    assert kept.dtype == np.int16
    assert kept.min() >= 0
    assert kept.max() < LARGEST  # nothing was cut off
    half_norms, densities = decode_half_norms(kept[:, 0]), decode_densities(kept[:, 1])
    assert np.abs(half_norms - np.square(vectors).sum(axis=1) / 2).max() <= 0.5 / HALF_NORM_STEPS + 1e-6
    crowded = measurer.densities(vectors, codes).clip(min=0)  # less than nothing counts as nothing
    assert np.abs(densities - crowded).max() <= 0.5 / DENSITY_STEPS + 1e-6


@pytest.mark.parametrize("sampled", [0, 300])
def test_equal_ids_get_equal_columns_whatever_they_are_computed_with(sampled):
    tables = drawn(5, (3, 200, 60), 64)
    codes = drawn_codes(6, 500, (3, 200, 60))
    measurer = NormAndDensity(tables, has_modality_level=True, sample=codes[:sampled])

    def columns_of(codes):
        return measurer.columns(sum_codes(tables, codes), codes)

    together = columns_of(codes)
    alone = np.concatenate([columns_of(code[None]) for code in codes[:100]])
    assert np.array_equal(alone, together[:100])
    backwards = columns_of(codes[::-1])
    assert np.array_equal(backwards[::-1], together)
