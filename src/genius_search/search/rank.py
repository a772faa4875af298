"""What ranks items: scores of IDs by their code vectors, and what else is known of a query and its items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64, Integer, UInt8

from genius_search.nn.codebooks import AnyArray, as_floats, sum_codes
from genius_search.nn.spread import (
    MAX_FADE,
    Spread,
    TargetSpread,
    decode_densities,
    decode_half_norms,
)
from genius_search.search.table import Restriction


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
        self.spread = spread or Spread.neutral(len(tables[0]))

    def tables(self) -> list[Float32[np.ndarray, "_ dim"]]:
        """Return the code vectors of each level."""
        return self._tables

    def vectors(self, ids: Integer[np.ndarray, "ids columns"]) -> Float32[np.ndarray, "ids dim"]:
        """Return the vectors of IDs: the sums of their code vectors."""
        return sum_codes(self._tables, ids)

    def scale(self, query: Float32[np.ndarray, " dim"], among: TargetSpread) -> float:
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
            scores += np.vecdot(table, query).take(
                codes
            )  # without threads, whose waiting costs more
        scores -= self.costs(ids, density_cost=density_cost)
        return scores

    def costs(
        self, ids: Integer[np.ndarray, "ids columns"], *, density_cost: float
    ) -> Float32[np.ndarray, " ids"]:
        """Return the part of the score that does not depend on the query; it is subtracted."""
        num_levels = len(self._tables)
        if ids.shape[1] == num_levels:
            return np.zeros(len(ids), dtype=np.float32)
        return decode_half_norms(ids[:, num_levels]) + np.float32(density_cost) * self.densities(
            ids
        )

    def densities(self, ids: Integer[np.ndarray, "ids columns"]) -> Float32[np.ndarray, " ids"]:
        """Return the densities of IDs."""
        num_levels = len(self._tables)
        if ids.shape[1] == num_levels:
            return np.zeros(len(ids), dtype=np.float32)
        return decode_densities(ids[:, num_levels + 1])


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

    def take(
        self, chosen: Int64[np.ndarray, " kept"] | Bool[np.ndarray, " hits"] | slice
    ) -> Ranking:
        """Return the chosen hits."""
        return Ranking._make([*(column[chosen] for column in self[:-1]), self.touched])


VectorReader = Callable[[Int64[np.ndarray, " items"]], AnyArray]
"""Function that returns the unit embeddings of item rows of a segment."""


@dataclass(eq=False)
class Evidence:
    """Data available for re-ranking. Re-ranking by something that is None raises an error."""

    codes: CodeRanker | None = None
    embeddings: Sequence[VectorReader] | None = None
    """Stored embeddings, one function for each segment."""
    is_raw: bool = False
    """Whether the embeddings are the encoder's features instead of the fused embeddings."""
    densities: Sequence[UInt8[np.ndarray, " _"]] | None = None
    """Densities of the items of each segment, which scores by fused embeddings are corrected by."""
    fade_width: float = MAX_FADE
    """Over which last part of the cosine densities fade (:func:`genius_search.nn.spread.fade_width`)."""
    last_view: tuple[Sequence[object], bytes, int] | None = None
    """What the compiled search made of these and of segments, for the next query; see there."""
