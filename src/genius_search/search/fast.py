"""Search by code vectors, or by a generator, in NumPy: one query at a time.

This finds what :func:`genius_search.search.beam.search` and :func:`genius_search.search.rank.rank_items`
find, with the same scores up to rounding, in about half the time. :mod:`genius_search.search.compiled` does
the same in a tenth of the time, where it can be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from genius_search.config import RANK_ALL, SearchConfig
from genius_search.nn.folded import EPSILON, Combination, FoldedWeights
from genius_search.search.beams import Beams, topk
from genius_search.search.rank import CodeRanker, Ranking, ids_under, items_of, table_rows
from genius_search.search.table import Restriction, SearchSegment, children_in_segments, count_ids


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


class Found(NamedTuple):
    """The ranked items of one query."""

    ranking: Ranking
    log_probabilities: Float32[np.ndarray, "hits levels"]
    """Log-probabilities of the codes of each hit's beam; NaN for levels that were not decoded."""


@dataclass
class NumpyState:
    """State of a :class:`NumpyGenerator`: what it knows of a query, and of the tokens of some prefixes."""

    sides: Float32[np.ndarray, "blocks two looks width"]
    """Keys and values of the query's prefix vectors, in the space of the tokens."""
    past: list[Float32[np.ndarray, "rows tokens three heads head_width"]]
    """Queries, keys and values of the prefixes' tokens in self-attention, by block."""

    def select(self, rows: Int64[np.ndarray, " kept"]) -> None:
        """Go on with these prefixes; one may occur repeatedly."""
        self.past = [block[rows] for block in self.past]


class NumpyGenerator:
    """A generator in NumPy: :class:`genius_search.search.decoder.T5Decoder` for one query."""

    def __init__(self, weights: FoldedWeights, combination: Combination) -> None:
        self.weights = weights
        self.combination = combination
        self.tokens = self._project(weights.embeddings, 0)
        """Queries, keys and values of each token in the first block, where they depend on nothing else."""
        sizes = [logits.shape[1] for logits in weights.codes]
        self._offsets = [0, *accumulate(sizes, initial=1)]

    def start(self, query: Float32[np.ndarray, " dim"]) -> NumpyState:
        """Return the state before any token."""
        w = self.weights
        vectors = _normalize((query @ w.prefix_weights + w.prefix_biases).reshape(w.prefixes, -1))
        projected = (vectors @ w.prefix_keys_values).reshape(w.prefixes, len(w.prefix_sides), -1)
        sides = projected.transpose(1, 0, 2) @ w.prefix_sides
        none = np.zeros((1, 0, *self.tokens.shape[1:]), dtype=np.float32)
        return NumpyState(sides.reshape(len(w.blocks), 2, w.heads * w.prefixes, -1), [none] * len(w.blocks))

    def advance(
        self,
        state: NumpyState,
        codes: Int64[np.ndarray, " rows"],
        near: Float32[np.ndarray, "rows codes"],
    ) -> Float32[np.ndarray, "rows codes"]:
        """Read a code of each prefix, first 0 for the start token; return log-probabilities of the next.

        Parameters
        ----------
        near
            the nearness of the next codes.
        """
        w, c, rows, level = self.weights, self.combination, len(codes), state.past[0].shape[1]
        tokens = self._offsets[level] + codes
        hidden = w.embeddings[tokens]
        for number, (block, looks) in enumerate(zip(w.blocks, state.sides, strict=True)):
            now = self._project(hidden, number) if number else self.tokens[tokens]
            state.past[number] = np.concatenate([state.past[number], now[:, None]], axis=1)
            queries, keys, values = state.past[number].transpose(2, 0, 3, 1, 4)
            shares = (keys @ queries[:, :, -1, :, None])[..., 0] + w.distances[:, level::-1]
            hidden += (_softmax(shares)[:, :, None] @ values).reshape(rows, -1) @ block.token_out
            shares = (_normalize(hidden) @ looks[0].T).reshape(rows, w.heads, -1)
            hidden += _softmax(shares).reshape(rows, -1) @ looks[1]
            hidden += np.maximum(_normalize(hidden) @ block.up, 0) @ block.down
        logits = (
            c.scales[level] * near + c.gates[level] * (_normalize(hidden) @ w.codes[level]) + c.biases[level]
        )
        logits -= logits.max(axis=1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))

    def _project(
        self, hidden: Float32[np.ndarray, "rows width"], block: int
    ) -> Float32[np.ndarray, "rows three heads head_width"]:
        """Project tokens to the queries, keys and values of a block's self-attention."""
        projected = _normalize(hidden) @ self.weights.blocks[block].token
        return np.asarray(projected.reshape(len(hidden), 3, self.weights.heads, -1))


def _normalize(rows: Float32[np.ndarray, "rows width"]) -> Float32[np.ndarray, "rows width"]:
    """Scale each row to unit length."""
    squares = np.einsum("rw,rw->r", rows, rows)[:, None] + np.float32(rows.shape[1] * EPSILON)
    return np.asarray(rows / np.sqrt(squares))


