"""A cluster whose shards are searched elsewhere, and whose texts and pictures are read from its folder."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from genius_search.cluster.folder import Cluster, open_state, read_cluster
from genius_search.cluster.router import DEPTH, Answer, RemoteShard, RoutedQuery, Router
from genius_search.cluster.shard import Top
from genius_search.config import SearchConfig
from genius_search.errors import SnapshotGone
from genius_search.index.filters import Filter
from genius_search.index.snapshot import Snapshot
from genius_search.model import Genius
from genius_search.search.decoder import Decoder
from genius_search.search.rank import Found, Wanted
from genius_search.search.table import Restriction

log = logging.getLogger(__name__)


class ShardHealth:
    """Counts what the copies of a shard answer, and keeps which of them answered last."""

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self.calls = 0
        """Calls that were answered."""
        self.failures = 0
        """Calls that a copy did not answer."""
        self._silent: set[int] = set()

    @property
    def answering(self) -> int:
        """Number of copies whose last call was answered, or that were not called yet."""
        return self.copies - len(self._silent)

    def answered(self, copy: int) -> None:
        """Count an answer of a copy."""
        self.calls += 1
        self._silent.discard(copy)

    def failed(self, copy: int) -> None:
        """Count a call that a copy did not answer."""
        self.failures += 1
        self._silent.add(copy)


@runtime_checkable
class PlacedShard(RemoteShard, Protocol):
    """A shard that is served elsewhere; its methods take a generation before their arguments."""

    health: ShardHealth


PlaceShard = Callable[[str], PlacedShard]
"""Begins to serve a shard, by name."""


class Conditions(tuple[None, ...]):  # noqa: SLOT001  a tuple of any length has no slots
    """A filter on its way to the shards, which look up what it allows."""

    wanted: Filter


class AtGeneration(NamedTuple):
    """A shard that is asked about one of its states."""

    shard: RemoteShard
    generation: int

    def submit(self, method: str, *arguments: Any) -> Answer:
        """Begin to call a method."""
        return self.shard.submit(method, self.generation, *arguments)


class RoutedSnapshot(Snapshot):
    """A state of a cluster that is searched by a router."""

    def __init__(
        self, opened: Snapshot, router: Router, decoder_for: Callable[[SearchConfig], Decoder]
    ) -> None:
        super().__init__(opened.manifest, opened.segments)
        self.search = self._search
        self._router = router
        self._decoder_for = decoder_for

    def restriction(
        self,
        wanted: Filter,
        *,
        deadline: float = math.inf,  # noqa: ARG002  the shards look up
        is_checked: bool = False,
    ) -> Restriction:
        """Return conditions that the shards look up; raises :class:`UsageError` for an unknown field."""
        if not is_checked:
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
        return self._router.find(self._decoder_for(config), queries, np.stack(evidence), routed, config)


class RoutedCluster(Cluster):
    """A cluster whose shards are searched elsewhere.

    After items were added or deleted, the next search is in the new state. If the cluster was cut into other
    shards, searches are in the state before while these are placed.
    """

    def __init__(self, folder: Path, model: Genius, place: PlaceShard) -> None:
        self._place = place
        self._decoder_for = model.decoder_for
        self._depth = min(DEPTH, model.num_levels)
        self.shards: dict[str, PlacedShard] = {
            shard.name: place(shard.name) for shard in read_cluster(folder).shards
        }
        self._tops: dict[tuple[str, int], list[Top]] = {}
        self._placing: threading.Thread | None = None
        super().__init__(folder, model)

    def health(self) -> dict[str, ShardHealth]:
        """Return the health of each shard that is searched."""
        return {name: shard.health for name, shard in self.shards.items()}

    def current(self) -> tuple[Genius, Snapshot]:
        """Return the model and the current state; see :meth:`Index.current`."""
        opened = self._opened
        if self._stamp() != opened.stamp and (missing := self._not_placed()):
            with self._opening:
                if self._placing is None or not self._placing.is_alive():
                    self._placing = threading.Thread(target=self._place_all, args=(missing,), daemon=True)
                    self._placing.start()
            return opened.model, opened.snapshot
        return super().current()

    def _not_placed(self) -> list[str]:
        return [shard.name for shard in read_cluster(self.folder).shards if shard.name not in self.shards]

    def _place_all(self, names: Sequence[str]) -> None:
        try:
            placed = {name: self._place(name) for name in names}
            for shard in read_cluster(self.folder).shards:
                if shard.name in placed:
                    AtGeneration(placed[shard.name], shard.generation).submit("top", 1).result()
            self.shards |= placed
        except Exception:  # a thread: the next search tries again
            log.exception("the new shards of %s could not be placed", self.folder)

    def _read(self) -> Snapshot:
        while True:
            cluster, opened = open_state(self.folder)
            shards = [AtGeneration(self.shards[one.name], one.generation) for one in cluster.shards]
            keys = [(shard.name, shard.generation) for shard in cluster.shards]
            asked = {
                key: shard.submit("top", self._depth)
                for key, shard in zip(keys, shards, strict=True)
                if key not in self._tops
            }
            try:
                known = self._tops | {key: answer.result() for key, answer in asked.items()}
            except SnapshotGone:  # changed meanwhile
                continue
            self._tops = {key: known[key] for key in keys}
            self.shards = {one.name: self.shards[one.name] for one in cluster.shards}
            router = Router(shards, list(self._tops.values()), depth=self._depth)
            return RoutedSnapshot(opened, router, self._decoder_for)
