"""Beam search over the IDs that exist (paper, section 4.4).

The generator writes an ID code by code, and at each level a query keeps its most probable prefixes: its
beams. A prefix is a range of rows in the table of each part, so the codes that may come next, and how many
IDs lie under each, are look-ups in sorted rows. All queries of a batch go through the levels together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from genius_search.config import SearchConfig
from genius_search.search.decoder import Decoder, DecoderState
from genius_search.search.table import Children, Part, Restriction, children_in_parts, count_ids

MAX_READ_AHEAD: Final = 4
"""Codes of level 0 that are read before their probability is known; there are three modalities."""


class Beams(NamedTuple):
    """The beams with which the search of each query ended, best first.

    A beam is a whole ID if all levels were decoded, otherwise a prefix: a range of rows in the table of each
    part. Places that are not filled are empty in all parts.
    """

    low: Int64[np.ndarray, "queries beams parts"]
    high: Int64[np.ndarray, "queries beams parts"]
    log_probabilities: Float32[np.ndarray, "queries beams levels"]
    """What each code added to the score; −inf in unfilled places, NaN for levels that were not decoded."""

    def filled(self) -> Bool[np.ndarray, "queries beams"]:
        """Return which places hold something."""
        return np.asarray((self.high > self.low).any(axis=2))

    def scores(self) -> Float32[np.ndarray, "queries beams"]:
        """Return the log-probability of each prefix: the sum over its levels."""
        return np.asarray(np.nansum(self.log_probabilities, axis=2, dtype=np.float32))


@torch.inference_mode()
def search(
    decoder: Decoder,
    parts: Sequence[Part],
    queries: Float[Tensor, "queries dim"],
    config: SearchConfig,
    *,
    level0: Sequence[frozenset[int]] | None = None,
    restrictions: Sequence[Restriction | None] | None = None,
    widths: Sequence[int] | None = None,
) -> Beams:
    """Find the ``config.beam`` most probable IDs of all parts for each query.

    Fewer are returned when fewer exist, never duplicates (deviation 16). Equal scores keep the order of
    their parents, then of their codes, so the result does not depend on the batch.

    A query is finished as soon as its beams lead to no more IDs than its beam is wide, for then none of them
    will be dropped. What is left of those IDs is scored in one pass; or not at all when a re-ranking orders
    them anyway. With a re-ranking, ``config.candidates`` ends decoding earlier still: as soon as that few IDs
    lie under the beams, which are then prefixes. The next best prefixes that were scored join them while the
    number of candidates allows. No ID that full decoding finds is lost by any of this.

    Parameters
    ----------
    level0
        for each query the level-0 codes it may begin with (a wanted modality); empty means any.
    restrictions
        for each query what it may find, deletions included; None, for all or for a query, means every item
        that is not deleted.
    widths
        beam width of each query, instead of ``config.beam``.
    """
    wide = np.full(len(queries), config.beam) if widths is None else np.asarray(widths, dtype=np.int64)
    return BeamSearch(decoder, parts, config, level0, restrictions, wide).run(queries)


class BeamSearch:
    """One batch of queries on its way through the levels."""

    def __init__(
        self,
        decoder: Decoder,
        parts: Sequence[Part],
        config: SearchConfig,
        level0: Sequence[frozenset[int]] | None,
        restrictions: Sequence[Restriction | None] | None,
        widths: Int64[np.ndarray, " queries"],
    ) -> None:
        self.decoder = decoder
        self.parts = parts
        self.scores = config.scores
        self.level0 = None if level0 is None or not any(level0) else level0
        self.is_reranked = config.rerank != "none"
        alive: Restriction = tuple(part.alive for part in parts)
        default = alive if any(allowed is not None for allowed in alive) else None
        given = [None] * len(widths) if restrictions is None else restrictions
        self.restrictions = [default if own is None else own for own in given]
        self.is_restricted = any(own is not None for own in self.restrictions)
        self.widths = widths
        # A query with no more IDs than this under its beams is finished.
        self.budgets = np.maximum(widths, config.candidates) if self.is_reranked else widths
        self.num_levels = len(decoder.sizes)
        self.finished: list[Frontier | None] = [None] * len(widths)

    def run(self, queries: Float[Tensor, "queries dim"]) -> Beams:
        """Decode until every query is finished."""
        frontier, children = self._begin(len(queries))
        if not len(frontier.queries):
            return self._beams()
        device = self.decoder.device
        codes, rows, rows_per_query = self._read_ahead(frontier, children)
        state = self.decoder.start(queries[torch.from_numpy(frontier.queries)].to(device))
        step = self.decoder.advance(state, torch.from_numpy(codes).to(device))
        state, hidden = step.state, step.hidden[:, 0]
        ahead = step.hidden[:, 1:]  # of codes that were read ahead: what follows level 0
        for level in range(self.num_levels):
            gained = self._log_probabilities(hidden, rows, level, children)
            chosen = self.choose(frontier, children, frontier.total.ravel()[children.parent] + gained)
            frontier = frontier.extend(children, chosen, gained, level, rows, rows_per_query)
            going_on = np.flatnonzero(self._finish(frontier, state, ahead, level))
            if not len(going_on):
                break
            everyone = len(going_on) == len(frontier.queries)
            if not everyone:
                frontier = frontier.take(going_on)
                frontier = frontier.places(slice(int(self.widths[frontier.queries].max())))
            places = torch.from_numpy(frontier.rows).to(device)
            state = state.select(None if everyone else torch.from_numpy(going_on).to(device), places)
            if ahead.shape[1]:
                hidden, ahead = ahead[places.ravel(), 0], ahead[:, 1:]
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
        """Choose the best children of each query: as many as its beam is wide, or as its budget allows."""
        owner = frontier.owners(children)
        widths = self.widths[frontier.queries]
        budgets = self.budgets[frontier.queries]
        if (budgets > widths).any():
            counts = self._count(children.low, children.high, frontier.queries[owner])
            bounds = owner.searchsorted(np.arange(len(widths) + 1)).tolist()
            for query, (first, last) in enumerate(pairwise(bounds)):
                best = first + topk(scores[first:last], int(budgets[query]))
                affordable = counts[best].cumsum().searchsorted(budgets[query], "right")
                widths[query] = max(widths[query], affordable)
        return choose_best(owner, scores, widths)

    def _begin(self, num_queries: int) -> tuple[Frontier, Children]:
        """Put all queries at the root; finish those that may find few enough IDs before the first code."""
        root = Frontier.root(num_queries, [len(part.table) for part in self.parts], self.num_levels)
        children = self._children(root, 0)
        if not self.is_reranked:
            return root, children
        owner = root.owners(children)
        counts = self._count(children.low, children.high, owner)
        is_open = np.bincount(owner, counts, minlength=num_queries) > self.budgets
        if is_open.all():
            return root, children
        below = root.extend(children, choose_all(owner, num_queries), None, 0)
        for query in np.flatnonzero(~is_open):
            self.finished[query] = below.take(np.array([query]))
        frontier = root.take(np.flatnonzero(is_open))
        return frontier, self._children(frontier, 0)

    def _read_ahead(self, frontier: Frontier, children: Children) -> tuple[np.ndarray, np.ndarray, int]:
        """Choose the codes of level 0 to read together with the start token; none unless few and all stay.

        Reading a modality's code costs next to nothing beside the start token, and saves a step.

        Returns
        -------
        The codes, a row for each; for each child the row that predicts it; rows of a query.
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

    def _children(self, frontier: Frontier, level: int) -> Children:
        """Return the children under which something may be found."""
        children = children_in_parts(self.parts, level, *frontier.ranges())
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
            children = children.take(np.flatnonzero(self._count(children.low, children.high, owner)))
        return children

    def _count(
        self,
        low: Int64[np.ndarray, "prefixes parts"],
        high: Int64[np.ndarray, "prefixes parts"],
        query: Int64[np.ndarray, " prefixes"],
    ) -> Int64[np.ndarray, " prefixes"]:
        """Count the IDs under each prefix that its query may find."""
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
        is_first = np.diff(children.parent, prepend=-1) > 0  # log-softmax among those of one parent
        starts, group = np.flatnonzero(is_first), np.cumsum(is_first) - 1
        logits = logits - np.maximum.reduceat(logits, starts)[group]
        normalised: np.ndarray = logits - np.log(np.add.reduceat(np.exp(logits), starts))[group]
        return normalised

    def _finish(
        self, frontier: Frontier, state: DecoderState, ahead: Tensor, level: int
    ) -> Bool[np.ndarray, " active"]:
        """Put away the queries that need no more decoding; return which ones go on."""
        counts = self._count(*frontier.ranges(), frontier.queries.repeat(frontier.width))
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
        """Write out all IDs under the beams of some queries, and score the later levels in one pass."""
        frontier = frontier.take(numbers)
        rows = frontier.rows
        later_children: list[Children] = []
        passed: list[np.ndarray] = []  # at each later level, the child on the way to each place
        for later in range(level + 1, self.num_levels):
            children = self._children(frontier, later)
            chosen = choose_all(frontier.owners(children), len(numbers))
            frontier = frontier.extend(children, chosen, None, later)
            child = np.zeros(frontier.rows.shape, dtype=np.int64)
            child[chosen.query, chosen.place] = chosen.child
            passed = [*(earlier.ravel()[frontier.rows] for earlier in passed), child]
            later_children.append(children)
            rows = rows.ravel()[frontier.rows]
        hidden = self._read_rest(frontier, numbers, rows, state, ahead)
        ids = np.flatnonzero(frontier.is_filled().ravel())
        total, history = frontier.total, frontier.history
        falling: list[np.ndarray] = []  # the negated score after each later level
        for number, (children, child) in enumerate(zip(later_children, passed, strict=True)):
            row = np.zeros(len(children.code), dtype=np.int64)
            row[child.ravel()[ids]] = ids  # IDs with the same prefix: any of their rows predicts the child
            gained = self._log_probabilities(hidden[:, number], row, level + 1 + number, children)[child]
            total += gained
            history[:, :, level + 1 + number] = gained
            falling.append(-total)
        num_possible = (total > -np.inf).sum(axis=1).tolist()
        for number, query in enumerate(frontier.queries):
            # Equal scores in the order of the level before, as if they were decoded level by level.
            order = np.lexsort([scores[number] for scores in falling])[: num_possible[number]]
            self.finished[query] = frontier.take(np.array([number])).places(order)

    def _read_rest(
        self,
        frontier: Frontier,
        numbers: Int64[np.ndarray, " settled"],
        rows: Int64[np.ndarray, "settled beams"],
        state: DecoderState,
        ahead: Tensor,
    ) -> Float[Tensor, "places later width"]:
        """Read whole IDs; return what predicts each of the levels to come."""
        places = torch.from_numpy(rows).to(self.decoder.device)
        hidden = ahead[places.ravel()]
        tokens = frontier.codes[:, :, state.level - 1 : self.num_levels - 1].reshape(rows.size, -1)
        if not tokens.shape[1]:
            return hidden
        chosen = state.select(torch.from_numpy(numbers).to(self.decoder.device), places)
        step = self.decoder.advance(chosen, torch.from_numpy(tokens).to(self.decoder.device))
        return torch.cat([hidden, step.hidden], dim=1)

    def _beams(self) -> Beams:
        """Return what was found, padded to the widest query."""
        width = max((frontier.width for frontier in self.finished if frontier is not None), default=1)
        shape = (len(self.finished), width)
        low = np.zeros((*shape, len(self.parts)), dtype=np.int64)
        high = np.zeros_like(low)
        history = np.full((*shape, self.num_levels), -np.inf, dtype=np.float32)
        for query, frontier in enumerate(self.finished):
            if frontier is not None:
                own = (query, slice(frontier.width))
                low[own], high[own], history[own] = frontier.low[0], frontier.high[0], frontier.history[0]
        return Beams(low, high, history)


