"""The highest of many scores; equal ones keep their order, so that results never depend on luck."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int64


def highest(scores: Float32[np.ndarray, " scores"], count: int) -> Int64[np.ndarray, " places"]:
    """Places of the ``count`` highest scores (all, if there are fewer), highest first."""
    if len(scores) > count > 0:
        limit = np.partition(scores, len(scores) - count)[len(scores) - count]
        if np.isfinite(limit):
            enough = (scores >= limit).nonzero()[0]
            return np.asarray(enough[(-scores[enough]).argsort(kind="stable")[:count]])
    return np.asarray((-scores).argsort(kind="stable")[:count])
