"""The engine of the service: open indexes, searched in batches, each changed by one writer at a time.

Searches of all indexes share one queue, and each batch shares one pass through encoder and decoder. The items
that a search allows are looked up before, in other threads, because this can take long. Every
index has a writer: items added at the same time become one change of the index, which readers see as a whole
or not at all. Once enough deleted items have piled up the index is compacted, while searches continue on the
previous state. An add is acknowledged when it is on the disk and the next search finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import torch

from genius_search.config import SearchConfig
from genius_search.errors import ArtifactError, DeadlinePassed, GeniusError, SnapshotGone
from genius_search.index.adding import ItemOutcome, NewItem
from genius_search.index.hits import SearchHit, SearchResult
from genius_search.index.index import Index
from genius_search.index.query import (
    Constraint,
    encode_queries,
    find_constraints,
    has_conditions,
    search_encoded,
)
from genius_search.index.requests import SearchRequest
from genius_search.index.snapshot import Snapshot
from genius_search.index.writer import DISK_FULL, Deleted, HeldByAnother, NotWritable
from genius_search.model import Genius
from genius_search.serve.metrics import Metrics
from genius_search.serve.schemas import Timing

Kind = TypeVar("Kind", bound=Hashable)
Request = TypeVar("Request")
Result = TypeVar("Result")

MAX_RETRY_SECONDS: Final = 60.0
SMOOTHING: Final = 0.2
"""Weight of the last batch in the measured rate."""
DRAIN_SECONDS: Final = 30.0
"""Longest time that a shutdown waits for accepted requests."""
MAX_WRITTEN: Final = 1024
"""Items in one change of an index."""
MAX_UNWRITTEN: Final = 8192
"""Maximum number of items waiting to be written."""
MAX_DEAD_SHARE: Final = 0.2
"""Share of deleted items that triggers compaction: at most four items are rewritten per deleted one. Many
segments need none, because adding merges them."""
PATIENCE_SECONDS: Final = 10.0
"""Longest wait for another process that is changing the index."""
COLLISIONS_EVERY_SECONDS: Final = 60.0
"""Collisions are counted at most this often, because counting reads every ID."""

log = logging.getLogger(__name__)


class Refused(GeniusError):
    """A valid request is refused; ``status`` is the HTTP status."""

    status = 503


class Overloaded(Refused):
    """Too many requests are waiting; ``retry_after_seconds`` says when to try again."""

    status = 429

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Draining(Refused):
    """The service is shutting down and accepts no new requests."""

    def __init__(self) -> None:
        super().__init__("the service is shutting down; try again later")


class DiskFull(Refused):
    """The disk is full; nothing was changed."""

    status = 507


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """Limits of a batcher. Sizes are those that requests are submitted with."""

    max_size: int = 32
    """Size of a batch; a larger request runs alone."""

    wait_ms: float = 2.0
    """Longest time that the first request of a batch waits for others."""

    max_waiting: int = 256
    """Maximum total size of waiting requests; a single request is never refused for its size."""

    workers: int = 1
    """Batches that run at the same time, each in its own thread."""


READS: Final = BatchLimits(max_size=1, wait_ms=0.0, max_waiting=64, workers=2)
"""For look-ups of items and codes."""
SLOW_READS: Final = BatchLimits(max_size=1, wait_ms=0.0, max_waiting=64, workers=4)
"""For conditions and explanations, which can take as long as their deadline allows."""


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Kind, Request, Result]):
    """A request in the queue."""

    kind: Kind
    request: Request
    size: int
    deadline: float
    since: float
    future: asyncio.Future[Result]

    def refuse(self) -> None:
        if not self.future.done():
            self.future.set_exception(Draining())


class Batcher(Generic[Kind, Request, Result]):
    """Collects requests on the event loop and runs them in threads, batch by batch.

    A batch holds requests of one kind, oldest first. If a batch fails its halves are run, so that an invalid
    request fails alone; unless the error is of the server and not of a request.

    >>> batcher = Batcher(search_many, BatchLimits())  # doctest: +SKIP
    >>> batcher.start()  # doctest: +SKIP
    >>> await batcher.submit("photos", request)  # doctest: +SKIP

    Parameters
    ----------
    run
        returns the results of requests of one kind, in order; called in a thread. An exception in place of a
        result is raised by the ``submit`` of that request.
    """

    def __init__(
        self, run: Callable[[Kind, Sequence[Request]], Sequence[Result | Exception]], limits: BatchLimits
    ) -> None:
        self.limits = limits
        self._run = run
        self._waiting: dict[int, _Waiting[Kind, Request, Result]] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._is_draining = False
        self._workers: list[asyncio.Task[None]] = []
        self._threads = ThreadPoolExecutor(limits.workers, thread_name_prefix="batch")
        self._rate = math.inf
        self.num_running = 0
        """Batches being run."""

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    def start(self) -> None:
        """Start running batches on the current event loop."""
        self._workers = [asyncio.create_task(self._work()) for _ in range(self.limits.workers)]

    async def stop(self, seconds: float | None = None) -> None:
        """Accept no new requests and finish waiting ones; refuse those not finished within ``seconds``."""
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

    async def submit(
        self, kind: Kind, request: Request, *, size: int = 1, deadline: float = math.inf
    ) -> Result:
        """Run a request in a batch with others of its kind; cancelling takes it out of the queue.

        Parameters
        ----------
        size
            share of a batch that the request takes.
        deadline
            latest useful time of the result, on the clock of :func:`time.monotonic`.

        Raises
        ------
        Overloaded
            Too many requests are waiting. The time to try again follows from the measured rate.
        DeadlinePassed
            The deadline has passed. A request that was still waiting is not run.
        Draining
            The service is shutting down.
        """
        if self._is_draining:
            raise Draining
        if self._waiting and self._waiting_size() + size > self.limits.max_waiting:
            seconds = self.retry_after_seconds()
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting, the maximum; try again in {seconds:.0f} s",
                retry_after_seconds=seconds,
            )
        now = time.monotonic()
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(kind, request, size, deadline, now, future)
        number = next(self._numbers)
        self._waiting[number] = waiting
        self._changed.set()
        allowed = deadline - now
        try:
            async with asyncio.timeout(None if allowed == math.inf else allowed):
                return await future
        except TimeoutError:
            raise DeadlinePassed(
                f"no answer within the {max(0.0, allowed):.3g} s allowed; allow more, or try again when the "
                "service is less busy"
            ) from None
        finally:
            self._waiting.pop(number, None)

    def retry_after_seconds(self) -> float:
        """Estimate the seconds until the waiting requests will be answered, rounded up."""
        seconds = math.ceil(self._waiting_size() / self._rate)
        return float(min(max(1, seconds), MAX_RETRY_SECONDS))

    def _waiting_size(self) -> int:
        return sum(waiting.size for waiting in self._waiting.values())

    async def _work(self) -> None:
        """Run batches until the service drains and none is left."""
        while True:
            while not self._waiting:
                if self._is_draining:
                    return
                self._changed.clear()
                await self._changed.wait()
            await self._gather()
            batch = self._take()
            if batch:
                await self._finish(batch)
            else:
                await asyncio.sleep(0)  # requests past their deadline leave first

    async def _gather(self) -> None:
        """Wait until a batch is full, or the oldest request has waited long enough."""
        oldest = next(iter(self._waiting.values()))
        patience = oldest.since + self.limits.wait_ms / 1000 - time.monotonic()
        if patience <= 0:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while 0 < len(self._waiting) < self.limits.max_size and not self._is_draining:
                    self._changed.clear()
                    await self._changed.wait()

    def _take(self) -> list[_Waiting[Kind, Request, Result]]:
        """Take the oldest request and others of its kind out of the queue; none past its deadline."""
        now = time.monotonic()
        batch: dict[int, _Waiting[Kind, Request, Result]] = {}
        size = 0
        for number, waiting in self._waiting.items():
            if waiting.future.done() or waiting.deadline <= now:
                continue  # its own task is about to remove it
            if batch and waiting.kind != next(iter(batch.values())).kind:
                continue
            if batch and size + waiting.size > self.limits.max_size:
                break
            batch[number] = waiting
            size += waiting.size
        for number in batch:
            del self._waiting[number]
        return list(batch.values())

    async def _finish(self, batch: Sequence[_Waiting[Kind, Request, Result]]) -> None:
        began = time.monotonic()
        requests = [waiting.request for waiting in batch]
        results: Sequence[Result | Exception]
        self.num_running += 1
        try:
            results = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._run_or_split, batch[0].kind, requests
            )
        except asyncio.CancelledError:
            for waiting in batch:
                waiting.refuse()
            raise
        except Exception as error:  # noqa: BLE001  no thread could be started: nobody may wait for ever
            results = [error] * len(batch)
        finally:
            self.num_running -= 1
        size = sum(waiting.size for waiting in batch)
        rate = self.limits.workers * size / max(time.monotonic() - began, 1e-6)
        self._rate = rate if self._rate == math.inf else self._rate + SMOOTHING * (rate - self._rate)
        for waiting, result in zip(batch, results, strict=True):
            if waiting.future.done():
                continue  # its client has gone
            if isinstance(result, Exception):
                waiting.future.set_exception(result)
            else:
                waiting.future.set_result(result)

    def _run_or_split(self, kind: Kind, requests: Sequence[Request]) -> list[Result | Exception]:
        """Return a result or an error for each request."""
        try:
            return [result for _, result in zip(requests, self._run(kind, requests), strict=True)]
        except Exception as error:  # noqa: BLE001  raised to whoever submitted the request
            if len(requests) == 1 or isinstance(error, Refused | ArtifactError | OSError):
                return [error] * len(requests)
        middle = len(requests) // 2
        return [*self._run_or_split(kind, requests[:middle]), *self._run_or_split(kind, requests[middle:])]


Change: TypeAlias = Literal["add", "delete", "compact"]


class IndexWriter:
    """Changes an index in its own thread: adds, deletes, compacts.

    Parameters
    ----------
    index
        a handle that only the writer uses.
    """

    def __init__(self, name: str, index: Index, limits: BatchLimits, metrics: Metrics) -> None:
        self._name = name
        self._index = index
        self._metrics = metrics
        self._compacting: asyncio.Task[None] | None = None
        self._needs_compaction = False
        self._collisions_counted = -math.inf
        self.changes: Batcher[Change, Sequence[Any], Any] = Batcher(self._change, limits)

    async def submit(self, change: Change, request: Sequence[Any]) -> Any:
        """Add or delete items, combined with concurrent changes of the same kind; return the outcome."""
        outcome = await self.changes.submit(change, request, size=len(request))
        if self._needs_compaction and (self._compacting is None or self._compacting.done()):
            self._compacting = asyncio.create_task(self._compact())
        return outcome

    def record_state(self) -> None:
        """Update the metrics of the index, and decide whether to compact it."""
        snapshot, metrics, name = self._index.snapshot, self._metrics, self._name
        num_items = snapshot.num_alive
        num_dead = sum(len(segment.dead) for segment in snapshot.segments)
        metrics.items.labels(name).set(num_items)
        metrics.segments.labels(name).set(len(snapshot.segments))
        metrics.deleted_items.labels(name).set(num_dead)
        self._needs_compaction = num_dead > MAX_DEAD_SHARE * (num_items + num_dead)
        if time.monotonic() - self._collisions_counted > COLLISIONS_EVERY_SECONDS:
            metrics.collision_rate.labels(name).set(self._index.info().collision_rate)
            self._collisions_counted = time.monotonic()

    async def _compact(self) -> None:
        try:
            with contextlib.suppress(Refused):
                await self.changes.submit("compact", ())
        except Exception:  # a background task: log instead of raising
            log.exception("%s could not be compacted", self._name)

    def _change(self, change: Change, requests: Sequence[Sequence[Any]]) -> Sequence[Any]:
        try:
            match change:
                case "add":
                    results: Sequence[Any] = self._add(requests)
                case "delete":
                    results = self._delete(requests)
                case "compact":
                    self._index.compact(wait_seconds=PATIENCE_SECONDS)
                    self._metrics.compactions.labels(self._name).inc()
                    results = [None]
        except HeldByAnother as held:
            raise Overloaded(str(held), retry_after_seconds=PATIENCE_SECONDS) from None
        except NotWritable:
            log.exception("%s cannot be changed", self._name)
            raise Refused(
                "this index cannot be changed: the server may not write to its folder; it can be searched"
            ) from None
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            log.exception("the disk is full")
            raise DiskFull(
                "the server's disk is full; nothing was changed, try again when there is room"
            ) from None
        try:
            self.record_state()
        except Exception:  # the change is made, whatever the metrics say
            log.exception("the metrics of %s are out of date", self._name)
        return results

    def _add(self, requests: Sequence[Sequence[NewItem]]) -> list[list[ItemOutcome]]:
        items = [item for request in requests for item in request]
        outcomes = self._index.add_items(items, wait_seconds=PATIENCE_SECONDS)
        for outcome in outcomes:
            self._metrics.changes.labels(self._name, outcome.status).inc()
        rest = iter(outcomes)
        return [list(islice(rest, len(request))) for request in requests]

    def _delete(self, requests: Sequence[Sequence[str]]) -> list[Deleted]:
        done = self._index.delete(
            dict.fromkeys(itertools.chain.from_iterable(requests)), wait_seconds=PATIENCE_SECONDS
        )
        self._metrics.changes.labels(self._name, "deleted").inc(done.deleted)
        missing = set(done.missing)
        results = []
        for request in requests:
            ids = dict.fromkeys(request)
            gone = [name for name in ids if name not in missing]
            results.append(Deleted(len(gone), [name for name in ids if name in missing]))
            missing.update(gone)  # a later request in the batch may contain them too
        return results


def _num_waiting(batchers: Sequence[Batcher[Any, Any, Any]]) -> float:
    return float(sum(map(len, batchers)))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Limits of concurrency."""

    torch_threads: int = 1
    """Threads per tensor operation."""

    max_batch: int = 32
    """Maximum number of searches per batch."""

    max_queue: int = 256
    """Maximum number of waiting searches; further ones are refused with a time to retry."""

    batch_wait_ms: float = 0.0
    """Longest time that the first search of a batch waits for others. Searches that arrive while a batch runs
    are the next one, so under load there are batches without waiting."""

    write_wait_ms: float = 20.0
    """Longest time that the first add of a change waits for others."""


