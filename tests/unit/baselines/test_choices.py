"""Named dense rivals: sizes that follow from the pool and from the bytes of an item."""

import numpy as np
import pytest

from genius_search.errors import UsageError
from genius_search.lab.baselines.dense import (
    Flat,
    Hnsw,
    build,
    dense_kind,
    fit,
    num_lists,
    pq_of,
    residual_of,
)

NAMES = ("exact", "hnsw", "ivf-pq", "ivf-rq")
RANDOM = np.random.default_rng(0)
VECTORS = RANDOM.standard_normal((1_000, 16)).astype(np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)


@pytest.mark.parametrize("code_bytes", [2, 5, 14, 15])
def test_codes_take_so_many_bytes_or_a_few_more(code_bytes):
    assert residual_of(num_items=10_000, code_bytes=code_bytes).code_bytes == code_bytes
    assert residual_of(num_items=10_000, code_bytes=code_bytes, is_fast=True).code_bytes == code_bytes
    product = pq_of(num_items=10_000, dim=128, code_bytes=code_bytes)
    assert 128 % product.parts == 0
    assert code_bytes <= product.code_bytes < 2 * code_bytes


def test_lists_and_codes_follow_from_the_pool():
    assert [num_lists(items) for items in (1, 320, 10_400, 10**6)] == [1, 10, 325, 1024]
    assert pq_of(num_items=100, dim=16, code_bytes=4).bits == 6


def test_residual_codes_without_room_beside_the_norm_are_refused():
    with pytest.raises(UsageError, match="give at least 2"):
        dense_kind("ivf-rq", num_items=1_000, num_training=1_000, dim=16, code_bytes=1, effort=4)


def test_exact_and_graph_keep_vectors_whatever_the_bytes_of_codes():
    kinds = [
        dense_kind(name, num_items=99, num_training=99, dim=16, code_bytes=3, effort=7)
        for name in ("exact", "hnsw")
    ]
    assert kinds == [Flat(stored="float16"), Hnsw(stored="float16", effort=7)]


@pytest.mark.parametrize("name", NAMES)
def test_an_index_of_other_vectors_than_it_was_fitted_on_finds_them(name):
    kind = dense_kind(name, num_items=500, num_training=500, dim=16, code_bytes=16, effort=64)
    fitted = fit(VECTORS[:500], kind)
    index = fitted.index(VECTORS[500:])
    found = index.search(VECTORS[500:520], 10).items
    assert sum(row in items for row, items in enumerate(found.tolist())) >= 19
    assert len(fitted.index(VECTORS[:7])) == 7
    assert len(index) == 500


@pytest.mark.parametrize("name", NAMES)
def test_compared_items_are_counted(name):
    kind = dense_kind(name, num_items=1_000, num_training=1_000, dim=16, code_bytes=8, effort=2)
    counted = build(VECTORS, kind).search_counting(VECTORS[:20], 5)
    assert counted.found.items.shape == (20, 5)
    if name == "exact":
        assert counted.compared == 20 * 1_000
    else:
        assert 20 * 5 <= counted.compared < 20 * 600


@pytest.mark.parametrize("name", ["ivf-pq", "ivf-rq"])
@pytest.mark.parametrize("items", [1, 3, 20, 40])
def test_small_pools_are_searched_whole(name, items):
    kind = dense_kind(name, num_items=items, num_training=1_000, dim=16, code_bytes=14, effort=16)
    found = fit(VECTORS, kind).index(VECTORS[:items]).search(VECTORS[:items], items)
    assert (np.sort(found.items, axis=1) == np.arange(items)).all()
    assert found.scores.max() < 1.2
    if items >= 20:
        assert (found.items[:, 0] == np.arange(items)).mean() > 0.5


def test_more_lists_than_there_are_mean_all_of_them():
    # Told of 16 lists where there is one, faiss's fast scan finds wrong items in about half of such draws.
    for seed in range(12):
        random = np.random.default_rng(seed)
        vectors = random.standard_normal((2_040, 32)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        pool, queries, training = np.split(vectors, [20, 40])
        one, sixteen = (
            fit(
                training,
                dense_kind("ivf-rq", num_items=20, num_training=2_000, dim=32, code_bytes=14, effort=effort),
            )
            .index(pool)
            .search(queries, 20)
            for effort in (1, 16)
        )
        np.testing.assert_array_equal(one.items, sixteen.items)
        np.testing.assert_allclose(one.scores, sixteen.scores, atol=1e-5)


def test_no_more_is_learned_than_there_are_vectors_to_learn_from():
    for name in ("ivf-pq", "ivf-rq"):
        kind = dense_kind(name, num_items=10_400, num_training=300, dim=16, code_bytes=14, effort=16)
        assert (kind.lists, kind.bits) == (300, 8)
        assert fit(VECTORS[:300], kind).index(VECTORS).search(VECTORS[:5], 3).items.shape == (5, 3)
