from __future__ import annotations

import types

import numpy as np
import pytest

from genius_search.config import SearchConfig
from genius_search.lab.bench.stand_ins import SyntheticPool, random_queries, stand_in
from genius_search.lab.bench.timing import WATCHED, Stopwatch, Watched, WatchedDecoder
from genius_search.search.beam import search
from genius_search.search.table import IdTable, Part


def busy(times: int = 30_000) -> int:
    return sum(range(times))


def test_a_part_inside_another_counts_for_itself_alone():
    watch = Stopwatch()
    inner = watch.timed("inner", lambda: busy(300_000))
    watch.timed("outer", lambda: (inner(), inner()))()
    assert watch.calls == {"inner": 2, "outer": 1}
    assert watch.seconds["outer"] < watch.seconds["inner"]


def test_functions_are_as_before_afterwards_whatever_happens():
    place = types.SimpleNamespace(work=busy)
    watch = Stopwatch()

    def fail() -> None:
        with watch.watching([Watched(place, "work", "work")]):
            assert place.work is not busy
            place.work()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert place.work is busy
    assert watch.calls == {"work": 1}


def test_a_watched_search_finds_the_same_and_every_part_is_seen():
    subject = stand_in("tiny", seed=0, sizes=(3, 16, 16, 16))
    (block,) = SyntheticPool(items=600, sizes=subject.sizes).blocks()
    parts = [Part(IdTable.build(block.codes, block.typicality))]
    queries = random_queries(3, subject.dim, seed=1)
    for config in (SearchConfig(beam=5), SearchConfig(beam=5, scores="children", rerank="codes")):
        watch = Stopwatch()
        plain = search(subject.decoder, parts, queries, config)
        with watch.watching(WATCHED):
            watched = search(WatchedDecoder(subject.decoder, watch), parts, queries, config)
        for left, right in zip(plain, watched, strict=True):
            np.testing.assert_array_equal(left, right)
        decoding = {part for part in watch.seconds if part.startswith("decoder")}
        assert decoding == {f"decoder: {part}" for part in ("start", "advance", "head", "select")}
        assert {"children", "leaves", "best"} <= set(watch.seconds)
