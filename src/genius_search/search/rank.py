"""Records of a search and its result, the data that ranks items, and scores by code vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int64, Integer, UInt8

from genius_search.nn.codebooks import AnyArray, as_floats, sum_codes
from genius_search.nn.fine import FineCodes
from genius_search.nn.spread import (
    MAX_FADE,
    Spread,
    TargetSpread,
    decode_densities,
    decode_half_norms,
)
from genius_search.search.table import Restriction


class CodeRanker:
    """Scores IDs against a query embedding by their code vectors, half norms and densities.

    With v the sum of an ID's code vectors, its score for a scaled query q is::

        q · v − w |v|² / 2 − density_cost · density

    Half norm and density are stored as two bytes after the codes of an ID
    (:mod:`genius_search.nn.density`). IDs without them (random pools in speed measurements) are
    scored by the inner product alone.

    Deviation 20: the paper has no re-ranking without stored embeddings.

    Parameters
    ----------
    tables
        the code vectors of each level.
    spread
        statistics that scale queries; if absent, queries are not scaled.
    norm_weight
        the weight w of half norms where prefixes are chosen. The half norms stored with IDs are
        already weighted.
    fine
        the fine codes that follow IDs, if there are any.
    """

    def __init__(
        self,
        tables: Sequence[AnyArray],
        spread: Spread | None = None,
        norm_weight: float = 1.0,
        fine: FineCodes | None = None,
    ) -> None:
        self.norm_weight = norm_weight
        self.fine = fine
        self._tables = [as_floats(table) for table in tables]
        self.spread = spread or Spread.neutral(len(tables[0]))

    def tables(self) -> list[Float32[np.ndarray, "_ dim"]]:
        """Return the code vectors of each level."""
        return self._tables

    def vectors(self, ids: Integer[np.ndarray, "ids columns"]) -> Float32[np.ndarray, "ids dim"]:
        """Return the vectors of IDs: the sums of their code vectors."""
        return sum_codes(self._tables, ids)

    def scale(self, query: Float32[np.ndarray, " dim"], among: TargetSpread) -> float:
        """Return the factor that scales a query before costs are subtracted from its scores."""
        return float(among.scale(np.vecdot(self._tables[self.spread.level], query)[None])[0])

    def scores(
        self, query: AnyArray, ids: Integer[np.ndarray, "ids columns"], *, density_cost: float = 0.0
    ) -> Float32[np.ndarray, " ids"]:
        """Score IDs by their distance to a scaled query.

        The score is the inner product minus half the squared norm, which ranks IDs by Euclidean
        distance, minus ``density_cost`` times the density.
        """
        query = as_floats(query)
        scores = np.zeros(len(ids), dtype=np.float32)
        for table, codes in zip(self._tables, ids.T, strict=False):
            # vecdot runs in one thread; for few vectors, waiting for more threads takes longer.
            scores += np.vecdot(table, query).take(codes)
        scores -= self.costs(ids, density_cost=density_cost)
        return scores

    def costs(
        self, ids: Integer[np.ndarray, "ids columns"], *, density_cost: float
    ) -> Float32[np.ndarray, " ids"]:
        """Return the part of the score that is subtracted and does not depend on the query."""
        num_levels = len(self._tables)
        if ids.shape[1] == num_levels:
            return np.zeros(len(ids), dtype=np.float32)
        densities = self.densities(ids)
        return decode_half_norms(ids[:, num_levels]) + np.float32(density_cost) * densities

    def densities(self, ids: Integer[np.ndarray, "ids columns"]) -> Float32[np.ndarray, " ids"]:
        """Return the densities of IDs."""
        num_levels = len(self._tables)
        if ids.shape[1] == num_levels:
            return np.zeros(len(ids), dtype=np.float32)
        return decode_densities(ids[:, num_levels + 1])


@dataclass(slots=True, eq=False)  # not frozen, since each search makes one, in a third of the time
class SearchQuery:
    """A query as a search of segments reads it; an index adds how its candidates are scored."""

    fused: Float32[np.ndarray, " dim"]
    """The fused embedding, in the space of the code vectors; the generator reads it."""
    compared: Float32[np.ndarray, " dim"]
    """The vector in the space of the stored embeddings: the fused embedding, or a raw feature."""
    k: int
    """Number of candidates to return."""
    beam: int | None = None
    """Beam width; None stands for the configured width."""
    level0: frozenset[int] = frozenset()
    """Allowed codes at level 0; empty allows any."""
    restriction: Restriction | None = None
    """Allowed items, without deleted ones; None allows every item that is not deleted."""


class Candidates(NamedTuple):
    """The ranked items of one query, best first: a row for each.

    A search fills the first seven fields. An index raises items by choices and words, and fills the
    others (:mod:`genius_search.index.score`). An example with one choice and one rare word::

        item      a      b      c      d
        scores    .80    .70    .60    .50      of the search
        meaning   .80    .70    .95    .50      c was chosen for a similar query
        scores    .80    .70    .95    .56      d contains the word
    """

    segments: Int64[np.ndarray, " hits"]
    """Segment of each item."""
    items: Int64[np.ndarray, " hits"]
    """Row of each item, or of its passage, in its segment."""
    id_rows: Int64[np.ndarray, " hits"]
    """Row of each item's ID in the table of its segment."""
    scores: Float[np.ndarray, " hits"]
    """Scores that order the items: those of the search, raised by choices and words."""
    beams: Int64[np.ndarray, " hits"]
    """Beam that each item was found under."""
    log_probabilities: Float32[np.ndarray, "hits levels"]
    """Log-probabilities of the codes of each item's beam; NaN for levels that were not decoded."""
    num_ranked: int
    """Number of items that the search ranked by codes, before the best k were taken: those under
    its beams, or those of the cells that it scanned."""
    meaning: Float[np.ndarray, " hits"] | None = None
    """Scores raised by choices alone; None if words do not count."""
    comparable: Float[np.ndarray, " hits"] | None = None
    """Scores that are compared with other modalities: raised by choices and rare words. None if
    words raise no item."""
    probabilities: Float64[np.ndarray, " hits"] | None = None
    """Probabilities that items are relevant, NaN for pinned items; None without calibration."""
    excess: Float64[np.ndarray, " hits"] | None = None
    """Excess over the other items of the modality (:func:`genius_search.index.score.find_excess`);
    None if it is unknown."""

    def take(
        self, rows: Int64[np.ndarray, " rows"] | Bool[np.ndarray, " hits"] | slice
    ) -> Candidates:
        """Return the candidates at some rows."""
        columns = [
            column if column is None or isinstance(column, int) else column[rows] for column in self
        ]
        return Candidates._make(columns)


