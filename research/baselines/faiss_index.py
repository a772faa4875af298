"""Indexes of faiss by their factory strings: the rivals that search embeddings."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import faiss
import numpy as np
from jaxtyping import Float, Float32, Int64

TRAINING_ITEMS: Final = 65_536
BLOCK: Final = 65_536
"""Vectors added at a time, so that a memory-mapped half-precision array can be indexed."""
RESIDUAL_WIDTH: Final = 4
"""Codes that a residual quantizer tries side by side for each level of an item."""
NORM_BYTES: Final = 1
"""Bytes of an item's norm, which residual codes need: inner products with code vectors give no distance."""


class Nearest(NamedTuple):
    """The result of a search, and its cost."""

    items: list[Int64[np.ndarray, " _"]]
    """Item rows of each query, best first."""
    scores: list[Float32[np.ndarray, " _"]]
    """Their similarities: inner products, or what squared distances between unit vectors say of them."""
    compared: int
    """Items that were compared, for all queries together."""


def train_index(factory: str, vectors: Float[np.ndarray, "items dim"], *, seed: int = 0) -> Any:
    """Return an index without items that has learned its centroids and code vectors from a sample of vectors.

    Parameters
    ----------
    factory
        As faiss writes it: ``HNSW32``, ``IVF1024,PQ12x8np``, ``IVF1024,RQ24x4fs_32_Nrq2x4``. Those with codes
        (PQ, RQ) compare by distance, the others by inner product, which order unit vectors alike. Without
        ``np`` a product quantizer is also trained for a filter that is not used here, which takes long.
    vectors
        Of any float type; may be memory-mapped. ``seed`` draws the sample.
    """
    has_codes = "PQ" in factory or "RQ" in factory
    metric = faiss.METRIC_L2 if has_codes else faiss.METRIC_INNER_PRODUCT
    num_items, dim = vectors.shape
    index: Any = faiss.index_factory(dim, factory, metric)
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        ivf.cp.min_points_per_centroid = 1  # no warnings about small samples
    if hasattr(index, "pq"):
        index.pq.cp.min_points_per_centroid = 1
    if hasattr(index, "rq"):
        index.rq.max_beam_size, index.rq.use_beam_LUT = RESIDUAL_WIDTH, 1
        index.rq.train_type = faiss.ResidualQuantizer.Train_default
        if ivf is not None:
            index.by_residual = True  # the factory leaves this out for 4-bit codes
    if not index.is_trained:
        chosen = np.sort(np.random.default_rng(seed).permutation(num_items)[:TRAINING_ITEMS])
        index.train(vectors[chosen].astype(np.float32))
    return index


class FaissIndex:
    """An index of unit vectors, built from one of :func:`train_index`, which stays empty."""

    def __init__(self, trained: Any, vectors: Float[np.ndarray, "items dim"]) -> None:
        self._index: Any = faiss.clone_index(trained)
        self._ivf: Any = faiss.try_extract_index_ivf(self._index)
        self._is_graph = hasattr(self._index, "hnsw")
        self._by_distance = self._index.metric_type == faiss.METRIC_L2
        for start in range(0, len(vectors), BLOCK):
            self._index.add(np.ascontiguousarray(vectors[start : start + BLOCK], dtype=np.float32))

    @property
    def item_bytes(self) -> float:
        """Bytes of the file that faiss writes, for each item."""
        return float(faiss.serialize_index(self._index).nbytes / max(1, self._index.ntotal))

    def search(
        self, queries: Float32[np.ndarray, "queries dim"], k: int, *, effort: int | None = None
    ) -> Nearest:
        """Return the ``k`` nearest items of each query; fewer where a search found fewer.

        Parameters
        ----------
        effort
            Lists to look through, or nodes of a graph to keep in view.
        """
        statistics: Any = faiss.cvar  # of the whole process
        stats = None
        if self._is_graph:
            stats = statistics.hnsw_stats
            if effort is not None:
                self._index.hnsw.efSearch = effort
        elif self._ivf is not None:
            stats = statistics.indexIVF_stats
            if effort is not None:
                # With more lists than there are, faiss's fast scan (1.15.1) returns wrong items.
                self._ivf.nprobe = min(effort, self._ivf.nlist)
        if stats is not None:
            stats.reset()
        scores, items = self._index.search(np.ascontiguousarray(queries), min(k, self._index.ntotal))
        compared = len(queries) * self._index.ntotal if stats is None else int(stats.ndis)
        if self._by_distance:
            scores = 1 - scores / 2
        found = items >= 0
        return Nearest(
            [row[used].astype(np.int64) for row, used in zip(items, found, strict=True)],
            [row[used] for row, used in zip(scores, found, strict=True)],
            compared,
        )


def num_lists(items: int) -> int:
    """Return how many lists so many items get: about their number's root, with 32 items each at least."""
    return max(1, min(max(1024, 1 << round(math.log2(items) / 2)), items // 32))


def num_bits(num_items: int) -> int:
    """Return the bits of a code, 8 unless so few items cannot teach as many codes."""
    return min(8, max(1, num_items.bit_length() - 1))


def num_parts(dim: int, code_bytes: int) -> int:
    """Return the parts of a product code: at least ``code_bytes`` and a divisor of the vectors' width."""
    return next((count for count in range(code_bytes, dim) if dim % count == 0), dim)
