"""Searching shards wherever they are: one decode here, the children of deep prefixes and the ranking there.

The router has the first levels of all IDs. A batch of queries is decoded once; at deeper levels, and at all
levels for queries with conditions, each shard that holds prefixes is asked for their children, and at the end
each shard that holds beams ranks the items under them. So a query costs one call to a shard for each deep
level, and one for the ranking, and finds what one index of all items finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64

from genius_search.cluster.shard import RankRequest, ShardChildren, ShardRanking, Top
from genius_search.config import SearchConfig
from genius_search.index.filters import Filter
from genius_search.search.beam import BeamSearch, Frontier
from genius_search.search.beams import topk
from genius_search.search.decoder import Decoder
from genius_search.search.fast import Found
from genius_search.search.rank import Ranking
from genius_search.search.table import Children, IdTable

DEPTH: Final = 4
"""Levels of the IDs that a router has."""


@runtime_checkable
class Answer(Protocol):
    """An answer of a shard that may not be there yet."""

    def result(self) -> Any:
        """Wait for the answer, and return it."""


@runtime_checkable
class RemoteShard(Protocol):
    """A shard (:class:`~genius_search.cluster.shard.Shard`) that may be elsewhere."""

    def submit(self, method: str, *arguments: Any) -> Answer:
        """Begin to call a method."""


class RoutedQuery(NamedTuple):
    """A query's beam width, number of hits, and conditions."""

    width: int
    k: int
    level0: frozenset[int] = frozenset()
    """Allowed codes at level 0; empty means any."""
    allowed: Filter | None = None


class Ranges(NamedTuple):
    """Those of some ranges of rows that a shard holds, or holds in part."""

    shard: int
    which: Int64[np.ndarray, " here"]
    low: Int64[np.ndarray, " here"]
    """First row in the shard."""
    high: Int64[np.ndarray, " here"]


