"""Searching shards wherever they are: one decode here, the children of deep prefixes and the ranking there.

The router has the first levels of all IDs. A batch of queries is decoded once; at deeper levels, and at all
levels for queries with conditions, each shard that holds prefixes is asked for their children, and at the end
each shard that holds beams ranks the items under them. So a query costs one call to a shard for each deep
level, and one for the ranking, and finds what one index of all items finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32, Int64

from genius_search.cluster.shard import RankRequest, ShardChildren, ShardRanking, Top
from genius_search.config import SearchConfig
from genius_search.index.filters import Filter
from genius_search.search.beam import BeamSearch, Frontier
from genius_search.search.beams import Beams, topk
from genius_search.search.decoder import Decoder
from genius_search.search.rank import Found, Ranking
from genius_search.search.table import Children, IdTable

DEPTH: Final = 4
"""Levels of the IDs that a router has."""
NOWHERE: Final = int(np.iinfo(np.int64).max)


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
    low: Int64[np.ndarray, "here segments"]
    """First row in each segment of the shard."""
    high: Int64[np.ndarray, "here segments"]


class Router:
    """Searches shards as one index.

    The first segments of all shards, one after the other, are one table that is divided among the shards; the
    second segments are another, and so on. A prefix is a range of rows in each of these tables.

    Parameters
    ----------
    shards
        in the order of their IDs.
    tops
        what the shards answer to ``top(depth)``.
    depth
        levels of the IDs that are held here, at most as many as there are.
    """

    def __init__(
        self, shards: Sequence[RemoteShard], tops: Sequence[Sequence[Top]], *, depth: int = DEPTH
    ) -> None:
        self.shards = shards
        self.depth = depth
        self.has_deleted = any(top.alive is not None for own in tops for top in own)
        self._num_segments = [len(own) for own in tops]
        self._segments_before = np.cumsum([0, *self._num_segments])
        tables = [
            [own[number] if number < len(own) else None for own in tops]
            for number in range(max(self._num_segments, default=0))
        ]
        self._offsets = np.array(
            [np.cumsum([0, *(0 if top is None else top.num_rows for top in own)]) for own in tables],
            dtype=np.int64,
        ).reshape(len(tables), len(shards) + 1)
        codes = [np.zeros((0, self.depth), dtype=np.int16)]
        codes += [top.codes.astype(np.int16) for own in tables for top in own if top is not None]
        # Building a table joins equal prefixes of several segments.
        self._top = IdTable.build(np.concatenate(codes), np.zeros(sum(map(len, codes))))
        rows = np.split(self._top.rows(), np.cumsum([len(one) for one in codes[1:]])[:-1])
        self._first = np.zeros((len(self._top) + 1, len(tables)), dtype=np.int64)
        self._alive = np.zeros(len(self._top) + 1, dtype=np.int64)
        place = 0
        for number, own in enumerate(tables):
            filled = [top for top in own if top is not None]
            starts = [
                start for start, top in zip(self._offsets[number], own, strict=False) if top is not None
            ]
            own_rows = np.concatenate(rows[place : place + len(filled)])
            place += len(filled)
            first = np.concatenate([top.first + start for top, start in zip(filled, starts, strict=True)])
            alive = [np.append(top.first, top.num_rows) if top.alive is None else top.alive for top in filled]
            before = np.cumsum([0, *(one[-1] for one in alive)])
            counts = np.concatenate([one[:-1] + start for one, start in zip(alive, before, strict=False)])
            at = own_rows.searchsorted(np.arange(len(self._top) + 1))
            self._first[:, number] = np.append(first, self._offsets[number, -1])[at]
            self._alive += np.append(counts, before[-1])[at]

    def __len__(self) -> int:
        """Return the number of IDs; one in several segments counts in each."""
        return int(self._offsets[:, -1].sum())

    @property
    def nbytes(self) -> int:
        """Size of the first levels in bytes."""
        return self._top.nbytes + int(self._first.nbytes + self._alive.nbytes)

    @property
    def sizes(self) -> list[int]:
        """Lengths of the columns of a range: number of IDs, prefixes held here, rows of each table."""
        return [len(self), len(self._top), *self._offsets[:, -1].tolist()]

    @torch.inference_mode()
    def find(
        self,
        decoder: Decoder,
        queries: Float32[np.ndarray, "queries dim"],
        evidence: Float32[np.ndarray, "queries dim"],
        routed: Sequence[RoutedQuery],
        config: SearchConfig,
    ) -> list[Found]:
        """Find the best items for each query of a batch; segments of the rankings are those of all shards.

        Parameters
        ----------
        evidence
            the queries in the space of the stored embeddings.
        """
        if not len(self):
            return [_nothing(len(decoder.sizes)) for _ in routed]
        if self.has_deleted:
            routed = [one._replace(allowed=one.allowed or Filter()) for one in routed]
        beams = _Search(self, decoder, config, routed).run(torch.from_numpy(queries))
        requests: list[list[RankRequest]] = [[] for _ in self.shards]
        places: list[list[tuple[int, np.ndarray]]] = [[] for _ in self.shards]
        for number, one in enumerate(routed):
            for own in self.split(beams.low[number, :, 2:], beams.high[number, :, 2:]):
                own_beams = Beams(
                    own.low[None], own.high[None], beams.log_probabilities[None, number, own.which]
                )
                request = RankRequest(own_beams, queries[number], evidence[number], one.k, one.allowed)
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
                rankings[number].append((shard, which[ranking.listed.beams], ranking))
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
        listed = [
            one.listed._replace(segments=self._segments_before[shard] + one.listed.segments, beams=own)
            for shard, own, one in rankings
        ]
        *columns, touched = zip(*listed, strict=True)
        found = Ranking._make([*map(np.concatenate, columns), sum(touched)])
        scores = np.concatenate([one.scores for _, _, one in rankings])
        shards = np.repeat([shard for shard, _, _ in rankings], [len(one.scores) for _, _, one in rankings])
        place = np.concatenate([np.arange(len(one.scores)) for _, _, one in rankings])
        best = np.lexsort((place, shards, found.beams, -found.scores))
        if config.rerank == "embeddings" and config.shortlist:
            best = best[: max(k, config.shortlist)]
            best = best[topk(scores[best], k)]
        best = best[:k]
        return Found(found.take(best)._replace(scores=scores[best]), history[found.beams[best]])

    def split(
        self, low: Int64[np.ndarray, "ranges tables"], high: Int64[np.ndarray, "ranges tables"]
    ) -> Iterator[Ranges]:
        """Yield, for each shard that holds any of some ranges of rows, those that it holds."""
        for shard, count in enumerate(self._num_segments):
            start, stop = self._offsets[:count, shard], self._offsets[:count, shard + 1]
            own_low, own_high = np.maximum(low[:, :count], start), np.minimum(high[:, :count], stop)
            is_filled = own_high > own_low
            here = np.flatnonzero(is_filled.any(axis=1))
            if len(here):
                own_low, own_high = ((one - start) * is_filled for one in (own_low, own_high))
                yield Ranges(shard, here, own_low[here], own_high[here])

    def children(
        self,
        level: int,
        low: Int64[np.ndarray, "prefixes columns"],
        high: Int64[np.ndarray, "prefixes columns"],
        filters: Sequence[Filter],
        chosen: Int64[np.ndarray, " prefixes"],
    ) -> ShardChildren:
        """Return the children of prefixes with the numbers of allowed IDs; see :meth:`Shard.children`.

        The columns are prefixes held here, and rows of each table.
        """
        is_plain = np.array([*(one == Filter() for one in filters), True])[chosen]  # -1 is the last
        is_here = is_plain & (level < self.depth)
        found = []
        if is_here.any():
            found = [self._children_here(level, low[:, 0], high[:, 0], np.flatnonzero(is_here))]
        there = np.flatnonzero(~is_here)
        calls = []
        for own in self.split(low[there, 1:], high[there, 1:]):
            which = there[own.which]
            call = self.shards[own.shard].submit("children", level, own.low, own.high, filters, chosen[which])
            calls.append((own.shard, which, call))
        for shard, which, call in calls:
            given: ShardChildren = call.result()
            count = self._num_segments[shard]
            ranges = np.zeros((2, len(given.parent), low.shape[1]), dtype=np.int64)
            start = self._offsets[:count, shard]
            ranges[:, :, 1 : count + 1] = (np.stack([given.low, given.high]) + start) * (
                given.high > given.low
            )
            found.append(given._replace(parent=which[given.parent], low=ranges[0], high=ranges[1]))
        if not found:
            nothing = np.zeros(0, dtype=np.int64)
            return ShardChildren(nothing, nothing, low[:0], high[:0], nothing)
        return _join(found) if calls else found[0]

    def _children_here(
        self,
        level: int,
        low: Int64[np.ndarray, " prefixes"],
        high: Int64[np.ndarray, " prefixes"],
        which: Int64[np.ndarray, " here"],
    ) -> ShardChildren:
        parent, code, first, last = self._top.children(level, low[which], high[which])
        own_low, own_high = (
            np.concatenate([one[:, None], self._first[one]], axis=1) for one in (first, last)
        )
        return ShardChildren(which[parent], code, own_low, own_high, self._alive[last] - self._alive[first])


def _nothing(levels: int) -> Found:
    none, scores = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
    return Found(Ranking(none, none, none, scores, none, 0), np.zeros((0, levels), dtype=np.float32))


def _join(found: Sequence[ShardChildren]) -> ShardChildren:
    """Sort children by parent, then code; a child that begins in one shard and ends in the next is one."""
    joined = ShardChildren(*map(np.concatenate, zip(*found, strict=True)))
    if not len(joined.parent):
        return joined
    order = np.lexsort((joined.code, joined.parent))
    parent, code, low, high, count = (one[order] for one in joined)
    is_new = np.ones(len(parent), dtype=bool)
    is_new[1:] = (parent[1:] != parent[:-1]) | (code[1:] != code[:-1])
    groups = np.flatnonzero(is_new)
    low = np.minimum.reduceat(np.where(high > low, low, NOWHERE), groups)
    high = np.maximum.reduceat(high, groups)
    return ShardChildren(
        parent[groups], code[groups], np.minimum(low, high), high, np.add.reduceat(count, groups)
    )


class _Search(BeamSearch):
    """Beam search for one batch of queries over the shards of a router.

    The first column of a range is as wide as the number of allowed IDs in it.
    """

    def __init__(
        self, router: Router, decoder: Decoder, config: SearchConfig, routed: Sequence[RoutedQuery]
    ) -> None:
        widths = np.array([one.width for one in routed], dtype=np.int64)
        super().__init__(decoder, [], config, [one.level0 for one in routed], None, widths)
        self.sizes = router.sizes
        self._router = router
        self._filters = list(dict.fromkeys(one.allowed for one in routed if one.allowed is not None))
        numbers = {one: number for number, one in enumerate(self._filters)}
        self._chosen = np.array([-1 if one.allowed is None else numbers[one.allowed] for one in routed])
        self.is_restricted = bool(self._filters)

    def find_children(self, frontier: Frontier, level: int) -> Children:
        low, high = (bound[:, 1:] for bound in frontier.ranges())
        chosen = self._chosen[frontier.queries.repeat(frontier.width)]
        found = self._router.children(level, low, high, self._filters, chosen)
        count = found.num_allowed[:, None]
        return Children(
            found.parent,
            found.code,
            np.concatenate([np.zeros_like(count), found.low], axis=1),
            np.concatenate([count, found.high], axis=1),
        )

    def count(
        self,
        low: Int64[np.ndarray, "prefixes columns"],
        high: Int64[np.ndarray, "prefixes columns"],
        query: Int64[np.ndarray, " prefixes"],  # noqa: ARG002  children come with their counts
    ) -> Int64[np.ndarray, " prefixes"]:
        return np.asarray(high[:, 0] - low[:, 0])
