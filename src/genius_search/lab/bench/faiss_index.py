"""Indexes of faiss by their factory strings, as rivals that are given as many bytes and candidates."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int64

from genius_search.lab.baselines.dense import imported

TRAINING_ITEMS: Final = 65_536
BLOCK: Final = 65_536
"""Vectors added at a time, so that a memory-mapped half-precision array can be indexed."""


class Nearest(NamedTuple):
    """The result of a search, and its cost."""

    items: list[Int64[np.ndarray, " _"]]
    """Item rows of each query, best first."""
    compared: int
    """Items that were compared, for all queries together."""


class FaissIndex:
    """A built index of unit vectors.

    Parameters
    ----------
    factory
        As faiss writes it: ``HNSW32``, ``IVF1024,PQ12x8np``, ``IVF1024,RQ24x4fs_32_Nrq2x4``. Those with codes
        (PQ, RQ) compare by distance, the others by inner product, which order unit vectors alike. Without
        ``np`` a product quantizer is also trained for a filter that is not used here, which takes long.
    vectors
        Of any float type; may be memory-mapped. Centroids and code vectors are learned from a sample of them.
    seed
        Of that sample.
    width
        Codes that a residual quantizer tries side by side while it encodes a vector.

    Raises
    ------
    MissingExtra
        faiss is not installed.
    """

    def __init__(
        self, factory: str, vectors: Float[np.ndarray, "items dim"], *, seed: int = 0, width: int = 1
    ) -> None:
        faiss = imported("faiss")
        began = time.process_time()
        has_codes = "PQ" in factory or "RQ" in factory
        metric = faiss.METRIC_L2 if has_codes else faiss.METRIC_INNER_PRODUCT
        num_items, dim = vectors.shape
        self._index = faiss.index_factory(dim, factory, metric)
        self._ivf = faiss.try_extract_index_ivf(self._index)
        self._is_graph = factory.startswith("HNSW")
        if self._ivf is not None:
            self._ivf.cp.min_points_per_centroid = 1  # no warnings about small samples
        if hasattr(self._index, "rq"):
            self._index.rq.max_beam_size = width
            self._index.rq.use_beam_LUT = int(width > 1)
            self._index.rq.train_type = faiss.ResidualQuantizer.Train_default
            if self._ivf is not None:
                self._index.by_residual = True  # the factory leaves this out for 4-bit codes
        if hasattr(self._index, "k_factor"):
            self._index.k_factor = 4.0
        if not self._index.is_trained:
            chosen = np.sort(np.random.default_rng(seed).permutation(num_items)[:TRAINING_ITEMS])
            self._index.train(vectors[chosen].astype(np.float32))
        self.fixed_bytes = self._count_bytes()
        """Bytes of centroids and code vectors, which do not grow with the pool."""
        for start in range(0, num_items, BLOCK):
            self._index.add(np.ascontiguousarray(vectors[start : start + BLOCK], dtype=np.float32))
        self.item_bytes = (self._count_bytes() - self.fixed_bytes) / num_items
        """Bytes that grow with the pool, for each item."""
        self.build_seconds = time.process_time() - began

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def num_lists(self) -> int:
        """Number of inverted lists; 0 without any."""
        return 0 if self._ivf is None else int(self._ivf.nlist)

    def search(
        self, queries: Float32[np.ndarray, "queries dim"], k: int, *, effort: int | None = None
    ) -> Nearest:
        """Return the ``k`` nearest items of each query; fewer where a search found fewer.

        Parameters
        ----------
        effort
            Lists to look through, or nodes of a graph to keep in view.
        """
        faiss = imported("faiss")
        stats = None
        if self._is_graph:
            stats = faiss.cvar.hnsw_stats
            if effort is not None:
                self._index.hnsw.efSearch = effort
        elif self._ivf is not None:
            stats = faiss.cvar.indexIVF_stats
            if effort is not None:
                # With more lists than there are, faiss's fast scan (1.15.1) returns wrong items.
                self._ivf.nprobe = min(effort, self.num_lists)
        if stats is not None:
            stats.reset()
        found = self._index.search(np.ascontiguousarray(queries), min(k, len(self)))[1].astype(np.int64)
        compared = len(queries) * len(self) if stats is None else int(stats.ndis)
        return Nearest([row[row >= 0] for row in found], compared)

    def _count_bytes(self) -> int:
        """Return the size of the index as faiss writes it, without holding a copy."""
        faiss = imported("faiss")
        counted = 0

        def count(part: bytes) -> int:
            nonlocal counted
            counted += len(part)
            return len(part)

        writer = faiss.BufferedIOWriter(faiss.PyCallbackIOWriter(count))
        faiss.write_index(self._index, writer)
        del writer  # flushes
        return counted
