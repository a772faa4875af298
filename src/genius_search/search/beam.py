"""Beam search over the IDs of a pool (paper, section 4.4).

The generator predicts an ID code by code. At each level, every query keeps its most probable prefixes: its
beams. A prefix is a range of rows in the table of each segment, so the codes that can follow it, and the
number of IDs under each, are found by binary search. All queries of a batch are decoded together, level by
level.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from genius_search.config import RANK_ALL, SearchConfig
from genius_search.search.beams import Beams, topk
from genius_search.search.decoder import Decoder, DecoderState
from genius_search.search.table import Children, Restriction, SearchSegment, children_in_segments, count_ids

MAX_READ_AHEAD: Final = 4
"""Level-0 codes that the decoder reads before their probabilities are known; there are three modalities."""


@torch.inference_mode()
def search(
    decoder: Decoder,
    segments: Sequence[SearchSegment],
    queries: Float[Tensor, "queries dim"],
    config: SearchConfig,
    *,
    level0: Sequence[frozenset[int]] | None = None,
    restrictions: Sequence[Restriction | None] | None = None,
    widths: Sequence[int] | None = None,
) -> Beams:
    """Find the ``config.beam`` most probable IDs of all segments for each query.

    Fewer are returned if fewer exist; duplicates never are (deviation 16). Ties are broken by the order of
    the parents, then by code, so the result does not depend on the batch.

    Decoding of a query stops early once at most as many IDs lie under its beams as the beam is wide, because
    none of these IDs can be dropped any more. Their remaining codes are scored in one pass, or not at all if
    they are re-ranked anyway. With re-ranking, decoding stops even earlier: as soon as at most
    ``config.candidates`` IDs lie under the beams, which then are prefixes. While this limit allows, the next
    best prefixes are kept in addition to the beam. Stopping early never loses an ID that full decoding finds.

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
    beam_widths = np.full(len(queries), config.beam) if widths is None else np.asarray(widths, dtype=np.int64)
    return BeamSearch(decoder, segments, config, level0, restrictions, beam_widths).run(queries)


