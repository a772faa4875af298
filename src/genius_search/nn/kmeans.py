"""K-means, and the codes of vectors: by the compiled library, or by NumPy where that does not serve.

:class:`Coder` gives items their IDs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Int16, Int64, Integer

from genius_search.native.build import CODES, NO_MEMORY, open_library
from genius_search.nn.codebooks import POOL_SAMPLE, Codebooks, normalize, sum_codes
from genius_search.nn.density import NormAndDensity

ASSIGN_BLOCK: Final = 16_384
"""Vectors per block when assigning centroids, to bound memory."""
VECTORS_PER_BLOCK: Final = 1024
"""Vectors that are handled at once, so that what belongs to them stays in a processor's cache."""
ERRORS_PER_BLOCK: Final = 1 << 20
"""Errors of sums in memory at once: 4 MiB, which stay in the cache of a processor."""
START_SPREAD: Final = 0.3
"""How far k-means starts from the mean, as a share of the distance of drawn samples."""


class Clusters(NamedTuple):
    """Centroids, and the nearest one of each sample."""

    centroids: Float32[np.ndarray, "codes dim"]
    chosen: Int64[np.ndarray, " items"]


def assign(
    samples: Float32[np.ndarray, "items dim"], centroids: Float32[np.ndarray, "codes dim"]
) -> Int64[np.ndarray, " items"]:
    """Return the index of the nearest centroid (squared Euclidean); the lowest index wins a tie."""
    halves = np.square(centroids).sum(axis=1) / 2
    chosen = np.empty(len(samples), dtype=np.int64)
    for start in range(0, len(samples), ASSIGN_BLOCK):
        products = samples[start : start + ASSIGN_BLOCK] @ centroids.T
        products -= halves
        chosen[start : start + ASSIGN_BLOCK] = products.argmax(axis=1)
    return chosen


def sum_by_code(
    vectors: Float32[np.ndarray, "items dim"], codes: Integer[np.ndarray, " items"], size: int
) -> Float32[np.ndarray, "codes dim"]:
    """Return the sum of the vectors with each code from 0 to ``size`` − 1."""
    sums = np.zeros((size, vectors.shape[1]), dtype=np.float32)
    vectors, codes = np.ascontiguousarray(vectors), np.ascontiguousarray(codes, dtype=np.int64)
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
    """Subtract from each vector, in place, that of its code."""
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
    """Run Lloyd's algorithm until assignments no longer change, for at most ``iterations`` iterations.

    The initial centroids are drawn samples, moved towards the mean of all: in many dimensions a sample is far
    from every other, and a centroid that starts there may keep few. With fewer samples than clusters they are
    drawn with replacement.
    """
    drawn = random.choice(len(samples), size, replace=len(samples) < size)
    mean = samples.mean(axis=0)
    centroids = mean + np.float32(START_SPREAD) * (samples[drawn] - mean)
    chosen = assign(samples, centroids)
    for _ in range(iterations):
        counts = np.bincount(chosen, minlength=size)[:, None]
        sums = sum_by_code(samples, chosen, size)
        centroids = np.where(counts > 0, sums / np.maximum(counts, 1).astype(np.float32), centroids)
        before, chosen = chosen, assign(samples, centroids)
        if np.array_equal(before, chosen):
            break
    return Clusters(centroids, chosen)


