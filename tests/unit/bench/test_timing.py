from __future__ import annotations

import pytest

from genius_search.errors import UsageError
from genius_search.lab.bench.timing import TURN, interleaved, latencies


def test_variants_take_turns_and_the_first_turn_does_not_count():
    called = []
    timed = interleaved({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, rounds=3, per=2)
    assert called == ["a", "b"] * 4
    assert {name: len(took.rounds_cpu_ms) for name, took in timed.items()} == {"a": 3, "b": 3}
    assert all(took.cpu_ms >= 0 and took.wall_ms > 0 for took in timed.values())


def test_what_works_harder_takes_longer():
    timed = interleaved({"little": lambda: sum(range(10)), "much": lambda: sum(range(300_000))}, rounds=3)
    assert timed["much"].cpu_ms > timed["little"].cpu_ms


def test_every_query_is_timed_once_and_each_turn_begins_with_one_that_is_not():
    called = []
    count = TURN + 3
    found = latencies({"a": called.append}, count)["a"]
    assert found.queries == count
    assert called == [0, *range(TURN), TURN, *range(TURN, count)]
    assert 0 < found.p50_ms <= found.p99_ms


def test_nothing_is_not_measured():
    with pytest.raises(UsageError, match="rounds is 0"):
        interleaved({"a": lambda: None}, rounds=0)
    with pytest.raises(UsageError, match="queries is 0"):
        latencies({"a": lambda number: None}, 0)
