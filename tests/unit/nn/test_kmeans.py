"""K-means as the codebooks use it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from genius_search.nn.quantizer import assign, kmeans


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@given(items=st.integers(1, 40), size=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_the_nearest_centroid_is_the_nearest_by_squared_distance(items, size, seed):
    samples = torch.randn(items, 3, generator=seeded(seed))
    centroids = torch.randn(size, 3, generator=seeded(seed + 1))
    nearest = [
        min(range(size), key=lambda c: float((sample.double() - centroids[c].double()).square().sum()))
        for sample in samples
    ]
    assert assign(samples, centroids).tolist() == nearest


@given(items=st.integers(1, 60), size=st.integers(1, 10), seed=st.integers(0, 10_000))
def test_kmeans_ends_where_every_used_centroid_is_the_mean_of_its_samples(items, size, seed):
    samples = torch.randn(items, 2, generator=seeded(seed))
    centroids, _ = kmeans(samples, size, iterations=200, generator=seeded(seed))
    chosen = assign(samples, centroids)
    for code in chosen.unique():
        mean = samples[chosen == code].mean(dim=0)
        torch.testing.assert_close(centroids[code], mean, rtol=1e-4, atol=1e-5)


def test_separate_heaps_are_found():
    samples = torch.cat([torch.randn(50, 2, generator=seeded(1)) * 0.01 + center for center in (-5, 0, 5)])
    centroids, _ = kmeans(samples, 12, iterations=50, generator=seeded(0))
    nearest = (centroids[:, None] - torch.tensor([-5.0, 0, 5])[None, :, None]).norm(dim=2).min(dim=0)
    assert nearest.values.max() < 0.1


def test_fewer_samples_than_clusters_works():
    samples = torch.randn(3, 4, generator=seeded(5))
    centroids, _ = kmeans(samples, 20, iterations=10, generator=seeded(5))
    assert centroids.shape == (20, 4)
    distances = (centroids[:, None] - samples[None]).norm(dim=2).min(dim=1).values
    assert distances.max() < 2.5
    assert centroids.isfinite().all()
