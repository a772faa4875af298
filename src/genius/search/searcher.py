"""Answer queries: from beams to items, ordered by the chosen evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from genius.config import SearchConfig
from genius.errors import UsageError
from genius.search.allowed import Part, rows_inside
from genius.search.beam import Beams
from genius.search.highest import highest
from genius.search.prefixes import Restriction
from genius.search.rank import CodeRanker, embedding_scores

Vectors = Callable[[Int64[np.ndarray, " items"]], Float[Tensor, "items dim"]]
"""Gives the unit embeddings of a part's item rows."""


class Answer(NamedTuple):
    """What one query found, best first."""

    parts: Int64[np.ndarray, " hits"]
    """Which part each hit is in."""
    items: Int64[np.ndarray, " hits"]
    """Item rows there."""
    rows: Int64[np.ndarray, " hits"]
    """Rows of their IDs in the part's table."""
    scores: Float32[np.ndarray, " hits"]
    """Of the evidence that ordered them, never rising."""
    beams: Int64[np.ndarray, " hits"]
    """Which beam each item came from."""
    touched: int
    """Items under all beams, before the cut."""


class Evidence(NamedTuple):
    """What re-ranking needs; absent parts make that way of ranking an error."""

    codes: CodeRanker | None = None
    embeddings: Sequence[Vectors] | None = None
    """Of each part."""


class _Leaves(NamedTuple):
    """IDs under the beams of one query, beam after beam."""

    part: Int64[np.ndarray, " leaves"]
    row: Int64[np.ndarray, " leaves"]
    beam: Int64[np.ndarray, " leaves"]


def rank_items(
    parts: Sequence[Part],
    beams: Beams,
    query: int,
    embedding: Float[Tensor, " dim"],
    *,
    config: SearchConfig,
    evidence: Evidence,
    k: int,
    restriction: Restriction | None = None,
    for_codes: Float[Tensor, " dim"] | None = None,
) -> Answer:
    """List the items under the beams of one query and order them.

    Without re-ranking they keep the generator's order; items that share an ID come most typical first. By
    ``codes`` and ``embeddings`` all items under all beams are ordered anew; ``embedding`` is the query's
    vector in the space of the evidence (the paper's GENIUS^R: sums of the encoder's features on both sides).
    With a ``config.shortlist`` only so many of them (at least ``k``), the best by codes, are compared by
    their embeddings; ``for_codes`` is the query's vector in the space of the codes, where the stored
    embeddings have another.

    Raises
    ------
    UsageError
        the evidence that the re-ranking needs is not there.
    """
    restriction = restriction or tuple(part.alive for part in parts)
    leaves = _leaves(beams, query, restriction)
    match config.rerank:
        case "none":
            by_leaf = beams.scores()[query][leaves.beam]
        case "codes":
            by_leaf = _by_codes(parts, leaves, embedding, evidence)
        case "embeddings":
            if evidence.embeddings is None:
                raise UsageError(
                    "this index stores no embeddings; rank by codes, or create it with --embeddings fused"
                )
            in_codes = embedding if for_codes is None else for_codes
            by_leaf = _by_codes(parts, leaves, in_codes, evidence) if config.shortlist else None
    found = _items(parts, leaves, by_leaf, restriction)
    touched = len(found.items)
    if config.rerank == "embeddings":
        if config.shortlist:
            found = found.take(highest(found.scores, max(k, config.shortlist)))
        found = found._replace(scores=_by_embeddings(found, embedding, evidence.embeddings or ()))
    best = found.take(highest(found.scores, k))
    return Answer(*best, touched)


class _Found(NamedTuple):
    """Items, before they are ordered."""

    parts: np.ndarray
    items: np.ndarray
    rows: np.ndarray
    scores: np.ndarray
    beams: np.ndarray

    def take(self, places: np.ndarray) -> _Found:
        return _Found(*(values[places] for values in self))


def _leaves(beams: Beams, query: int, restriction: Restriction) -> _Leaves:
    """All rows in the ranges of all parts under which something may be found."""
    found: list[_Leaves] = []
    for number, allowed in enumerate(restriction):
        ranges = (beams.low[query, :, number], beams.high[query, :, number])
        beam, row = rows_inside(*ranges) if allowed is None else allowed.ids.inside(*ranges)
        found.append(_Leaves(np.full(len(row), number), row, beam))
    if len(found) == 1:
        return found[0]
    together = _Leaves(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
    order = np.argsort(together.beam, kind="stable")
    return _Leaves(*(values[order] for values in together))


def _by_codes(
    parts: Sequence[Part], leaves: _Leaves, embedding: Tensor, evidence: Evidence
) -> Float32[np.ndarray, " leaves"]:
    if evidence.codes is None:
        raise UsageError("ranking by codes needs the model's codebooks")
    ids = np.empty((len(leaves.row), parts[0].table.num_levels), dtype=np.int16)
    for number, part in enumerate(parts):
        here = leaves.part == number if len(parts) > 1 else slice(None)
        ids[here] = part.table.ids[leaves.row[here]]
    return evidence.codes.scores(embedding, ids)


def _items(
    parts: Sequence[Part], leaves: _Leaves, scores: np.ndarray | None, restriction: Restriction
) -> _Found:
    """The items of all leaves that may be found, beam after beam."""
    found: list[_Found] = []
    for number, (part, allowed) in enumerate(zip(parts, restriction, strict=True)):
        here = np.flatnonzero(leaves.part == number)
        buckets = part.table.buckets(leaves.row[here])
        owner = here[buckets.owner]
        kept = np.arange(len(owner)) if allowed is None else np.flatnonzero(allowed.items[buckets.items])
        owner = owner[kept]
        found.append(
            _Found(
                np.full(len(kept), number),
                buckets.items[kept],
                leaves.row[owner],
                np.zeros(len(kept), dtype=np.float32) if scores is None else scores[owner],
                leaves.beam[owner],
            )
        )
    if len(found) == 1:
        return found[0]
    together = _Found(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
    return together.take(np.argsort(together.beams, kind="stable"))


def _by_embeddings(found: _Found, embedding: Tensor, vectors: Sequence[Vectors]) -> np.ndarray:
    scores = np.empty(len(found.items), dtype=np.float32)
    for number, part_vectors in enumerate(vectors):
        here = np.flatnonzero(found.parts == number)
        scores[here] = embedding_scores(embedding, part_vectors(found.items[here]))
    return scores
