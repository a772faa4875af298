"""Indexes of faiss: recall, scores, bytes, and the candidates they compare."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

from research.baselines.faiss_index import FaissIndex, train_index

RANDOM = np.random.default_rng(0)
VECTORS = RANDOM.standard_normal((1_000, 8)).astype(np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)
QUERIES = VECTORS[:20]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    faiss.omp_set_num_threads(1)


@pytest.mark.parametrize(
    "factory", ["IVF20,RQ3x8_Nqint8", "IVF20,PQ4x8np", "Flat", "SQfp16", "HNSW32_SQfp16"]
)
def test_scores_never_rise_and_are_about_the_inner_products(factory):
    found = FaissIndex(train_index(factory, VECTORS), VECTORS).search(QUERIES, 10, effort=64)
    for query, items, scores in zip(QUERIES, found.items, found.scores, strict=True):
        assert (np.diff(scores) <= 0).all()
        assert abs((scores - VECTORS[items] @ query).mean()) < 0.1


@pytest.mark.parametrize("factory", ["IVF20,PQ4x6np", "IVF20,RQ4x4fs_32_Nrq2x4", "IVF20,RQ2x6_Nqint8"])
def test_candidates_are_counted_whatever_the_index(factory):
    index = FaissIndex(train_index(factory, VECTORS), VECTORS)
    assert index.search(QUERIES, 10, effort=20).compared == 20 * 1_000
    assert 0 < index.search(QUERIES, 10, effort=1).compared < 20 * 200
    assert all(len(items) == 10 for items in index.search(QUERIES, 10, effort=20).items)
    everything = index.search(QUERIES, 10, effort=50)  # more lists than there are
    assert [row.tolist() for row in everything.items] == [
        row.tolist() for row in index.search(QUERIES, 10, effort=20).items
    ]
