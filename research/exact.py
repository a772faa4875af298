"""Exact search, which compares every item: the reference for everything quicker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

ITEM_BLOCK: Final = 16_384
QUERY_BLOCK: Final = 2_048
"""Size of the blocks of items and queries that are compared at once: 128 MiB of scores."""


class Nearest(NamedTuple):
    """The items nearest to each query, best first."""

    items: Int64[np.ndarray, "queries hits"]
    """Item rows."""
    scores: Float32[np.ndarray, "queries hits"]
    """Inner products, in descending order."""


def exact_search(
    queries: Float[Tensor, "queries dim"],
    vectors: Callable[[slice], Tensor],
    num_items: int,
    *,
    k: int,
    device: torch.device,
) -> Nearest:
    """Return the ``k`` items with the highest inner product (all, if there are fewer).

    Which of the items that tie for the last place are returned is not defined.

    Parameters
    ----------
    vectors
        returns the vectors of a range of item rows, so that they need not all fit in memory; called once for
        each range.
    """
    blocks = [block.to(device) for block in queries.split(QUERY_BLOCK)]
    scores = [block.new_zeros(len(block), 0) for block in blocks]
    rows = [values.long() for values in scores]
    for start in range(0, num_items, ITEM_BLOCK):
        stop = min(start + ITEM_BLOCK, num_items)
        items = vectors(slice(start, stop)).to(device)
        for number, block in enumerate(blocks):
            products = block @ items.T
            best = products.topk(min(k, stop - start), dim=1)
            both = torch.cat([scores[number], best.values], dim=1)
            order = both.argsort(dim=1, descending=True, stable=True)[:, :k]
            scores[number] = both.gather(1, order)
            rows[number] = torch.cat([rows[number], best.indices + start], dim=1).gather(1, order)
    return Nearest(torch.cat(rows).cpu().numpy(), torch.cat(scores).cpu().numpy())