class Frontier(NamedTuple):
    """The beams of the queries that are being decoded; each query has the same number of places for them."""

    queries: Int64[np.ndarray, " active"]
    """Their numbers in the batch."""
    low: Int64[np.ndarray, "active beams parts"]
    """First row of each prefix in each part; a place that is empty in all parts is not filled."""
    high: Int64[np.ndarray, "active beams parts"]
    codes: Int64[np.ndarray, "active beams levels"]
    """Codes written so far."""
    history: Float32[np.ndarray, "active beams levels"]
    """What each code added to the score; −inf in unfilled places, NaN for levels to come."""
    total: Float32[np.ndarray, "active beams"]
    """The score."""
    rows: Int64[np.ndarray, "active beams"]
    """The decoder's row that each beam continues."""

    @staticmethod
    def root(num_queries: int, sizes: Sequence[int], num_levels: int) -> Frontier:
        """Return the empty prefix for every query, over tables of these sizes."""
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
        """Places of each query."""
        return int(self.low.shape[1])

    def take(self, chosen: Int64[np.ndarray, " queries"]) -> Frontier:
        """Return some of the queries."""
        return Frontier(*(values[chosen] for values in self))

    def places(self, chosen: Int64[np.ndarray, " beams"] | slice) -> Frontier:
        """Return some of the places of every query, in this order."""
        return Frontier(self.queries, *(values[:, chosen] for values in self[1:]))

    def is_filled(self) -> Bool[np.ndarray, "active beams"]:
        """Return which places hold a prefix."""
        return np.asarray((self.high > self.low).any(axis=2))

    def ranges(self) -> tuple[Int64[np.ndarray, "places parts"], Int64[np.ndarray, "places parts"]]:
        """Return the ranges of all places, query after query."""
        return self.low.reshape(-1, self.low.shape[2]), self.high.reshape(-1, self.high.shape[2])

    def owners(self, children: Children) -> Int64[np.ndarray, " children"]:
        """Return which of the active queries each child belongs to; never decreasing."""
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
        """Return the chosen children in their places, one level further.

        Parameters
        ----------
        gained
            log-probability of each child; None leaves the score as it is.
        rows, rows_per_query
            the decoder's row that predicted each child, and how many it has for a query; by default the
            place of the child's parent.
        """
        rows = children.parent if rows is None else rows
        count = len(self.queries)
        width = max(1, int(chosen.place.max(initial=0)) + 1)
        place = chosen.query * width + chosen.place
        is_full = len(place) == count * width

        def placed(values: np.ndarray, empty: float = 0.0) -> np.ndarray:
            if not is_full:
                spread = np.full((count * width, *values.shape[1:]), empty, dtype=values.dtype)
                spread[place] = values
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
        first = (rows_per_query or self.width) * np.arange(count)  # what an empty place continues
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
    """Children that stay, each with its place among the beams of its query."""

    query: Int64[np.ndarray, " chosen"]
    """Position among the active queries."""
    place: Int64[np.ndarray, " chosen"]
    child: Int64[np.ndarray, " chosen"]


