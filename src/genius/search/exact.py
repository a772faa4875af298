"""Exact search: compare every query with every item, some items at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from genius.search.rank import best_first

ITEM_BATCH: Final = 65_536
"""Items whose scores are in memory at once."""


class Nearest(NamedTuple):
    """The items nearest to each query, best first."""

    items: Int64[np.ndarray, "queries hits"]
    """Item rows."""
    scores: Float32[np.ndarray, "queries hits"]
    """Inner products, never rising."""


def exact_search(
    queries: Float[Tensor, "queries dim"],
    vectors: Callable[[slice], Float[Tensor, "items dim"]],
    num_items: int,
    *,
    k: int,
) -> Nearest:
    """The ``k`` items of highest inner product (all, if there are fewer); of equal ones the first rows.

    Parameters
    ----------
    vectors
        gives the vectors of a range of item rows, so that they need not all be in memory.
    """
    items = np.zeros((len(queries), 0), dtype=np.int64)
    scores = np.zeros((len(queries), 0), dtype=np.float32)
    for start in range(0, num_items, ITEM_BATCH):
        rows = range(start, min(start + ITEM_BATCH, num_items))
        products = (queries @ vectors(slice(rows.start, rows.stop)).T).numpy()
        # What was found before stands first, so that of equal scores the lower row does.
        scores = np.concatenate([scores, products], axis=1)
        items = np.concatenate([items, np.broadcast_to(rows, products.shape)], axis=1)
        best = _best_columns(scores, k)
        items, scores = np.take_along_axis(items, best, 1), np.take_along_axis(scores, best, 1)
    return Nearest(items, scores)


def _best_columns(scores: Float32[np.ndarray, "queries items"], k: int) -> Int64[np.ndarray, "queries hits"]:
    """Columns of each row's ``k`` highest scores, highest first, equal ones from left to right.

    ``topk`` alone takes any of the scores that equal the lowest it takes.
    """
    size = min(k, scores.shape[1])
    lowest = torch.from_numpy(scores).topk(size).values[:, -1].numpy()
    best = np.empty((len(scores), size), dtype=np.int64)
    for row, (values, least) in enumerate(zip(scores, lowest, strict=True)):
        enough = np.flatnonzero(values >= least)
        best[row] = enough[best_first(values[enough])[:size]]
    return best
