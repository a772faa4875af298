"""What can be found without decoding anything: all items, to be ordered by the evidence alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genius.search.allowed import Part
from genius.search.beam import Beams


def everything(parts: Sequence[Part], queries: int) -> Beams:
    """For each query one beam that holds all IDs; nothing was decoded for it.

    Ordered by codes, this is the best that a search that routes and then orders by codes can reach.
    """
    sizes = np.array([len(part.table) for part in parts], dtype=np.int64)
    low = np.zeros((queries, 1, len(parts)), dtype=np.int64)
    return Beams(low, low + sizes, np.zeros((queries, 1, 0), dtype=np.float32))
