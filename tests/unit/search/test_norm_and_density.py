"""IDs as an index stores them: codes, then half norm and density, which only ranking uses."""

from __future__ import annotations

import numpy as np

from genius_search.nn.density import NormAndDensity
from genius_search.nn.spread import decode_densities, decode_half_norms
from genius_search.search.rank import CodeRanker

SIZES = (3, 6, 5)
DIM = 6
ITEMS = 120
DENSITY_WEIGHT = 0.7


def test_by_codes_an_id_scores_its_inner_product_less_half_norm_and_hubness():
    random = np.random.default_rng(11)
    tables = [random.standard_normal((size, DIM), dtype=np.float32) / 4 for size in SIZES]
    codes = random.integers(SIZES, size=(ITEMS, len(SIZES))).astype(np.int16)
    vectors = sum(table[codes[:, level]] for level, table in enumerate(tables))
    own = NormAndDensity(tables, has_modality_level=True).columns(vectors, codes)
    marked = np.concatenate([codes, own], axis=1)
    query = random.standard_normal(DIM, dtype=np.float32)
    products = vectors @ query
    ranker = CodeRanker(tables)
    half_norms, densities = decode_half_norms(own[:, 0]), decode_densities(own[:, 1])
    for given, costs, expected in (
        (codes, {}, products),
        (marked, {}, products - half_norms),
        (
            marked,
            {"density_cost": DENSITY_WEIGHT},
            products - half_norms - DENSITY_WEIGHT * densities,
        ),
    ):
        np.testing.assert_allclose(ranker.scores(query, given, **costs), expected, atol=1e-5)
