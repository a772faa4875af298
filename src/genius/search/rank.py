"""Order found items by better evidence than the generator's probability.

By the IDs themselves: the inner product of the query embedding with the sum of an ID's code vectors is one
table look-up per level, and no embedding is stored. By stored embeddings: the paper's GENIUS^R.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float32, Int16, Int64
from torch import Tensor


class CodeRanker:
    """Scores IDs against query embeddings by look-ups of code-vector products.

    Deviation 20: the paper knows no re-ranking without stored embeddings.
    """

    def __init__(self, tables: list[Float[Tensor, "_ dim"]]) -> None:
        self._tables = [table.cpu().float() for table in tables]

    def look_ups(self, query: Float[Tensor, " dim"]) -> list[Float32[np.ndarray, " _"]]:
        """Inner products of one query with all code vectors, level by level."""
        return [(table @ query).numpy() for table in self._tables]

    def scores(
        self, query: Float[Tensor, " dim"], ids: Int16[np.ndarray, "ids levels"]
    ) -> Float32[np.ndarray, " ids"]:
        """Inner product of one query with the vector that each ID stands for."""
        total = np.zeros(len(ids), dtype=np.float32)
        for level, products in enumerate(self.look_ups(query)):
            total += products[ids[:, level]]
        return total


def embedding_scores(
    query: Float[Tensor, " dim"], items: Float[Tensor, "items dim"]
) -> Float32[np.ndarray, " items"]:
    """Cosine between one query and some items, all unit vectors."""
    scores: np.ndarray = (items.float() @ query.float()).numpy()
    return scores


def best_first(scores: Float32[np.ndarray, " items"]) -> Int64[np.ndarray, " items"]:
    """Places of the items in descending order of score; equal scores keep their order."""
    return np.argsort(-scores, kind="stable")