def choose_best(
    owner: Int64[np.ndarray, " children"],
    scores: Float32[np.ndarray, " children"],
    widths: Int64[np.ndarray, " active"],
) -> Chosen:
    """Choose the best children of each query, best first; equal ones keep their order.

    Those of probability 0 are dropped.
    """
    bounds = owner.searchsorted(np.arange(len(widths) + 1)).tolist()
    kept = []
    for (first, last), width in zip(pairwise(bounds), widths.tolist(), strict=True):
        best = first + topk(scores[first:last], width)
        kept.append(best[scores[best] > -np.inf])
    counts = np.array([len(best) for best in kept])
    query = np.arange(len(kept)).repeat(counts)
    return Chosen(query, np.arange(len(query)) - (counts.cumsum() - counts)[query], np.concatenate(kept))


def choose_all(owner: Int64[np.ndarray, " children"], num_queries: int) -> Chosen:
    """Choose all children of each query, in their order."""
    child = np.arange(len(owner))
    return Chosen(owner, child - owner.searchsorted(np.arange(num_queries))[owner], child)


def topk(scores: Float32[np.ndarray, " scores"], k: int) -> Int64[np.ndarray, " places"]:
    """Return the places of the ``k`` highest scores (all, if there are fewer), highest first.

    Equal scores keep their order, unlike those of ``torch.topk``.
    """
    if len(scores) > k > 0:
        limit = np.partition(scores, len(scores) - k)[len(scores) - k]
        if np.isfinite(limit):
            enough = (scores >= limit).nonzero()[0]
            return np.asarray(enough[(-scores[enough]).argsort(kind="stable")[:k]])
    return np.asarray((-scores).argsort(kind="stable")[:k])


def gather(
    values: Float[Tensor, "rows codes"], rows: Int64[np.ndarray, " pairs"], codes: Int64[np.ndarray, " pairs"]
) -> Float32[np.ndarray, " pairs"]:
    """Return single values of a tensor; only these leave the device."""
    if values.device.type == "cpu":
        return np.asarray(values.float().numpy()[rows, codes])
    at = torch.from_numpy(np.stack([rows, codes])).to(values.device)
    return np.asarray(values[at[0], at[1]].float().cpu().numpy())
