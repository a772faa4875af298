"""The search in PyTorch: decoders, beam search over IDs, and ranking of the items under beams.

Paper, section 4.4. A decoder predicts an ID code by code. At each level, every query keeps its most
probable prefixes, its beams. A prefix is a range of rows in the table of each segment, so the codes
that can follow it, and the number of IDs under each, are found by binary search. All queries of a
batch are decoded together, level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import SearchSettings
from genius_search.errors import UsageError
from genius_search.nn.codebooks import AnyArray, as_floats
from genius_search.nn.generator import DecoderStep, Generator, GeneratorState
from genius_search.nn.spread import Spread, decode_densities, fade
from genius_search.search.rank import Candidates, Evidence
from genius_search.search.table import (
    Children,
    Restriction,
    SearchSegment,
    children_in_segments,
    count_ids,
    expand_ranges,
)

Level0: TypeAlias = Sequence[frozenset[int]]
"""Allowed level-0 codes of each query; empty means any."""


@runtime_checkable
class Decoder(Protocol):
    """A decoder of IDs; a generator without a guide is one itself (paper, section 4.3).

    Its state has one row per beam, query after query, and a method ``select(queries, rows)``, which
    returns the state of the chosen queries (None: all) and rows, in this order. ``rows`` has one
    line per chosen query, with row numbers of the state; a row may occur repeatedly.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of codes at each level."""

    @property
    def device(self) -> torch.device:
        """Device of the computation."""

    def start(self, queries: Float[Tensor, "queries dim"], level0: Level0 | None = None) -> Any:
        """Return the initial state, before any token.

        Parameters
        ----------
        level0
            allowed level-0 codes of each query; empty means any, as None does for all queries.
        """

    def advance(self, state: Any, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read further codes; each attends to those before it.

        In the initial state the start token is read first: without any codes, the result predicts
        level 0; with one code, levels 0 and 1. The initial state may be continued by several
        adjacent rows per query, the same number for each query.
        """

    def log_probabilities(
        self,
        hidden: Float[Tensor, "rows width"],
        level: int,
        scores: Literal["level", "vocabulary"],
    ) -> Float[Tensor, "rows codes"]:
        """Return the scores of one level's codes, normalised over this level or all levels."""


class GeometricState(NamedTuple):
    """State of a :class:`GeometricDecoder`."""

    level: int
    residuals: Float[Tensor, "rows dim"]
    """The query's embedding minus the weighted vectors of the codes read so far. Before the first
    token, there is one row per query."""

    def select(
        self, queries: Int64[Tensor, " chosen"] | None, rows: Int64[Tensor, "chosen beams"]
    ) -> GeometricState:
        """Return the state of the chosen queries (None: all) and rows."""
        if self.level:
            return self._replace(residuals=self.residuals[rows.flatten()])
        return self if queries is None else self._replace(residuals=self.residuals[queries])


