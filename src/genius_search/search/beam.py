"""Beam search over the IDs that exist (paper, section 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from genius_search.config import SearchConfig
from genius_search.search.decoder import Decoding, DecodingState
from genius_search.search.table import Children, Part, Restriction, children_in_parts, count_ids


def highest(scores: Float32[np.ndarray, " scores"], count: int) -> Int64[np.ndarray, " places"]:
    """Places of the ``count`` highest scores (all, if there are fewer), highest first."""
    if len(scores) > count > 0:
        limit = np.partition(scores, len(scores) - count)[len(scores) - count]
        if np.isfinite(limit):
            enough = (scores >= limit).nonzero()[0]
            return np.asarray(enough[(-scores[enough]).argsort(kind="stable")[:count]])
    return np.asarray((-scores).argsort(kind="stable")[:count])


class Chosen(NamedTuple):
    """Children that stay, each with its place in the beams of its query."""

    query: Int64[np.ndarray, " chosen"]
    """Among those of the frontier."""
    place: Int64[np.ndarray, " chosen"]
    child: Int64[np.ndarray, " chosen"]


class Frontier(NamedTuple):
    """Queries that are being written, with equally many places each; a place without IDs is not filled."""

    queries: Int64[np.ndarray, " active"]
    """Their numbers in the batch."""
    low: Int64[np.ndarray, "active beams parts"]
    high: Int64[np.ndarray, "active beams parts"]
    codes: Int64[np.ndarray, "active beams levels"]
    """What was written so far."""
    history: Float32[np.ndarray, "active beams levels"]
    """What each code added to the score; −inf in unfilled places, NaN for levels to come."""
    total: Float32[np.ndarray, "active beams"]
    """The score."""

    @staticmethod
    def root(num_queries: int, sizes: list[int], num_levels: int) -> Frontier:
        """Every query at the beginning of every table, which have so many rows."""
        shape = (num_queries, 1, len(sizes))
        return Frontier(
            queries=np.arange(num_queries),
            low=np.zeros(shape, dtype=np.int64),
            high=np.broadcast_to(np.array(sizes, dtype=np.int64), shape).copy(),
            codes=np.zeros((num_queries, 1, num_levels), dtype=np.int64),
            history=np.full((num_queries, 1, num_levels), np.nan, dtype=np.float32),
            total=np.zeros((num_queries, 1), dtype=np.float32),
        )

    @property
    def width(self) -> int:
        """Places of each query."""
        return int(self.low.shape[1])

    def take(self, chosen: np.ndarray) -> Frontier:
        """Some of the queries."""
        return Frontier(*(values[chosen] for values in self))

    def places(self, chosen: Int64[np.ndarray, " beams"]) -> Frontier:
        """Some of the places of every query, in this order."""
        beams = (values[:, chosen] for values in self[1:])
        return Frontier(self.queries, *beams)

    def is_filled(self) -> Bool[np.ndarray, "active beams"]:
        """Whether a place holds IDs."""
        return np.asarray((self.high > self.low).any(axis=2))

    def ranges(self) -> tuple[Int64[np.ndarray, "places parts"], Int64[np.ndarray, "places parts"]]:
        """First rows and ends, place after place."""
        return self.low.reshape(-1, self.low.shape[2]), self.high.reshape(-1, self.high.shape[2])

    def owners(self, children: Children) -> Int64[np.ndarray, " children"]:
        """Which of the queries here each continuation belongs to; never falling."""
        return children.parent // self.width

    def grown(
        self,
        children: Children,
        chosen: Chosen,
        gained: Float32[np.ndarray, " children"] | None,
        level: int,
    ) -> Grown:
        """These continuations in their places; without ``gained``, what they add stays to be said."""
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
        first = self.width * np.arange(count)  # an empty place continues its query's first one
        rows = placed(parent - first[chosen.query]) + first[:, None]
        grown = Frontier(
            self.queries,
            placed(children.low[chosen.child]),
            placed(children.high[chosen.child]),
            placed(codes),
            placed(history, -np.inf),
            placed(total, -np.inf),
        )
        return Grown(grown, rows)


class Grown(NamedTuple):
    """A frontier one level further."""

    frontier: Frontier
    rows: Int64[np.ndarray, "active beams"]
    """The place, in the frontier before, that each place came from; all places are numbered through."""

    def take(self, chosen: np.ndarray, *, width: int) -> Grown:
        """Some of the queries, and of their places the first so many."""
        frontier = Frontier(
            self.frontier.queries[chosen], *(values[chosen, :width] for values in self.frontier[1:])
        )
        return Grown(frontier, self.rows[chosen, :width])


def best(
    owner: Int64[np.ndarray, " children"],
    scores: Float32[np.ndarray, " children"],
    widths: Int64[np.ndarray, " active"],
) -> Chosen:
    """The best continuations of each query, best first; equal ones keep their order.

    Those of probability 0 are dropped.
    """
    bounds = owner.searchsorted(np.arange(len(widths) + 1)).tolist()
    kept = []
    for (first, last), width in zip(pairwise(bounds), widths.tolist(), strict=True):
        places = first + highest(scores[first:last], width)
        kept.append(places[scores[places] > -np.inf])
    return _placed(kept)


def everything(owner: Int64[np.ndarray, " children"], num_queries: int) -> Chosen:
    """All continuations of each query, in their order."""
    bounds = owner.searchsorted(np.arange(num_queries + 1)).tolist()
    return _placed([np.arange(first, last) for first, last in pairwise(bounds)])


def _placed(kept: list[np.ndarray]) -> Chosen:
    if len(kept) == 1:
        count = len(kept[0])
        return Chosen(np.zeros(count, dtype=np.int64), np.arange(count), kept[0])
    counts = [len(places) for places in kept]
    place = np.concatenate([np.arange(count) for count in counts])
    return Chosen(np.arange(len(kept)).repeat(counts), place, np.concatenate(kept))


class Beams(NamedTuple):
    """Where the beams of each query ended, best first: prefixes of IDs, whole IDs if all levels were decoded.

    A prefix is a range of rows in the table of each part; empty in all parts where a place is not filled.
    """

    low: Int64[np.ndarray, "queries beams parts"]
    high: Int64[np.ndarray, "queries beams parts"]
    log_probabilities: Float32[np.ndarray, "queries beams levels"]
    """What each code added to the score; −inf in unfilled places, NaN for levels that were not decoded."""

    def filled(self) -> Bool[np.ndarray, "queries beams"]:
        """Places that hold something."""
        return np.asarray((self.high > self.low).any(axis=2))

    def scores(self) -> Float32[np.ndarray, "queries beams"]:
        """Log-probability of each prefix: the sum over its levels."""
        return np.asarray(np.nansum(self.log_probabilities, axis=2, dtype=np.float32))


@torch.inference_mode()
def search(
    decoder: Decoding,
    parts: Sequence[Part],
    queries: Float[Tensor, "queries dim"],
    config: SearchConfig,
    *,
    level0: Sequence[frozenset[int]] | None = None,
    restrictions: Sequence[Restriction | None] | None = None,
    widths: Sequence[int] | None = None,
) -> Beams:
    """The ``config.beam`` most probable IDs of all parts for each query.

    Fewer are returned when fewer exist, never duplicates (deviation 16). Equal scores keep the order of
    their parents, then of their codes, so the result does not depend on the batch.

    A query whose beams lead to no more IDs than its beam is wide is settled: nothing will be dropped any
    more. What is left of those IDs is scored in one pass; or not at all when a re-ranking orders them anyway.
    Then a leaf budget (``config.candidates``) ends decoding earlier still, as soon as that few IDs lie under the
    beams, which are then prefixes; the next best of the prefixes that were scored join them while the budget
    lasts. No ID that full decoding finds is lost by any of this.

    Parameters
    ----------
    level0
        for each query the level-0 codes it may begin with (a wanted modality); empty means any.
    restrictions
        for each query what it may find, deletions included; left out, or None for a query: all that is alive.
    widths
        beam width of each query, instead of ``config.beam``.
    """
    wide = np.full(len(queries), config.beam) if widths is None else np.asarray(widths, dtype=np.int64)
    run = Run(decoder, parts, config, level0, restrictions, wide)
    run.decode(queries)
    return run.beams()


MOST_AHEAD: Final = 4
"""Codes of level 0 that are read before it is known how probable they are; there are three modalities."""


class _Opening(NamedTuple):
    """What the decoder reads first."""

    codes: Int64[np.ndarray, "rows codes"]
    """Of level 0, to be read with the start token: one, or none."""
    rows: Int64[np.ndarray, " children"]
    """The row that foretells each continuation at level 0."""
    width: int
    """Rows of each query."""

    def moved(self, grown: Grown, chosen: Chosen) -> Grown:
        """The same places, come from the rows that were read."""
        rows = np.repeat(np.arange(len(grown.rows))[:, None] * self.width, grown.rows.shape[1], axis=1)
        rows[chosen.query, chosen.place] = self.rows[chosen.child]
        return grown._replace(rows=rows)


class Run:
    """One batch of queries on its way through the levels; :func:`search` is one."""

    def __init__(
        self,
        decoder: Decoding,
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
        self.is_ordered_later = config.rerank != "none"
        alive: Restriction = tuple(part.alive for part in parts)
        usual = alive if any(allowed is not None for allowed in alive) else None
        given = [None] * len(widths) if restrictions is None else restrictions
        self.restrictions = [usual if own is None else own for own in given]
        self.is_restricted = any(own is not None for own in self.restrictions)
        self.widths = widths
        self.settled_at = np.maximum(widths, config.candidates) if self.is_ordered_later else widths
        self.num_levels = len(decoder.sizes)
        self.found: list[Frontier | None] = [None] * len(widths)

    def decode(self, queries: Tensor) -> None:
        """Go through the levels until every query is finished."""
        frontier, children = self._begin(len(queries))
        if not len(frontier.queries):
            return
        device = self.decoder.device
        opening = self._opening(frontier, children)
        state = self.decoder.start(queries[torch.from_numpy(frontier.queries)].to(device))
        step = self.decoder.advance(state, torch.from_numpy(opening.codes).to(device))
        state, hidden = step.state, step.hidden[:, 0]
        ahead = step.hidden[:, 1:]  # what was read ahead: nothing, or what follows level 0
        for level in range(self.num_levels):
            rows = opening.rows if level == 0 else children.parent
            gained = self._gained(hidden, rows, level, children)
            scores = frontier.total.ravel()[children.parent] + gained
            chosen = self.choose(frontier, children, scores)
            grown = frontier.grown(children, chosen, gained, level)
            if level == 0:
                grown = opening.moved(grown, chosen)
            kept = np.flatnonzero(self._finish(grown, state, ahead, level))
            if not len(kept):
                return
            everyone = len(kept) == len(grown.rows)
            if not everyone:
                grown = grown.take(kept, width=int(self.widths[frontier.queries[kept]].max()))
            frontier, places = grown.frontier, torch.from_numpy(grown.rows).to(device)
            state = state.select(None if everyone else torch.from_numpy(kept).to(device), places)
            if ahead.shape[1]:
                hidden, ahead = ahead[places.ravel(), 0], ahead[:, 1:]
            else:
                tokens = frontier.codes[:, :, level : level + 1].reshape(-1, 1)
                step = self.decoder.advance(state, torch.from_numpy(tokens).to(device))
                state, hidden, ahead = step.state, step.hidden[:, 0], step.hidden[:, 1:]
            children = self._continue(frontier, level + 1)

    def beams(self) -> Beams:
        """What was found, padded to the widest."""
        width = max((frontier.width for frontier in self.found if frontier is not None), default=1)
        shape = (len(self.found), width)
        low = np.zeros((*shape, len(self.parts)), dtype=np.int64)
        high = np.zeros_like(low)
        history = np.full((*shape, self.num_levels), -np.inf, dtype=np.float32)
        for query, frontier in enumerate(self.found):
            if frontier is not None:
                here = (query, slice(0, frontier.width))
                low[here], high[here], history[here] = frontier.low[0], frontier.high[0], frontier.history[0]
        return Beams(low, high, history)

    def _opening(self, frontier: Frontier, children: Children) -> _Opening:
        """Level 0's codes are read together with the start token where they are few and all stay."""
        owner = frontier.owners(children)
        count = len(frontier.queries)
        bounds = owner.searchsorted(np.arange(count + 1))
        most = int(np.diff(bounds).max(initial=0))
        if self.num_levels == 1 or not 0 < most <= min(MOST_AHEAD, int(self.widths.min())):
            return _Opening(np.zeros((count, 0), dtype=np.int64), children.parent, 1)
        rows = owner * most + np.arange(len(owner)) - bounds[owner]
        codes = np.zeros((count * most, 1), dtype=np.int64)
        codes[rows, 0] = children.code
        return _Opening(codes, rows, most)

    def _begin(self, num_queries: int) -> tuple[Frontier, Children]:
        """All queries at the root, less those whose pool is small enough to be ordered as it is."""
        root = Frontier.root(num_queries, [len(part.table) for part in self.parts], self.num_levels)
        children = self._continue(root, 0)
        if not self.is_ordered_later:
            return root, children
        owner = root.owners(children)
        counts = self._count(children.low, children.high, owner)
        is_open = np.bincount(owner, counts, minlength=num_queries) > self.settled_at
        if is_open.all():
            return root, children
        whole = root.grown(children, everything(owner, num_queries), None, 0).frontier
        for query in np.flatnonzero(~is_open):
            self.found[query] = whole.take(np.array([query]))
        frontier = root.take(np.flatnonzero(is_open))
        return frontier, self._continue(frontier, 0)

    def _continue(self, frontier: Frontier, level: int) -> Children:
        """The continuations under which something may be found."""
        children = children_in_parts(self.parts, level, *frontier.ranges())
        if level == 0 and self.level0 is not None:
            wanted = [self.level0[query] for query in frontier.queries]
            owner = frontier.owners(children)
            is_wanted = [
                not wanted[query] or code in wanted[query]
                for query, code in zip(owner.tolist(), children.code.tolist(), strict=True)
            ]
            children = children.take(np.flatnonzero(is_wanted))
        if self.is_restricted:
            owner = frontier.queries[frontier.owners(children)]
            counts = self._count(children.low, children.high, owner)
            children = children.take(np.flatnonzero(counts))
        return children

    def choose(
        self, frontier: Frontier, children: Children, scores: Float32[np.ndarray, " children"]
    ) -> Chosen:
        """The best continuations: as many as a beam is wide, or as the leaf budget of a query pays for."""
        owner = frontier.owners(children)
        widths = self.widths[frontier.queries]
        budgets = self.settled_at[frontier.queries]
        if not (budgets > widths).any():
            return best(owner, scores, widths)
        counts = self._count(children.low, children.high, frontier.queries[owner])
        bounds = owner.searchsorted(np.arange(len(widths) + 1)).tolist()
        paid = widths.copy()
        for query, (first, last) in enumerate(pairwise(bounds)):
            order = first + highest(scores[first:last], int(budgets[query]))
            leaves = counts[order].cumsum()
            paid[query] = max(widths[query], leaves.searchsorted(budgets[query], "right"))
        return best(owner, scores, paid)

    def _leaves(self, frontier: Frontier) -> Int64[np.ndarray, " active"]:
        """IDs under all beams of each query."""
        counts = self._count(*frontier.ranges(), frontier.queries.repeat(frontier.width))
        return np.asarray(counts.reshape(-1, frontier.width).sum(axis=1))

    def _count(
        self,
        low: Int64[np.ndarray, "prefixes parts"],
        high: Int64[np.ndarray, "prefixes parts"],
        query: Int64[np.ndarray, " prefixes"],
    ) -> Int64[np.ndarray, " prefixes"]:
        """IDs under each prefix that its query may find."""
        if not self.is_restricted:
            return np.asarray((high - low).sum(axis=1))
        return count_ids(low, high, self.restrictions, query)

    def _gained(
        self, hidden: Tensor, rows: Int64[np.ndarray, " children"], level: int, children: Children
    ) -> Float32[np.ndarray, " children"]:
        """Log-probability of each continuation; ``rows`` are those of ``hidden`` that foretell it."""
        if self.scores != "children":
            return _picked(self.decoder.log_probabilities(hidden, level, self.scores), rows, children.code)
        logits = _picked(self.decoder.logits(hidden, level), rows, children.code)
        is_first = np.diff(children.parent, prepend=-1) > 0
        if not len(is_first):
            return logits
        starts, group = np.flatnonzero(is_first), np.cumsum(is_first) - 1
        logits = logits - np.maximum.reduceat(logits, starts)[group]
        gained: np.ndarray = logits - np.log(np.add.reduceat(np.exp(logits), starts))[group]
        return gained

    def _finish(
        self, grown: Grown, state: DecodingState, ahead: Tensor, level: int
    ) -> Bool[np.ndarray, " active"]:
        """Put away the queries that need no more decoding; true for those that go on."""
        frontier = grown.frontier
        leaves = self._leaves(frontier)
        is_last = level == self.num_levels - 1
        is_done = (leaves <= self.settled_at[frontier.queries]) | is_last
        is_unscored = is_done & (leaves > 0) & (not is_last) & (not self.is_ordered_later)
        if is_unscored.any():
            self._settle(grown, np.flatnonzero(is_unscored), state, ahead, level)
        for number in np.flatnonzero(is_done & ~is_unscored):
            self.found[frontier.queries[number]] = frontier.take(np.array([number]))
        return np.asarray(~is_done)

    def _settle(
        self,
        grown: Grown,
        numbers: Int64[np.ndarray, " settled"],
        state: DecodingState,
        ahead: Tensor,
        level: int,
    ) -> None:
        """Write out all IDs under the beams of some queries, and score what was not decoded in one pass."""
        frontier, rows = grown.frontier.take(numbers), grown.rows[numbers]
        written: list[Children] = []
        passed: list[np.ndarray] = []  # for each place and later level: which of its continuations it passed
        for later in range(level + 1, self.num_levels):
            children = self._continue(frontier, later)
            chosen = everything(frontier.owners(children), len(numbers))
            frontier, came_from = frontier.grown(children, chosen, None, later)
            own = np.zeros(came_from.shape, dtype=np.int64)
            own[chosen.query, chosen.place] = chosen.child
            passed = [*(earlier.ravel()[came_from] for earlier in passed), own]
            written.append(children)
            rows = rows.ravel()[came_from]
        hidden = self._foretold(frontier, numbers, rows, state, ahead)
        leaves = np.flatnonzero(frontier.is_filled().ravel())
        total, history = frontier.total, frontier.history
        loss: list[np.ndarray] = []  # after each later level
        for number, children in enumerate(written):
            leaf = np.zeros(len(children.code), dtype=np.int64)
            leaf[passed[number].ravel()[leaves]] = leaves
            gained = self._gained(hidden[:, number], leaf, level + 1 + number, children)[passed[number]]
            total += gained
            history[:, :, level + 1 + number] = gained
            loss.append(-total)
        possible = (total > -np.inf).sum(axis=1).tolist()
        for number, query in enumerate(frontier.queries):
            # Equal ones in the order of the level before, as if they were decoded level by level.
            order = np.lexsort([after[number] for after in loss])[: possible[number]]
            self.found[query] = frontier.take(np.array([number])).places(order)

    def _foretold(
        self,
        frontier: Frontier,
        numbers: Int64[np.ndarray, " settled"],
        rows: Int64[np.ndarray, "settled beams"],
        state: DecodingState,
        ahead: Tensor,
    ) -> Float[Tensor, "places later width"]:
        """What the decoder says of all levels to come, whose codes are known."""
        places = torch.from_numpy(rows).to(self.decoder.device)
        hidden = ahead[places.ravel()]
        tokens = frontier.codes[:, :, state.level - 1 : self.num_levels - 1].reshape(rows.size, -1)
        if not tokens.shape[1]:
            return hidden
        chosen = state.select(torch.from_numpy(numbers).to(self.decoder.device), places)
        step = self.decoder.advance(chosen, torch.from_numpy(tokens).to(self.decoder.device))
        return torch.cat([hidden, step.hidden], dim=1)


def _picked(
    values: Float[Tensor, "rows codes"],
    rows: Int64[np.ndarray, " picked"],
    codes: Int64[np.ndarray, " picked"],
) -> Float32[np.ndarray, " picked"]:
    """Single values; only these leave the device."""
    if values.device.type == "cpu":
        everything_here: np.ndarray = values.float().numpy()[rows, codes]
        return everything_here
    at = torch.from_numpy(np.stack([rows, codes])).to(values.device)
    picked: np.ndarray = values[at[0], at[1]].float().cpu().numpy()
    return picked