class BeamSearch:
    """Beam search for one batch of queries."""

    def __init__(
        self,
        decoder: Decoder,
        segments: Sequence[SearchSegment],
        config: SearchConfig,
        level0: Sequence[frozenset[int]] | None,
        restrictions: Sequence[Restriction | None] | None,
        widths: Int64[np.ndarray, " queries"],
    ) -> None:
        self.decoder = decoder
        self.segments = segments
        self.sizes = [len(segment.table) for segment in segments]
        self.scores = config.scores
        self.level0 = None if level0 is None or not any(level0) else level0
        self.is_reranked = config.rerank != "none"
        alive: Restriction = tuple(segment.alive for segment in segments)
        default = alive if any(allowed is not None for allowed in alive) else None
        given = [None] * len(widths) if restrictions is None else restrictions
        self.restrictions = [default if own is None else own for own in given]
        self.is_restricted = any(own is not None for own in self.restrictions)
        self.widths = widths
        # A query is finished once at most this many IDs lie under its beams.
        self.budgets = np.maximum(widths, config.candidates) if self.is_reranked else widths
        self.candidates = config.candidates
        self.num_levels = len(decoder.sizes)
        self.finished: list[Frontier | None] = [None] * len(widths)

    def run(self, queries: Float[Tensor, "queries dim"]) -> Beams:
        """Decode until every query is finished."""
        frontier, children = self._begin(len(queries))
        if not len(frontier.queries):
            return self._beams()
        device = self.decoder.device
        codes, rows, rows_per_query = self._read_ahead(frontier, children)
        level0 = None if self.level0 is None else [self.level0[query] for query in frontier.queries]
        state = self.decoder.start(queries[torch.from_numpy(frontier.queries)].to(device), level0)
        step = self.decoder.advance(state, torch.from_numpy(codes).to(device))
        state, hidden = step.state, step.hidden[:, 0]
        ahead = step.hidden[:, 1:]  # hidden states of codes that were read ahead; they predict level 1
        for level in range(self.num_levels):
            gained = self._log_probabilities(hidden, rows, level, children)
            chosen = self.choose(frontier, children, frontier.total.ravel()[children.parent] + gained)
            frontier = frontier.extend(children, chosen, gained, level, rows, rows_per_query)
            unfinished = np.flatnonzero(self._finish(frontier, state, ahead, level))
            if not len(unfinished):
                break
            none_finished = len(unfinished) == len(frontier.queries)
            if not none_finished:
                frontier = frontier.take(unfinished)
                frontier = frontier.slots(slice(int(self.widths[frontier.queries].max())))
            slots = torch.from_numpy(frontier.rows).to(device)
            state = state.select(None if none_finished else torch.from_numpy(unfinished).to(device), slots)
            if ahead.shape[1]:
                hidden, ahead = ahead[slots.ravel(), 0], ahead[:, 1:]
            else:
                tokens = frontier.codes[:, :, level : level + 1].reshape(-1, 1)
                step = self.decoder.advance(state, torch.from_numpy(tokens).to(device))
                state, hidden, ahead = step.state, step.hidden[:, 0], step.hidden[:, 1:]
            children = self._children(frontier, level + 1)
            rows, rows_per_query = children.parent, frontier.width
        return self._beams()

    def choose(
        self, frontier: Frontier, children: Children, scores: Float32[np.ndarray, " children"]
    ) -> Chosen:
        """Choose the best children of each query: as many as its beam width, or more if its budget allows."""
        owner = frontier.owners(children)
        widths = self.widths[frontier.queries]
        budgets = self.budgets[frontier.queries]
        if (budgets > widths).any():
            counts = self.count(children.low, children.high, frontier.queries[owner])
            bounds = owner.searchsorted(np.arange(len(widths) + 1)).tolist()
            for query, (first, last) in enumerate(pairwise(bounds)):
                best = first + topk(scores[first:last], int(budgets[query]))
                affordable = counts[best].cumsum().searchsorted(budgets[query], "right")
                widths[query] = max(widths[query], affordable)
        return choose_best(owner, scores, widths)

    def _begin(self, num_queries: int) -> tuple[Frontier, Children]:
        """Start all queries at the root, and finish those with few enough IDs to need no decoding."""
        root = Frontier.root(num_queries, self.sizes, self.num_levels)
        children = self._children(root, 0)
        if not self.is_reranked:
            return root, children
        owner = root.owners(children)
        counts = self.count(children.low, children.high, owner)
        most = np.maximum(self.budgets, RANK_ALL * self.candidates)
        is_open = np.bincount(owner, counts, minlength=num_queries) > most
        if is_open.all():
            return root, children
        below = root.extend(children, choose_all(owner, num_queries), None, 0)
        for query in np.flatnonzero(~is_open):
            self.finished[query] = below.take(np.array([query]))
        frontier = root.take(np.flatnonzero(is_open))
        return frontier, self._children(frontier, 0)

    def _read_ahead(self, frontier: Frontier, children: Children) -> tuple[np.ndarray, np.ndarray, int]:
        """Choose the level-0 codes to read together with the start token.

        This saves a decoding step at almost no cost, but only works if a query has few level-0 codes and its
        beam keeps them all; otherwise none is read.

        Returns
        -------
        The codes, one row each; the row that predicts each child; the number of rows per query.
        """
        owner = frontier.owners(children)
        count = len(frontier.queries)
        bounds = owner.searchsorted(np.arange(count + 1))
        most = int(np.diff(bounds).max(initial=0))
        if self.num_levels == 1 or not 0 < most <= min(MAX_READ_AHEAD, int(self.widths.min())):
            return np.zeros((count, 0), dtype=np.int64), children.parent, 1
        rows = owner * most + np.arange(len(owner)) - bounds[owner]
        codes = np.zeros((count * most, 1), dtype=np.int64)
        codes[rows, 0] = children.code
        return codes, rows, most

    def find_children(self, frontier: Frontier, level: int) -> Children:
        """Return the children of the prefixes of all slots, allowed or not."""
        return children_in_segments(self.segments, level, *frontier.ranges())

    def _children(self, frontier: Frontier, level: int) -> Children:
        """Return the children with at least one allowed ID."""
        children = self.find_children(frontier, level)
        if level == 0 and self.level0 is not None:
            wanted = [self.level0[query] for query in frontier.queries]
            is_wanted = [
                not wanted[query] or code in wanted[query]
                for query, code in zip(
                    frontier.owners(children).tolist(), children.code.tolist(), strict=True
                )
            ]
            children = children.take(np.flatnonzero(is_wanted))
        if self.is_restricted:
            owner = frontier.queries[frontier.owners(children)]
            children = children.take(np.flatnonzero(self.count(children.low, children.high, owner)))
        return children

    def count(
        self,
        low: Int64[np.ndarray, "prefixes segments"],
        high: Int64[np.ndarray, "prefixes segments"],
        query: Int64[np.ndarray, " prefixes"],
    ) -> Int64[np.ndarray, " prefixes"]:
        """Count the allowed IDs under each prefix."""
        if not self.is_restricted:
            return np.asarray((high - low).sum(axis=1))
        return count_ids(low, high, self.restrictions, query)

    def _log_probabilities(
        self, hidden: Tensor, rows: Int64[np.ndarray, " children"], level: int, children: Children
    ) -> Float32[np.ndarray, " children"]:
        """Return the log-probability of each child; ``rows`` are the rows of ``hidden`` that predict them."""
        if self.scores != "children":
            values = self.decoder.log_probabilities(hidden, level, self.scores)
            return gather(values, rows, children.code)
        logits = gather(self.decoder.logits(hidden, level), rows, children.code)
        if not len(logits):
            return logits
        is_first = np.diff(children.parent, prepend=-1) > 0  # log-softmax over the children of a parent
        starts, group = np.flatnonzero(is_first), np.cumsum(is_first) - 1
        logits = logits - np.maximum.reduceat(logits, starts)[group]
        normalised: np.ndarray = logits - np.log(np.add.reduceat(np.exp(logits), starts))[group]
        return normalised

    def _finish(
        self, frontier: Frontier, state: DecoderState, ahead: Tensor, level: int
    ) -> Bool[np.ndarray, " active"]:
        """Store the beams of queries that need no more decoding; return a mask of the others."""
        counts = self.count(*frontier.ranges(), frontier.queries.repeat(frontier.width))
        counts = counts.reshape(-1, frontier.width).sum(axis=1)
        is_last = level == self.num_levels - 1
        is_done = (counts <= self.budgets[frontier.queries]) | is_last
        is_unscored = is_done & (counts > 0) & (not is_last) & (not self.is_reranked)
        if is_unscored.any():
            self._score_rest(frontier, np.flatnonzero(is_unscored), state, ahead, level)
        for number in np.flatnonzero(is_done & ~is_unscored):
            self.finished[frontier.queries[number]] = frontier.take(np.array([number]))
        return np.asarray(~is_done)

    def _score_rest(
        self,
        frontier: Frontier,
        numbers: Int64[np.ndarray, " settled"],
        state: DecoderState,
        ahead: Tensor,
        level: int,
    ) -> None:
        """Expand all IDs under the beams of some queries, and score their later levels in one pass."""
        frontier = frontier.take(numbers)
        rows = frontier.rows
        later_children: list[Children] = []
        passed: list[np.ndarray] = []  # the child at each later level that leads to each beam
        for later in range(level + 1, self.num_levels):
            children = self._children(frontier, later)
            chosen = choose_all(frontier.owners(children), len(numbers))
            frontier = frontier.extend(children, chosen, None, later)
            child = np.zeros(frontier.rows.shape, dtype=np.int64)
            child[chosen.query, chosen.slot] = chosen.child
            passed = [*(earlier.ravel()[frontier.rows] for earlier in passed), child]
            later_children.append(children)
            rows = rows.ravel()[frontier.rows]
        hidden = self._read_rest(frontier, numbers, rows, state, ahead)
        ids = np.flatnonzero(frontier.is_filled().ravel())
        total, history = frontier.total, frontier.history
        negated: list[np.ndarray] = []  # the negated scores after each later level
        for number, (children, child) in enumerate(zip(later_children, passed, strict=True)):
            row = np.zeros(len(children.code), dtype=np.int64)
            row[child.ravel()[ids]] = ids  # the rows of IDs with this prefix are equal; any of them will do
            gained = self._log_probabilities(hidden[:, number], row, level + 1 + number, children)[child]
            total += gained
            history[:, :, level + 1 + number] = gained
            negated.append(-total)
        num_possible = (total > -np.inf).sum(axis=1).tolist()
        for number, query in enumerate(frontier.queries):
            # Ties are broken by the scores of the level before, as in decoding level by level.
            order = np.lexsort([scores[number] for scores in negated])[: num_possible[number]]
            self.finished[query] = frontier.take(np.array([number])).slots(order)

    def _read_rest(
        self,
        frontier: Frontier,
        numbers: Int64[np.ndarray, " settled"],
        rows: Int64[np.ndarray, "settled beams"],
        state: DecoderState,
        ahead: Tensor,
    ) -> Float[Tensor, "slots later width"]:
        """Read the remaining codes of IDs; return the hidden states that predict each later level."""
        slots = torch.from_numpy(rows).to(self.decoder.device)
        hidden = ahead[slots.ravel()]
        tokens = frontier.codes[:, :, state.level - 1 : self.num_levels - 1].reshape(rows.size, -1)
        if not tokens.shape[1]:
            return hidden
        chosen = state.select(torch.from_numpy(numbers).to(self.decoder.device), slots)
        step = self.decoder.advance(chosen, torch.from_numpy(tokens).to(self.decoder.device))
        return torch.cat([hidden, step.hidden], dim=1)

    def _beams(self) -> Beams:
        """Return the final beams, padded to the largest number of any query."""
        width = max((frontier.width for frontier in self.finished if frontier is not None), default=1)
        shape = (len(self.finished), width)
        low = np.zeros((*shape, len(self.sizes)), dtype=np.int64)
        high = np.zeros_like(low)
        history = np.full((*shape, self.num_levels), -np.inf, dtype=np.float32)
        for query, frontier in enumerate(self.finished):
            if frontier is not None:
                own = (query, slice(frontier.width))
                low[own], high[own], history[own] = frontier.low[0], frontier.high[0], frontier.history[0]
        return Beams(low, high, history)


