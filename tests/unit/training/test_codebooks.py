"""Codebooks fitted to a pool without training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from genius_search.config import FusionConfig
from genius_search.nn.quantizer import Quantizer
from genius_search.nn.spread import HALF_NORM_STEPS
from genius_search.progress import Silent
from genius_search.recipe import QuantizerConfig
from genius_search.training.codebooks import codebook_size, fit_codebooks

DIM = 16
ITEMS = 1200


def unit(vectors):
    return F.normalize(torch.from_numpy(vectors).float(), dim=1)


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


def encode(quantizer, embeddings, modalities):
    modalities = torch.from_numpy(modalities.astype(np.int64))
    return quantizer.encode_items(torch.zeros_like(embeddings), embeddings, modalities)


@pytest.mark.parametrize(("items", "expected"), [(1, 4), (159, 8), (1_000, 64), (32_368, 256), (10**7, 256)])
def test_codebooks_shrink_with_the_pool(items, expected):
    assert codebook_size(items) == expected


def test_codes_describe_the_pool_better_than_residual_kmeans(embeddings, tmp_path):
    quantizer = fit(embeddings, MODALITIES, tmp_path / "quantizer").quantizer
    codes = encode(quantizer, embeddings, MODALITIES).codes
    assert (codes[:, 0].numpy() == MODALITIES).all()
    assert len(quantizer.pool_sample) > 100

    plain = Quantizer(DIM, quantizer.config)
    modalities = torch.from_numpy(MODALITIES.astype(np.int64))
    random = torch.Generator().manual_seed(0)
    plain.start_codebooks(embeddings, modalities, batch_size=ITEMS, generator=random)
    greedy = plain.quantize(embeddings, modalities).codes
    errors = [
        float((embeddings - own.decode(ids)).square().sum(dim=1).mean())
        for own, ids in ((quantizer, codes), (plain, greedy))
    ]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("items", [1, 2, 5])
def test_a_handful_of_items_gets_ids(tmp_path, items):
    vectors = unit(np.random.default_rng(2).standard_normal((items, DIM)))
    kinds = np.ones(items, dtype=np.int8)
    encoded = encode(fit(vectors, kinds, tmp_path / "quantizer").quantizer, vectors, kinds)
    assert (encoded.code_cosine > 0.99).all()
    assert len(encoded.codes.unique(dim=0)) == items


def test_ids_store_half_of_their_half_norms_unless_the_embeddings_were_trained(embeddings, tmp_path):
    untrained = fit(embeddings, MODALITIES, tmp_path / "untrained").quantizer
    stored = []
    for kind, weight in (("sum", 0.5), ("network", 1.0)):
        fused_by = Quantizer(DIM, QuantizerConfig(fusion=FusionConfig(kind=kind)))
        quantizer = fit(embeddings, MODALITIES, tmp_path / kind, fused_by=fused_by).quantizer
        assert quantizer.config.norm_weight == weight
        stored.append(quantizer.norm_and_density.columns(quantizer.pool_sample.long()))
    codes = untrained.pool_sample.long()
    assert torch.equal(untrained.norm_and_density.columns(codes), stored[0])
    vectors = untrained.decode(codes)
    expected = vectors.square().sum(dim=1) / 4
    assert (stored[0][:, 0] / HALF_NORM_STEPS - expected).abs().max() < 0.6 / HALF_NORM_STEPS
    assert (stored[1][:, 0] / HALF_NORM_STEPS - 2 * expected).abs().max() < 0.6 / HALF_NORM_STEPS
    assert torch.equal(stored[0][:, 1], stored[1][:, 1])


def test_the_same_embeddings_and_seed_give_the_same_codebooks(embeddings, tmp_path):
    first, second = (fit(embeddings, MODALITIES, tmp_path / name) for name in "ab")
    assert first.manifest.fingerprint == second.manifest.fingerprint
    for one, other in zip(first.quantizer.tables(), second.quantizer.tables(), strict=True):
        assert torch.equal(one, other)
