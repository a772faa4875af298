"""Exact search: compare every query with every item, a block of either at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.nn import functional as F

from genius.errors import BadData
from genius.search.highest import highest

ITEM_BLOCK: Final = 16_384
QUERY_BLOCK: Final = 2_048
"""Scores of so many items and queries are in memory at once: 128 MiB."""


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
    device: torch.device | None = None,
) -> Nearest:
    """The ``k`` items of highest inner product (all, if there are fewer); of equal ones the first rows.

    Parameters
    ----------
    vectors
        gives the vectors of a range of item rows, so that they need not all be in memory; each range is
        asked for once.
    device
        where products are computed; default: where the queries are.

    Raises
    ------
    BadData
        a vector holds NaN or infinity, which no order can place.
    """
    device = device or queries.device
    if not bool(queries.isfinite().all()):
        raise BadData("queries have vectors with NaN or infinity; embed them again")
    blocks = [
        queries[start : start + QUERY_BLOCK].to(device) for start in range(0, len(queries), QUERY_BLOCK)
    ]
    found = [
        Nearest(np.zeros((len(block), 0), np.int64), np.zeros((len(block), 0), np.float32))
        for block in blocks
    ]
    for start in range(0, num_items, ITEM_BLOCK):
        stop = min(start + ITEM_BLOCK, num_items)
        part = vectors(slice(start, stop)).to(device).T
        if not bool(part.isfinite().all()):
            raise BadData(f"items {start} to {stop - 1} have vectors with NaN or infinity; embed them again")
        for number, block in enumerate(blocks):
            best = _best_columns(block @ part, k)
            found[number] = _merged(found[number], Nearest(best.items + start, best.scores), k)
    if not found:
        return Nearest(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.float32))
    return Nearest(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def with_one(queries: Float[Tensor, "queries dim"]) -> Float[Tensor, "queries longer"]:
    """Queries for items that :func:`less` has made longer."""
    return F.pad(queries, (0, 1), value=1.0)


def less(
    vectors: Float[Tensor, "items dim"], costs: Float32[np.ndarray, " items"]
) -> Float[Tensor, "items longer"]:
    """Vectors whose inner products with :func:`with_one`'s are lower by what each item costs."""
    column = torch.from_numpy(costs).to(vectors)
    return torch.cat([vectors, -column[:, None]], dim=1)


def _merged(before: Nearest, here: Nearest, k: int) -> Nearest:
    """The best of two; what was found before stands first, so that of equal scores the lower row does."""
    scores = np.concatenate([before.scores, here.scores], axis=1)
    items = np.concatenate([before.items, here.items], axis=1)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return Nearest(np.take_along_axis(items, best, 1), np.take_along_axis(scores, best, 1))


def _best_columns(products: Float[Tensor, "queries items"], k: int) -> Nearest:
    """Columns of each row's ``k`` highest scores, highest first, equal ones from left to right.

    ``topk`` alone takes any of the scores that equal the lowest it takes, so rows with such ties are looked
    at again.
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
        columns[row] = enough[highest(values[enough], size)]
        scores[row] = values[columns[row]]
    return Nearest(columns, scores)
