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
CODED = ["IVF20,RQ3x8_Nqint8", "IVF20,RQ6x4fs_32_Nrq2x4", "IVF20,PQ4x8np"]


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


@pytest.mark.parametrize("factory", CODED)
def test_in_a_cone_distance_finds_more_than_inner_products_at_as_many_bytes(factory):
    random, dim = np.random.default_rng(5), 16
    axis, centres = random.standard_normal(dim), 0.6 * random.standard_normal((40, dim))
    items = unit(axis + centres[random.integers(0, 40, 2_000)] + 0.4 * random.standard_normal((2_000, dim)))
    queries = unit(items[:100] + 0.05 * random.standard_normal((100, dim)))
    exact = np.argsort(-queries @ items.T, axis=1)[:, :10].tolist()
    # Residual codes without a norm have another code for its byte.
    plain = factory.replace("3x8_Nqint8", "4x8_Nnone").replace("6x4fs_32_Nrq2x4", "8x4fs_32_Nnone")
    by_product = faiss.index_factory(dim, plain, faiss.METRIC_INNER_PRODUCT)
    if hasattr(by_product, "rq"):
        by_product.rq.max_beam_size, by_product.rq.use_beam_LUT = 4, 1
        by_product.rq.train_type = faiss.ResidualQuantizer.Train_default
    by_product.train(items)
    by_product.add(items)
    if "IVF" in factory:
        by_product.nprobe = 20
    products = by_product.search(queries, 10)[1].tolist()
    distances = FaissIndex(factory, items).search(queries, 10, effort=20).items
    assert recall(distances, exact) > recall(products, exact)


@pytest.mark.parametrize("factory", ["SQfp16", "HNSW32_SQfp16", "IVF15,PQ16x8np", "IVF15,RQ15x8_Nqint8"])
def test_an_index_of_other_vectors_than_it_was_trained_on_finds_them(factory):
    vectors = unit(np.random.default_rng(1).standard_normal((1_000, 16)))
    trained = train_index(factory, vectors[:500])
    index = FaissIndex(factory, vectors[500:], trained=trained)
    found = index.search(vectors[500:520], 10, effort=64).items
    assert sum(row in items for row, items in enumerate(found)) >= 19
    assert len(index) == 500
    assert len(FaissIndex(factory, vectors[:7], trained=trained)) == 7


def test_an_approximate_search_may_find_fewer():
    found = FaissIndex("IVF200,SQfp16", VECTORS).search(QUERIES, 1_000, effort=1)
    assert min(map(len, found.items)) < 1_000
    assert [len(items) for items in found.items] == [len(scores) for scores in found.scores]


def test_the_same_seed_trains_the_same_index(monkeypatch):
    monkeypatch.setattr("research.baselines.faiss_index.TRAINING_ITEMS", 300)
    one, two, other = (
        [row.tolist() for row in FaissIndex("IVF20,Flat", VECTORS, trained=trained).search(QUERIES, 50).items]
        for trained in (train_index("IVF20,Flat", VECTORS, seed=seed) for seed in (1, 1, 2))
    )
    assert one == two
    assert one != other


def test_vectors_are_added_in_blocks(monkeypatch):
    expected = FaissIndex("Flat", VECTORS.astype(np.float16)).search(QUERIES, 10)
    monkeypatch.setattr("research.baselines.faiss_index.BLOCK", 300)
    found = FaissIndex("Flat", VECTORS.astype(np.float16)).search(QUERIES, 10)
    np.testing.assert_array_equal(found.items, expected.items)


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


def test_codes_in_four_bits_find_as_much_as_codes_in_six():
    def share(factory: str) -> float:
        found = FaissIndex(factory, VECTORS).search(QUERIES, 10, effort=20)
        return float(np.mean([number in row for number, row in enumerate(found.items)]))

    assert share("IVF20,RQ4x4fs_32_Nrq2x4") > 0.9
    assert share("IVF20,RQ2x6_Nqint8") > 0.9


def test_bytes_are_those_of_the_file_faiss_writes(tmp_path):
    index = FaissIndex("HNSW8", VECTORS)
    faiss.write_index(index._index, str(tmp_path / "index"))
    assert index.item_bytes * len(index) == (tmp_path / "index").stat().st_size
