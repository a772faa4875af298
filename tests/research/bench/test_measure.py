from __future__ import annotations

import pytest

from genius_search.errors import UsageError
from research.bench.measure import TURN, WARM, time_queries, time_rounds


def test_variants_take_turns_and_the_first_turn_does_not_count():
    called = []
    timed = time_rounds({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, rounds=3, per=2)
    assert called == ["a", "b"] * 4
    assert timed.keys() == {"a", "b"}
    assert all(cpu_ms >= 0 for cpu_ms in timed.values())


def test_every_query_is_timed_once_and_each_turn_begins_with_some_that_are_not():
    called = []
    count = TURN + 3
    found = time_queries({"a": called.append}, count)["a"]
    warm = [[number % count for number in range(turn + TURN, turn + TURN + WARM)] for turn in (0, TURN)]
    assert called == [*warm[0], *range(TURN), *warm[1], *range(TURN, count)]
    assert 0 < found.p50_ms <= found.p99_ms


def test_nothing_is_not_measured():
    with pytest.raises(UsageError, match="rounds is 0"):
        time_rounds({"a": lambda: None}, rounds=0)
    with pytest.raises(UsageError, match="queries is 0"):
        time_queries({"a": lambda number: None}, 0)
