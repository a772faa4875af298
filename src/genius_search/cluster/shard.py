"""A shard, where its files are: the children of prefixes, and the ranking of items under beams."""

from __future__ import annotations

import dataclasses
import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64, Integer

from genius_search.cluster.folder import SHARDS, read_cluster, shard_manifest
from genius_search.config import SearchConfig
from genius_search.errors import ArtifactError, SnapshotGone
from genius_search.index.filters import Filter
from genius_search.index.snapshot import Snapshot
from genius_search.model.genius import open_ranker
from genius_search.nn.arrays import AnyArray, as_floats
from genius_search.search.beams import Beams
from genius_search.search.rank import CodeRanker, Evidence, Ranking, by_embeddings, rank_items
from genius_search.search.table import Restriction, children_in_segments, count_ids

KEPT_STATES: Final = 4
"""States of a shard that are kept open."""
ATTEMPTS: Final = 8
"""How often a state is looked for that is not there yet."""
PAUSE_SECONDS: Final = 0.05


class Top(NamedTuple):
    """The prefixes of one length in a segment."""

    num_rows: int
    """Number of IDs in the segment."""
    first: Int64[np.ndarray, " prefixes"]
    """First row of each prefix, ascending."""
    codes: Integer[np.ndarray, "prefixes depth"]
    alive: Int64[np.ndarray, " bounds"] | None
    """Number of IDs with items before each prefix, and in all; None if no item is deleted."""


class ShardChildren(NamedTuple):
    """Children of prefixes in a shard, with the number of allowed IDs under each."""

    parent: Int64[np.ndarray, " children"]
    code: Int64[np.ndarray, " children"]
    low: Int64[np.ndarray, "children segments"]
    high: Int64[np.ndarray, "children segments"]
    num_allowed: Int64[np.ndarray, " children"]


class RankRequest(NamedTuple):
    """The beams of one query that lie in a shard."""

    beams: Beams
    embedding: Float32[np.ndarray, " dim"]
    """The query in the space of the codes."""
    evidence: Float32[np.ndarray, " dim"]
    """The query in the space of the stored embeddings."""
    k: int
    allowed: Filter | None
    """None allows every item, :class:`Filter` without conditions every one that is not deleted."""


class ShardRanking(NamedTuple):
    """The best items of one query in a shard, best first; with a shortlist, that of the shard."""

    listed: Ranking
    """With the scores that a shortlist is made by, and positions of beams among those of the request."""
    scores: Float32[np.ndarray, " hits"]
    """Scores by stored embeddings; without a shortlist, those of ``listed``."""


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
        scores = self._look_up(as_floats(query), ids)
        scores -= self.costs(ids, density_weight=density_weight)
        return scores


def shard_ranker(ranker: CodeRanker) -> CodeRanker:
    """Return what scores IDs in shards, where a model's ranker scores them in one index."""
    return LookupRanker(ranker.tables()) if type(ranker) is CodeRanker else ranker