class Frontier(NamedTuple):
    """Current beams of the unfinished queries; every query has the same number of slots, some unused."""

    queries: Int64[np.ndarray, " active"]
    """Positions of the queries in the batch."""
    low: Int64[np.ndarray, "active beams segments"]
    """First row of each prefix in each segment; an unused slot has an empty range in every segment."""
    high: Int64[np.ndarray, "active beams segments"]
    codes: Int64[np.ndarray, "active beams levels"]
    """Codes so far."""
    history: Float32[np.ndarray, "active beams levels"]
    """Log-probability of each code; −inf in unused slots, NaN for later levels."""
    total: Float32[np.ndarray, "active beams"]
    """Score of each beam: the sum of its log-probabilities."""
    rows: Int64[np.ndarray, "active beams"]
    """Row of the decoder's state that each beam continues."""

    @staticmethod
    def root(num_queries: int, sizes: Sequence[int], num_levels: int) -> Frontier:
        """Return the empty prefix for every query; ``sizes`` are the lengths of the tables."""
        shape = (num_queries, 1, len(sizes))
        return Frontier(
            queries=np.arange(num_queries),
            low=np.zeros(shape, dtype=np.int64),
            high=np.broadcast_to(np.array(sizes, dtype=np.int64), shape).copy(),
            codes=np.zeros((num_queries, 1, num_levels), dtype=np.int64),
            history=np.full((num_queries, 1, num_levels), np.nan, dtype=np.float32),
            total=np.zeros((num_queries, 1), dtype=np.float32),
            rows=np.arange(num_queries)[:, None],
        )

    @property
    def width(self) -> int:
        """Number of slots per query."""
        return int(self.low.shape[1])

    def take(self, chosen: Int64[np.ndarray, " queries"]) -> Frontier:
        """Return the chosen queries."""
        return Frontier(*(values[chosen] for values in self))

    def slots(self, chosen: Int64[np.ndarray, " beams"] | slice) -> Frontier:
        """Return the chosen slots of every query, in this order."""
        return Frontier(self.queries, *(values[:, chosen] for values in self[1:]))

    def is_filled(self) -> Bool[np.ndarray, "active beams"]:
        """Return a mask of the used slots."""
        return np.asarray((self.high > self.low).any(axis=2))

    def ranges(self) -> tuple[Int64[np.ndarray, "slots segments"], Int64[np.ndarray, "slots segments"]]:
        """Return the row ranges of all slots, query after query."""
        return self.low.reshape(-1, self.low.shape[2]), self.high.reshape(-1, self.high.shape[2])

    def owners(self, children: Children) -> Int64[np.ndarray, " children"]:
        """Return the position of each child's query among the active ones; never decreasing."""
        return children.parent // self.width

    def extend(
        self,
        children: Children,
        chosen: Chosen,
        gained: Float32[np.ndarray, " children"] | None,
        level: int,
        rows: Int64[np.ndarray, " children"] | None = None,
        rows_per_query: int | None = None,
    ) -> Frontier:
        """Advance by one level: put the chosen children in their slots.

        Parameters
        ----------
        gained
            log-probability of each child; None leaves the score as it is.
        rows, rows_per_query
            row of the decoder's state that predicted each child, and the number of rows per query; by default
            the slot of the child's parent.
        """
        rows = children.parent if rows is None else rows
        count = len(self.queries)
        width = max(1, int(chosen.slot.max(initial=0)) + 1)
        slot = chosen.query * width + chosen.slot
        is_full = len(slot) == count * width

        def placed(values: np.ndarray, empty: float = 0.0) -> np.ndarray:
            if not is_full:
                spread = np.full((count * width, *values.shape[1:]), empty, dtype=values.dtype)
                spread[slot] = values
                values = spread
            return values.reshape(count, width, *values.shape[1:])

        parent = children.parent[chosen.child]
        codes = self.codes.reshape(-1, self.codes.shape[2])[parent]
        codes[:, level] = children.code[chosen.child]
        history = self.history.reshape(-1, self.history.shape[2])[parent]
        total = self.total.ravel()[parent]
        if gained is not None:
            history[:, level] = gained[chosen.child]
            total += gained[chosen.child]
        first = (rows_per_query or self.width) * np.arange(count)  # row of unused slots
        return Frontier(
            self.queries,
            placed(children.low[chosen.child]),
            placed(children.high[chosen.child]),
            placed(codes),
            placed(history, -np.inf),
            placed(total, -np.inf),
            placed(rows[chosen.child] - first[chosen.query]) + first[:, None],
        )