class Router:
    """Searches shards as one index.

    Parameters
    ----------
    shards
        in the order of their IDs.
    depth
        levels of the IDs that are held here.
    """

    def __init__(self, decoder: Decoder, shards: Sequence[RemoteShard], *, depth: int = DEPTH) -> None:
        self.decoder = decoder
        self.shards = shards
        self.depth = min(depth, len(decoder.sizes))
        tops: list[Top] = [one.result() for one in [shard.submit("top", self.depth) for shard in shards]]
        self.has_deleted = any(top.has_deleted for top in tops)
        self._offsets = np.cumsum([0, *(top.num_rows for top in tops)])
        first = np.concatenate([top.first + start for top, start in zip(tops, self._offsets, strict=False)])
        codes = np.concatenate([top.codes.astype(np.int16) for top in tops])
        # Building a table drops repeated prefixes, of a prefix that begins in one shard and ends in the next.
        self._top = IdTable.build(codes, np.zeros(len(codes)))
        self._first = np.append(first[self._top.bucket_starts[:-1]], self._offsets[-1])

    def __len__(self) -> int:
        """Return the number of IDs."""
        return int(self._offsets[-1])

    @property
    def nbytes(self) -> int:
        """Size of the first levels in bytes."""
        return self._top.nbytes + int(self._first.nbytes)

    @torch.inference_mode()
    def find(
        self,
        queries: Float32[np.ndarray, "queries dim"],
        evidence: Float32[np.ndarray, "queries dim"],
        routed: Sequence[RoutedQuery],
        config: SearchConfig,
    ) -> list[Found]:
        """Find the best items for each query of a batch; shards are the parts of the rankings.

        Parameters
        ----------
        evidence
            the queries in the space of the stored embeddings.
        """
        if not len(self):
            return [_nothing(len(self.decoder.sizes)) for _ in routed]
        if self.has_deleted:
            routed = [one._replace(allowed=one.allowed or Filter()) for one in routed]
        beams = _Search(self, config, routed).run(torch.from_numpy(queries))
        requests: list[list[RankRequest]] = [[] for _ in self.shards]
        places: list[list[tuple[int, np.ndarray]]] = [[] for _ in self.shards]
        for number, one in enumerate(routed):
            for own in self.split(beams.low[number, :, 0], beams.high[number, :, 0]):
                history = beams.log_probabilities[number, own.which]
                request = RankRequest(
                    own.low, own.high, history, queries[number], evidence[number], one.k, one.allowed
                )
                requests[own.shard].append(request)
                places[own.shard].append((number, own.which))
        calls = [
            (number, self.shards[number].submit("rank", given, config))
            for number, given in enumerate(requests)
            if given
        ]
        rankings: list[list[tuple[int, np.ndarray, ShardRanking]]] = [[] for _ in routed]
        for shard, call in calls:
            for (number, which), ranking in zip(places[shard], call.result(), strict=True):
                rankings[number].append((shard, which[ranking.beams], ranking))
        return [
            self._merge(rankings[number], beams.log_probabilities[number], one.k, config)
            for number, one in enumerate(routed)
        ]

    def _merge(
        self,
        rankings: Sequence[tuple[int, Int64[np.ndarray, " _"], ShardRanking]],
        history: Float32[np.ndarray, "beams levels"],
        k: int,
        config: SearchConfig,
    ) -> Found:
        """Merge the rankings of shards, each with its hits' beams; ties are in the order of one index."""
        if not rankings:
            return _nothing(history.shape[1])
        shards = np.repeat([shard for shard, _, _ in rankings], [len(one.scores) for _, _, one in rankings])
        place = np.concatenate([np.arange(len(one.scores)) for _, _, one in rankings])
        beams = np.concatenate([own for _, own, _ in rankings])
        scores = np.concatenate([one.scores for _, _, one in rankings])
        listed_by = np.concatenate([one.listed_by for _, _, one in rankings])
        best = np.lexsort((place, shards, beams, -listed_by))
        touched = sum(one.touched for _, _, one in rankings)
        if config.rerank == "embeddings" and config.shortlist:
            best = best[: max(k, config.shortlist)]
            best = best[topk(scores[best], k)]
        best = best[:k]
        items = np.concatenate([one.items for _, _, one in rankings])
        rows = np.concatenate([one.rows for _, _, one in rankings])
        ranking = Ranking(shards[best], items[best], rows[best], scores[best], beams[best], touched)
        return Found(ranking, history[beams[best]])

    def split(
        self, low: Int64[np.ndarray, " ranges"], high: Int64[np.ndarray, " ranges"]
    ) -> Iterator[Ranges]:
        """Yield, for each shard that holds any of some ranges of rows, those that it holds."""
        for shard, (start, stop) in enumerate(pairwise(self._offsets.tolist())):
            own_low, own_high = np.maximum(low, start), np.minimum(high, stop)
            here = np.flatnonzero(own_high > own_low)
            if len(here):
                yield Ranges(shard, here, own_low[here] - start, own_high[here] - start)

    def children(
        self,
        level: int,
        low: Int64[np.ndarray, " prefixes"],
        high: Int64[np.ndarray, " prefixes"],
        filters: Sequence[Filter],
        chosen: Int64[np.ndarray, " prefixes"],
    ) -> ShardChildren:
        """Return the children of prefixes with the numbers of allowed IDs; see :meth:`Shard.children`."""
        is_here = (chosen < 0) & (level < self.depth)
        found = [self._children_here(level, low, high, np.flatnonzero(is_here & (high > low)))]
        there = np.flatnonzero(~is_here)
        calls = []
        for own in self.split(low[there], high[there]):
            which = there[own.which]
            call = self.shards[own.shard].submit("children", level, own.low, own.high, filters, chosen[which])
            calls.append((own.shard, which, call))
        for shard, which, call in calls:
            given: ShardChildren = call.result()
            start = self._offsets[shard]
            found.append(
                given._replace(parent=which[given.parent], low=given.low + start, high=given.high + start)
            )
        return _join(found)

    def _children_here(
        self, level: int, low: np.ndarray, high: np.ndarray, which: Int64[np.ndarray, " prefixes"]
    ) -> ShardChildren:
        if not len(which):
            nothing = np.zeros(0, dtype=np.int64)
            return ShardChildren(nothing, nothing, nothing, nothing, nothing)
        rows = [np.searchsorted(self._first, bound[which]) for bound in (low, high)]
        parent, code, first, last = self._top.children(level, *rows)
        first, last = self._first[first], self._first[last]
        return ShardChildren(which[parent], code, first, last, last - first)


