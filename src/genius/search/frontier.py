"""The beams of a batch while they are written: prefixes, their scores, and where each came from."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64

from genius.search.highest import highest
from genius.search.prefixes import Continuations


class Chosen(NamedTuple):
    """Continuations that stay, each with its place in the beams of its query."""

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

    def owners(self, children: Continuations) -> Int64[np.ndarray, " children"]:
        """Which of the queries here each continuation belongs to; never falling."""
        return children.parent // self.width

    def grown(
        self,
        children: Continuations,
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
