"""K-means, and residual k-means: each level clusters the residuals of the earlier levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64, Integer

from genius_search.native.build import open_library

ASSIGN_BLOCK: Final = 16_384
"""Number of vectors per block when centroids are assigned, to bound memory."""
VECTORS_PER_BLOCK: Final = 1024
"""Number of vectors per block whose residuals and products stay in a processor's cache."""
START_SPREAD: Final = 0.3
"""Distance of the initial centroids from the mean, as a share of the drawn samples' distance."""


class Clusters(NamedTuple):
    """Centroids, and the number of the nearest centroid of each sample."""

    centroids: Float32[np.ndarray, "codes dim"]
    codes: Int64[np.ndarray, " items"]


def assign(
    samples: Float32[np.ndarray, "items dim"], centroids: Float32[np.ndarray, "codes dim"]
) -> Int64[np.ndarray, " items"]:
    """Return the index of the nearest centroid (squared Euclidean); the lowest index wins a tie."""
    # argmin_c |x − c|² = argmax_c (x·c − |c|²/2), since |x|² is the same for every centroid.
    halves = np.square(centroids).sum(axis=1) / 2
    codes = np.empty(len(samples), dtype=np.int64)
    for start in range(0, len(samples), ASSIGN_BLOCK):
        products = samples[start : start + ASSIGN_BLOCK] @ centroids.T
        products -= halves
        codes[start : start + ASSIGN_BLOCK] = products.argmax(axis=1)
    return codes


def sum_by_code(
    vectors: Float32[np.ndarray, "items dim"], codes: Integer[np.ndarray, " items"], size: int
) -> Float32[np.ndarray, "codes dim"]:
    """Return the sum of the vectors with each code from 0 to ``size`` − 1."""
    sums = np.zeros((size, vectors.shape[1]), dtype=np.float32)
    vectors = np.ascontiguousarray(vectors)
    codes = np.ascontiguousarray(codes, dtype=np.int64)
    library = open_library()
    if library is None:
        np.add.at(sums, codes, vectors)
    else:
        library.sum_by_code(
            vectors.ctypes.data, codes.ctypes.data, *vectors.shape, sums.ctypes.data
        )
    return sums


def subtract_vectors(
    vectors: Float32[np.ndarray, "items dim"],
    table: Float32[np.ndarray, "codes dim"],
    codes: Integer[np.ndarray, " items"],
) -> None:
    """Subtract from each vector, in place, the vector of its code."""
    for start in range(0, len(vectors), VECTORS_PER_BLOCK):
        vectors[start : start + VECTORS_PER_BLOCK] -= table[
            codes[start : start + VECTORS_PER_BLOCK]
        ]


def kmeans(
    samples: Float32[np.ndarray, "items dim"],
    size: int,
    *,
    iterations: int,
    random: np.random.Generator,
) -> Clusters:
    """Run at most ``iterations`` of Lloyd's algorithm, until assignments no longer change."""
    centroids = draw_centroids(samples, size, random)
    codes = assign(samples, centroids)
    for _ in range(iterations):
        centroids = move_centroids(centroids, samples, codes)
        previous_codes = codes
        codes = assign(samples, centroids)
        if np.array_equal(previous_codes, codes):
            break
    return Clusters(centroids, codes)


def draw_centroids(
    samples: Float32[np.ndarray, "items dim"], size: int, random: np.random.Generator
) -> Float32[np.ndarray, "size dim"]:
    """Return initial centroids: drawn samples x, moved towards the mean m: m + 0.3 (x − m).

    In many dimensions every sample is far from every other, and a centroid that starts at one
    attracts few others. With fewer samples than centroids, they are drawn with replacement.
    """
    starts = random.choice(len(samples), size, replace=len(samples) < size)
    mean = samples.mean(axis=0)
    return np.asarray(mean + np.float32(START_SPREAD) * (samples[starts] - mean))


def move_centroids(
    centroids: Float32[np.ndarray, "codes dim"],
    samples: Float32[np.ndarray, "items dim"],
    codes: Integer[np.ndarray, " items"],
) -> Float32[np.ndarray, "codes dim"]:
    """Return the mean of each centroid's samples; one without samples stays where it is."""
    counts = np.bincount(codes, minlength=len(centroids))[:, None]
    means = sum_by_code(samples, codes, len(centroids)) / counts.clip(min=1).astype(np.float32)
    return np.where(counts > 0, means, centroids)


def residual_kmeans(
    embeddings: Float32[np.ndarray, "items dim"],
    modalities: Integer[np.ndarray, " items"] | None,
    sizes: Sequence[int],
    *,
    iterations: Sequence[int | None],
    random: np.random.Generator,
) -> list[Clusters]:
    """Run k-means on the residuals, level by level; return the code vectors and the items' codes.

    Level l clusters the residuals x − e_0 − … − e_{l−1} that the earlier levels leave.

    Parameters
    ----------
    embeddings
        vectors x of the items.
    modalities
        codes of the items at level 0, whose vectors are then the means of their items; with None,
        level 0 is clustered like the others.
    sizes
        number of codes at each level.
    iterations
        maximum number of k-means iterations at each level; at a level with None, items get the
        nearest of the previous level's vectors.
    """
    levels: list[Clusters] = []
    residuals = embeddings.copy()
    for level, (size, max_iterations) in enumerate(zip(sizes, iterations, strict=True)):
        if level == 0 and modalities is not None:
            counts = np.bincount(modalities, minlength=size)[:, None]
            sums = sum_by_code(residuals, modalities, size)
            means = sums / np.maximum(counts, 1).astype(np.float32)
            levels.append(Clusters(means, modalities.astype(np.int64)))
        elif max_iterations is None:
            centroids = levels[-1].centroids
            levels.append(Clusters(centroids, assign(residuals, centroids)))
        else:
            levels.append(kmeans(residuals, size, iterations=max_iterations, random=random))
        subtract_vectors(residuals, *levels[-1])
    return levels
