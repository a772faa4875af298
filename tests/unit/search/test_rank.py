from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from genius_search.search.rank import CodeRanker, embedding_scores

SIZES = (2, 40, 30)
DIM = 6


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.fixture
def tables(random) -> list[torch.Tensor]:
    return [torch.randn(size, DIM, generator=random) for size in SIZES]


@pytest.mark.parametrize("count", [0, 1, 3, 200])
def test_the_score_by_codes_is_the_inner_product_with_the_sum_of_the_code_vectors(tables, random, count):
    """Few IDs and many take different ways."""
    query = torch.randn(DIM, generator=random)
    drawn = np.random.default_rng(count)
    ids = np.stack([drawn.integers(0, size, count) for size in SIZES], axis=1).astype(np.int16)
    expected = [
        float(query @ sum(tables[level][code] for level, code in enumerate(id_))) for id_ in ids.tolist()
    ]
    ranker = CodeRanker(tables)
    np.testing.assert_allclose(ranker.scores(query, ids), expected, rtol=1e-5, atol=1e-5)
    products = ranker.products(torch.stack([query, -query]))
    assert products.shape == (2, sum(SIZES))
    np.testing.assert_allclose(
        ranker.look_up(products[1], ids), [-score for score in expected], rtol=1e-5, atol=1e-5
    )


def test_code_vectors_that_are_being_trained_may_rank(tables):
    ranker = CodeRanker([table.double().requires_grad_() for table in tables])
    assert ranker.scores(torch.ones(DIM), np.zeros((1, 3), dtype=np.int16)).dtype == np.float32


def test_the_score_by_embeddings_is_the_cosine(random):
    stored = F.normalize(torch.randn(7, DIM, generator=random), dim=1)
    query = F.normalize(torch.randn(DIM, generator=random), dim=0)
    items = np.array([6, 0, 3])
    found = embedding_scores(query, stored[torch.from_numpy(items)].half())
    expected = F.cosine_similarity(query[None], stored[torch.from_numpy(items)])
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-3)
