"""Mean and covariance of the vectors of IDs, from which the spread of a query's products follows.

The product q · v of a query q with the vector v of a random ID has the variance qᵀ C q, where C is
the covariance of the vectors. Choices raise items in units of the standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import Lock
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Float32, Int64

from genius_search.forks import free_in_children
from genius_search.index.snapshot import Snapshot
from genius_search.search.rank import CodeRanker
from genius_search.search.table import IdTable, SearchSegment

MAX_MOMENT_IDS: Final = 4096
"""Maximum number of IDs per modality and segment whose vectors are measured."""


class Moments(NamedTuple):
    """Mean and covariance of the vectors of IDs."""

    size: int
    """Number of IDs that the sample was drawn from."""
    mean: Float32[np.ndarray, " dim"]
    covariance: Float32[np.ndarray, "dim dim"]


_moments_of_tables: Final[WeakKeyDictionary[IdTable, dict[int, Moments]]] = WeakKeyDictionary()
"""Moments of tables by first code; they outlast a change of the index, as its segments do."""


class ProductSpread:
    """Standard deviations of queries' products with the IDs of a snapshot."""

    def __init__(self, ranker: CodeRanker, snapshot: Snapshot) -> None:
        self._ranker = ranker
        self._segments = snapshot.searched_segments
        self._pooled: dict[frozenset[int], Moments] = {}
        self._lock = free_in_children(Lock())

    def of_query(self, query: Float32[np.ndarray, " dim"], level0: frozenset[int]) -> float:
        """Return √(qᵀ C q) for the IDs with these first codes; an empty set allows any."""
        with self._lock:
            moments = self._pooled.get(level0)
            if moments is None:
                moments = self._pooled[level0] = self._pool(level0)
        variance = float(query @ moments.covariance @ query)
        return math.sqrt(max(0.0, variance))

    def _pool(self, level0: frozenset[int]) -> Moments:
        """Pool the moments of the segments' IDs with these first codes."""
        parts = []
        for segment in self._segments:
            by_code = _moments_of_tables.get(segment.table)
            by_code = by_code or measure_moments(self._ranker, segment)
            parts += [moments for code, moments in by_code.items() if code in level0 or not level0]
        return pool_moments(parts)


def pool_moments(parts: Sequence[Moments]) -> Moments:
    """Return the moments of the union of samples.

    With n_i the sizes, p_i = n_i / Σ n_j, means m_i and covariances C_i::

        m = Σ p_i m_i
        C = Σ p_i (C_i + (m_i − m)(m_i − m)ᵀ)
    """
    sizes = np.array([part.size for part in parts])
    shares = (sizes / sizes.sum()).astype(np.float32)
    means = np.stack([part.mean for part in parts])
    mean = shares @ means
    covariance = (means - mean).T @ ((means - mean) * shares[:, None])
    for share, part in zip(shares, parts, strict=True):
        covariance += share * part.covariance
    return Moments(int(sizes.sum()), mean, covariance)


def measure_moments(ranker: CodeRanker, segment: SearchSegment) -> dict[int, Moments]:
    """Measure a sample of a segment's IDs for each first code, which stands for a modality.

    If IDs have no level of modalities, all of them are measured together, under code 0. IDs that
    fine codes follow are those of many items, so items are measured instead.
    """
    table = segment.table
    ranges = [(0, 0, len(table))]
    if ranker.spread.level:
        children = table.children(0, np.array([0]), np.array([len(table)]))
        columns = (children.code.tolist(), children.low.tolist(), children.high.tolist())
        ranges = [*zip(*columns, strict=True)]
    measured = {}
    random = np.random.default_rng(0)
    for code, low_row, high_row in ranges:
        low, high = low_row, high_row
        if segment.fine is not None:
            low, high = int(table.bucket_starts[low]), int(table.bucket_starts[high])
        size = min(high - low, MAX_MOMENT_IDS)
        numbers = low + random.choice(high - low, size, replace=False, shuffle=False)
        vectors = _coded_vectors(ranker, segment, numbers)
        mean = vectors.mean(axis=0)
        vectors -= mean
        measured[code] = Moments(high - low, mean, vectors.T @ vectors / len(vectors))
    return _moments_of_tables.setdefault(table, measured)


def _coded_vectors(
    ranker: CodeRanker, segment: SearchSegment, numbers: Int64[np.ndarray, " numbers"]
) -> Float32[np.ndarray, "numbers dim"]:
    """Return the vectors of IDs by their rows, or with fine codes of items by their positions."""
    table = segment.table
    if segment.fine is None or ranker.fine is None:
        return ranker.vectors(table.ids[numbers])
    rows = np.searchsorted(table.bucket_starts, numbers, side="right") - 1
    fine_vectors = segment.fine.vectors(ranker.fine, table.items[numbers].astype(np.int64))
    return np.asarray(ranker.vectors(table.ids[rows]) + fine_vectors)
