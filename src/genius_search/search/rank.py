"""Ranking of the items under the beams, by codes or embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64, Integer, UInt8

from genius_search.config import SearchConfig
from genius_search.errors import UsageError
from genius_search.nn.codebooks import AnyArray, as_floats
from genius_search.nn.spread import Spread, SpreadOf, decode_densities, decode_half_norms, sum_codes
from genius_search.search.table import Restriction, SearchSegment, expand_ranges

NO_EMBEDDINGS: Final = (
    "this index stores no embeddings; rank by codes, or create it with `embeddings='fused'`"
)


class Beams(NamedTuple):
    """Final beams of each query: best first, or by their rows if items are re-ranked.

    A beam is an ID if all levels were decoded, otherwise a prefix, as a range of rows in the table of each
    segment. The range of an unused beam is empty in every segment.
    """

    low: Int64[np.ndarray, "queries beams segments"]
    high: Int64[np.ndarray, "queries beams segments"]
    log_probabilities: Float32[np.ndarray, "queries beams levels"]
    """Log-probability of each code; −inf for unused beams, NaN for levels that were not decoded."""

    def scores(self) -> Float32[np.ndarray, "queries beams"]:
        """Return the log-probability of each beam: the sum over its levels."""
        return np.asarray(np.nansum(self.log_probabilities, axis=2, dtype=np.float32))


class CodeRanker:
    """Scores IDs against a query embedding by their code vectors, norms and densities.

    Deviation 20: the paper has no re-ranking without stored embeddings.

    Norm and density are stored after the codes of an ID (:mod:`genius_search.nn.density`). IDs without them
    (random pools in speed measurements) are scored by the inner product alone.

    Parameters
    ----------
    tables
        the code vectors of each level.
    spread
        by which queries are scaled; if absent, they are not.
    norm_weight
        the weight of half norms where prefixes are chosen. Of IDs, weighted ones are stored.
    """

    def __init__(
        self, tables: Sequence[AnyArray], spread: Spread | None = None, norm_weight: float = 1.0
    ) -> None:
        self.norm_weight = norm_weight
        self._tables = [as_floats(table) for table in tables]
        self.spread = spread or Spread.none(len(tables[0]))

    def tables(self) -> list[Float32[np.ndarray, "_ dim"]]:
        """Return the code vectors of each level."""
        return self._tables

    def vectors(self, ids: Integer[np.ndarray, "ids columns"]) -> Float32[np.ndarray, "ids dim"]:
        """Return the vectors of IDs: the sums of their code vectors."""
        return sum_codes(self._tables, ids)

    def scale(self, query: Float32[np.ndarray, " dim"], among: SpreadOf) -> float:
        """Return the factor by which a query is scaled before costs are subtracted from its scores."""
        return float(among.scale(np.vecdot(self._tables[self.spread.level], query)[None])[0])

    def scores(
        self, query: AnyArray, ids: Integer[np.ndarray, "ids columns"], *, density_cost: float = 0.0
    ) -> Float32[np.ndarray, " ids"]:
        """Score IDs by their distance to a scaled query.

        The score is the inner product minus half the squared norm, which ranks IDs by Euclidean distance,
        minus ``density_cost`` times the density.
        """
        query = as_floats(query)
        scores = np.zeros(len(ids), dtype=np.float32)
        for table, codes in zip(self._tables, ids.T, strict=False):
            scores += np.vecdot(table, query).take(codes)  # without threads, whose waiting costs more
        scores -= self.costs(ids, density_cost=density_cost)
        return scores

    def costs(
        self, ids: Integer[np.ndarray, "ids columns"], *, density_cost: float
    ) -> Float32[np.ndarray, " ids"]:
        """Return the part of the score that does not depend on the query; it is subtracted."""
        num_levels = len(self._tables)
        if ids.shape[1] == num_levels:
            return np.zeros(len(ids), dtype=np.float32)
        return decode_half_norms(ids[:, num_levels]) + np.float32(density_cost) * self.densities(ids)

    def densities(self, ids: Integer[np.ndarray, "ids columns"]) -> Float32[np.ndarray, " ids"]:
        """Return the densities of IDs."""
        num_levels = len(self._tables)
        if ids.shape[1] == num_levels:
            return np.zeros(len(ids), dtype=np.float32)
        return decode_densities(ids[:, num_levels + 1])


def topk(scores: Float32[np.ndarray, " scores"], k: int) -> Int64[np.ndarray, " rows"]:
    """Return the positions of the ``k`` highest scores, or of all if there are fewer, highest first.

    Unlike ``torch.topk``, equal scores keep their order.
    """
    if len(scores) > k > 0:
        limit = np.partition(scores, len(scores) - k)[len(scores) - k]
        if np.isfinite(limit):
            enough = (scores >= limit).nonzero()[0]
            return np.asarray(enough[(-scores[enough]).argsort(kind="stable")[:k]])
    return np.asarray((-scores).argsort(kind="stable")[:k])


class Wanted(NamedTuple):
    """The conditions of one query."""

    width: int
    """Beam width."""
    k: int
    """Number of hits."""
    level0: frozenset[int] = frozenset()
    """Allowed codes at level 0; empty means any."""
    restriction: Restriction | None = None
    """Allowed items, deletions taken into account; None allows every item that is not deleted."""


class Ranking(NamedTuple):
    """Ranked items of one query, best first."""

    segments: Int64[np.ndarray, " hits"]
    """Segment of each item."""
    items: Int64[np.ndarray, " hits"]
    """Row of each item in its segment."""
    rows: Int64[np.ndarray, " hits"]
    """Row of each item's ID in the table of its segment."""
    scores: Float32[np.ndarray, " hits"]
    """In descending order."""
    beams: Int64[np.ndarray, " hits"]
    """Beam that each item was found under."""
    log_probabilities: Float32[np.ndarray, "hits levels"]
    """Log-probabilities of the codes of each hit's beam; NaN for levels that were not decoded."""
    touched: int
    """Number of items under all beams, before the best k were taken."""

    def take(self, chosen: Int64[np.ndarray, " kept"] | Bool[np.ndarray, " hits"] | slice) -> Ranking:
        """Return the chosen hits."""
        return Ranking._make([*(column[chosen] for column in self[:-1]), self.touched])