class Shard:
    """A state of a shard.

    Parameters
    ----------
    ranker
        scores IDs by the code vectors; a :class:`LookupRanker`, so that all shards score alike.
    """

    def __init__(self, snapshot: Snapshot, ranker: CodeRanker) -> None:
        self._snapshot = snapshot
        self._ranker = ranker
        self._segments = list(snapshot.search_segments)

    def top(self, depth: int) -> list[Top]:
        """Return the prefixes of ``depth`` codes in each segment."""
        tops = []
        for table, alive in self._segments:
            first = np.sort(np.concatenate([[0], table.starts[: table.level_bounds[depth]]])).astype(np.int64)
            bounds = np.append(first, len(table))
            counts = None if alive is None else alive.ids.count(np.zeros_like(bounds), bounds)
            tops.append(Top(len(table), first, np.asarray(table.ids[first, :depth]), counts))
        return tops

    def children(
        self,
        level: int,
        low: Int64[np.ndarray, "prefixes segments"],
        high: Int64[np.ndarray, "prefixes segments"],
        filters: Sequence[Filter],
        chosen: Int64[np.ndarray, " prefixes"],
    ) -> ShardChildren:
        """Return the children of prefixes; ``chosen`` is the filter of each, −1 if it has none."""
        children = children_in_segments(self._segments, level, low, high)
        restrictions = [self._restrict(one) for one in filters]
        counts = count_ids(children.low, children.high, [*restrictions, None], chosen[children.parent])
        return ShardChildren(*children, counts)

    def rank(self, requests: Sequence[RankRequest], config: SearchConfig) -> list[ShardRanking]:
        """Rank the items under the beams of several queries."""
        return [self._rank(request, config) for request in requests]

    def _rank(self, request: RankRequest, config: SearchConfig) -> ShardRanking:
        snapshot = self._snapshot
        evidence = Evidence(
            self._ranker,
            snapshot.vectors(self._ranker),
            snapshot.manifest.embeddings == "raw",
            snapshot.densities,
        )
        allowed = None if request.allowed is None else self._restrict(request.allowed)
        is_listed = config.rerank == "embeddings" and config.shortlist > 0
        first = dataclasses.replace(config, rerank="codes", shortlist=0) if is_listed else config
        found = rank_items(
            self._segments,
            request.beams,
            0,
            request.evidence if config.rerank == "embeddings" and not is_listed else request.embedding,
            config=first,
            evidence=evidence,
            k=max(request.k, config.shortlist) if is_listed else request.k,
            restriction=allowed,
        )
        scores = found.scores
        if is_listed:
            scores = by_embeddings(self._segments, found, request.evidence, evidence, config)
        return ShardRanking(found, scores)

    def _restrict(self, wanted: Filter) -> Restriction:
        """Return the items that a filter allows, and that are not deleted."""
        if wanted == Filter():
            return tuple(segment.alive for segment in self._segments)
        return self._snapshot.restriction(wanted, is_checked=True)


class ShardStates:
    """The last states of a shard that were asked for.

    Parameters
    ----------
    cluster
        folder of the cluster.
    ranker
        returns what :func:`shard_ranker` does.
    """

    def __init__(self, cluster: Path, name: str, ranker: Callable[[], CodeRanker]) -> None:
        self._cluster = cluster
        self._name = name
        self._ranker = ranker
        self._states: dict[int, Shard] = {}

    def call(self, method: str, generation: int, arguments: Sequence[Any]) -> Any:
        """Call a method of a state.

        Raises
        ------
        SnapshotGone
            The state is not open here, and its files are not there any more.
        """
        if generation not in self._states:
            self._states[generation] = Shard(self._open(generation), self._ranker())
            for old in sorted(self._states)[:-KEPT_STATES]:
                del self._states[old]
        return getattr(self._states[generation], method)(*arguments)

    def _open(self, generation: int) -> Snapshot:
        for attempt in range(ATTEMPTS):
            entry = next((one for one in read_cluster(self._cluster).shards if one.name == self._name), None)
            if entry is None or entry.generation > generation:
                raise SnapshotGone(f"shard {self._name} is not in its generation {generation} any more")
            if entry.generation == generation:
                try:
                    place = self._cluster / SHARDS / self._name
                    return Snapshot.load(place, shard_manifest(self._cluster, entry))
                except (ArtifactError, OSError, sqlite3.Error):
                    if attempt == ATTEMPTS - 1:
                        raise
            time.sleep(PAUSE_SECONDS * attempt)  # a shared folder may show a change late
        raise SnapshotGone(f"shard {self._name} is not in its generation {generation} yet")


class ShardCopy(ShardStates):
    """A shard in a process of its own, which needs neither the model's encoder nor its generator.

    It opens files when it is called, because Ray does not start a process again whose constructor fails.
    """

    def __init__(self, cluster: Path, name: str, model: Path) -> None:
        super().__init__(cluster, name, cache(lambda: shard_ranker(open_ranker(model))))
