"""The search in PyTorch: decoders, beam search over IDs (paper, section 4.4), ranking of items under beams.

A decoder predicts an ID code by code. At each level, every query keeps its most probable prefixes: its beams.
A prefix is a range of rows in the table of each segment, so the codes that can follow it, and the number of
IDs under each, are found by binary search. All queries of a batch are decoded together, level by level.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import SearchSettings
from genius_search.errors import UsageError
from genius_search.nn.codebooks import AnyArray, as_floats
from genius_search.nn.generator import DecoderStep, Generator, GeneratorState
from genius_search.nn.spread import Spread, decode_densities, fade
from genius_search.search.rank import Evidence, Ranking
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

    Its state has one row per beam, query after query, and a method ``select(queries, rows)``, which returns
    the state of the chosen queries (None: all) and rows, in this order. ``rows`` has one line per kept query,
    with row numbers of the state; a row may occur repeatedly.
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

        In the initial state the start token is read first: without any codes, the result predicts level 0;
        with one code, levels 0 and 1. The initial state may be continued by several adjacent rows per query,
        the same number for each query.
        """

    def log_probabilities(
        self,
        hidden: Float[Tensor, "rows width"],
        level: int,
        scores: Literal["level", "vocabulary"],
    ) -> Float[Tensor, "rows codes"]:
        """Return the scores of one level's codes, normalised over the level or over the whole vocabulary."""


class GeometricState(NamedTuple):
    """State of a :class:`GeometricDecoder`."""

    level: int
    residuals: Float[Tensor, "rows dim"]
    """The query's embedding minus the weighted vectors of the codes read; one row per query before the first
    token."""

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> GeometricState:
        """Return the state of the chosen queries (None: all) and rows."""
        if self.level:
            return self._replace(residuals=self.residuals[rows.flatten()])
        return self if queries is None else self._replace(residuals=self.residuals[queries])


