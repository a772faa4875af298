"""Order found items by better evidence than the generator's probability.

By the IDs themselves: the inner product of the query embedding with the sum of an ID's code vectors is one
table look-up per level, and no embedding is stored; what else ranks, an ID's marks know
(:mod:`genius.models.marks`). By stored embeddings: the paper's GENIUS^R.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, Integer
from torch import Tensor
from torch.nn import functional as F

from genius.models import marks

FEW: Final = 4
"""The vectors of IDs are summed one by one when all their codes are at most one of so many code vectors."""


class CodeRanker:
    """Scores IDs against query embeddings by look-ups of code-vector products, and by the IDs' marks.

    Deviation 20: the paper knows no re-ranking without stored embeddings.

    IDs may come as codes alone (pools that were drawn to measure speed): then nothing is known of them but
    the inner product.

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

    def vectors(self, ids: Integer[np.ndarray, "ids columns"]) -> Float[Tensor, "ids dim"]:
        """What IDs stand for: the sums of their code vectors."""
        return F.embedding_bag(torch.from_numpy(self._places(ids)), self._vectors, mode="sum")

    def look_up(
        self, products: Float32[np.ndarray, " codes"], ids: Integer[np.ndarray, "ids columns"]
    ) -> Float32[np.ndarray, " ids"]:
        """Inner products of one query with the vectors that IDs stand for."""
        scores: np.ndarray = products[self._places(ids)].sum(axis=1)
        return scores

    def scores(
        self, query: Float[Tensor, " dim"], ids: Integer[np.ndarray, "ids columns"], *, hubness: float = 0.0
    ) -> Float32[np.ndarray, " ids"]:
        """How near IDs are to a query: inner product, less half norm, less ``hubness`` times density.

        A few IDs are not worth the products with all code vectors.
        """
        places = self._places(ids)
        if places.size * FEW > len(self._vectors):
            products = self.products(query[None])[0]
            scores: np.ndarray = products[places].sum(axis=1)
        else:
            scores = (self.vectors(ids) @ query.float().cpu()).numpy()
        scores -= self.costs(ids, hubness=hubness)
        return scores

    def costs(
        self, ids: Integer[np.ndarray, "ids columns"], *, hubness: float
    ) -> Float32[np.ndarray, " ids"]:
        """What is taken from the inner products of IDs, whatever the query."""
        if not self._has_marks(ids):
            return np.zeros(len(ids), dtype=np.float32)
        kept = ids[:, len(self._offsets) :]
        return marks.half_norms(kept) + np.float32(hubness) * marks.densities(kept)

    def densities(self, ids: Integer[np.ndarray, "ids columns"]) -> Float32[np.ndarray, " ids"]:
        """How crowded it is around IDs."""
        if not self._has_marks(ids):
            return np.zeros(len(ids), dtype=np.float32)
        return marks.densities(ids[:, len(self._offsets) :])

    def _has_marks(self, ids: Integer[np.ndarray, "ids columns"]) -> bool:
        return bool(ids.shape[1] > len(self._offsets))

    def _places(self, ids: Integer[np.ndarray, "ids columns"]) -> Int64[np.ndarray, "ids levels"]:
        """Where the vectors of the codes are among all."""
        return np.asarray(ids[:, : len(self._offsets)] + self._offsets)


def embedding_scores(
    query: Float[Tensor, " dim"], items: Float[Tensor, "items dim"]
) -> Float32[np.ndarray, " items"]:
    """Cosine between one query and some items, all unit vectors."""
    scores: np.ndarray = (items.float() @ query.float()).numpy()
    return scores
