"""What runs behind the service: opened indexes, searched in batches, and changed one writer at a time.

Searches of all indexes share one queue, and each batch of them one pass through encoder and decoder. Every
index has a writer: adds that come together become one change of the index, which readers see whole or not at
all, and once that has piled up enough deleted items it is compacted, while searches go on in what was there
before. An add is acknowledged when it is on the disk and the next search finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import torch

from genius_search.config import SearchConfig
from genius_search.errors import ArtifactError, GeniusError
from genius_search.index.adding import ItemOutcome, NewItem
from genius_search.index.index import Index
from genius_search.index.query import SearchHit, SearchRequest, SearchResult, encode_queries, search_encoded
from genius_search.index.writer import Deleted, HeldByAnother
from genius_search.serve.metrics import Metrics
from genius_search.serve.problems import DeadlinePassed, DiskFull, Draining, Overloaded, Refused

__all__ = ["BatchLimits", "Batcher", "Done"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Kind = TypeVar("Kind", bound=Hashable)

LONGEST_RETRY_SECONDS: Final = 60.0
"""Nobody is sent away for longer."""
SHUTTING_DOWN: Final = "the service is shutting down; ask another one, or this one when it is back"
SMOOTHING: Final = 0.2
"""Weight of the last batch in the measured rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """How long requests wait for company, and how many may wait at all."""

    most: int = 32
    """Sizes that are answered together add up to this at most; a larger request is answered alone."""

    wait_ms: float = 2.0
    """The first request of a batch waits this long for others."""

    queue: int = 256
    """Sizes that may wait; what is beyond is refused, unless nothing else waits."""

    workers: int = 1
    """Batches that are answered at the same time, each in a thread of its own."""


@dataclass(frozen=True, slots=True)
class Done(Generic[Answer]):
    """An answer, and how long its request waited for its batch to begin."""

    answer: Answer
    queue_seconds: float


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Kind, Request, Answer]):
    """A request that nobody works on yet."""

    kind: Kind
    request: Request
    size: int
    deadline: float
    since: float
    done: asyncio.Future[Done[Answer]]

    def refuse(self) -> None:
        """Say that there will be no answer."""
        if not self.done.done():
            self.done.set_exception(Draining(SHUTTING_DOWN))


