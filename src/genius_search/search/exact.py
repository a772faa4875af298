"""Exact search, which compares every item: the reference for everything quicker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.nn import functional as F

from genius_search.errors import BadData
from genius_search.nn.arrays import AnyArray
from genius_search.search.beams import topk

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
    vectors: Callable[[slice], AnyArray],
    num_items: int,
    *,
    k: int,
    device: torch.device | None = None,
) -> Nearest:
    """Return the ``k`` items with the highest inner product (all, if there are fewer). Ties go by item row.

    Parameters
    ----------
    vectors
        returns the vectors of a range of item rows, so that they need not all fit in memory; called once for
        each range.
    device
        device to compute on; by default that of the queries.

    Raises
    ------
    BadData
        A vector contains NaN or infinity.
    """
    device = device or queries.device
    if not bool(queries.isfinite().all()):
        raise BadData("queries have vectors with NaN or infinity; embed them again")
    blocks = [block.to(device) for block in queries.split(QUERY_BLOCK)]
    nearest = [
        Nearest(np.zeros((len(block), 0), np.int64), np.zeros((len(block), 0), np.float32))
        for block in blocks
    ]
    for start in range(0, num_items, ITEM_BLOCK):
        stop = min(start + ITEM_BLOCK, num_items)
        items = torch.as_tensor(vectors(slice(start, stop))).to(device).T
        if not bool(items.isfinite().all()):
            raise BadData(f"items {start} to {stop - 1} have vectors with NaN or infinity; embed them again")
        for number, block in enumerate(blocks):
            best = _best_columns(block @ items, k)
            # Earlier items come first, so that the stable sort puts the lower row first among equal scores.
            scores = np.concatenate([nearest[number].scores, best.scores], axis=1)
            rows = np.concatenate([nearest[number].items, best.items + start], axis=1)
            order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
            nearest[number] = Nearest(
                np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1)
            )
    return Nearest(*(np.concatenate(columns) for columns in zip(*nearest, strict=True)))


def _best_columns(products: Float[Tensor, "queries items"], k: int) -> Nearest:
    """Return the columns of the ``k`` highest scores of each row, highest first, ties from left to right.

    ``Tensor.topk`` picks arbitrarily among scores that tie for the last place, so rows with such ties are
    computed again.
    """
    size = min(k, products.shape[1])
    top = products.topk(size, dim=1)
    lowest = top.values[:, -1:]
    tied = ((products >= lowest).sum(dim=1) > size).cpu().numpy()
    columns, scores = top.indices.cpu().numpy(), top.values.cpu().numpy()
    order = np.lexsort((columns, -scores), axis=1)
    columns, scores = np.take_along_axis(columns, order, 1), np.take_along_axis(scores, order, 1)
    for row in np.flatnonzero(tied):
        values = products[int(row)].cpu().numpy()
        enough = np.flatnonzero(values >= scores[row, -1])
        columns[row] = enough[topk(values[enough], size)]
        scores[row] = values[columns[row]]
    return Nearest(columns, scores)


def append_one(queries: Float[Tensor, "queries dim"]) -> Float[Tensor, "queries longer"]:
    """Append a column of ones to queries, to match vectors from :func:`append_bias`."""
    return F.pad(queries, (0, 1), value=1.0)


def append_bias(vectors: AnyArray, costs: Float32[np.ndarray, " items"]) -> Float[Tensor, "items longer"]:
    """Append the negated costs to vectors, so that inner products with :func:`append_one` subtract them."""
    rows = torch.as_tensor(vectors)
    return torch.cat([rows, -torch.from_numpy(costs).to(rows)[:, None]], dim=1)
