"""A cluster whose shards are searched elsewhere, and whose texts and pictures are read from its folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from genius_search.cluster.folder import Cluster, read_cluster
from genius_search.cluster.router import RemoteShard, RoutedQuery, Router
from genius_search.config import SearchConfig
from genius_search.index.filters import Filter
from genius_search.index.snapshot import Snapshot
from genius_search.model import Genius
from genius_search.search.fast import Found, Wanted
from genius_search.search.table import Restriction


class Conditions(tuple[None, ...]):  # noqa: SLOT001  a tuple of any length has no slots
    """A filter on its way to the shards, which look up what it allows."""

    wanted: Filter


class RoutedSnapshot(Snapshot):
    """A state of a cluster that is searched by a router."""

    def __init__(self, opened: Snapshot, router: Router) -> None:
        super().__init__(opened.manifest, opened.segments)
        self.search = self._search
        self._router = router

    def restriction(self, wanted: Filter, *, deadline: float = math.inf) -> Restriction:  # noqa: ARG002
        """Return conditions that the shards look up; raises :class:`UsageError` for an unknown field."""
        self.check_fields(wanted)
        conditions = Conditions(None for _ in self.segments)
        conditions.wanted = wanted
        return conditions

    def _search(
        self,
        queries: Float32[np.ndarray, "queries dim"],
        evidence: Sequence[np.ndarray],
        wanted: Sequence[Wanted],
        config: SearchConfig,
    ) -> list[Found]:
        routed = [
            RoutedQuery(one.width, one.k, one.level0, getattr(one.restriction, "wanted", None))
            for one in wanted
        ]
        return self._router.find(queries, np.stack(evidence), routed, config)


class RoutedCluster(Cluster):
    """A cluster whose shards with items are searched by ``shards``, in the order of their IDs."""

    def __init__(self, folder: Path, model: Genius, shards: Sequence[RemoteShard]) -> None:
        self._router = Router(model.decoder, shards)
        super().__init__(folder, model)

    def _stamp(self) -> tuple[int, ...]:
        return ()  # the shards keep the state that they opened

    def _read(self) -> Snapshot:
        return RoutedSnapshot(super()._read(), self._router)


def filled_shards(folder: Path) -> list[str]:
    """Return the names of the shards with items, in the order of their IDs."""
    return [shard.name for shard in read_cluster(folder).shards if shard.items]