class SearchOutcome(NamedTuple):
    """Hits of a search, best first, and its duration."""

    hits: list[SearchHit]
    timing: Timing


_State: TypeAlias = tuple[Genius, Snapshot]
"""A state of an index, in which the items that a request allows were looked up."""
_Kind: TypeAlias = tuple[str, SearchConfig, _State | None]
"""Index, settings, and state, by default the current one."""
_Constrained: TypeAlias = tuple[SearchRequest, list[Constraint] | None]


class _Searched(NamedTuple):
    """The result of a search, when its batch began, and the seconds to encode and to search all of it."""

    result: SearchResult
    began: float
    encode: float
    search: float


class Engine:
    """Searches and changes open indexes for many concurrent clients, on one event loop.

    >>> engine = Engine({"photos": Index.open("photos.index")})  # doctest: +SKIP
    >>> await engine.start()  # doctest: +SKIP
    >>> outcome = await engine.search("photos", SearchRequest(text="a kite"), config)  # doctest: +SKIP

    Parameters
    ----------
    indexes
        by name; used for reading only, as writers open their own.
    """

    def __init__(
        self,
        indexes: Mapping[str, Index],
        settings: EngineSettings = EngineSettings(),
        metrics: Metrics | None = None,
    ) -> None:
        self.indexes = dict(indexes)
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.is_ready = False
        """True once every index has answered a first search."""
        self._searches: Batcher[_Kind, _Constrained, _Searched] = Batcher(
            self._search_together,
            BatchLimits(
                max_size=settings.max_batch,
                wait_ms=settings.batch_wait_ms,
                max_waiting=settings.max_queue,
            ),
        )
        self._reads, self._slow_reads = (
            Batcher[None, Callable[[], Any], Any](
                lambda _, look_ups: [look_up() for look_up in look_ups], limits
            )
            for limits in (READS, SLOW_READS)
        )
        write_limits = BatchLimits(
            max_size=MAX_WRITTEN, wait_ms=settings.write_wait_ms, max_waiting=MAX_UNWRITTEN
        )
        self._writers = {
            name: IndexWriter(name, index.reopen(), write_limits, self.metrics)
            for name, index in self.indexes.items()
        }
        self._batchers: dict[str, list[Batcher[Any, Any, Any]]] = {
            "search": [self._searches],
            "read": [self._reads, self._slow_reads],
            "write": [writer.changes for writer in self._writers.values()],
        }
        for queue, batchers in self._batchers.items():
            self.metrics.queue_length.labels(queue).set_function(partial(_num_waiting, batchers))

    async def start(self) -> None:
        """Start the workers and warm up every index with one search."""
        torch.set_num_threads(self.settings.torch_threads)
        for writer in self._writers.values():
            writer.record_state()
        for batcher in itertools.chain.from_iterable(self._batchers.values()):
            batcher.start()
        for name, index in self.indexes.items():
            with contextlib.suppress(GeniusError):  # an encoder without texts cannot be warmed up by one
                first = SearchRequest(text="a first search", k=1)
                await self._searches.submit((name, index.settings, None), (first, None))
        self.is_ready = True

    async def stop(self) -> None:
        """Refuse new requests (:class:`Draining`) and finish accepted ones within :data:`DRAIN_SECONDS`."""
        self.is_ready = False
        batchers = itertools.chain.from_iterable(self._batchers.values())
        await asyncio.gather(*(batcher.stop(DRAIN_SECONDS) for batcher in batchers))

    async def search(self, name: str, request: SearchRequest, config: SearchConfig) -> SearchOutcome:
        """Search an index, in a batch with other searches.

        Raises
        ------
        Refused
            Too many requests are waiting, or the service is shutting down.
        DeadlinePassed
            The deadline of the request has passed.
        UsageError
            The request is invalid.
        """
        began = time.monotonic()
        with self._counting_errors():
            request.check()  # an invalid request must not split a batch
            state = constraints = None
            if has_conditions(self.indexes[name].model, request):
                look_up = partial(_look_up, self.indexes[name], request)
                state, constraints = await self._slow_reads.submit(None, look_up, deadline=request.deadline)
            submitted = time.monotonic()
            found, batch_began, encode, search = await self._searches.submit(
                (name, config, state), (request, constraints), deadline=request.deadline
            )
        queue = batch_began - submitted
        for stage, seconds in (("queue", queue), ("encode", encode), ("search", search)):
            self.metrics.stage_seconds.labels(stage).observe(seconds)
        self.metrics.beam.observe(max(request.beam or config.beam, request.k))
        self.metrics.candidates.observe(found.touched)
        total = time.monotonic() - began
        return SearchOutcome(
            found.hits,
            Timing(queue=1000 * queue, encode=1000 * encode, search=1000 * search, total=1000 * total),
        )

    async def read(
        self, name: str, look_up: Callable[[Index], Result], *, deadline: float = math.inf
    ) -> Result:
        """Run a read-only function of an index, other than a search, in a thread.

        One with a deadline can be slow, and does not delay those without.
        """
        look_up_here = partial(look_up, self.indexes[name])
        reads = self._reads if deadline == math.inf else self._slow_reads
        with self._counting_errors():
            result: Result = await reads.submit(None, look_up_here, deadline=deadline)
        return result

    async def add(self, name: str, items: Sequence[NewItem]) -> list[ItemOutcome]:
        """Add items; on return they are stored on disk and searchable."""
        with self._counting_errors():
            outcomes: list[ItemOutcome] = await self._writers[name].submit("add", items)
        return outcomes

    async def delete(self, name: str, ids: Sequence[str]) -> Deleted:
        """Delete items; on return no search finds them."""
        with self._counting_errors():
            deleted: Deleted = await self._writers[name].submit("delete", ids)
        return deleted

    def _search_together(self, kind: _Kind, requests: Sequence[_Constrained]) -> list[_Searched]:
        name, config, state = kind
        index = self.indexes[name]
        try:
            return self._search_state(state or index.current(), requests, config)
        except SnapshotGone:
            anew = [(request, None) for request, _ in requests]
            return self._search_state(index.current(), anew, config)

    def _search_state(
        self, state: _State, requests: Sequence[_Constrained], config: SearchConfig
    ) -> list[_Searched]:
        model, snapshot = state
        began = time.monotonic()
        constraints = [
            find_constraints(model, snapshot, request) if known is None else known
            for request, known in requests
        ]
        queries = encode_queries(model, snapshot, [request for request, _ in requests], config, constraints)
        encode = time.monotonic() - began
        found = search_encoded(model, snapshot, queries, config)
        search = time.monotonic() - began - encode
        self.metrics.batch_size.observe(len(requests))
        return [_Searched(one, began, encode, search) for one in found]

    @contextlib.contextmanager
    def _counting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.metrics.errors.labels(type(error).__name__).inc()
            raise


def _look_up(index: Index, request: SearchRequest) -> tuple[_State, list[Constraint]]:
    """Look up the items that a request allows; its search has to be in the same state of the index."""
    state = index.current()
    return state, find_constraints(*state, request)