class Chosen(NamedTuple):
    """Children that are kept, each with its slot among the beams of its query."""

    query: Int64[np.ndarray, " chosen"]
    """Position among the active queries."""
    slot: Int64[np.ndarray, " chosen"]
    child: Int64[np.ndarray, " chosen"]


def choose_best(
    owner: Int64[np.ndarray, " children"],
    scores: Float32[np.ndarray, " children"],
    widths: Int64[np.ndarray, " active"],
) -> Chosen:
    """Choose the best children of each query, best first, in a stable order. Probability 0 is dropped."""
    bounds = owner.searchsorted(np.arange(len(widths) + 1)).tolist()
    kept = []
    for (first, last), width in zip(pairwise(bounds), widths.tolist(), strict=True):
        best = first + topk(scores[first:last], width)
        kept.append(best[scores[best] > -np.inf])
    counts = np.array([len(best) for best in kept])
    query = np.arange(len(kept)).repeat(counts)
    return Chosen(query, np.arange(len(query)) - (counts.cumsum() - counts)[query], np.concatenate(kept))


def choose_all(owner: Int64[np.ndarray, " children"], num_queries: int) -> Chosen:
    """Choose all children of each query, in order."""
    child = np.arange(len(owner))
    return Chosen(owner, child - owner.searchsorted(np.arange(num_queries))[owner], child)


def gather(
    values: Float[Tensor, "rows codes"], rows: Int64[np.ndarray, " pairs"], codes: Int64[np.ndarray, " pairs"]
) -> Float32[np.ndarray, " pairs"]:
    """Return single values of a tensor as an array, transferring only these from the device."""
    if values.device.type == "cpu":
        return np.asarray(values.float().numpy()[rows, codes])
    at = torch.from_numpy(np.stack([rows, codes])).to(values.device)
    return np.asarray(values[at[0], at[1]].float().cpu().numpy())
