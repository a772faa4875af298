"""The batcher loses nothing, mixes nothing up, and refuses in time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genius_search.errors import DeadlinePassed
from genius_search.serve.engine import Batcher, BatchLimits, Draining, Overloaded


class Bad(Exception):
    """What the fake search raises at a request it cannot answer."""


class Fake:
    """Doubles numbers; negative ones are bad. Can be held to keep requests waiting."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[int]]] = []
        self.free = threading.Event()
        self.free.set()

    def __call__(self, kind: str, numbers: Sequence[int]) -> list[tuple[str, int]]:
        self.free.wait(10)
        self.batches.append((kind, list(numbers)))
        if any(number < 0 for number in numbers):
            raise Bad(str(min(numbers)))
        return [(kind, 2 * number) for number in numbers]

    @property
    def ran(self) -> list[int]:
        return [number for _, batch in self.batches for number in batch]


async def until(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came true")


async def held(fake: Fake, batcher: Batcher) -> asyncio.Task:
    """Occupy the one worker, so that what comes now waits."""
    fake.free.clear()
    first = asyncio.create_task(batcher.submit("held", 0))
    await until(lambda: batcher.num_running == 1)
    return first


REQUESTS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(-2, 50), st.integers(1, 3)), max_size=30)


@given(REQUESTS, st.integers(1, 8), st.integers(1, 3), st.sampled_from([0.0, 1.0]))
@settings(max_examples=60)
def test_every_request_gets_its_own_answer_and_no_batch_mixes_kinds(requests, most, workers, wait_ms):
    fake = Fake()

    async def all_at_once():
        batcher = Batcher(fake, BatchLimits(max_size=most, workers=workers, wait_ms=wait_ms))
        batcher.start()
        submitted = [batcher.submit(kind, number, size=size) for kind, number, size in requests]
        answers = await asyncio.gather(*submitted, return_exceptions=True)
        await batcher.stop()
        return answers

    answers = asyncio.run(all_at_once())
    for (kind, number, _), answer in zip(requests, answers, strict=True):
        if number < 0:
            assert isinstance(answer, Bad)
            assert str(number) == str(answer)
        else:
            assert answer == (kind, 2 * number)
    assert all(len(numbers) <= most for _, numbers in fake.batches)
    if not any(number < 0 for _, number, _ in requests):
        assert sorted(fake.ran) == sorted(number for _, number, _ in requests)


def test_waiting_requests_run_oldest_first_and_together():
    fake = Fake()

    async def run():
        batcher = Batcher(fake, BatchLimits(max_size=4, wait_ms=0.0))
        batcher.start()
        first = await held(fake, batcher)
        later = [asyncio.create_task(batcher.submit("ab"[n % 5 == 4], n)) for n in range(1, 11)]
        await until(lambda: len(batcher) == 10)
        fake.free.set()
        await asyncio.gather(first, *later)
        await batcher.stop()

    asyncio.run(run())
    assert fake.batches[1:] == [("a", [1, 2, 3, 5]), ("b", [4, 9]), ("a", [6, 7, 8, 10])]


def test_a_large_request_is_answered_alone_and_sizes_fill_a_batch():
    fake = Fake()

    async def run():
        batcher = Batcher(fake, BatchLimits(max_size=10, wait_ms=0.0))
        batcher.start()
        first = await held(fake, batcher)
        sizes = [4, 4, 4, 99, 10]
        later = [asyncio.create_task(batcher.submit("a", n, size=size)) for n, size in enumerate(sizes)]
        await until(lambda: len(batcher) == 5)
        fake.free.set()
        await asyncio.gather(first, *later)
        await batcher.stop()

    asyncio.run(run())
    assert [numbers for _, numbers in fake.batches[1:]] == [[0, 1], [2], [3], [4]]


def test_a_batch_does_not_wait_when_it_is_full_and_waits_for_company_when_not():
    async def seconds(count: int) -> float:
        batcher = Batcher(Fake(), BatchLimits(max_size=3, wait_ms=500.0))
        batcher.start()
        began = time.monotonic()
        await asyncio.gather(*(batcher.submit("a", n) for n in range(count)))
        took = time.monotonic() - began
        await batcher.stop()
        return took

    assert asyncio.run(seconds(2)) >= 0.49
    assert asyncio.run(seconds(3)) < 0.49


def test_a_request_past_its_deadline_fails_at_once_and_never_runs():
    fake = Fake()

    async def run():
        batcher = Batcher(fake, BatchLimits(wait_ms=0.0))
        batcher.start()
        first = await held(fake, batcher)
        began = time.monotonic()
        with pytest.raises(DeadlinePassed, match=r"within the 0\.0\d+ s"):
            await batcher.submit("a", 1, deadline=began + 0.05)
        assert time.monotonic() - began < 5  # while the worker is still held
        with pytest.raises(DeadlinePassed):
            await batcher.submit("a", 2, deadline=began - 1)
        assert len(batcher) == 0
        fake.free.set()
        assert await batcher.submit("a", 3, deadline=time.monotonic() + 60) == ("a", 6)
        await first
        await batcher.stop()

    asyncio.run(run())
    assert fake.ran == [0, 3]


def test_a_result_after_the_deadline_is_dropped():
    fake = Fake()

    async def run():
        batcher = Batcher(fake, BatchLimits(wait_ms=0.0))
        batcher.start()
        fake.free.clear()
        with pytest.raises(DeadlinePassed):
            await batcher.submit("a", 1, deadline=time.monotonic() + 0.05)
        fake.free.set()
        assert await batcher.submit("a", 2) == ("a", 4)
        await batcher.stop()

    asyncio.run(run())