Vectors = Callable[[Int64[np.ndarray, " items"]], AnyArray]
"""Function that returns the unit embeddings of item rows of a segment."""


@dataclass(eq=False)
class Evidence:
    """Data available for re-ranking. Re-ranking by something that is None raises an error."""

    codes: CodeRanker | None = None
    embeddings: Sequence[Vectors] | None = None
    """Stored embeddings, one function for each segment."""
    is_raw: bool = False
    """Whether the embeddings are the encoder's features instead of the fused embeddings."""
    densities: Sequence[UInt8[np.ndarray, " _"]] | None = None
    """Densities of the items of each segment, which scores by fused embeddings are corrected by."""
    last_view: tuple[Sequence[object], bytes, int] | None = None
    """What the compiled search made of these and of segments, for the next query; see there."""


def rank_items(
    segments: Sequence[SearchSegment],
    beams: Beams,
    query: int,
    embedding: AnyArray,
    *,
    config: SearchConfig,
    evidence: Evidence,
    k: int,
    restriction: Restriction | None = None,
    level0: frozenset[int] = frozenset(),
    for_codes: AnyArray | None = None,
) -> Ranking:
    """Rank the items under the beams of one query.

    ``config.rerank`` selects the order:

    - ``none``: by the generator's log-probability; items that share an ID by descending ``code_cosine``.
    - ``codes``: by the score of their IDs (:meth:`CodeRanker.scores`).
    - ``embeddings``: by the cosine with their stored embeddings. ``config.shortlist``, if set, limits this to
      that many items (at least ``k``), the best by codes.

    The query is scaled (:mod:`genius_search.nn.spread`) before costs are subtracted from products, and
    scores are divided by that factor in the end. ``config.density_weight`` is the weight of the density in
    scores by codes and by fused embeddings, but not by raw ones, whose order is the paper's (GENIUS^R).

    Parameters
    ----------
    embedding
        the query's vector in the space that it is compared in: that of the stored embeddings with
        ``rerank="embeddings"``, otherwise that of the codes.
    level0
        allowed codes at level 0; empty means any.
    for_codes
        the query's vector in the space of the codes, if that is another one; a shortlist needs it.

    Raises
    ------
    UsageError
        The data that the re-ranking needs is not available.
    """
    if config.rerank == "embeddings" and evidence.embeddings is None:
        raise UsageError(NO_EMBEDDINGS)
    ranking = _items_under(segments, beams, query, restriction or tuple(one.alive for one in segments))
    if config.rerank == "none":
        return ranking.take(topk(ranking.scores, k))
    in_codes = as_floats(embedding if for_codes is None else for_codes)
    scale, density_cost = np.float32(1), 0.0
    if evidence.codes is not None:
        among = evidence.codes.spread.among(level0)
        scale = np.float32(evidence.codes.scale(in_codes, among))
        density_cost = config.density_weight * among.density_unit
    is_shortened = config.rerank == "embeddings" and 0 < config.shortlist < len(ranking.items)
    if config.rerank == "codes" or is_shortened:
        if evidence.codes is None:
            raise UsageError("ranking by codes needs the model's codebooks")
        scores = _by_codes(segments, ranking, in_codes * scale, evidence.codes, density_cost)
        ranking = ranking._replace(scores=scores)
    if config.rerank == "embeddings":
        if is_shortened:
            ranking = ranking.take(topk(ranking.scores, max(k, config.shortlist)))
        scores = _by_embeddings(ranking, as_floats(embedding) * scale, evidence, density_cost)
        ranking = ranking._replace(scores=scores)
    ranking = ranking.take(topk(ranking.scores, k))
    return ranking._replace(scores=ranking.scores / scale)