class Batcher(Generic[Kind, Request, Answer]):
    """Collects requests on the event loop and runs them, batch by batch, in threads.

    Requests of one kind are answered together, oldest first; a batch holds one kind. If a batch fails, its
    halves are tried, so that one bad request spoils no other's answer.

    >>> batcher = Batcher(search_together, BatchLimits())  # doctest: +SKIP
    >>> batcher.start()  # doctest: +SKIP
    >>> (await batcher.ask("photos", request, deadline=time.monotonic() + 1)).answer  # doctest: +SKIP

    Parameters
    ----------
    run
        answers requests of one kind, in their order; called in a thread. Where it returns an exception in an
        answer's place, that is raised to whoever asked.
    """

    def __init__(
        self,
        run: Callable[[Kind, Sequence[Request]], Sequence[Answer | Exception]],
        limits: BatchLimits,
    ) -> None:
        self.limits = limits
        self._run = run
        self._waiting: dict[int, _Waiting[Kind, Request, Answer]] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._is_draining = False
        self._workers: list[asyncio.Task[None]] = []
        self._threads = ThreadPoolExecutor(limits.workers, thread_name_prefix="batch")
        self._rate: float | None = None
        self.num_running = 0
        """Batches that are being answered."""

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def start(self) -> None:
        """Begin to answer; inside a running event loop."""
        self._workers = [asyncio.create_task(self._work()) for _ in range(self.limits.workers)]

    async def stop(self, seconds: float | None = None) -> None:
        """Answer what waits and take nothing new; what is not answered after some seconds is refused."""
        self._is_draining = True
        self._changed.set()
        late: set[asyncio.Task[None]] = set()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=seconds)
        for worker in late:
            worker.cancel()
        for waiting in self._waiting.values():
            waiting.refuse()
        self._threads.shutdown(wait=not late, cancel_futures=True)

    async def ask(
        self, kind: Kind, request: Request, *, size: int = 1, deadline: float | None = None
    ) -> Done[Answer]:
        """The answer to a request, in a batch with others of its kind.

        Whoever stops waiting (cancels the task) takes the request out of the queue.

        Parameters
        ----------
        size
            how much of a batch it takes.
        deadline
            when the answer is of no use any more, on the clock of :func:`time.monotonic`.

        Raises
        ------
        Overloaded
            too many wait already; says when to try again, from the rate that was measured.
        DeadlinePassed
            the deadline has come; if no batch had begun with the request, none will.
        Draining
            the service is shutting down.
        """
        if self._is_draining:
            raise Draining(SHUTTING_DOWN)
        if self._waiting and self.waiting_size() + size > self.limits.queue:
            seconds = self.retry_after_seconds()
            raise Overloaded(
                f"{len(self._waiting)} requests wait already, as many as may; try again in {seconds:.0f} s",
                retry_after_seconds=seconds,
            )
        now = time.monotonic()
        deadline = math.inf if deadline is None else deadline
        waiting = _Waiting(kind, request, size, deadline, now, asyncio.get_running_loop().create_future())
        number = next(self._numbers)
        self._waiting[number] = waiting
        self._changed.set()
        try:
            async with asyncio.timeout(None if deadline == math.inf else deadline - now):
                return await waiting.done
        except TimeoutError:
            raise DeadlinePassed(
                f"no answer within the {max(0.0, deadline - now):.3g} s that were allowed; allow more, or "
                "ask when the service is less busy"
            ) from None
        finally:
            self._waiting.pop(number, None)

    def retry_after_seconds(self) -> float:
        """When what waits now will have been answered, in whole seconds."""
        rate = self._rate or math.inf
        return float(min(max(1, math.ceil(self.waiting_size() / rate)), LONGEST_RETRY_SECONDS))

    def waiting_size(self) -> int:
        """How much waits."""
        return sum(waiting.size for waiting in self._waiting.values())

    async def _work(self) -> None:
        """One worker: batch after batch, until there is nothing left when the service drains."""
        while True:
            while not self._waiting:
                if self._is_draining:
                    return
                self._changed.clear()
                await self._changed.wait()
            await self._gather()
            batch = self._take()
            if batch:
                await self._answer(batch)
            else:
                await asyncio.sleep(0)  # those whose deadline has passed go first

    async def _gather(self) -> None:
        """Wait for company, but no longer than the oldest request may."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience()):
                while 0 < len(self._waiting) < self.limits.most and not self._is_draining:
                    self._changed.clear()
                    await self._changed.wait()

    def _patience(self) -> float:
        oldest = next(iter(self._waiting.values()))
        return max(0.0, oldest.since + self.limits.wait_ms / 1000 - time.monotonic())

    def _take(self) -> list[_Waiting[Kind, Request, Answer]]:
        """The oldest request and others of its kind, out of the queue; none whose deadline has passed."""
        now = time.monotonic()
        batch: dict[int, _Waiting[Kind, Request, Answer]] = {}
        size = 0
        for number, waiting in self._waiting.items():
            if waiting.done.done() or waiting.deadline <= now:
                continue  # its own task is about to take it out
            if batch and waiting.kind != next(iter(batch.values())).kind:
                continue
            if batch and size + waiting.size > self.limits.most:
                break
            batch[number] = waiting
            size += waiting.size
        for number in batch:
            del self._waiting[number]
        return list(batch.values())

    async def _answer(self, batch: Sequence[_Waiting[Kind, Request, Answer]]) -> None:
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        requests = [waiting.request for waiting in batch]
        self.num_running += 1
        try:
            answers = await loop.run_in_executor(self._threads, self._each, batch[0].kind, requests)
        except Exception as error:  # noqa: BLE001  no thread to be had: nobody may wait for ever
            answers = [error] * len(batch)
        except asyncio.CancelledError:
            for waiting in batch:
                waiting.refuse()
            raise
        finally:
            self.num_running -= 1
        size = sum(waiting.size for waiting in batch)
        rate = self.limits.workers * size / max(time.monotonic() - began, 1e-6)
        before = rate if self._rate is None else self._rate
        self._rate = before + SMOOTHING * (rate - before)
        for waiting, answer in zip(batch, answers, strict=True):
            if waiting.done.done():
                continue  # whoever asked has gone
            if isinstance(answer, Exception):
                waiting.done.set_exception(answer)
            else:
                waiting.done.set_result(Done(answer, began - waiting.since))

    def _each(self, kind: Kind, requests: Sequence[Request]) -> list[Answer | Exception]:
        """An answer or an error for each request: where together they fail, by halves."""
        try:
            return [answer for _, answer in zip(requests, self._run(kind, requests), strict=True)]
        except Exception as error:  # noqa: BLE001  it is raised to whoever asked
            if len(requests) == 1 or isinstance(error, ArtifactError | OSError):  # no request is at fault
                return [error] * len(requests)
        middle = len(requests) // 2
        return [*self._each(kind, requests[:middle]), *self._each(kind, requests[middle:])]


__all__ = ["IndexWriter"]

MOST_DEAD: Final = 0.2
"""Share of deleted items at which an index is compacted: that writes at most four items for each deleted
one. Segments need no compaction, for adding merges them, and searching eight costs little more than one."""
PATIENCE_SECONDS: Final = 10.0
"""How long to wait while another process changes the index."""
COUNTED_EVERY_SECONDS: Final = 60.0
"""Collisions are counted no more often than this, because every ID is looked at."""
DISK_FULL: Final = "the server's disk is full; nothing was changed, so try again when there is room"

_Job: TypeAlias = Literal["add", "delete", "compact"]

_log = logging.getLogger(__name__)


class IndexWriter:
    """Adds to an index, deletes from it and compacts it, in a thread of its own.

    Parameters
    ----------
    index
        a handle of the writer's own.
    """

    def __init__(self, name: str, index: Index, limits: BatchLimits, metrics: Metrics) -> None:
        self._name = name
        self._index = index
        self._metrics = metrics
        self._changes: Batcher[_Job, Sequence[Any], Any] = Batcher(self._change, limits)
        self._compacting: asyncio.Task[None] | None = None
        self._is_compaction_due = False
        self._counted_at = 0.0

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._changes)

    def start(self) -> None:
        """Begin to write; inside a running event loop."""
        self._tell()
        self._changes.start()

    async def stop(self, seconds: float | None = None) -> None:
        """Write what waits and take nothing new; what is not written after some seconds is refused."""
        await self._changes.stop(seconds)

    async def add(self, items: Sequence[NewItem]) -> list[ItemOutcome]:
        """Add items, in one change with what else comes at the same time; what became of each, in order."""
        done = await self._changes.ask("add", items, size=len(items))
        outcomes: list[ItemOutcome] = done.answer
        self._compact_if_due()
        return outcomes

    async def delete(self, item_ids: Sequence[str]) -> Deleted:
        """Delete items, in one change with what else comes at the same time."""
        done = await self._changes.ask("delete", item_ids, size=len(item_ids))
        deleted: Deleted = done.answer
        self._compact_if_due()
        return deleted

    def _change(self, job: _Job, requests: Sequence[Sequence[Any]]) -> Sequence[Any]:
        try:
            match job:
                case "add":
                    answers: Sequence[Any] = self._add(requests)
                case "delete":
                    answers = self._delete(requests)
                case "compact":
                    self._index.compact(wait_seconds=PATIENCE_SECONDS)
                    self._metrics.compacted(self._name)
                    answers = [None]
        except HeldByAnother as held:
            again = Overloaded(str(held), retry_after_seconds=PATIENCE_SECONDS)
            return [again] * len(requests)
        except (ArtifactError, OSError) as error:  # it is not one of the requests that is wrong
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                _log.error("the disk is full", exc_info=error)
                return [DiskFull(DISK_FULL)] * len(requests)
            return [error] * len(requests)
        self._tell()
        return answers

    def _add(self, requests: Sequence[Sequence[NewItem]]) -> list[list[ItemOutcome]]:
        together = [item for items in requests for item in items]
        outcomes = self._index.add_items(together, wait_seconds=PATIENCE_SECONDS)
        for outcome in outcomes:
            self._metrics.changed(self._name, outcome.status, 1)
        rest = iter(outcomes)
        return [list(islice(rest, len(items))) for items in requests]

    def _delete(self, requests: Sequence[Sequence[str]]) -> list[Deleted]:
        together = dict.fromkeys(name for ids in requests for name in ids)
        done = self._index.delete(together, wait_seconds=PATIENCE_SECONDS)
        self._metrics.changed(self._name, "deleted", done.deleted)
        missing = set(done.missing)
        answers = []
        for ids in requests:
            own = dict.fromkeys(ids)
            gone = [name for name in own if name not in missing]
            answers.append(Deleted(len(gone), [name for name in own if name in missing]))
            missing.update(gone)  # whoever asks again finds them missing
        return answers

    def _tell(self) -> None:
        """Note what the index consists of now, and whether it should be compacted."""
        state = self._index.snapshot
        items = state.num_alive
        dead = sum(len(segment.dead) for segment in state.segments)
        self._metrics.state(self._name, items=items, segments=len(state.segments), deleted=dead)
        self._is_compaction_due = dead > MOST_DEAD * (items + dead)
        if time.monotonic() - self._counted_at > COUNTED_EVERY_SECONDS:
            self._metrics.collisions(self._name, self._index.info().collision_rate)
            self._counted_at = time.monotonic()

    def _compact_if_due(self) -> None:
        """Let compaction be the next change but those that wait already."""
        if self._is_compaction_due and (self._compacting is None or self._compacting.done()):
            self._compacting = asyncio.create_task(self._compact())

    async def _compact(self) -> None:
        try:
            with contextlib.suppress(Refused):
                await self._changes.ask("compact", ())
        except Exception:  # noqa: BLE001  nobody waits for it
            _log.exception("%s could not be compacted", self._name)


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

    found: SearchResult
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
        """Answer what waits, for a while, and take nothing new: :class:`genius_search.serve.problems.Draining`."""
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

    async def add(self, name: str, items: Sequence[NewItem]) -> list[ItemOutcome]:
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
        began = time.perf_counter()
        snapshot = index.snapshot
        queries = encode_queries(index.model, snapshot, requests, kind.config)
        encoded = time.perf_counter()
        found = search_encoded(index.model, snapshot, queries, kind.config)
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