def _nothing(levels: int) -> Found:
    none, scores = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
    return Found(Ranking(none, none, none, scores, none, 0), np.zeros((0, levels), dtype=np.float32))


def _join(found: Sequence[ShardChildren]) -> ShardChildren:
    """Sort children by parent, then code; a child that begins in one shard and ends in the next is one."""
    joined = ShardChildren(*map(np.concatenate, zip(*found, strict=True)))
    if not len(joined.parent):
        return joined
    order = np.lexsort((joined.low, joined.code, joined.parent))
    parent, code, low, high, count = (one[order] for one in joined)
    is_new = np.ones(len(parent), dtype=bool)
    is_new[1:] = (parent[1:] != parent[:-1]) | (code[1:] != code[:-1])
    is_last = np.append(is_new[1:], True)
    counts = np.add.reduceat(count, np.flatnonzero(is_new))
    return ShardChildren(parent[is_new], code[is_new], low[is_new], high[is_last], counts)


class _Search(BeamSearch):
    """Beam search for one batch of queries over the shards of a router, whose rows are those of one table."""

    def __init__(self, router: Router, config: SearchConfig, routed: Sequence[RoutedQuery]) -> None:
        widths = np.array([one.width for one in routed], dtype=np.int64)
        super().__init__(router.decoder, [], config, [one.level0 for one in routed], None, widths)
        self.sizes = [len(router)]
        self._router = router
        self._filters = list(dict.fromkeys(one.allowed for one in routed if one.allowed is not None))
        numbers = {one: number for number, one in enumerate(self._filters)}
        self._chosen = np.array([-1 if one.allowed is None else numbers[one.allowed] for one in routed])
        self.is_restricted = bool(self._filters)
        self._keys = self._counts = np.zeros(0, dtype=np.int64)

    def find_children(self, frontier: Frontier, level: int) -> Children:
        low, high = (bound[:, 0] for bound in frontier.ranges())
        chosen = self._chosen[frontier.queries.repeat(frontier.width)]
        found = self._router.children(level, low, high, self._filters, chosen)
        keys, first = np.unique(self._key(chosen[found.parent], found.low), return_index=True)
        self._keys, self._counts = keys, found.num_allowed[first]
        return Children(found.parent, found.code, found.low[:, None], found.high[:, None])

    def count(
        self,
        low: Int64[np.ndarray, "prefixes parts"],
        high: Int64[np.ndarray, "prefixes parts"],
        query: Int64[np.ndarray, " prefixes"],
    ) -> Int64[np.ndarray, " prefixes"]:
        counts: np.ndarray = (high - low).sum(axis=1)
        restricted: Bool[np.ndarray, " prefixes"] = (self._chosen[query] >= 0) & (counts > 0)
        if restricted.any():  # only the children that were found last are counted
            keys = self._key(self._chosen[query[restricted]], low[restricted, 0])
            counts[restricted] = self._counts[np.searchsorted(self._keys, keys)]
        return counts

    def _key(self, chosen: np.ndarray, low: np.ndarray) -> Int64[np.ndarray, " prefixes"]:
        """Return a number for each filter and first row; prefixes of one length differ in it."""
        return np.asarray((chosen + 1) * (len(self._router) + 1) + low)