def _items_under(
    segments: Sequence[SearchSegment], beams: Beams, query: int, restriction: Restriction
) -> Ranking:
    """List the allowed items under the beams, in their order, with the log-probabilities of the beams."""
    scores = beams.scores()[query]
    parts = []
    for number, (segment, allowed) in enumerate(zip(segments, restriction, strict=True)):
        low, high = beams.low[query, :, number], beams.high[query, :, number]
        beam, row = expand_ranges(low, high) if allowed is None else allowed.ids.inside(low, high)
        owner, items = segment.table.buckets(row)
        if allowed is not None:
            kept = np.flatnonzero(allowed.items[items])
            items, owner = items[kept], owner[kept]
        parts.append((np.full(len(items), number), items, row[owner], scores[beam[owner]], beam[owner]))
    numbers, items, rows, of_items, owners = (np.concatenate(column) for column in zip(*parts, strict=True))
    decoded = beams.log_probabilities[query, owners]
    ranking = Ranking(numbers, items, rows, of_items, owners, decoded, touched=len(items))
    return ranking if len(segments) == 1 else ranking.take(ranking.beams.argsort(kind="stable"))


def _by_codes(
    segments: Sequence[SearchSegment],
    ranking: Ranking,
    query: Float32[np.ndarray, " dim"],
    ranker: CodeRanker,
    density_cost: float,
) -> Float32[np.ndarray, " hits"]:
    """Return the scores of the items' IDs."""
    scores = np.empty(len(ranking.items), dtype=np.float32)
    for number, segment in enumerate(segments):
        in_segment = np.flatnonzero(ranking.segments == number)
        ids = segment.table.ids[ranking.rows[in_segment]]
        scores[in_segment] = ranker.scores(query, ids, density_cost=density_cost)
    return scores


def _by_embeddings(
    ranking: Ranking,
    query: Float32[np.ndarray, " dim"],
    evidence: Evidence,
    density_cost: float,
) -> Float32[np.ndarray, " hits"]:
    """Return the products of the items' embeddings and the scaled query, minus the costs of densities."""
    scores = np.empty(len(ranking.items), dtype=np.float32)
    for number, vectors in enumerate(evidence.embeddings or ()):
        in_segment = np.flatnonzero(ranking.segments == number)
        items = ranking.items[in_segment]
        scores[in_segment] = as_floats(vectors(items)) @ query
        if density_cost and evidence.densities is not None and not evidence.is_raw:
            densities = decode_densities(evidence.densities[number][items])
            scores[in_segment] -= np.float32(density_cost) * densities
    return scores