def _softmax(scores: Float32[np.ndarray, "*rows keys"]) -> Float32[np.ndarray, "*rows keys"]:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


class NumpySearch:
    """Search by code vectors, or by a generator, in NumPy.

    Parameters
    ----------
    ranker
        scores IDs by the code vectors; its tables must not change.
    generator
        scores the codes that follow a prefix; without one, nearness to the query does.
    """

    most_queries: ClassVar[int] = 16
    """Queries of a batch up to which this is quicker than PyTorch, which searches for all of them at once."""

    def __init__(self, ranker: CodeRanker, generator: NumpyGenerator | None = None) -> None:
        self._ranker = ranker
        self.generator = generator
        self._tables = ranker.tables()
        self._vectors = np.concatenate(self._tables)
        self._offsets = np.array([0, *accumulate(map(len, self._tables))][:-1])
        self._halves = [np.square(table).sum(axis=1) / 2 for table in self._tables]

    def covers(self, segments: Sequence[SearchSegment], config: SearchConfig) -> bool:
        """Return whether this search knows such settings and tables."""
        return (
            config.rerank != "none"
            and (config.scores == "level" or (config.scores == "vocabulary" and self.generator is None))
            and all(
                segment.table.ids.dtype == np.uint8 and segment.table.items.dtype == np.int32
                for segment in segments
            )
        )

    @np.errstate(invalid="ignore")  # products of small matrices may compute with what lies beside them
    def search(
        self,
        segments: Sequence[SearchSegment],
        queries: Float32[np.ndarray, "queries dim"],
        wanted: Sequence[Wanted],
        config: SearchConfig,
    ) -> list[Found]:
        """Find the best items by codes for each query; with ``k`` 0, list all items under the beams."""
        return [
            self._search(segments, query, one, config) for query, one in zip(queries, wanted, strict=True)
        ]

    def _search(
        self,
        segments: Sequence[SearchSegment],
        query: Float32[np.ndarray, " dim"],
        wanted: Wanted,
        config: SearchConfig,
    ) -> Found:
        restriction = wanted.restriction or tuple(segment.alive for segment in segments)
        beams = self._find_beams(segments, query, wanted, config.candidates, restriction)
        ids = ids_under(beams, 0, restriction)
        if not wanted.k:
            ranking = items_of(segments, ids, np.zeros(len(ids.row), dtype=np.float32), restriction)
            return Found(ranking, beams.log_probabilities[0, ranking.beams])
        rows = table_rows(segments, ids.segment, ids.row)
        products = np.vecdot(self._vectors, query)
        scores = products.take(rows[:, : len(self._tables)] + self._offsets).sum(axis=1)
        scores -= self._ranker.costs(rows, density_weight=config.density_weight)
        if config.generator_weight:
            scores += config.generator_weight * beams.scores()[0][ids.beam]
        ranking = items_of(segments, ids, scores, restriction)
        ranking = ranking.take(topk(ranking.scores, wanted.k))
        return Found(ranking, beams.log_probabilities[0, ranking.beams])

    def _find_beams(
        self,
        segments: Sequence[SearchSegment],
        query: Float32[np.ndarray, " dim"],
        wanted: Wanted,
        candidates: int,
        restriction: Restriction,
    ) -> Beams:
        budget = max(wanted.width, candidates)
        low = np.zeros((1, len(segments)), dtype=np.int64)
        high = np.array([[len(segment.table) for segment in segments]], dtype=np.int64)
        total = np.zeros(1, dtype=np.float32)
        history = np.full((1, len(self._tables)), np.nan, dtype=np.float32)
        residuals = query[None]
        code = np.zeros(1, dtype=np.int64)
        state = None
        for level, table in enumerate(self._tables):
            children = children_in_segments(segments, level, low, high)
            if level == 0 and wanted.level0:
                children = children.take(np.flatnonzero(np.isin(children.code, list(wanted.level0))))
            counts = count_ids(
                children.low, children.high, [restriction], np.zeros(len(children.code), dtype=np.int64)
            )
            allowed = counts.nonzero()[0]
            children, counts = children.take(allowed), counts[allowed]
            low, high = children.low, children.high
            if level == 0 and counts.sum() <= max(budget, RANK_ALL * candidates):
                history = history.repeat(len(low), axis=0)
                break
            near = residuals @ table.T - self._halves[level]
            if self.generator is not None:
                state = state or self.generator.start(query)
                near = self.generator.advance(state, code, near)
            gained = near[children.parent, children.code]
            total = total[children.parent] + gained
            best = topk(total, budget)
            affordable = int(counts[best].cumsum().searchsorted(budget, "right"))
            best = best[: max(wanted.width, affordable)]
            parent, code = children.parent[best], children.code[best]
            low, high, total = low[best], high[best], total[best]
            history = history[parent]
            history[:, level] = gained[best]
            if counts[best].sum() <= budget:
                break
            residuals = residuals[parent] - table[code]
            if state is not None:
                state.select(parent)
        return Beams(low[None], high[None], history[None])