VectorReader = Callable[[Int64[np.ndarray, " items"]], AnyArray]
"""Function that returns the unit embeddings of item rows of a segment."""


class PackedSegments(NamedTuple):
    """Segments as the compiled search reads them; cached, since most searches repeat them."""

    sources: tuple[object, ...]
    """The objects that were packed; the cache is valid for the identical objects."""
    parts: bytes
    """Structures of search.c, one for each segment."""
    num_items: int
    """Number of items in all segments."""
    num_allowed: int
    """Number of items that a search may return."""


@dataclass(eq=False)
class Evidence:
    """Data available for re-ranking. Re-ranking by data that is None raises an error."""

    codes: CodeRanker | None = None
    embeddings: Sequence[VectorReader] | None = None
    """Stored embeddings, one function for each segment."""
    is_raw: bool = False
    """Whether the embeddings are the encoder's features instead of the fused embeddings."""
    densities: Sequence[UInt8[np.ndarray, " _"]] | None = None
    """Densities of the items of each segment, which correct scores by fused embeddings."""
    fade_width: float = MAX_FADE
    """Densities fade for cosines within this distance of 1
    (:func:`genius_search.nn.spread.fade_width`)."""
    packed_allowed: PackedSegments | None = None
    """Cache of the compiled search (:mod:`genius_search.search.kernel`): the last conditions."""
    packed_all: PackedSegments | None = None
    """The same for searches without conditions."""