def test_a_cancelled_request_leaves_the_queue():
    fake = Fake()

    async def run():
        batcher = Batcher(fake, BatchLimits(max_waiting=2))
        batcher.start()
        first = await held(fake, batcher)
        gone, stays = (asyncio.create_task(batcher.submit("a", n)) for n in (1, 2))
        await until(lambda: len(batcher) == 2)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert gone.cancelled()
        assert len(batcher) == 1
        fake.free.set()
        assert await stays == ("a", 4)
        await first
        await batcher.stop()

    asyncio.run(run())
    assert fake.ran == [0, 2]


def test_cancelling_a_request_of_a_running_batch_harms_no_other():
    fake = Fake()

    async def run():
        batcher = Batcher(fake, BatchLimits(max_size=2, wait_ms=1000.0))
        batcher.start()
        fake.free.clear()
        gone, stays = (asyncio.create_task(batcher.submit("a", n)) for n in (1, 2))
        await until(lambda: batcher.num_running == 1)
        gone.cancel()
        fake.free.set()
        assert await stays == ("a", 4)
        await batcher.stop()

    asyncio.run(run())


def test_a_full_queue_refuses_and_says_when_to_come_back():
    fake = Fake()

    async def run():
        batcher = Batcher(fake, BatchLimits(max_size=2, max_waiting=3, wait_ms=0.0))
        batcher.start()
        first = await held(fake, batcher)
        waiting = [asyncio.create_task(batcher.submit("a", n)) for n in range(3)]
        await until(lambda: len(batcher) == 3)
        with pytest.raises(Overloaded, match="3 requests") as refused:
            await batcher.submit("a", 9)
        assert refused.value.retry_after_seconds == 1  # nothing is measured yet
        waiting.pop().cancel()
        await until(lambda: len(batcher) == 2)
        waiting.append(asyncio.create_task(batcher.submit("a", 5)))
        await until(lambda: len(batcher) == 3)  # who goes away makes room
        fake.free.set()
        await first
        await asyncio.gather(*waiting)
        await batcher.stop()

    asyncio.run(run())
    assert fake.ran == [0, 0, 1, 5]


def test_the_time_to_come_back_follows_from_the_measured_rate():
    async def run() -> tuple[float, float]:
        def slow(kind: str, numbers: Sequence[int]) -> list[int]:
            time.sleep(0.2)
            return list(numbers)

        batcher = Batcher(slow, BatchLimits(max_size=1, wait_ms=0.0, max_waiting=100))
        batcher.start()
        await batcher.submit("a", 0)
        waiting = [asyncio.create_task(batcher.submit("a", n)) for n in range(16)]
        await until(lambda: len(batcher) == 15)
        seconds = batcher.retry_after_seconds()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await batcher.stop()
        return seconds, 15 * 0.2

    seconds, expected = asyncio.run(run())
    assert expected <= seconds <= 3 * expected


def test_one_request_larger_than_the_queue_is_taken_when_nothing_waits():
    async def run():
        batcher = Batcher(Fake(), BatchLimits(max_size=2, max_waiting=3))
        batcher.start()
        assert await batcher.submit("a", 1, size=50) == ("a", 2)
        await batcher.stop()

    asyncio.run(run())


def test_an_exception_in_place_of_a_result_is_raised_to_its_request_only():
    async def run():
        busy = Bad("busy")
        batcher = Batcher(lambda kind, numbers: [n or busy for n in numbers], BatchLimits())
        batcher.start()
        outcomes = await asyncio.gather(*(batcher.submit("a", n) for n in (1, 0, 2)), return_exceptions=True)
        assert [getattr(outcome, "result", outcome) for outcome in outcomes] == [1, busy, 2]
        await batcher.stop()

    asyncio.run(run())


def test_stopping_finishes_waiting_requests_and_accepts_nothing_new():
    fake = Fake()

    async def run():
        batcher = Batcher(fake, BatchLimits(max_size=2, wait_ms=60_000.0))
        batcher.start()
        waiting = [asyncio.create_task(batcher.submit("a", n)) for n in range(3)]
        await asyncio.sleep(0.01)
        stopping = asyncio.create_task(batcher.stop())
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            await batcher.submit("a", 9)
        await stopping
        assert [await task for task in waiting] == [("a", 0), ("a", 2), ("a", 4)]

    asyncio.run(run())


def test_requests_not_finished_in_the_time_to_stop_are_refused():
    fake = Fake()

    async def run():
        batcher = Batcher(fake, BatchLimits(max_size=1, wait_ms=0.0))
        batcher.start()
        running = await held(fake, batcher)
        waiting = asyncio.create_task(batcher.submit("a", 1))
        await until(lambda: len(batcher) == 1)
        await batcher.stop(0.05)
        for task in (running, waiting):
            with pytest.raises(Draining):
                await task
        fake.free.set()

    asyncio.run(run())
    assert 1 not in fake.ran


def test_too_few_answers_are_an_error_for_everybody_and_the_next_batch_runs():
    async def run():
        batcher = Batcher(lambda kind, numbers: numbers if kind == "good" else [], BatchLimits(wait_ms=0.0))
        batcher.start()
        with pytest.raises(ValueError, match="shorter"):
            await batcher.submit("bad", 1)
        assert await batcher.submit("good", 2) == 2
        await batcher.stop()

    asyncio.run(run())


def test_two_workers_answer_two_batches_at_the_same_time():
    async def run():
        both = threading.Barrier(2, timeout=10)

        def meet(kind: str, numbers: Sequence[int]) -> Sequence[int]:
            both.wait()
            return numbers

        batcher = Batcher(meet, BatchLimits(max_size=1, workers=2, wait_ms=0.0))
        batcher.start()
        await asyncio.gather(batcher.submit("a", 1), batcher.submit("a", 2))
        await batcher.stop()

    asyncio.run(run())
