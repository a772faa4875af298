"""Beams, whichever way they were found."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64


class Beams(NamedTuple):
    """Final beams of each query, best first.

    A beam is an ID if all levels were decoded, otherwise a prefix, as a range of rows in the table of each
    segment. The range of an unused beam is empty in every segment.
    """

    low: Int64[np.ndarray, "queries beams segments"]
    high: Int64[np.ndarray, "queries beams segments"]
    log_probabilities: Float32[np.ndarray, "queries beams levels"]
    """Log-probability of each code; −inf for unused beams, NaN for levels that were not decoded."""

    def filled(self) -> Bool[np.ndarray, "queries beams"]:
        """Return a mask of the used beams."""
        return np.asarray((self.high > self.low).any(axis=2))

    def scores(self) -> Float32[np.ndarray, "queries beams"]:
        """Return the log-probability of each beam: the sum over its levels."""
        return np.asarray(np.nansum(self.log_probabilities, axis=2, dtype=np.float32))


def topk(scores: Float32[np.ndarray, " scores"], k: int) -> Int64[np.ndarray, " rows"]:
    """Return the positions of the ``k`` highest scores, or of all if there are fewer, highest first.

    Unlike ``torch.topk``, equal scores keep their order.
    """
    if len(scores) > k > 0:
        limit = np.partition(scores, len(scores) - k)[len(scores) - k]
        if np.isfinite(limit):
            enough = (scores >= limit).nonzero()[0]
            return np.asarray(enough[(-scores[enough]).argsort(kind="stable")[:k]])
    return np.asarray((-scores).argsort(kind="stable")[:k])
