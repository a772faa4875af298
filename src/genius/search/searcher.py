"""Answer queries: beams to items, ordered by the chosen evidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from genius.errors import UsageError
from genius.search.beam import NOTHING, Beams
from genius.search.rank import CodeRanker, best_first, embedding_scores
from genius.search.table import IdTable


class Answer(NamedTuple):
    """What one query found, best first."""

    items: Int64[np.ndarray, " hits"]
    """Item rows."""
    scores: Float32[np.ndarray, " hits"]
    """Of the evidence that ordered them, never rising."""
    beams: Int64[np.ndarray, " hits"]
    """Which beam each item came from."""
    touched: int
    """Items under all beams, before the cut."""


class Evidence(NamedTuple):
    """What re-ranking needs; absent parts make that way of ranking an error."""

    codes: CodeRanker | None = None
    embeddings: Callable[[Int64[np.ndarray, " items"]], Float[Tensor, "items dim"]] | None = None
    """Gives the unit embeddings of item rows."""


def rank_items(
    table: IdTable,
    beams: Beams,
    query: int,
    embedding: Float[Tensor, " dim"],
    *,
    rerank: str,
    evidence: Evidence,
    k: int,
) -> Answer:
    """List the items under the beams of one query and order them.

    ``none`` keeps the generator's order; items that share an ID come most typical first. ``codes`` and
    ``embeddings`` re-order all items under all beams; ``embedding`` is the query's vector in the space of the
    evidence (the paper's GENIUS^R: sums of the encoder's features on both sides).
    """
    rows = beams.rows[query]
    filled = np.flatnonzero(rows != NOTHING)
    buckets = [table.bucket(int(rows[beam])) for beam in filled]
    items = np.concatenate(buckets) if buckets else np.zeros(0, dtype=np.int64)
    beam = np.repeat(filled, [len(bucket) for bucket in buckets])
    match rerank:
        case "none":
            scores = beams.scores()[query][beam]
        case "codes":
            if evidence.codes is None:
                raise UsageError("ranking by codes needs the model's codebooks")
            by_id = evidence.codes.scores(embedding, table.ids[rows[filled]])
            scores = np.repeat(by_id, [len(bucket) for bucket in buckets])
        case "embeddings":
            if evidence.embeddings is None:
                raise UsageError(
                    "this index stores no embeddings; rank by codes, or create it with --embeddings fused"
                )
            scores = embedding_scores(embedding, evidence.embeddings(items))
        case _:
            raise UsageError(f"rerank is {rerank!r}, expected none, codes or embeddings")
    order = best_first(scores)[:k]
    return Answer(items[order], scores[order], beam[order], len(items))
