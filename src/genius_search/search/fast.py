"""Search by code vectors, or by a generator of one block, in NumPy: one query at a time.

This finds what :func:`genius_search.search.beam.search` and :func:`genius_search.search.rank.rank_items`
find, with the same scores up to rounding, in about half the time. :mod:`genius_search.search.compiled` does
the same in a tenth of the time, where it can be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from genius_search.config import RANK_ALL, SearchConfig
from genius_search.nn.folded import EPSILON, Combination, OneBlock
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


class NumpyGenerator:
    """A generator of one block in NumPy: :class:`genius_search.search.decoder.T5Decoder` for one query."""

    def __init__(self, weights: OneBlock, combination: Combination) -> None:
        self.weights = weights
        self.combination = combination
        heads, sizes = weights.heads, [logits.shape[1] for logits in weights.codes]
        self.tokens = (_normalize(weights.embeddings) @ weights.token).reshape(
            -1, 3, heads, len(weights.token_out) // heads
        )
        """Queries, keys and values of each token in self-attention, which depend on nothing else."""
        self._offsets = np.array([0, *accumulate(sizes, initial=1)][:-1])

    def read(self, query: Float32[np.ndarray, " dim"]) -> np.ndarray:
        """Return the keys and values of the query's prefix vectors, in the space of the tokens."""
        w = self.weights
        vectors = _normalize((query @ w.prefix_weights + w.prefix_biases).reshape(w.prefixes, -1))
        projected = (vectors @ w.prefix_keys_values).reshape(w.prefixes, 2 * w.heads, -1).transpose(1, 0, 2)
        sides: np.ndarray = (projected @ w.prefix_sides).reshape(2, w.heads * w.prefixes, -1)
        return sides

    def score(
        self,
        sides: np.ndarray,
        codes: Int64[np.ndarray, "rows level"],
        near: Float32[np.ndarray, "rows codes"],
    ) -> Float32[np.ndarray, "rows codes"]:
        """Return the log-probabilities of the codes that follow prefixes, given their nearness."""
        w, level, rows = self.weights, codes.shape[1], len(codes)
        tokens = np.concatenate([np.zeros((rows, 1), np.int64), codes], axis=1) + self._offsets[: level + 1]
        queries, keys, values = self.tokens[tokens].transpose(2, 0, 3, 1, 4)
        shares = (keys @ queries[:, :, -1, :, None])[..., 0] + w.distances[:, level::-1]
        attended = (_softmax(shares)[:, :, None] @ values).reshape(rows, -1)
        hidden = w.embeddings[tokens[:, -1]] + attended @ w.token_out
        shares = (_normalize(hidden) @ sides[0].T).reshape(rows, w.heads, -1)
        hidden += _softmax(shares).reshape(rows, -1) @ sides[1]
        hidden += np.maximum(_normalize(hidden) @ w.up, 0) @ w.down
        c = self.combination
        logits = (
            c.scales[level] * near + c.gates[level] * (_normalize(hidden) @ w.codes[level]) + c.biases[level]
        )
        logits -= logits.max(axis=1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def _normalize(rows: Float32[np.ndarray, "rows width"]) -> Float32[np.ndarray, "rows width"]:
    """Scale each row to unit length."""
    squares = np.einsum("rw,rw->r", rows, rows)[:, None] + np.float32(rows.shape[1] * EPSILON)
    return np.asarray(rows / np.sqrt(squares))


def _softmax(scores: Float32[np.ndarray, "*rows keys"]) -> Float32[np.ndarray, "*rows keys"]:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


class NumpySearch:
    """Search by code vectors, or by a generator of one block, in NumPy.

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
        rows = table_rows(segments, ids)
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
        codes = np.zeros((1, 0), dtype=np.int64)
        sides = None
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
                sides = self.generator.read(query) if sides is None else sides
                near = self.generator.score(sides, codes, near)
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
            codes = np.concatenate([codes[parent], code[:, None]], axis=1)
        return Beams(low[None], high[None], history[None])
