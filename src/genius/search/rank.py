"""Order found items by better evidence than the generator's probability.

By the IDs themselves: the inner product of the query embedding with the sum of an ID's code vectors is one
table look-up per level, and no embedding is stored. By stored embeddings: the paper's GENIUS^R.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Int16
from torch import Tensor
from torch.nn import functional as F

FEW: Final = 4
"""The vectors of IDs are summed one by one when all their codes are at most one of so many code vectors."""


class CodeRanker:
    """Scores IDs against query embeddings by look-ups of code-vector products.

    Deviation 20: the paper knows no re-ranking without stored embeddings.

    Parameters
    ----------
    tables
        the code vectors of each level.
    """

    def __init__(self, tables: list[Float[Tensor, "_ dim"]]) -> None:
        self._vectors = torch.cat([table.detach().cpu().float() for table in tables])
        sizes = [len(table) for table in tables]
        self._offsets = np.array([0, *accumulate(sizes)][:-1], dtype=np.int64)

    def products(self, queries: Float[Tensor, "queries dim"]) -> Float32[np.ndarray, "queries codes"]:
        """Inner products with all code vectors, level after level."""
        products: np.ndarray = (queries.float().cpu() @ self._vectors.T).numpy()
        return products

    def look_up(
        self, products: Float32[np.ndarray, " codes"], ids: Int16[np.ndarray, "ids levels"]
    ) -> Float32[np.ndarray, " ids"]:
        """Inner products of one query with the vectors that IDs stand for."""
        scores: np.ndarray = products[ids + self._offsets].sum(axis=1)
        return scores

    def scores(
        self, query: Float[Tensor, " dim"], ids: Int16[np.ndarray, "ids levels"]
    ) -> Float32[np.ndarray, " ids"]:
        """The same for a single query; a few IDs are not worth the products with all code vectors."""
        if ids.size * FEW > len(self._vectors):
            return self.look_up(self.products(query[None])[0], ids)
        vectors = F.embedding_bag(torch.from_numpy(ids + self._offsets), self._vectors, mode="sum")
        scores: np.ndarray = (vectors @ query.float().cpu()).numpy()
        return scores


def embedding_scores(
    query: Float[Tensor, " dim"], items: Float[Tensor, "items dim"]
) -> Float32[np.ndarray, " items"]:
    """Cosine between one query and some items, all unit vectors."""
    scores: np.ndarray = (items.float() @ query.float()).numpy()
    return scores
