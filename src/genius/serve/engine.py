"""What runs behind the service: opened indexes, searched in batches, and changed one writer at a time.

Searches of all indexes share one queue, and each batch of them one pass through encoder and decoder. Every
index has a writer: adds that come together become one change of the index, which readers see whole or not at
all, and once that has piled up enough deleted items it is compacted, while searches go on in what was there
before. An add is acknowledged when it is on the disk and the next search finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import torch

from genius.answers import Found, SearchHit, SearchRequest, embed_requests, find
from genius.config import SearchConfig
from genius.errors import GeniusError
from genius.index import Index, NewItem, Outcome
from genius.search.damage import naming_damage
from genius.search.live import Deleted
from genius.serve.batching import Batcher, BatchLimits, Done
from genius.serve.metrics import Metrics
from genius.serve.writing import IndexWriter

__all__ = ["Answered", "Engine", "EngineSettings", "Took"]

Result = TypeVar("Result")

READERS: Final = 2
"""Look-ups at the same time: a slow one holds up no picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How much the service takes on at once."""

    max_batch: int = 32
    """Searches that are answered together."""

    batch_wait_ms: float = 2.0
    """The first search of a batch waits this long for others."""

    max_queue: int = 256
    """Searches that may wait; beyond that clients are told when to come back."""

    workers: int = 1
    """Batches of searches that are answered at the same time."""

    torch_threads: int = 1
    """Threads that share one tensor operation."""

    max_reads: int = 64
    """Look-ups of items, codes and explanations that may wait."""

    max_written: int = 1024
    """Items that are written in one change of an index."""

    max_unwritten: int = 8192
    """Items that may wait to be written."""

    write_wait_ms: float = 20.0
    """The first add of a change waits this long for others."""

    drain_seconds: float = 30.0
    """On shutdown what waits has this long to be answered."""


class Took(NamedTuple):
    """Where the time of a search went."""

    queue_ms: float
    encode_ms: float
    """Of its batch."""
    search_ms: float
    """Of its batch."""
    total_ms: float


class Answered(NamedTuple):
    """Hits of a search, best first, and what they cost."""

    hits: list[SearchHit]
    took: Took


class _Kind(NamedTuple):
    """Searches that can be answered together."""

    name: str
    config: SearchConfig


class _Together(NamedTuple):
    """What one search found, and the time its batch took."""

    found: Found
    encode_seconds: float
    search_seconds: float


class _Look(NamedTuple):
    """A look-up in an index."""

    name: str
    work: Callable[[Index], Any]


class Engine:
    """Opened indexes, ready to be searched and changed by many at once; lives on one event loop.

    >>> engine = Engine({"photos": Index.open("photos.index")})  # doctest: +SKIP
    >>> await engine.start()  # doctest: +SKIP
    >>> answered = await engine.search("photos", SearchRequest(text="a kite"), config)  # doctest: +SKIP

    Parameters
    ----------
    indexes
        by name; used for reading. Writers open their own.
    """

    def __init__(
        self,
        indexes: Mapping[str, Index],
        settings: EngineSettings = EngineSettings(),
        metrics: Metrics | None = None,
    ) -> None:
        self.indexes = dict(indexes)
        self.settings = settings
        self.metrics = Metrics() if metrics is None else metrics
        self.is_ready = False
        """Whether every index has answered its first search."""
        self._searches: Batcher[_Kind, SearchRequest, _Together] = Batcher(
            self._search_together,
            BatchLimits(
                most=settings.max_batch,
                wait_ms=settings.batch_wait_ms,
                queue=settings.max_queue,
                workers=settings.workers,
            ),
        )
        self._reads: Batcher[None, _Look, Any] = Batcher(
            self._look_up, BatchLimits(most=1, wait_ms=0.0, queue=settings.max_reads, workers=READERS)
        )
        limits = BatchLimits(
            most=settings.max_written, wait_ms=settings.write_wait_ms, queue=settings.max_unwritten
        )
        self._writers = {
            name: IndexWriter(name, Index(index.folder, index.model), limits, self.metrics)
            for name, index in self.indexes.items()
        }
        self._parts: list[Batcher[Any, Any, Any] | IndexWriter] = [
            self._searches,
            self._reads,
            *self._writers.values(),
        ]
        self.metrics.watch_queue("search", self._searches.__len__)
        self.metrics.watch_queue("read", self._reads.__len__)
        self.metrics.watch_queue("write", lambda: sum(len(writer) for writer in self._writers.values()))

    async def start(self) -> None:
        """Begin to answer; returns when every index has answered once, so that no client waits for that."""
        torch.set_num_threads(self.settings.torch_threads)
        for part in self._parts:
            part.start()
        for name, index in self.indexes.items():
            with contextlib.suppress(GeniusError):  # one that cannot read words has to do without
                await self._searches.ask(
                    _Kind(name, index.settings), SearchRequest(text="a first search", k=1)
                )
        self.is_ready = True

    async def stop(self) -> None:
        """Answer what waits, for a while, and take nothing new: :class:`genius.serve.refused.Draining`."""
        self.is_ready = False
        seconds = self.settings.drain_seconds
        await asyncio.gather(*(part.stop(seconds) for part in self._parts))

    async def search(
        self, name: str, request: SearchRequest, config: SearchConfig, *, deadline: float | None = None
    ) -> Answered:
        """The answer to a search, in a batch with others.

        Parameters
        ----------
        deadline
            when the answer is of no use any more, on the clock of :func:`time.monotonic`.

        Raises
        ------
        Refused
            too many wait, the deadline has passed, or the service is shutting down.
        """
        began = time.monotonic()
        with self._counting_errors():
            done = await self._searches.ask(_Kind(name, config), request, deadline=deadline)
        return self._answered(done, request, config, time.monotonic() - began)

    async def read(self, name: str, work: Callable[[Index], Result]) -> Result:
        """What some work with an index gives that is no search; in a thread of its own."""
        with self._counting_errors():
            done: Done[Result] = await self._reads.ask(None, _Look(name, work))
        return done.answer

    async def add(self, name: str, items: Sequence[NewItem]) -> list[Outcome]:
        """Add items; when this returns they are on the disk and the next search finds them.

        Whoever adds at the same time shares one change of the index.
        """
        with self._counting_errors():
            return await self._writers[name].add(items)

    async def delete(self, name: str, item_ids: Sequence[str]) -> Deleted:
        """Delete items; when this returns no search finds them."""
        with self._counting_errors():
            return await self._writers[name].delete(item_ids)

    def _search_together(self, kind: _Kind, requests: Sequence[SearchRequest]) -> list[_Together]:
        index = self.indexes[kind.name]
        with naming_damage(index.folder):
            began = time.perf_counter()
            opened = index.opened
            asked = embed_requests(index.model, opened, requests, kind.config)
            encoded = time.perf_counter()
            found = find(index.model, opened, asked, kind.config)
            searched = time.perf_counter()
        self.metrics.batch(len(requests))
        return [_Together(one, encoded - began, searched - encoded) for one in found]

    def _look_up(self, _: None, looks: Sequence[_Look]) -> list[Any]:
        return [look.work(self.indexes[look.name]) for look in looks]

    def _answered(
        self, done: Done[_Together], request: SearchRequest, config: SearchConfig, seconds: float
    ) -> Answered:
        together = done.answer
        self.metrics.search(
            queue_seconds=done.queue_seconds,
            encode_seconds=together.encode_seconds,
            search_seconds=together.search_seconds,
        )
        beam = max(request.beam or config.beam, request.k)
        self.metrics.found(beam=beam, leaves=together.found.touched)
        stages = (done.queue_seconds, together.encode_seconds, together.search_seconds, seconds)
        return Answered(together.found.hits, Took(*(1000 * stage for stage in stages)))

    @contextlib.contextmanager
    def _counting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.metrics.failed(type(error).__name__)
            raise
