"""Answer queries: from beams to items, ordered by the chosen evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int16, Int64, UInt8
from torch import Tensor

from genius.config import SearchConfig
from genius.errors import UsageError
from genius.models import marks
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

    def first(self, count: int) -> Answer:
        """The best of them only."""
        return self._replace(
            parts=self.parts[:count],
            items=self.items[:count],
            rows=self.rows[:count],
            scores=self.scores[:count],
            beams=self.beams[:count],
        )


class Evidence(NamedTuple):
    """What re-ranking needs; absent parts make that way of ranking an error."""

    codes: CodeRanker | None = None
    embeddings: Sequence[Vectors] | None = None
    """Of each part."""
    is_raw: bool = False
    """Whether the embeddings are the encoder's features and not the fused ones that IDs are made from."""
    densities: Sequence[UInt8[np.ndarray, " items"]] | None = None
    """How crowded it is around the items of each part, by row. Where it is not known, it is taken from their
    IDs, which know it less well."""


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

    With a ``config.mix`` an ID's score by codes is raised by so many times the log-probability
    of its beam. All beams of a query were decoded equally deep, so what is added is comparable: it is that
    of the prefix where decoding stopped, and nothing for a query that was settled before the first code.

    Both orders, by codes and by fused embeddings, take ``config.hubness`` times a density from each score,
    where it is known: that around an ID, and that around the item itself. By raw embeddings the order is
    the paper's.

    Raises
    ------
    UsageError
        the evidence that the re-ranking needs is not there.
    """
    restriction = restriction or tuple(part.alive for part in parts)
    leaves = _leaves(beams, query, restriction)
    by_leaf: np.ndarray | None = None
    match config.rerank:
        case "none":
            by_leaf = _probability(beams, query, leaves)
        case "codes":
            by_leaf = _by_codes(parts, leaves, embedding, evidence, config)
        case "embeddings":
            if evidence.embeddings is None:
                raise UsageError(
                    "this index stores no embeddings; rank by codes, or create it with --embeddings fused"
                )
            if config.shortlist:
                asked = embedding if for_codes is None else for_codes
                by_leaf = _by_codes(parts, leaves, asked, evidence, config)
    if by_leaf is not None and config.mix and config.rerank != "none":
        by_leaf = by_leaf + config.mix * _probability(beams, query, leaves)
    found = _items(parts, leaves, by_leaf, restriction)
    touched = len(found.items)
    if config.rerank == "embeddings":
        if config.shortlist:
            found = found.take(highest(found.scores, max(k, config.shortlist)))
        found = found._replace(scores=_by_embeddings(parts, found, embedding, evidence, config))
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


def _probability(beams: Beams, query: int, leaves: _Leaves) -> Float32[np.ndarray, " leaves"]:
    """Log-probability of each leaf's beam, of as many codes as were decoded."""
    of_beams = np.asarray(np.nansum(beams.log_probabilities[query], axis=1, dtype=np.float32))
    found: np.ndarray = of_beams[leaves.beam]
    return found


def _by_codes(
    parts: Sequence[Part], leaves: _Leaves, embedding: Tensor, evidence: Evidence, config: SearchConfig
) -> Float32[np.ndarray, " leaves"]:
    if evidence.codes is None:
        raise UsageError("ranking by codes needs the model's codebooks")
    ids = _ids(parts, leaves.part, leaves.row)
    return evidence.codes.scores(embedding, ids, hubness=config.hubness)


def _ids(
    parts: Sequence[Part], numbers: Int64[np.ndarray, " rows"], rows: Int64[np.ndarray, " rows"]
) -> Int16[np.ndarray, "rows columns"]:
    """These rows of the parts' tables: codes, and marks where there are any."""
    ids = np.empty((len(rows), parts[0].table.num_levels), dtype=np.int16)
    for number, part in enumerate(parts):
        here = numbers == number if len(parts) > 1 else slice(None)
        ids[here] = part.table.ids[rows[here]]
    return ids


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


def _by_embeddings(
    parts: Sequence[Part], found: _Found, embedding: Tensor, evidence: Evidence, config: SearchConfig
) -> Float32[np.ndarray, " items"]:
    scores = np.empty(len(found.items), dtype=np.float32)
    for number, part_vectors in enumerate(evidence.embeddings or ()):
        here = np.flatnonzero(found.parts == number)
        scores[here] = embedding_scores(embedding, part_vectors(found.items[here]))
        if config.hubness and not evidence.is_raw:
            crowded = _densities(parts[number], number, found.take(here), evidence)
            scores[here] -= np.float32(config.hubness) * crowded
    return scores


def _densities(
    part: Part, number: int, found: _Found, evidence: Evidence
) -> Float32[np.ndarray, " items"] | float:
    """How crowded it is around items of one part."""
    if evidence.densities is not None:
        return marks.measured(evidence.densities[number][found.items])
    return 0.0 if evidence.codes is None else evidence.codes.densities(part.table.ids[found.rows])
