"""Codebooks fitted to a pool without training."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.config import FusionConfig
from genius_search.nn.codebooks import (
    POOL_SAMPLE,
    Codebooks,
    normalize,
    sum_codes,
    weight_shapes,
)
from genius_search.nn.coder import Coder
from genius_search.nn.kmeans import residual_kmeans
from genius_search.nn.spread import HALF_NORM_STEPS
from genius_search.progress import Silent
from genius_search.recipe import QuantizerConfig
from genius_search.training.codebooks import fit_codebooks, measure_reliability

DIM = 16
ITEMS = 1200


def unit(vectors):
    return normalize(vectors.astype(np.float32))


@pytest.fixture(scope="module")
def embeddings():
    """Unit vectors around forty centres."""
    random = np.random.default_rng(1)
    vectors = random.standard_normal((40, DIM))[random.integers(40, size=ITEMS)]
    return unit(vectors + 0.3 * random.standard_normal((ITEMS, DIM)))


MODALITIES = np.arange(ITEMS, dtype=np.int8) % 3


def fit(embeddings, modalities, folder, fused_by=None):
    return fit_codebooks(
        embeddings,
        modalities,
        folder,
        items=len(embeddings),
        inputs={"made": "up"},
        fused_by=fused_by,
        progress=Silent(),
    )


def test_codes_describe_the_pool_better_than_residual_kmeans(embeddings, tmp_path):
    codebooks = fit(embeddings, MODALITIES, tmp_path / "quantizer").codebooks
    codes = Coder(codebooks).encode_items(embeddings, MODALITIES).codes
    assert (codes[:, 0] == MODALITIES).all()
    assert len(codebooks.weights[POOL_SAMPLE]) > 100
    left = embeddings - sum_codes(codebooks.tables(), codes)
    random, iterations = np.random.default_rng(0), [15] * len(codebooks.sizes)
    levels = residual_kmeans(
        embeddings, MODALITIES, codebooks.sizes, iterations=iterations, random=random
    )
    plain = embeddings - sum(level.centroids[level.codes] for level in levels)
    assert np.square(left).sum() < 0.8 * np.square(plain).sum()


@pytest.mark.parametrize("items", [1, 2, 5])
def test_a_handful_of_items_gets_ids(tmp_path, items):
    vectors = unit(np.random.default_rng(2).standard_normal((items, DIM)))
    kinds = np.ones(items, dtype=np.int8)
    encoded = Coder(fit(vectors, kinds, tmp_path / "quantizer").codebooks).encode_items(
        vectors, kinds
    )
    assert (encoded.code_cosine > 0.99).all()
    assert len(np.unique(encoded.codes, axis=0)) == items


def test_ids_store_half_of_their_half_norms_unless_the_embeddings_were_trained(
    embeddings, tmp_path
):
    untrained = fit(embeddings, MODALITIES, tmp_path / "untrained").codebooks
    codes, stored = untrained.weights[POOL_SAMPLE], []
    vectors = sum_codes(untrained.tables(), codes)
    for kind, weight in (("sum", 0.5), ("network", 1.0)):
        config = QuantizerConfig(fusion=FusionConfig(kind=kind), codebook_size=4)
        shapes = weight_shapes(DIM, config)
        fused_by = Codebooks(
            DIM, config, {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        )
        codebooks = fit(embeddings, MODALITIES, tmp_path / kind, fused_by=fused_by).codebooks
        assert codebooks.config.norm_weight == weight
        assert codebooks.config.fusion == config.fusion
        stored.append(Coder(codebooks).norm_and_density.columns(vectors, codes))
    assert np.array_equal(Coder(untrained).norm_and_density.columns(vectors, codes), stored[0])
    expected = np.square(vectors).sum(axis=1) / 4
    assert np.abs(stored[0][:, 0] / HALF_NORM_STEPS - expected).max() < 0.6 / HALF_NORM_STEPS
    assert np.abs(stored[1][:, 0] / HALF_NORM_STEPS - 2 * expected).max() < 0.6 / HALF_NORM_STEPS
    assert np.array_equal(stored[0][:, 1], stored[1][:, 1])


def test_the_same_embeddings_and_seed_give_the_same_codebooks(embeddings, tmp_path):
    first, second = (fit(embeddings, MODALITIES, tmp_path / name) for name in "ab")
    assert first.manifest.fingerprint == second.manifest.fingerprint
    for one, other in zip(first.codebooks.tables(), second.codebooks.tables(), strict=True):
        assert np.array_equal(one, other)


def plain_reliability(items: np.ndarray) -> float:
    """Return the agreement of densities among every second item and among the others."""
    estimates = []
    for start in (0, 1):
        others = items[start::2]
        nearest = []
        for item in items:
            cosines = others @ item
            nearest.append(max(cosines[cosines <= 1 - 1e-4]))
        estimates.append(nearest)
    correlation = np.corrcoef(estimates)[0, 1]
    return max(0.0, 2 * correlation / (1 + correlation))


def test_densities_of_random_vectors_are_noise_and_those_of_clusters_are_not():
    random = np.random.default_rng(0)
    noise = unit(random.standard_normal((1000, 32)))
    assert measure_reliability(noise) == pytest.approx(plain_reliability(noise), abs=1e-4)
    assert measure_reliability(noise) < 0.1
    widths = np.linspace(0.05, 1, 20)  # of clusters; in narrow ones items are near to each other
    cluster = random.integers(20, size=1000)
    centres = random.standard_normal((20, 32))
    items = unit(centres[cluster] + widths[cluster, None] * random.standard_normal((1000, 32)))
    assert measure_reliability(items) == pytest.approx(plain_reliability(items), abs=1e-4)
    assert measure_reliability(items) > 0.95


@pytest.mark.parametrize("items", [1, 2, 3])
def test_densities_of_a_handful_or_of_copies_are_of_no_reliability(items):
    vectors = unit(np.random.default_rng(3).standard_normal((items, DIM)))
    assert measure_reliability(vectors) == 0
    assert measure_reliability(np.repeat(unit(np.ones((1, DIM))), 10 * items, axis=0)) == 0


def test_the_densities_of_a_pool_are_relative_to_their_mean_times_their_reliability(tmp_path):
    random = np.random.default_rng(4)
    widths = np.linspace(0.05, 0.6, 30)
    cluster = random.integers(30, size=ITEMS)
    centres = random.standard_normal((30, DIM))
    items = unit(centres[cluster] + widths[cluster, None] * random.standard_normal((ITEMS, DIM)))
    kinds = np.ones(ITEMS, dtype=np.int8)
    coder = Coder(fit(items, kinds, tmp_path / "quantizer").codebooks)
    codes = coder.encode_items(items, kinds).codes
    density = coder.norm_and_density.densities(items, codes)
    bytes_ = coder.norm_and_density.item_density(items, codes)
    reliability = measure_reliability(items)
    assert reliability > 0.9
    expected = 128 + 800 * reliability * (density - density.mean())
    assert np.abs(bytes_ - expected.clip(0, 255)).max() < 8  # of samples drawn for each
    assert bytes_.std() > 5
    flat = unit(random.standard_normal((ITEMS, 64)))
    coder = Coder(fit(flat, kinds, tmp_path / "flat").codebooks)
    bytes_ = coder.norm_and_density.item_density(flat, coder.encode_items(flat, kinds).codes)
    assert np.abs(bytes_.astype(int) - 128).max() < 8  # by which no item rises or falls