class NearestSums:
    """Approximates vectors by sums of code vectors, one from each table.

    This is a beam search over the levels that keeps ``beam`` partial sums; 1 is the greedy choice.
    """

    def __init__(self, tables: Sequence[Float32[np.ndarray, "_ dim"]], *, beam: int) -> None:
        self._tables = [np.asarray(table, dtype=np.float32) for table in tables]
        self._beam = beam
        self._is_compiled = max(map(len, tables)) <= CODES and open_library() is not None

    def __call__(
        self, vectors: Float32[np.ndarray, "items dim"]
    ) -> Int64[np.ndarray, "items levels"]:
        """Return the codes of vectors."""
        if self._is_compiled:
            return self._compiled(vectors)
        most = max(1, ERRORS_PER_BLOCK // (self._beam * max(map(len, self._tables))))
        codes = np.empty((len(vectors), len(self._tables)), dtype=np.int64)
        for start in range(0, len(vectors), most):
            codes[start : start + most] = self.in_numpy(vectors[start : start + most])
        return codes

    def in_numpy(
        self, vectors: Float32[np.ndarray, "items dim"]
    ) -> Int64[np.ndarray, "items levels"]:
        """Do so in NumPy, for a few vectors."""
        items, dim = vectors.shape
        every = np.arange(items)[:, None]
        codes, residuals = np.zeros((items, 1, 0), dtype=np.int64), vectors[:, None]
        errors = np.square(residuals).sum(axis=2) / 2
        for table in self._tables:
            products = (residuals.reshape(-1, dim) @ table.T).reshape(*errors.shape, len(table))
            longer = errors[..., None] + np.square(table).sum(axis=1) / 2 - products
            flat = longer.reshape(items, errors.shape[1] * len(table))
            width = min(self._beam, flat.shape[1])
            best = np.argpartition(flat, width - 1, axis=1)[:, :width]
            parents, chosen, errors = best // len(table), best % len(table), flat[every, best]
            residuals = residuals[every, parents] - table[chosen]
            codes = np.concatenate([codes[every, parents], chosen[..., None]], axis=2)
        return np.asarray(codes[every[:, 0], errors.argmin(axis=1)])

    @cached_property
    def _packed(self) -> list[Float32[np.ndarray, ...]]:
        """Code vectors, their half squared norms, and their products between levels, for the library.

        From these products it knows the error of a sum, and never computes what remains of a vector.
        """
        levels, dim = len(self._tables), self._tables[0].shape[1]
        wide = np.zeros((levels, CODES, dim), np.float32)
        halves = np.full((levels, CODES), np.inf, np.float32)
        for level, table in enumerate(self._tables):
            wide[level, : len(table)] = table
            halves[level, : len(table)] = np.square(table).sum(axis=1) / 2
        every = wide.reshape(-1, dim)
        crossed = np.concatenate(
            [every[: CODES * level] @ wide[level].T for level in range(levels)]
        )
        return [every, halves, crossed]

    def _compiled(
        self, vectors: Float32[np.ndarray, "items dim"]
    ) -> Int64[np.ndarray, "items levels"]:
        library, (every, halves, crossed) = open_library(), self._packed
        codes = np.empty((len(vectors), len(self._tables)), np.uint8)
        for start in range(0, len(vectors), VECTORS_PER_BLOCK):
            products = vectors[start : start + VECTORS_PER_BLOCK] @ every.T
            arrays = [array.ctypes.data for array in (products, halves, crossed)]
            own = codes[start : start + VECTORS_PER_BLOCK]
            status = library.nearest_sums(*arrays, *own.shape, self._beam, own.ctypes.data)  # type: ignore[union-attr]
            if status == NO_MEMORY:
                raise MemoryError
        return codes.astype(np.int64)


def residual_kmeans(
    embeddings: Float32[np.ndarray, "items dim"],
    modalities: Integer[np.ndarray, " items"] | None,
    sizes: Sequence[int],
    *,
    iterations: Sequence[int | None],
    random: np.random.Generator,
) -> list[Clusters]:
    """Return code vectors by k-means on the residuals, level by level, and the codes of the items.

    Parameters
    ----------
    modalities
        the codes of level 0, which has their means as vectors; None finds them by k-means as well.
    sizes, iterations
        of each level: its codes, and the most iterations of k-means; None keeps the vectors of the level
        before.
    """
    levels: list[Clusters] = []
    residuals = embeddings.copy()
    for level, (size, most) in enumerate(zip(sizes, iterations, strict=True)):
        if level == 0 and modalities is not None:
            counts = np.bincount(modalities, minlength=size)[:, None]
            means = sum_by_code(residuals, modalities, size) / np.maximum(counts, 1).astype(
                np.float32
            )
            levels.append(Clusters(means, modalities.astype(np.int64)))
        elif most is None:
            levels.append(Clusters(levels[-1].centroids, assign(residuals, levels[-1].centroids)))
        else:
            levels.append(kmeans(residuals, size, iterations=most, random=random))
        subtract_vectors(residuals, *levels[-1])
    return levels


class EncodedItems(NamedTuple):
    """Items as an index stores them."""

    embeddings: Float32[np.ndarray, "items dim"]
    """Fused embeddings, which the IDs are computed from; unit vectors."""
    codes: Int64[np.ndarray, "items levels"]
    code_cosine: Float32[np.ndarray, " items"]
    """Cosine between an item's embedding and the vector of its ID; ranks the items that share an ID."""
    columns: Int16[np.ndarray, "items columns"]
    """The rows that an ID table stores: codes, half norm and density (:mod:`genius_search.nn.density`)."""


class Coder:
    """Gives items their IDs by finished codebooks."""

    def __init__(self, codebooks: Codebooks) -> None:
        self._codebooks = codebooks
        self._tables = codebooks.tables()

    def assign_ids(
        self,
        embeddings: Float32[np.ndarray, "items dim"],
        modalities: Integer[np.ndarray, " items"],
    ) -> Int64[np.ndarray, "items levels"]:
        """Return the IDs of unit embeddings; the semantic codes are chosen by beam search (deviation 30).

        ``modalities`` (0 image, 1 text, 2 image-text) are the items' own.
        """
        codebooks, level0 = self._codebooks, self._codebooks.config.level0
        if not codebooks.has_modality_level:
            return self._nearest_sums(embeddings)
        first = modalities.astype(np.int64)
        if level0 == "classifier":
            weight, bias = (
                codebooks.weights["classifier.weight"],
                codebooks.weights["classifier.bias"],
            )
            first = (embeddings @ weight.T + bias).argmax(axis=1)
        elif level0 == "learned":
            first = assign(embeddings, self._tables[0])
        residuals = embeddings - self._tables[0][first]
        semantic = self._nearest_sums(
            residuals if codebooks.metric is None else residuals @ codebooks.metric
        )
        return np.concatenate([first[:, None], semantic], axis=1)

    @cached_property
    def _nearest_sums(self) -> NearestSums:
        tables, metric = (
            self._tables[int(self._codebooks.has_modality_level) :],
            self._codebooks.metric,
        )
        if metric is not None:
            tables = [table @ metric for table in tables]
        return NearestSums(tables, beam=self._codebooks.config.encoding_beam)

    @cached_property
    def norm_and_density(self) -> NormAndDensity:
        """Measures half norms and densities of IDs."""
        return NormAndDensity(
            self._tables,
            has_modality_level=self._codebooks.has_modality_level,
            norm_weight=self._codebooks.config.norm_weight,
            sample=self._codebooks.weights.get(POOL_SAMPLE),
            baseline=self._codebooks.weights["spreads"][:, 1:],
        )

    def encode_items(
        self,
        embeddings: Float32[np.ndarray, "items dim"],
        modalities: Integer[np.ndarray, " items"],
    ) -> EncodedItems:
        """Return IDs of items with these fused embeddings."""
        codes = self.assign_ids(embeddings, modalities)
        vectors = sum_codes(self._tables, codes)
        cosine = np.vecdot(embeddings, normalize(vectors))
        costs = self.norm_and_density.columns(vectors, codes)
        columns = np.concatenate([codes.astype(np.int16), costs], axis=1)
        return EncodedItems(embeddings, codes, cosine, columns)
