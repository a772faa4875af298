"""K-means as the codebooks use it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius_search.nn.kmeans import assign, kmeans, sum_by_code


def draw_vectors(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def distances(samples, centroids):
    return np.linalg.norm(samples[:, None].astype(np.float64) - centroids, axis=2)


@given(items=st.integers(1, 40), size=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_the_nearest_centroid_is_the_nearest_by_squared_distance(items, size, seed):
    samples, centroids = draw_vectors(seed, items, 3), draw_vectors(seed + 1, size, 3)
    assert (
        assign(samples, centroids).tolist() == distances(samples, centroids).argmin(axis=1).tolist()
    )


@given(items=st.integers(1, 60), size=st.integers(1, 10), seed=st.integers(0, 10_000))
def test_kmeans_ends_where_every_used_centroid_is_the_mean_of_its_samples(items, size, seed):
    samples = draw_vectors(seed, items, 2)
    centroids, chosen = kmeans(samples, size, iterations=200, random=np.random.default_rng(seed))
    assert np.array_equal(chosen, assign(samples, centroids))
    for code in np.unique(chosen):
        np.testing.assert_allclose(
            centroids[code], samples[chosen == code].mean(axis=0), rtol=1e-4, atol=1e-5
        )


def test_separate_heaps_are_found():
    samples = np.concatenate(
        [draw_vectors(1, 50, 2) * np.float32(0.01) + center for center in (-5, 0, 5)]
    )
    centroids, _ = kmeans(samples, 12, iterations=50, random=np.random.default_rng(0))
    assert distances(np.array([[-5.0, -5], [0, 0], [5, 5]]), centroids).min(axis=1).max() < 0.1


def test_fewer_samples_than_clusters_works():
    samples = draw_vectors(5, 3, 4)
    centroids, _ = kmeans(samples, 20, iterations=10, random=np.random.default_rng(5))
    assert centroids.shape == (20, 4)
    assert distances(centroids, samples).min(axis=1).max() < 2.5


@pytest.mark.parametrize("has_library", [True, False])
def test_sums_by_code_are_those_of_each_codes_vectors(has_library, monkeypatch):
    if not has_library:
        monkeypatch.setattr("genius_search.nn.kmeans.open_library", lambda: None)
    vectors, codes = (
        draw_vectors(7, 100, 5).T.copy().T,
        np.random.default_rng(7).integers(6, size=100),
    )
    expected = [vectors[codes == code].sum(axis=0) for code in range(8)]
    np.testing.assert_allclose(sum_by_code(vectors, codes, 8), expected, atol=1e-5)
