"""IDs as an index stores them: codes, then half norm and density, which only ranking uses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from genius_search.config import SearchConfig
from genius_search.nn.density import NormAndDensity
from genius_search.nn.spread import decode_densities, decode_half_norms
from genius_search.search.rank import Beams, CodeRanker, Evidence, rank_items
from genius_search.search.table import IdTable, SearchSegment

SIZES = (3, 6, 5)
DIM = 6
ITEMS = 120
DENSITY_WEIGHT = 0.7


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(11)


@pytest.fixture
def tables(random) -> list[torch.Tensor]:
    return [torch.randn(size, DIM, generator=random) / 4 for size in SIZES]


@pytest.fixture
def codes(random) -> torch.Tensor:
    return torch.stack([torch.randint(size, (ITEMS,), generator=random) for size in SIZES], dim=1)


@pytest.fixture
def marked(tables, codes) -> np.ndarray:
    """Codes of items with half norm and density."""
    own = NormAndDensity([table.numpy() for table in tables], has_modality_level=True).columns(codes.numpy())
    return np.concatenate([codes.numpy(), own], axis=1).astype(np.int16)


@pytest.fixture
def embeddings(random) -> torch.Tensor:
    return F.normalize(torch.randn(ITEMS, DIM, generator=random), dim=1)


@pytest.fixture
def queries(random) -> torch.Tensor:
    return F.normalize(torch.randn(5, DIM, generator=random), dim=1)


def built(items: np.ndarray) -> IdTable:
    return IdTable.build(items, np.zeros(len(items), dtype=np.float16))


def test_by_codes_an_id_scores_its_inner_product_less_half_norm_and_hubness(tables, codes, marked, queries):
    own = marked[:, len(SIZES) :]
    vectors = sum(table[codes[:, level]] for level, table in enumerate(tables))
    products = (queries[0] @ vectors.T).numpy()
    ranker = CodeRanker(tables)
    expected = products - decode_half_norms(own[:, 0]) - DENSITY_WEIGHT * decode_densities(own[:, 1])
    np.testing.assert_allclose(
        ranker.scores(queries[0], marked, density_cost=DENSITY_WEIGHT), expected, atol=1e-5
    )
    np.testing.assert_allclose(
        ranker.scores(queries[0], marked), products - decode_half_norms(own[:, 0]), atol=1e-5
    )
    np.testing.assert_allclose(ranker.scores(queries[0], codes.short().numpy()), products, atol=1e-5)


def test_fused_embeddings_are_corrected_by_their_own_density_where_that_is_known(
    tables, marked, embeddings, queries
):
    first, second = built(marked[:40]), built(marked[40:])
    known = np.arange(len(marked)).astype(np.uint8) * np.uint8(2)
    cosines = (embeddings @ queries[0]).numpy()
    expected = cosines - DENSITY_WEIGHT * known / np.float32(255)
    sizes = np.array([[[len(first), len(second)]]])
    whole = rank_items(
        [SearchSegment(first), SearchSegment(second)],
        Beams(np.zeros_like(sizes), sizes, np.zeros((1, 1, 0), dtype=np.float32)),
        0,
        queries[0],
        config=SearchConfig(rerank="embeddings", density_weight=DENSITY_WEIGHT),
        evidence=Evidence(
            CodeRanker(tables),
            [
                lambda items: embeddings[torch.from_numpy(items)],
                lambda items: embeddings[torch.from_numpy(items + 40)],
            ],
            densities=[known[:40], known[40:]],
        ),
        k=len(marked),
    )
    found = whole.items + 40 * whole.segments
    np.testing.assert_allclose(whole.scores, expected[found], atol=1e-6)
    assert found.tolist() == np.argsort(-expected, kind="stable").tolist()
