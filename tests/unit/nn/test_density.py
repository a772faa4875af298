from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from genius_search.nn import density
from genius_search.nn.density import NormAndDensity
from genius_search.nn.quantizer import Quantizer
from genius_search.nn.spread import (
    DENSITY_STEPS,
    HALF_NORM_STEPS,
    LARGEST,
    decode_densities,
    decode_half_norms,
)
from genius_search.recipe import QuantizerConfig

DIM = 5
SIZES = (3, 9, 7)


def drawn(seed: int, sizes=SIZES, dim=DIM) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(size, dim, generator=random) * 0.5**level for level, size in enumerate(sizes)]


def drawn_codes(seed: int, count: int, sizes=SIZES) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(size, (count,), generator=random) for size in sizes], dim=1)


def plainly(tables: list[torch.Tensor], code: list[int], *, has_modality_level: bool) -> tuple[float, float]:
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
        found = NormAndDensity(tables, has_modality_level=has_modality_level).measure(codes)
        np.testing.assert_allclose(torch.stack([*found], dim=1).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("has_modality_level", [True, False])
def test_with_a_sample_of_the_pool_density_is_the_mean_cosine_to_the_four_nearest_others(has_modality_level):
    tables, codes, sample = drawn(1), drawn_codes(2, 60), drawn_codes(3, 80).unique(dim=0)
    found = (
        NormAndDensity(tables, has_modality_level=has_modality_level, sample=sample.short())
        .measure(codes)
        .densities
    )
    vectors = {tuple(one): sum(t[c] for t, c in zip(tables, one, strict=True)) for one in sample.tolist()}
    for code, value in zip(codes.tolist(), found.tolist(), strict=True):
        own = sum(table[at] for table, at in zip(tables, code, strict=True))
        cosines = [
            torch.cosine_similarity(own, other, dim=0).item()
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
    sample = torch.cat([codes[:20], drawn_codes(3, sampled)]).unique(dim=0) if sampled else codes[:0]
    embeddings = torch.nn.functional.normalize(
        torch.randn(60, DIM, generator=torch.Generator().manual_seed(9)), dim=1
    )
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
        cosines = sorted(torch.cosine_similarity(embedding, one, dim=0).item() for one in near)
        expected.append(min(max(np.mean(cosines[-4:]), 0), 1) * DENSITY_STEPS)
    for at_once in (density.SCORES_AT_ONCE, 20):
        monkeypatch.setattr(density, "SCORES_AT_ONCE", at_once)
        measurer = NormAndDensity(tables, has_modality_level=has_modality_level, sample=sample)
        kept = measurer.item_density(embeddings, codes)
        assert kept.dtype == torch.uint8
        np.testing.assert_allclose(kept.numpy(), expected, atol=0.51)


def test_what_is_kept_is_within_half_a_step_of_what_was_measured():
    tables, codes = [table / 3 for table in drawn(3)], drawn_codes(4, 200)
    found = NormAndDensity(tables, has_modality_level=True).measure(codes)
    kept = NormAndDensity(tables, has_modality_level=True).columns(codes)
    assert kept.dtype == torch.int16
    assert kept.min() >= 0
    assert kept.max() < LARGEST  # nothing was cut off
    half_norms, densities = decode_half_norms(kept[:, 0].numpy()), decode_densities(kept[:, 1].numpy())
    assert np.abs(half_norms - found.half_norms.numpy()).max() <= 0.5 / HALF_NORM_STEPS + 1e-6
    crowded = found.densities.clamp(min=0).numpy()  # less than nothing counts as nothing
    assert np.abs(densities - crowded).max() <= 0.5 / DENSITY_STEPS + 1e-6


@pytest.mark.parametrize("sampled", [0, 300])
def test_equal_ids_get_equal_columns_whatever_they_are_computed_with(sampled):
    tables = drawn(5, (3, 200, 60), 64)
    codes = drawn_codes(6, 500, (3, 200, 60))
    columns_of = NormAndDensity(tables, has_modality_level=True, sample=codes[:sampled]).columns
    together = columns_of(codes)
    alone = torch.cat([columns_of(code[None]) for code in codes[:100]])
    assert torch.equal(alone, together[:100])
    backwards = columns_of(codes.flip(0))
    assert torch.equal(backwards.flip(0), together)


@pytest.mark.parametrize("level0", ["assigned", "learned", "none"])
def test_an_encoded_item_comes_with_norm_and_density_of_its_id(level0):
    torch.manual_seed(0)
    quantizer = Quantizer(8, QuantizerConfig(levels=2, codebook_size=6, level0=level0))
    for table in quantizer.tables():
        table.copy_(torch.randn_like(table) / 4)
    features = torch.randn(20, 8)
    found = quantizer.encode_items(features, torch.zeros(20, 8), torch.zeros(20, dtype=torch.int64))
    expected = NormAndDensity(quantizer.tables(), has_modality_level=level0 != "none").columns(found.codes)
    assert torch.equal(found.columns, torch.cat([found.codes, expected], dim=1).short())


def test_norm_and_density_follow_when_code_vectors_or_the_sample_change():
    torch.manual_seed(0)
    quantizer = Quantizer(8, QuantizerConfig(levels=2, codebook_size=6, level0="none"))
    for table in quantizer.tables():
        table.copy_(torch.randn_like(table) / 4)
    codes = drawn_codes(8, 30, (6, 6))
    seen = [quantizer.norm_and_density.columns(codes)]
    quantizer.set_pool_sample(codes[:20].unique(dim=0))
    seen.append(quantizer.norm_and_density.columns(codes))
    residuals = torch.randn(64, 8)
    quantizer.follow(quantizer.quantize(residuals), generator=torch.Generator().manual_seed(0))
    seen.append(quantizer.norm_and_density.columns(codes))
    quantizer.start_codebooks(
        residuals,
        torch.zeros(64, dtype=torch.int64),
        batch_size=8,
        generator=torch.Generator().manual_seed(0),
    )
    seen.append(quantizer.norm_and_density.columns(codes))
    assert not any(torch.equal(one, other) for one, other in pairwise(seen))
    expected = NormAndDensity(quantizer.tables(), has_modality_level=False, sample=codes[:20].unique(dim=0))
    assert torch.equal(seen[-1], expected.columns(codes))
