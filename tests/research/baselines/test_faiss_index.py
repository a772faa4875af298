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


def unit(vectors):
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def recall(items, exact):
    return np.mean([len(set(row) & set(best)) / len(best) for row, best in zip(items, exact, strict=True)])


@pytest.mark.parametrize(
    "factory", ["IVF20,RQ3x8_Nqint8", "IVF20,PQ4x8np", "Flat", "SQfp16", "HNSW32_SQfp16"]
)
def test_scores_never_rise_and_are_about_the_inner_products(factory):
    found = FaissIndex(factory, VECTORS).search(QUERIES, 10, effort=64)
    for query, items, scores in zip(QUERIES, found.items, found.scores, strict=True):
        assert (np.diff(scores) <= 0).all()
        assert abs((scores - VECTORS[items] @ query).mean()) < 0.1


@pytest.mark.parametrize("factory", ["SQfp16", "HNSW32_SQfp16", "IVF15,PQ16x8np", "IVF15,RQ15x8_Nqint8"])
def test_an_index_of_other_vectors_than_it_was_trained_on_finds_them(factory):
    vectors = unit(np.random.default_rng(1).standard_normal((1_000, 16)))
    trained = train_index(factory, vectors[:500])
    index = FaissIndex(factory, vectors[500:], trained=trained)
    found = index.search(vectors[500:520], 10, effort=64).items
    assert sum(row in items for row, items in enumerate(found)) >= 19
    assert len(index) == 500
    assert len(FaissIndex(factory, vectors[:7], trained=trained)) == 7


@pytest.mark.parametrize("factory", ["IVF20,PQ4x6np", "IVF20,RQ4x4fs_32_Nrq2x4", "IVF20,RQ2x6_Nqint8"])
def test_candidates_are_counted_whatever_the_index(factory):
    index = FaissIndex(factory, VECTORS)
    assert index.search(QUERIES, 10, effort=20).compared == 20 * 1_000
    assert 0 < index.search(QUERIES, 10, effort=1).compared < 20 * 200
    assert all(len(items) == 10 for items in index.search(QUERIES, 10, effort=20).items)
    everything = index.search(QUERIES, 10, effort=50)  # more lists than there are
    assert [row.tolist() for row in everything.items] == [
        row.tolist() for row in index.search(QUERIES, 10, effort=20).items
    ]


@pytest.mark.parametrize("factory", ["Flat", "SQ8", "HNSW32", "IVF20,PQ4x8np,Refine(SQfp16)"])
def test_whole_vectors_find_themselves(factory):
    found = FaissIndex(factory, VECTORS).search(QUERIES, 10, effort=64)
    assert [row[0] for row in found.items] == list(range(20))