class GeometricDecoder:
    """Decoder without a network that prefers the IDs whose vectors are nearest to the query.

    A prefix whose code vectors sum up to v scores q·v − w|v|²/2: with w = 1 prefixes are ranked by
    distance, as in quantization. So a code with the vector e adds (q − wv)·e − w|e|²/2. The query is scaled
    first (:mod:`genius_search.nn.spread`). Beam search uses these scores in place of log-probabilities; they
    are not normalised.

    The vectors are copied, so construct a new decoder after further training.

    Parameters
    ----------
    tables
        the code vectors of each level.
    spread
        by which queries are scaled; if absent, they are not.
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
        return GeometricState(
            level=0, residuals=queries * torch.from_numpy(scales).to(queries)[:, None]
        )

    def advance(self, state: GeometricState, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes; ``hidden`` is the residual, which the next code's vector should approximate."""
        rows, count = codes.shape
        first = max(state.level - 1, 0)
        vectors = F.embedding(codes + self._offsets[first : first + count], self._vectors)
        before = state.residuals.repeat_interleave(rows // max(len(state.residuals), 1), dim=0)
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
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> GuidedState:
        """Return the state of the chosen queries (None: all) and rows."""
        return GuidedState(
            self.generated.select(queries, rows), self.geometric.select(queries, rows)
        )


class GuidedDecoder:
    """A generator with its guide: logits and distances, combined as in training.

    Parameters
    ----------
    spread
        by which queries are scaled.
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
                "this model's generator is guided by geometry, level by level; its scores cannot be "
                'normalised over the whole vocabulary. Use scores="level"'
            )
        generated, residual = hidden.tensor_split([self._generator.config.width], dim=1)
        logits = self._guide.combine(self._generator.logits(generated, level), residual, level)
        return torch.log_softmax(logits, dim=-1)


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


class Prefixes(NamedTuple):
    """The beams of all unfinished queries: query after query, and best first for each."""

    query: Int64[np.ndarray, " beams"]
    low: Int64[np.ndarray, "beams segments"]
    """First row of the prefix in each segment."""
    high: Int64[np.ndarray, "beams segments"]
    code: Int64[np.ndarray, " beams"]
    """The last code."""
    row: Int64[np.ndarray, " beams"]
    """Row of the decoder's output that predicted this code."""
    total: Float32[np.ndarray, " beams"]
    """Sum of the log-probabilities."""
    log_probabilities: Float32[np.ndarray, "beams levels"]
    """NaN for levels that were not decoded yet."""

    def take(self, chosen: np.ndarray) -> Prefixes:
        """Return the chosen prefixes."""
        return Prefixes(*(values[chosen] for values in self))


@torch.inference_mode()
def search(
    decoder: Decoder,
    segments: Sequence[SearchSegment],
    queries: Float[Tensor, "queries dim"],
    config: SearchSettings,
    *,
    level0: Sequence[frozenset[int]] | None = None,
    restrictions: Sequence[Restriction | None] | None = None,
    widths: Sequence[int] | None = None,
) -> Beams:
    """Find the ``config.beam`` most probable IDs of all segments for each query.

    Fewer are returned if fewer exist; duplicates never are (deviation 16). Ties are broken by the order of
    the parents, then by code, so the result does not depend on the batch.

    With re-ranking, decoding of a query stops as soon as at most ``config.candidates`` IDs lie under its
    beams (or as many as the beam is wide, if that is more); the beams then are prefixes. While this limit
    allows, the next best prefixes are kept in addition to the beam. Stopping early never loses an ID that
    full decoding finds.

    Parameters
    ----------
    level0
        allowed level-0 codes of each query (its target modality); empty means any.
    restrictions
        allowed items of each query, deletions taken into account. None, for all queries or for one, allows
        every item that is not deleted.
    widths
        beam width of each query, instead of ``config.beam``.
    """
    count, num_levels = len(queries), len(decoder.sizes)
    beam_widths = (
        np.full(count, config.beam) if widths is None else np.asarray(widths, dtype=np.int64)
    )
    is_reranked = config.rerank != "none"
    budgets = np.maximum(beam_widths, config.candidates) if is_reranked else beam_widths
    alive: Restriction = tuple(segment.alive for segment in segments)
    default = alive if any(allowed is not None for allowed in alive) else None
    given = [None] * count if restrictions is None else restrictions
    allowed_items = [default if own is None else own for own in given]

    prefixes = _root(segments, count, num_levels)
    finished = [prefixes.take(np.arange(0))]
    for level in range(num_levels):
        children, counts = _children(
            segments, prefixes, level, level0 if level == 0 else None, allowed_items
        )
        owner = prefixes.query[children.parent]
        if level == 0 and is_reranked:
            # Of few IDs none is left out: to find as many as candidates takes looking among more of all IDs.
            below = np.bincount(owner, counts, minlength=count)
            num_ids = sum(len(segment.table) for segment in segments)
            is_open = ((below > budgets) & (below**2 > config.candidates * num_ids))[owner]
            finished.append(_extend(prefixes, children.take(~is_open)))
            children, counts, owner = children.take(is_open), counts[is_open], owner[is_open]
        if not len(owner):
            break
        if level == 0:
            active = np.unique(owner)
            prefixes = prefixes._replace(row=active.searchsorted(prefixes.query))
            state = decoder.start(
                queries[torch.from_numpy(active)].to(decoder.device),
                None if level0 is None else [level0[query] for query in active],
            )
            tokens = np.zeros((len(active), 0), dtype=np.int64)
        else:
            grid = _grid(prefixes.query)
            kept = active.searchsorted(prefixes.query[grid[:, 0]])
            state = state.select(
                None if len(kept) == len(active) else torch.from_numpy(kept).to(decoder.device),
                torch.from_numpy(prefixes.row[grid]).to(decoder.device),
            )
            active, tokens = active[kept], prefixes.code[grid].reshape(-1, 1)
            prefixes.row[grid.ravel()] = np.arange(
                grid.size
            )  # of one that is repeated, any row will do
        step = decoder.advance(state, torch.from_numpy(tokens).to(decoder.device))
        state, hidden = step.state, step.hidden[:, -1]
        values = decoder.log_probabilities(hidden, level, config.scores)
        places = torch.from_numpy(np.stack([prefixes.row[children.parent], children.code])).to(
            values.device
        )
        gained = values[places[0], places[1]].float().cpu().numpy()
        totals = prefixes.total[children.parent] + gained
        chosen = _choose(owner, totals, counts, beam_widths, budgets, by_row=is_reranked)
        prefixes = _extend(prefixes, children.take(chosen))
        prefixes.total[:] = totals[chosen]
        prefixes.log_probabilities[:, level] = gained[chosen]
        left = np.bincount(prefixes.query, counts[chosen], minlength=count)
        is_done = ((left <= budgets) & is_reranked | (level == num_levels - 1))[prefixes.query]
        finished.append(prefixes.take(is_done))
        prefixes = prefixes.take(~is_done)
    return _beams(finished, count)


def _root(segments: Sequence[SearchSegment], count: int, num_levels: int) -> Prefixes:
    """Return the empty prefix for each query."""
    high = np.array([[len(segment.table) for segment in segments]], dtype=np.int64).repeat(
        count, axis=0
    )
    return Prefixes(
        query=np.arange(count),
        low=np.zeros_like(high),
        high=high,
        code=np.zeros(count, dtype=np.int64),
        row=np.arange(count),
        total=np.zeros(count, dtype=np.float32),
        log_probabilities=np.full((count, num_levels), np.nan, dtype=np.float32),
    )


def _children(
    segments: Sequence[SearchSegment],
    prefixes: Prefixes,
    level: int,
    level0: Sequence[frozenset[int]] | None,
    restrictions: Sequence[Restriction | None],
) -> tuple[Children, Int64[np.ndarray, " children"]]:
    """Return the children of prefixes with at least one allowed ID, and the number of these IDs."""
    children = children_in_segments(segments, level, prefixes.low, prefixes.high)
    if level0 is not None:
        pairs = zip(prefixes.query[children.parent].tolist(), children.code.tolist(), strict=True)
        children = children.take(
            np.array(
                [not level0[query] or code in level0[query] for query, code in pairs], dtype=bool
            )
        )
    counts = count_ids(children.low, children.high, restrictions, prefixes.query[children.parent])
    return children.take(counts > 0), counts[counts > 0]


def _extend(prefixes: Prefixes, children: Children) -> Prefixes:
    """Return the prefixes with one code more; their scores are those of the parents."""
    parents = prefixes.take(children.parent)
    return parents._replace(low=children.low, high=children.high, code=children.code)


def _choose(
    owner: Int64[np.ndarray, " children"],
    scores: Float32[np.ndarray, " children"],
    counts: Int64[np.ndarray, " children"],
    widths: Int64[np.ndarray, " queries"],
    budgets: Int64[np.ndarray, " queries"],
    *,
    by_row: bool,
) -> Int64[np.ndarray, " chosen"]:
    """Choose the best children of each query: as many as its beam width, or more if its budget allows.

    Equal scores keep their order. Children of probability 0 are dropped. With ``by_row``, those whose IDs are
    within the budget come in the order of their rows instead of their scores.
    """
    bounds = [*np.flatnonzero(np.diff(owner, prepend=-1)).tolist(), len(owner)]
    kept = []
    for first, last in pairwise(bounds):
        budget, width = int(budgets[owner[first]]), int(widths[owner[first]])
        best = first + topk(scores[first:last], budget)
        affordable = int(counts[best].cumsum().searchsorted(budget, "right"))
        best = best[: max(width, affordable)]
        best = best[scores[best] > -np.inf]
        kept.append(np.sort(best) if by_row and counts[best].sum() <= budget else best)
    return np.concatenate(kept)


def _grid(query: Int64[np.ndarray, " beams"]) -> Int64[np.ndarray, "queries width"]:
    """Return the beams of each query as a row; if there are fewer than elsewhere, the first is repeated."""
    first = np.flatnonzero(np.diff(query, prepend=-1))
    counts = np.diff(first, append=len(query))[:, None]
    slots = np.arange(counts.max(initial=0))
    return first[:, None] + np.where(slots < counts, slots, 0)


def _beams(finished: Sequence[Prefixes], count: int) -> Beams:
    """Return the final beams of each query, padded to the largest number of any."""
    query, low, high, _, _, _, history = (
        np.concatenate(columns) for columns in zip(*finished, strict=True)
    )
    order = query.argsort(kind="stable")
    query, low, high, history = query[order], low[order], high[order], history[order]
    counts = np.bincount(query, minlength=count)
    slot = np.arange(len(query)) - (counts.cumsum() - counts)[query]
    width = max(1, int(counts.max(initial=0)))
    beams = Beams(
        np.zeros((count, width, low.shape[1]), dtype=np.int64),
        np.zeros((count, width, low.shape[1]), dtype=np.int64),
        np.full((count, width, history.shape[1]), -np.inf, dtype=np.float32),
    )
    beams.low[query, slot], beams.high[query, slot] = low, high
    beams.log_probabilities[query, slot] = history
    return beams


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


def rank_items(
    segments: Sequence[SearchSegment],
    beams: Beams,
    query: int,
    embedding: AnyArray,
    *,
    config: SearchSettings,
    evidence: Evidence,
    k: int,
    restriction: Restriction | None = None,
    level0: frozenset[int] = frozenset(),
    for_codes: AnyArray | None = None,
) -> Ranking:
    """Rank the items under the beams of one query.

    ``config.rerank`` selects the order:

    - ``none``: by the generator's log-probability; items that share an ID by descending ``code_cosine``.
    - ``codes``: by the score of their IDs (:meth:`~genius_search.search.rank.CodeRanker.scores`).
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
    """
    ranking = _items_under(
        segments, beams, query, restriction or tuple(one.alive for one in segments)
    )
    if config.rerank == "none":
        return ranking.take(topk(ranking.scores, k))
    in_codes = as_floats(embedding if for_codes is None else for_codes)
    scale = np.float32(1)
    if evidence.codes is not None:
        scale = np.float32(
            evidence.codes.scale(in_codes, evidence.codes.spread.target_spread(level0))
        )
    is_shortened = config.rerank == "embeddings" and 0 < config.shortlist < len(ranking.items)
    if config.rerank == "codes" or is_shortened:
        if evidence.codes is None:
            raise UsageError("ranking by codes needs the model's codebooks")
        # A shortlist is chosen without densities, which do not fade among codes.
        density_cost = 0.0 if is_shortened else config.density_weight
        scores = np.empty(len(ranking.items), dtype=np.float32)
        for number, segment in enumerate(segments):
            in_segment = np.flatnonzero(ranking.segments == number)
            ids = segment.table.ids[ranking.rows[in_segment]]
            scores[in_segment] = evidence.codes.scores(
                in_codes * scale, ids, density_cost=density_cost
            )
        ranking = ranking._replace(scores=scores)
    if config.rerank == "embeddings":
        if is_shortened:
            ranking = ranking.take(topk(ranking.scores, max(k, config.shortlist)))
        scores = _by_embeddings(
            ranking, as_floats(embedding), scale, evidence, config.density_weight
        )
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
        parts.append(
            (np.full(len(items), number), items, row[owner], scores[beam[owner]], beam[owner])
        )
    numbers, items, rows, of_items, owners = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    decoded = beams.log_probabilities[query, owners]
    ranking = Ranking(numbers, items, rows, of_items, owners, decoded, touched=len(items))
    return ranking if len(segments) == 1 else ranking.take(ranking.beams.argsort(kind="stable"))


def _by_embeddings(
    ranking: Ranking,
    query: Float32[np.ndarray, " dim"],
    scale: np.float32,
    evidence: Evidence,
    density_weight: float,
) -> Float32[np.ndarray, " hits"]:
    """Return the products of the items' embeddings and the scaled query, minus the costs of densities."""
    scores = np.empty(len(ranking.items), dtype=np.float32)
    for number, vectors in enumerate(evidence.embeddings or ()):
        in_segment = np.flatnonzero(ranking.segments == number)
        items = ranking.items[in_segment]
        products = as_floats(vectors(items)) @ query
        scores[in_segment] = scale * products
        if density_weight and evidence.densities is not None and not evidence.is_raw:
            densities = decode_densities(evidence.densities[number][items])
            scores[in_segment] -= (
                np.float32(density_weight) * fade(products, evidence.fade_width) * densities
            )
    return scores
