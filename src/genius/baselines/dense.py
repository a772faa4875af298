"""Search by embeddings, as a user without GENIUS would do it: faiss's indexes behind one small interface.

Every index is for unit vectors, and its scores are inner products, so cosines. Those that keep codes rank by
distance (:mod:`genius.baselines.kinds`), which becomes the inner product of unit vectors so far apart. What
each costs in bytes is measured on the index as faiss writes it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from genius.baselines.kinds import (
    Flat,
    Hnsw,
    Kind,
    Refined,
    check,
    empty_index,
    has_effort,
    leaves_query_out,
    ranks_by_distance,
)
from genius.baselines.needs import imported
from genius.errors import UsageError
from genius.search.exact import Nearest

ADDED_AT_ONCE: Final = 65_536
"""Vectors turned into float32 at a time, so that a memory-mapped half-precision array can be given."""
NOTHING: Final = -1
"""Stands in for an item where an approximate index found fewer than were asked for."""


class Counted(NamedTuple):
    """What a search found, and what it took."""

    found: Nearest
    compared: int
    """Items that were compared, of all queries together."""


class DenseIndex:
    """A built index.

    Parameters
    ----------
    index
        faiss's own object.
    kind
        what it was built as.
    """

    def __init__(self, index: Any, kind: Kind) -> None:
        self._index = index
        self.kind = kind

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: Float32[np.ndarray, "queries dim"], k: int) -> Nearest:
        """The ``k`` items nearest to each unit vector, best first; −1 (and −inf) where it found fewer."""
        size = min(k, len(self))
        if not size:
            return Nearest(np.zeros((len(queries), 0), np.int64), np.zeros((len(queries), 0), np.float32))
        scores, items = self._index.search(np.ascontiguousarray(queries), size)
        if ranks_by_distance(self.kind):
            scores = 1 - (scores + leaves_query_out(self.kind)) / 2
        return Nearest(items.astype(np.int64, copy=False), np.where(items == NOTHING, -np.inf, scores))

    def search_counting(self, queries: Float32[np.ndarray, "queries dim"], k: int) -> Counted:
        """The same, and how many items were compared: of HNSW every node that was looked at."""
        if not has_effort(self.kind):
            return Counted(self.search(queries, k), len(queries) * len(self))
        counts = imported("faiss").cvar
        counts = counts.hnsw_stats if isinstance(self.kind, Hnsw) else counts.indexIVF_stats
        counts.reset()
        found = self.search(queries, k)
        return Counted(found, int(counts.ndis))

    def set_effort(self, effort: int) -> None:
        """Trade time for recall: how many nodes HNSW keeps in view, or how many lists are looked through.

        More lists than there are means all: told of more, faiss's fast scan (1.15.1) returns wrong items.

        Raises
        ------
        UsageError
            this kind always looks at everything.
        """
        if not has_effort(self.kind):
            raise UsageError(f"{self.kind} looks at every item; it has no effort to set")
        if isinstance(self.kind, Hnsw):
            self._index.hnsw.efSearch = effort
        elif isinstance(self.kind, Refined):
            base = imported("faiss").downcast_index(self._index.base_index)
            base.nprobe = min(effort, base.nlist)
        else:
            self._index.nprobe = min(effort, self._index.nlist)

    def num_bytes(self) -> int:
        """Bytes of the index as faiss writes it, counted without holding them."""
        counted = 0

        def count(part: bytes) -> int:
            nonlocal counted
            counted += len(part)
            return len(part)

        faiss = imported("faiss")
        writer = faiss.BufferedIOWriter(faiss.PyCallbackIOWriter(count))
        faiss.write_index(self._index, writer)
        del writer  # hands over what it still holds
        return counted

    def bytes_per_item(self) -> float:
        """The same for each item; what is paid once (centroids, code vectors) is spread over them."""
        return self.num_bytes() / max(1, len(self))


class Fitted:
    """A kind that has learned its centroids and code vectors; it makes an index of any vectors.

    Parameters
    ----------
    empty
        faiss's own object, trained and without items.
    kind
        what it was made as.
    """

    def __init__(self, empty: Any, kind: Kind) -> None:
        self._empty = empty
        self.kind = kind

    def index(self, vectors: Float[np.ndarray, "items dim"]) -> DenseIndex:
        """Index these vectors, of any float type; item rows are their rows. They may be memory-mapped."""
        index = imported("faiss").clone_index(self._empty)
        for start in range(0, len(vectors), ADDED_AT_ONCE):
            index.add(np.ascontiguousarray(vectors[start : start + ADDED_AT_ONCE], dtype=np.float32))
        built = DenseIndex(index, self.kind)
        if not isinstance(self.kind, Flat) and has_effort(self.kind):
            built.set_effort(self.kind.effort)
        return built


def fit(
    vectors: Float[np.ndarray, "items dim"], kind: Kind, *, training_items: int = 65_536, seed: int = 0
) -> Fitted:
    """Learn what a kind needs from vectors like those that will be indexed.

    Parameters
    ----------
    vectors
        of any float type; may be memory-mapped.
    training_items
        centroids and code vectors are learned from at most so many vectors, drawn with ``seed``.

    Raises
    ------
    UsageError
        the kind does not fit the vectors: too few to train on, or a width its parts do not divide.
    MissingExtra
        faiss is not installed.
    """
    num_items, dim = vectors.shape
    check(kind, num_training=min(num_items, training_items), dim=dim)
    index = empty_index(kind, dim)
    if not index.is_trained:
        chosen = np.sort(np.random.default_rng(seed).permutation(num_items)[:training_items])
        index.train(vectors[chosen].astype(np.float32))
    return Fitted(index, kind)


def build(
    vectors: Float[np.ndarray, "items dim"], kind: Kind, *, training_items: int = 65_536, seed: int = 0
) -> DenseIndex:
    """Index vectors by a kind that is fitted on themselves. Raises as :func:`fit` does."""
    return fit(vectors, kind, training_items=training_items, seed=seed).index(vectors)


def use_threads(num_threads: int) -> None:
    """Let faiss use so many threads, from now on, in the whole process."""
    imported("faiss").omp_set_num_threads(num_threads)
