"""A shard, where its files are: the children of prefixes, and the ranking of items under beams."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int64, Integer

from genius_search.config import SearchConfig
from genius_search.errors import UsageError
from genius_search.index.filters import Filter
from genius_search.index.snapshot import MAX_FILTERS, Snapshot
from genius_search.model import Genius
from genius_search.nn.arrays import AnyArray, as_floats
from genius_search.search.beams import Beams
from genius_search.search.rank import CodeRanker, Evidence, by_embeddings, rank_items
from genius_search.search.table import Allowed


class Top(NamedTuple):
    """The prefixes of one length in a shard."""

    num_rows: int
    """Number of IDs in the shard."""
    first: Int64[np.ndarray, " prefixes"]
    """First row of each prefix, ascending."""
    codes: Integer[np.ndarray, "prefixes depth"]
    has_deleted: bool


class ShardChildren(NamedTuple):
    """Children of prefixes in a shard, with the number of allowed IDs under each."""

    parent: Int64[np.ndarray, " children"]
    code: Int64[np.ndarray, " children"]
    low: Int64[np.ndarray, " children"]
    high: Int64[np.ndarray, " children"]
    num_allowed: Int64[np.ndarray, " children"]


class RankRequest(NamedTuple):
    """The beams of one query that lie in a shard."""

    low: Int64[np.ndarray, " beams"]
    high: Int64[np.ndarray, " beams"]
    log_probabilities: Float32[np.ndarray, "beams levels"]
    embedding: Float32[np.ndarray, " dim"]
    """The query in the space of the codes."""
    evidence: Float32[np.ndarray, " dim"]
    """The query in the space of the stored embeddings."""
    k: int
    allowed: Filter | None
    """None allows every item, :class:`Filter` without conditions every one that is not deleted."""


class ShardRanking(NamedTuple):
    """The best items of one query in a shard, best first; with a shortlist, that of the shard."""

    scores: Float32[np.ndarray, " hits"]
    listed_by: Float32[np.ndarray, " hits"]
    """Scores that a shortlist is made by; without one, those of the ranking."""
    beams: Int64[np.ndarray, " hits"]
    """Position of each item's beam among those of the request."""
    items: Int64[np.ndarray, " hits"]
    rows: Int64[np.ndarray, " hits"]
    touched: int


class LookupRanker(CodeRanker):
    """Scores IDs by look-ups, however few, so that a score does not depend on which others are scored."""

    def scores(
        self,
        query: AnyArray,
        ids: Integer[np.ndarray, "ids columns"],
        *,
        density_weight: float = 0.0,
    ) -> Float32[np.ndarray, " ids"]:
        """Score IDs by their distance to a query; see :meth:`CodeRanker.scores`."""
        products = self._vectors @ as_floats(query)
        found: np.ndarray = products[self._places(ids)].sum(axis=1)
        return np.asarray(found - self.costs(ids, density_weight=density_weight))


class Shard:
    """A shard of at most one segment.

    Parameters
    ----------
    ranker
        scores IDs by the code vectors; a :class:`LookupRanker`, so that all shards score alike.
    """

    def __init__(self, snapshot: Snapshot, ranker: CodeRanker) -> None:
        if len(snapshot.segments) > 1:
            raise UsageError(f"{snapshot.folder} has several segments; `genius index compact` merges them")
        self._snapshot = snapshot
        self._ranker = ranker
        self._parts = list(snapshot.parts)
        self._allowed: dict[Filter, Allowed] = {}

    @staticmethod
    def open(folder: Path, model: Genius) -> Shard:
        """Open a shard of a cluster."""
        tables = model.ids.scheme.tables()
        return Shard(Snapshot.open(folder), model.ranker if tables is None else LookupRanker(tables))

    def top(self, depth: int) -> Top:
        """Return the prefixes of ``depth`` codes."""
        if not self._parts:
            nothing = np.zeros((0, depth), dtype=np.int16)
            return Top(0, nothing[:, 0].astype(np.int64), nothing, has_deleted=False)
        table = self._parts[0].table
        first = np.sort(np.concatenate([[0], table.starts[: table.level_bounds[depth]]])).astype(np.int64)
        codes = np.asarray(table.ids[first, :depth])
        return Top(len(table), first, codes, has_deleted=self._parts[0].alive is not None)

    def children(
        self,
        level: int,
        low: Int64[np.ndarray, " prefixes"],
        high: Int64[np.ndarray, " prefixes"],
        filters: Sequence[Filter],
        chosen: Int64[np.ndarray, " prefixes"],
    ) -> ShardChildren:
        """Return the children of prefixes; ``chosen`` is the filter of each, −1 if it has none."""
        children = self._parts[0].table.children(level, low, high)
        count = children.high - children.low
        owner = chosen[children.parent]
        for number in np.unique(owner[owner >= 0]).tolist():
            own = owner == number
            allowed = self._restrict(filters[number])
            if allowed is not None:
                count[own] = allowed.ids.count(children.low[own], children.high[own])
        return ShardChildren(*children, count)

    def rank(self, requests: Sequence[RankRequest], config: SearchConfig) -> list[ShardRanking]:
        """Rank the items under the beams of several queries."""
        return [self._rank(request, config) for request in requests]

    def _rank(self, request: RankRequest, config: SearchConfig) -> ShardRanking:
        snapshot = self._snapshot
        evidence = Evidence(
            self._ranker, snapshot.vectors, snapshot.manifest.embeddings == "raw", snapshot.densities
        )
        allowed = None if request.allowed is None else (self._restrict(request.allowed),)
        beams = Beams(
            request.low[None, :, None], request.high[None, :, None], request.log_probabilities[None]
        )
        is_listed = config.rerank == "embeddings" and config.shortlist > 0
        first = dataclasses.replace(config, rerank="codes", shortlist=0) if is_listed else config
        found = rank_items(
            self._parts,
            beams,
            0,
            request.evidence if config.rerank == "embeddings" and not is_listed else request.embedding,
            config=first,
            evidence=evidence,
            k=max(request.k, config.shortlist) if is_listed else request.k,
            restriction=allowed,
        )
        scores = found.scores
        if is_listed:
            scores = by_embeddings(self._parts, found, request.evidence, evidence, config)
        return ShardRanking(scores, found.scores, found.beams, found.items, found.rows, found.touched)

    def _restrict(self, wanted: Filter) -> Allowed | None:
        """Return the items that a filter allows, and that are not deleted."""
        if wanted == Filter():
            return self._parts[0].alive
        if wanted not in self._allowed:
            segment = self._snapshot.segments[0]
            mask = np.zeros(segment.table.num_items, dtype=bool)
            mask[segment.items.matching(wanted)] = True
            mask[segment.dead] = False
            if len(self._allowed) >= MAX_FILTERS:
                self._allowed.pop(next(iter(self._allowed)))
            self._allowed[wanted] = Allowed.of(segment.table, mask)
        return self._allowed[wanted]
