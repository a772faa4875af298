"""Requests that come at the same time are answered together.

A model answers thirty requests in far less than thirty times the time of one, so requests wait a few
milliseconds for company. While a batch is answered the next one gathers, so the busier the service, the
larger its batches: that is what keeps it up with its clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from genius.serve.refused import DeadlinePassed, Draining, Overloaded

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
            if len(requests) == 1:
                return [error]
        middle = len(requests) // 2
        return [*self._each(kind, requests[:middle]), *self._each(kind, requests[middle:])]