class GeometricDecoder:
    """Decoder without a network that prefers the IDs whose vectors are nearest to the query.

    A prefix whose code vectors sum to v has the score q·v − w|v|²/2; with w = 1 this ranks prefixes
    by distance, as in quantization. A further code with the vector e adds::

        (q − wv)·e − w|e|²/2

    The query is scaled first (:mod:`genius_search.nn.spread`). Beam search uses these scores in
    place of log-probabilities; they are not normalised. The vectors are copied, so construct a new
    decoder after further training.

    Parameters
    ----------
    tables
        the code vectors of each level.
    spread
        statistics that scale queries; if absent, queries are not scaled.
    norm_weight
        the weight w of half norms.
    """

    def __init__(
        self,
        tables: list[Float[Tensor, "_ dim"]],
        spread: Spread | None = None,
        norm_weight: float = 1.0,
    ) -> None:
        self._spread = spread or Spread.neutral(len(tables[0]))
        self.sizes: tuple[int, ...] = tuple(len(table) for table in tables)
        vectors = torch.cat([table.detach().float() for table in tables])
        self._vectors = norm_weight * vectors
        self._offsets = torch.tensor([0, *accumulate(self.sizes)][:-1], device=self.device)
        levels = vectors.split(self.sizes)
        self._columns = tuple(level.t().contiguous() for level in levels)
        self._costs = tuple(level.square().sum(dim=1) * (norm_weight / -2) for level in levels)

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self._vectors.device

    def start(
        self, queries: Float[Tensor, "queries dim"], level0: Level0 | None = None
    ) -> GeometricState:
        """Return the initial state, before any token."""
        queries = queries.detach().float()
        products = as_floats(queries @ self._columns[self._spread.level])
        scales = self._spread.scales(products, level0 or [frozenset()] * len(queries))
        residuals = queries * torch.from_numpy(scales).to(queries)[:, None]
        return GeometricState(level=0, residuals=residuals)

    def advance(self, state: GeometricState, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes; ``hidden`` is the residual that the next code's vector should approximate."""
        num_rows, num_codes = codes.shape
        first_level = max(state.level - 1, 0)
        offsets = self._offsets[first_level : first_level + num_codes]
        vectors = F.embedding(codes + offsets, self._vectors)
        rows_each = num_rows // max(len(state.residuals), 1)
        before = state.residuals.repeat_interleave(rows_each, dim=0)
        # Columns: q − w·(v so far), then minus w·e of one code more each.
        residuals = torch.cat([before[:, None], -vectors], dim=1).cumsum(dim=1)
        hidden = residuals[:, 1:] if state.level else residuals
        level = state.level + hidden.shape[1]
        return DecoderStep(hidden, GeometricState(level, hidden[:, -1]))

    def log_probabilities(
        self,
        hidden: Float[Tensor, "rows dim"],
        level: int,
        scores: Literal["level", "vocabulary"],  # noqa: ARG002  nothing is normalised
    ) -> Float[Tensor, "rows codes"]:
        """Return the scores of one level's codes, which are not normalised."""
        return torch.addmm(self._costs[level], hidden, self._columns[level])


class GuidedState(NamedTuple):
    """State of a :class:`GuidedDecoder`."""

    generated: GeneratorState
    geometric: GeometricState

    def select(
        self, queries: Int64[Tensor, " chosen"] | None, rows: Int64[Tensor, "chosen beams"]
    ) -> GuidedState:
        """Return the state of the chosen queries (None: all) and rows."""
        return GuidedState(
            self.generated.select(queries, rows), self.geometric.select(queries, rows)
        )


class GuidedDecoder:
    """A generator with a guide: logits and distances, combined as in training.

    Parameters
    ----------
    spread
        statistics that scale queries; if absent, queries are not scaled.
    """

    @torch.no_grad()
    def __init__(self, generator: Generator, spread: Spread | None = None) -> None:
        self._generator = generator
        self._guide = generator.require_guide()
        self._geometry = GeometricDecoder(self._guide.tables(), spread)
        self.sizes: tuple[int, ...] = generator.sizes
        self.device: torch.device = generator.device

    def start(
        self, queries: Float[Tensor, "queries dim"], level0: Level0 | None = None
    ) -> GuidedState:
        """Return the initial state, before any token."""
        return GuidedState(self._generator.start(queries), self._geometry.start(queries, level0))

    def advance(self, state: GuidedState, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes; ``hidden`` is the generator's hidden state followed by the residual."""
        generated = self._generator.advance(state.generated, codes)
        geometric = self._geometry.advance(state.geometric, codes)
        hidden = torch.cat([generated.hidden, geometric.hidden], dim=-1)
        return DecoderStep(hidden, GuidedState(generated.state, geometric.state))

    def log_probabilities(
        self,
        hidden: Float[Tensor, "rows width"],
        level: int,
        scores: Literal["level", "vocabulary"],
    ) -> Float[Tensor, "rows codes"]:
        """Return the log-probabilities of one level's codes, normalised over the level.

        Raises
        ------
        UsageError
            ``scores`` is ``vocabulary``, which would compare distances at different levels.
        """
        if scores == "vocabulary":
            raise UsageError(
                "this model's generator is guided by geometry, level by level, so its scores "
                'cannot be normalised over the whole vocabulary; use scores="level"'
            )
        generated, residual = hidden.tensor_split([self._generator.config.width], dim=1)
        logits = self._guide.combine(self._generator.logits(generated, level), residual, level)
        return torch.log_softmax(logits, dim=-1)


class Beams(NamedTuple):
    """Final beams of each query: best first, or by their rows if items are re-ranked.

    A beam is an ID if all levels were decoded, otherwise a prefix: a range of rows in the table of
    each segment. The range of an unused beam is empty in every segment.
    """

    low: Int64[np.ndarray, "queries beams segments"]
    high: Int64[np.ndarray, "queries beams segments"]
    log_probabilities: Float32[np.ndarray, "queries beams levels"]
    """Log-probability of each code; −inf for unused beams, NaN for levels that were not decoded."""

    def scores(self) -> Float32[np.ndarray, "queries beams"]:
        """Return the log-probability of each beam: the sum over its levels."""
        return np.asarray(np.nansum(self.log_probabilities, axis=2, dtype=np.float32))


class Prefixes(NamedTuple):
    """The beams of all unfinished queries: query after query, and best first for each."""

    query: Int64[np.ndarray, " beams"]
    """Number of the query in the batch."""
    low: Int64[np.ndarray, "beams segments"]
    """First row of the prefix in each segment."""
    high: Int64[np.ndarray, "beams segments"]
    code: Int64[np.ndarray, " beams"]
    """The last code."""
    row: Int64[np.ndarray, " beams"]
    """Row of the decoder that predicted this code; see :class:`DecoderRows`."""
    total: Float32[np.ndarray, " beams"]
    """Sum of the log-probabilities."""
    log_probabilities: Float32[np.ndarray, "beams levels"]
    """Log-probability of each code; NaN for levels that were not decoded yet."""

    def take(self, chosen: np.ndarray) -> Prefixes:
        """Return the chosen prefixes."""
        return Prefixes(*(values[chosen] for values in self))


class BeamLimits(NamedTuple):
    """Limits of the beams of each query."""

    widths: Int64[np.ndarray, " queries"]
    """Beam widths."""
    budgets: Int64[np.ndarray, " queries"]
    """IDs that may be under the beams when decoding stops; the beam width without re-ranking."""

    @staticmethod
    def of(config: SearchSettings, widths: Sequence[int] | None, count: int) -> BeamLimits:
        """Return the limits of ``count`` queries; ``widths`` replaces the configured width."""
        if widths is None:
            beam_widths = np.full(count, config.beam)
        else:
            beam_widths = np.asarray(widths, dtype=np.int64)
        if config.rerank == "none":
            return BeamLimits(beam_widths, beam_widths)
        return BeamLimits(beam_widths, np.maximum(beam_widths, config.candidates))


@torch.inference_mode()
def find_beams(
    decoder: Decoder,
    segments: Sequence[SearchSegment],
    queries: Float[Tensor, "queries dim"],
    config: SearchSettings,
    *,
    level0: Sequence[frozenset[int]] | None = None,
    restrictions: Sequence[Restriction | None] | None = None,
    widths: Sequence[int] | None = None,
    observe: Callable[[int, Prefixes], object] | None = None,
) -> Beams:
    """Find the ``config.beam`` most probable IDs of all segments for each query.

    Fewer are returned if fewer exist; duplicates never are (deviation 16). Ties are broken by the
    order of the parents, then by code, so the result does not depend on the batch.

    With re-ranking, decoding of a query stops as soon as at most ``config.candidates`` IDs are
    under its beams (or the beam width, if that is larger); the beams then are prefixes. While this
    limit allows, the next best prefixes are kept in addition to the beam. Stopping early never
    loses an ID that full decoding finds.

    Parameters
    ----------
    level0
        allowed level-0 codes of each query (its target modality); empty means any.
    restrictions
        allowed items of each query, without deleted ones. None, for all queries or for one, allows
        every item that is not deleted.
    widths
        beam width of each query, instead of ``config.beam``.
    observe
        called with each level that was decoded and the prefixes that are kept after it.
    """
    count, num_levels = len(queries), len(decoder.sizes)
    is_reranked = config.rerank != "none"
    limits = BeamLimits.of(config, widths, count)
    allowed = _without_deleted(segments, restrictions, count)

    prefixes = _root(segments, count, num_levels)
    children, counts = _allowed_children(segments, prefixes, 0, level0, allowed)
    finished = [prefixes.take(np.arange(0))]
    if is_reranked:
        is_open = _needs_decoder(segments, children, counts, limits, config.candidates)
        finished.append(_extend(prefixes, children.take(~is_open)))
        children, counts = children.take(is_open), counts[is_open]
    rows = DecoderRows(decoder, queries, level0)
    for level in range(num_levels):
        if level:
            children, counts = _allowed_children(segments, prefixes, level, None, allowed)
        if not len(children.parent):
            break
        prefixes, gained = rows.score_children(prefixes, children, level, config.scores)
        owner = prefixes.query[children.parent]
        totals = prefixes.total[children.parent] + gained
        chosen = _choose(owner, totals, counts, limits, by_row=is_reranked)
        prefixes = _extend(prefixes, children.take(chosen))
        prefixes.total[:] = totals[chosen]
        prefixes.log_probabilities[:, level] = gained[chosen]
        if observe is not None:
            observe(level, prefixes)
        num_ids = np.bincount(prefixes.query, counts[chosen], minlength=count)
        is_within_budget = (num_ids <= limits.budgets) & is_reranked
        is_done = (is_within_budget | (level == num_levels - 1))[prefixes.query]
        finished.append(prefixes.take(is_done))
        prefixes = prefixes.take(~is_done)
    return _pad_finished(finished, count)


class DecoderRows:
    """The rows of a decoder's state, and the beams that they belong to.

    A decoder has the same number of rows for each query, so the first beam of a query is repeated
    if another query has more beams. Three numberings meet when children are scored. For example,
    queries 0 and 2 are unfinished, and have three beams and one beam::

        beam (position in Prefixes)     0    1    2    3
        query                           0    0    0    2

        grid (queries × width)          0    1    2  |  3    3    3       beams
        decoder row                     0    1    2  |  3    4    5

        row of each beam                0    1    2    5                  3 or 4 would also do

        child (position in Children)    0    1    2    3    4    5
        parent, a beam                  0    0    1    2    3    3
        code                            7    9    1    4    2    7
        row of the parent               0    0    1    2    5    5

    The decoder predicts ``values[row, code]``, so child 4 gains ``values[5, 2]``. The chosen
    children are the next beams, and inherit the rows of their parents: the rows of the state that
    the decoder continues from when it reads their codes.
    """

    def __init__(
        self, decoder: Decoder, embeddings: Float[Tensor, "queries dim"], level0: Level0 | None
    ) -> None:
        self._decoder = decoder
        self._embeddings = embeddings
        self._level0 = level0
        self._queries = np.zeros(0, dtype=np.int64)
        """Queries that have rows in the state, ascending."""
        self._state: Any = None

    def score_children(
        self,
        prefixes: Prefixes,
        children: Children,
        level: int,
        scores: Literal["level", "vocabulary"],
    ) -> tuple[Prefixes, Float32[np.ndarray, " children"]]:
        """Let the decoder read the last code of each prefix, and score the codes that follow.

        Returns
        -------
        The prefixes with their rows in the new state, and the log-probability of each child's code.
        """
        if level:
            row, step = self._read_codes(prefixes)
        else:
            row, step = self._start(prefixes, children)
        self._state = step.state
        values = self._decoder.log_probabilities(step.hidden[:, -1], level, scores)
        positions = torch.from_numpy(np.stack([row[children.parent], children.code]))
        positions = positions.to(values.device)
        gained = values[positions[0], positions[1]].float().cpu().numpy()
        return prefixes._replace(row=row), gained

    def _start(
        self, prefixes: Prefixes, children: Children
    ) -> tuple[Int64[np.ndarray, " beams"], Any]:
        """Start the decoder for the queries with children; the other queries are finished."""
        self._queries = np.unique(prefixes.query[children.parent])
        state = self._decoder.start(
            self._embeddings[torch.from_numpy(self._queries)].to(self._decoder.device),
            None
            if self._level0 is None
            else [self._level0[query] for query in self._queries.tolist()],
        )
        row = self._queries.searchsorted(prefixes.query)
        no_codes = np.zeros((len(self._queries), 0), dtype=np.int64)
        return row, self._advance(state, no_codes)

    def _read_codes(self, prefixes: Prefixes) -> tuple[Int64[np.ndarray, " beams"], Any]:
        """Select the rows that prefixes continue from, and let the decoder read the last codes."""
        grid = _grid(prefixes.query)
        unfinished = self._queries.searchsorted(prefixes.query[grid[:, 0]])
        is_complete = len(unfinished) == len(self._queries)
        device = self._decoder.device
        state = self._state.select(
            None if is_complete else torch.from_numpy(unfinished).to(device),
            torch.from_numpy(prefixes.row[grid]).to(device),
        )
        self._queries = self._queries[unfinished]
        row = np.empty_like(prefixes.row)
        row[grid.ravel()] = np.arange(grid.size)
        return row, self._advance(state, prefixes.code[grid].reshape(-1, 1))

    def _advance(self, state: Any, codes: Int64[np.ndarray, "rows tokens"]) -> Any:
        return self._decoder.advance(state, torch.from_numpy(codes).to(self._decoder.device))


def _without_deleted(
    segments: Sequence[SearchSegment],
    restrictions: Sequence[Restriction | None] | None,
    count: int,
) -> list[Restriction | None]:
    """Return the restriction of each query; by default, the items that are not deleted."""
    alive: Restriction = tuple(segment.alive for segment in segments)
    has_deleted = any(allowed is not None for allowed in alive)
    default = alive if has_deleted else None
    if restrictions is None:
        return [default] * count
    return [default if restriction is None else restriction for restriction in restrictions]


def _needs_decoder(
    segments: Sequence[SearchSegment],
    children: Children,
    counts: Int64[np.ndarray, " children"],
    limits: BeamLimits,
    candidates: int,
) -> Bool[np.ndarray, " children"]:
    """Return for each first code whether its query has too many IDs to rank them all.

    A query with n allowed IDs out of N ranks them all, without decoding, if its budget allows n.
    Otherwise a search for C candidates looks through about C · N / n IDs, because only n / N of
    the IDs under its beams are allowed. If that is no fewer than n, ranking all is quicker, so
    nothing is decoded if n² ≤ C · N.
    """
    num_queries = len(limits.budgets)
    num_allowed = np.bincount(children.parent, counts, minlength=num_queries)
    num_ids = sum(len(segment.table) for segment in segments)
    is_over_budget = num_allowed > limits.budgets
    is_large_share = num_allowed**2 > candidates * num_ids
    # Before level 0, each query has one beam, the empty prefix; so the parent is the query.
    return np.asarray((is_over_budget & is_large_share)[children.parent])


def _root(segments: Sequence[SearchSegment], count: int, num_levels: int) -> Prefixes:
    """Return the empty prefix of each query: all rows of all segments."""
    sizes = np.array([[len(segment.table) for segment in segments]], dtype=np.int64)
    high = sizes.repeat(count, axis=0)
    return Prefixes(
        query=np.arange(count),
        low=np.zeros_like(high),
        high=high,
        code=np.zeros(count, dtype=np.int64),
        row=np.arange(count),
        total=np.zeros(count, dtype=np.float32),
        log_probabilities=np.full((count, num_levels), np.nan, dtype=np.float32),
    )


def _allowed_children(
    segments: Sequence[SearchSegment],
    prefixes: Prefixes,
    level: int,
    level0: Sequence[frozenset[int]] | None,
    restrictions: Sequence[Restriction | None],
) -> tuple[Children, Int64[np.ndarray, " children"]]:
    """Return the children of prefixes that have allowed IDs, and the number of allowed IDs.

    ``level0``, the allowed first codes of each query, is None at later levels.
    """
    children = children_in_segments(segments, level, prefixes.low, prefixes.high)
    if level0 is not None:
        owner = prefixes.query[children.parent].tolist()
        is_allowed = [
            not level0[query] or code in level0[query]
            for query, code in zip(owner, children.code.tolist(), strict=True)
        ]
        children = children.take(np.array(is_allowed, dtype=bool))
    counts = count_ids(children.low, children.high, restrictions, prefixes.query[children.parent])
    return children.take(counts > 0), counts[counts > 0]


def _extend(prefixes: Prefixes, children: Children) -> Prefixes:
    """Return the children as prefixes; their totals are still the totals of the parents."""
    parents = prefixes.take(children.parent)
    return parents._replace(low=children.low, high=children.high, code=children.code)


def _choose(
    owner: Int64[np.ndarray, " children"],
    scores: Float32[np.ndarray, " children"],
    counts: Int64[np.ndarray, " children"],
    limits: BeamLimits,
    *,
    by_row: bool,
) -> Int64[np.ndarray, " chosen"]:
    """Choose the best children of each query: its beam width, or more if its budget allows.

    For example, a query has the width 2 and a budget of 10 IDs, and its children, best first, have
    4, 3, 2 and 5 IDs. The first three have 9 IDs together, so three children are chosen.

    Equal scores keep their order. Children of probability 0 are dropped. With ``by_row``, children
    whose IDs are all within the budget come in the order of their rows instead of their scores.
    """
    bounds = [*np.flatnonzero(np.diff(owner, prepend=-1)).tolist(), len(owner)]
    chosen = []
    for first, last in pairwise(bounds):
        budget = int(limits.budgets[owner[first]])
        width = int(limits.widths[owner[first]])
        best = first + topk(scores[first:last], budget)
        affordable = int(counts[best].cumsum().searchsorted(budget, "right"))
        best = best[: max(width, affordable)]
        best = best[scores[best] > -np.inf]
        chosen.append(np.sort(best) if by_row and counts[best].sum() <= budget else best)
    return np.concatenate(chosen)


def _grid(query: Int64[np.ndarray, " beams"]) -> Int64[np.ndarray, "queries width"]:
    """Return the beams of each query as a row; shorter rows repeat the query's first beam.

    >>> _grid(np.array([0, 0, 0, 2]))
    array([[0, 1, 2],
           [3, 3, 3]])
    """
    first = np.flatnonzero(np.diff(query, prepend=-1))
    counts = np.diff(first, append=len(query))[:, None]
    slots = np.arange(counts.max(initial=0))
    return first[:, None] + np.where(slots < counts, slots, 0)


def _pad_finished(finished: Sequence[Prefixes], count: int) -> Beams:
    """Return the final beams of each query, padded to the largest number of beams."""
    prefixes = Prefixes(*(np.concatenate(columns) for columns in zip(*finished, strict=True)))
    prefixes = prefixes.take(prefixes.query.argsort(kind="stable"))
    query = prefixes.query
    counts = np.bincount(query, minlength=count)
    # The slot of a beam: its position among the beams of its query.
    slot = np.arange(len(query)) - (counts.cumsum() - counts)[query]
    width = max(1, int(counts.max(initial=0)))
    num_segments = prefixes.low.shape[1]
    num_levels = prefixes.log_probabilities.shape[1]
    beams = Beams(
        np.zeros((count, width, num_segments), dtype=np.int64),
        np.zeros((count, width, num_segments), dtype=np.int64),
        np.full((count, width, num_levels), -np.inf, dtype=np.float32),
    )
    beams.low[query, slot] = prefixes.low
    beams.high[query, slot] = prefixes.high
    beams.log_probabilities[query, slot] = prefixes.log_probabilities
    return beams


def topk(scores: Float32[np.ndarray, " scores"], k: int) -> Int64[np.ndarray, " rows"]:
    """Return the positions of the ``k`` highest scores, highest first, or of all if they are fewer.

    Unlike ``torch.topk``, equal scores keep their order.
    """
    if len(scores) > k > 0:
        kth_score = np.partition(scores, len(scores) - k)[len(scores) - k]
        if np.isfinite(kth_score):  # sort only the scores that reach it
            positions = (scores >= kth_score).nonzero()[0]
            order = (-scores[positions]).argsort(kind="stable")
            return np.asarray(positions[order[:k]])
    return np.asarray((-scores).argsort(kind="stable")[:k])


def rank_items(
    segments: Sequence[SearchSegment],
    beams: Beams,
    query: int,
    vector: AnyArray,
    *,
    config: SearchSettings,
    evidence: Evidence,
    k: int,
    restriction: Restriction | None = None,
    level0: frozenset[int] = frozenset(),
    code_vector: AnyArray | None = None,
) -> Candidates:
    """Rank the items under the beams of one query.

    ``config.rerank`` selects the order:

    - ``none``: by log-probability; items that share an ID by descending ``code_cosine``.
    - ``codes``: by the score of their IDs (:meth:`~genius_search.search.rank.CodeRanker.scores`).
    - ``embeddings``: by the cosine with their stored embeddings. ``config.shortlist``, if set,
      limits this to the best items by codes (at least ``k``).

    The query is scaled (:mod:`genius_search.nn.spread`) before costs are subtracted from products,
    and scores are divided by that factor in the end. ``config.density_weight`` is the weight of the
    density in scores by codes and by fused embeddings, but not by raw ones, whose order is the
    paper's (GENIUS^R).

    Parameters
    ----------
    query
        number of the query in ``beams``.
    vector
        the query's vector in the space that it is compared in: the space of the stored embeddings
        with ``rerank="embeddings"``, otherwise the space of the codes.
    level0
        allowed codes at level 0; empty means any.
    code_vector
        the query's vector in the space of the codes, if it differs; a shortlist needs it.
    """
    allowed = restriction or tuple(segment.alive for segment in segments)
    ranking = _items_under(segments, beams, query, allowed)
    if config.rerank == "none":
        return ranking.take(topk(ranking.scores, k))
    code_query = as_floats(vector if code_vector is None else code_vector)
    scale = np.float32(1)
    if evidence.codes is not None:
        scale = np.float32(
            evidence.codes.scale(code_query, evidence.codes.spread.target_spread(level0))
        )
    has_shortlist = config.rerank == "embeddings" and 0 < config.shortlist < len(ranking.items)
    if config.rerank == "codes" or has_shortlist:
        # A shortlist is chosen without densities, which do not fade among codes.
        density_cost = 0.0 if has_shortlist else config.density_weight
        ranking = _score_by_codes(ranking, segments, code_query * scale, evidence, density_cost)
    if has_shortlist:
        ranking = ranking.take(topk(ranking.scores, max(k, config.shortlist)))
    if config.rerank == "embeddings":
        weight = config.density_weight
        ranking = _score_by_embeddings(ranking, as_floats(vector), scale, evidence, weight)
    ranking = ranking.take(topk(ranking.scores, k))
    return ranking._replace(scores=ranking.scores / scale)


def _items_under(
    segments: Sequence[SearchSegment], beams: Beams, query: int, restriction: Restriction
) -> Candidates:
    """List the allowed items under the beams of a query, in the order of the beams.

    The scores are the log-probabilities of the beams.
    """
    scores = beams.scores()[query]
    by_segment = []
    for number, (segment, allowed) in enumerate(zip(segments, restriction, strict=True)):
        low, high = beams.low[query, :, number], beams.high[query, :, number]
        beam, row = expand_ranges(low, high) if allowed is None else allowed.ids.inside(low, high)
        owner, items = segment.table.buckets(row)
        if allowed is not None:
            is_allowed = np.flatnonzero(allowed.items[items])
            items, owner = items[is_allowed], owner[is_allowed]
        item_beam = beam[owner]
        numbers = np.full(len(items), number)
        by_segment.append((numbers, items, row[owner], scores[item_beam], item_beam))
    numbers, items, rows, item_scores, item_beams = (
        np.concatenate(column) for column in zip(*by_segment, strict=True)
    )
    decoded = beams.log_probabilities[query, item_beams]
    ranking = Candidates(numbers, items, rows, item_scores, item_beams, decoded, len(items))
    return ranking if len(segments) == 1 else ranking.take(ranking.beams.argsort(kind="stable"))


def _score_by_codes(
    ranking: Candidates,
    segments: Sequence[SearchSegment],
    query: Float32[np.ndarray, " dim"],
    evidence: Evidence,
    density_cost: float,
) -> Candidates:
    """Return the ranking with the scores of the items' IDs for a scaled query."""
    if evidence.codes is None:
        raise UsageError("ranking by codes needs the model's codebooks")
    scores = np.empty(len(ranking.items), dtype=np.float32)
    for number, segment in enumerate(segments):
        positions = np.flatnonzero(ranking.segments == number)
        ids = segment.table.ids[ranking.id_rows[positions]]
        scores[positions] = evidence.codes.scores(query, ids, density_cost=density_cost)
    return ranking._replace(scores=scores)


def _score_by_embeddings(
    ranking: Candidates,
    query: Float32[np.ndarray, " dim"],
    scale: np.float32,
    evidence: Evidence,
    density_weight: float,
) -> Candidates:
    """Return the ranking with the scores of the items' embeddings.

    With p the product of the query, before scaling, and an embedding::

        score = scale · p − density_weight · fade(p) · density
    """
    scores = np.empty(len(ranking.items), dtype=np.float32)
    has_costs = density_weight and evidence.densities is not None and not evidence.is_raw
    for number, vectors in enumerate(evidence.embeddings or ()):
        positions = np.flatnonzero(ranking.segments == number)
        items = ranking.items[positions]
        products = as_floats(vectors(items)) @ query
        scores[positions] = scale * products
        if has_costs and evidence.densities is not None:
            densities = decode_densities(evidence.densities[number][items])
            shares = fade(products, evidence.fade_width)
            scores[positions] -= np.float32(density_weight) * shares * densities
    return ranking._replace(scores=scores)
