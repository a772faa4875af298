"""Codebooks fitted to a pool without training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from genius_search.config import FusionConfig
from genius_search.nn.fusion import make_fusion
from genius_search.nn.quantizer import encode, fuse, make_quantizer
from genius_search.progress import Silent
from genius_search.training.codebooks import codebook_size, fit_codebooks

DIM = 16
ITEMS = 1200


@pytest.fixture(scope="module")
def pool(make_features):
    """Images, texts and pairs around forty centres."""
    random = np.random.default_rng(1)
    vectors = random.standard_normal((40, DIM))[random.integers(40, size=ITEMS)]
    vectors += 0.3 * random.standard_normal((ITEMS, DIM))
    image = [None if row % 3 == 1 else vectors[row] for row in range(ITEMS)]
    text = [None if row % 3 == 0 else 5 * vectors[row] for row in range(ITEMS)]
    return make_features(range(ITEMS), image, text, dim=DIM)


@pytest.mark.parametrize(("items", "expected"), [(1, 4), (159, 8), (1_000, 64), (32_368, 256), (10**7, 256)])
def test_codebooks_shrink_with_the_pool(items, expected):
    assert codebook_size(items) == expected


def test_sum_fusion_weighs_image_and_text_alike_whatever_their_scale():
    image, text = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0))
    image[0], text[1] = 0, 0
    fused = make_fusion(DIM, FusionConfig(kind="sum"))(100 * image, text)
    torch.testing.assert_close(fused[0], F.normalize(text[0], dim=0))
    torch.testing.assert_close(fused[1], F.normalize(image[1], dim=0))
    both = F.normalize(image[2:], dim=1) + F.normalize(text[2:], dim=1)
    torch.testing.assert_close(fused[2:], F.normalize(both, dim=1))


def test_codes_describe_the_pool_better_than_residual_kmeans(pool, tmp_path):
    quantizer = fit_codebooks(pool, tmp_path / "quantizer", progress=Silent()).quantizer
    embeddings, codes = fuse(quantizer, pool).float(), encode(quantizer, pool).codes
    assert (codes[:, 0].numpy() == pool.modality).all()
    assert len(quantizer.pool_sample) > 100

    plain = make_quantizer(DIM, quantizer.config)
    modalities = torch.from_numpy(pool.modality.astype(np.int64))
    random = torch.Generator().manual_seed(0)
    plain.start_codebooks(embeddings, modalities, batch_size=ITEMS, generator=random)
    greedy = plain.quantize(embeddings, modalities).codes
    errors = [
        float((embeddings - own.decode(ids)).square().sum(dim=1).mean())
        for own, ids in ((quantizer, codes), (plain, greedy))
    ]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("items", [1, 2, 5])
def test_a_handful_of_items_gets_ids(make_features, tmp_path, items):
    vectors = np.random.default_rng(2).standard_normal((items, DIM))
    features = make_features(range(items), [None] * items, list(vectors), dim=DIM)
    quantizer = fit_codebooks(features, tmp_path / "quantizer", progress=Silent()).quantizer
    encoded = encode(quantizer, features)
    assert (encoded.code_cosine > 0.99).all()
    assert len(encoded.codes.unique(dim=0)) == items


def test_the_same_features_and_seed_give_the_same_codebooks(pool, tmp_path):
    first, second = (fit_codebooks(pool, tmp_path / name, progress=Silent()) for name in "ab")
    assert first.manifest.fingerprint == second.manifest.fingerprint
    for one, other in zip(first.quantizer.tables(), second.quantizer.tables(), strict=True):
        assert torch.equal(one, other)
