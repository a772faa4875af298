from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from genius_search.lab.bench import speed
from genius_search.lab.bench.pools import NumberedPool, SyntheticPool
from genius_search.lab.bench.settings import SpeedSettings
from genius_search.lab.bench.speed import (
    EXACT,
    FULL,
    GENERATE,
    LEAF_STOP,
    NUMBERS,
    SHALLOW,
    VOCABULARY,
    bench_speed,
    build_apart,
    build_table,
)
from genius_search.progress import Silent
from genius_search.search.table import IdTable

SETTINGS = SpeedSettings(
    sizes="900,300", beam=3, small_beam=2, small_candidates=10, timed=1, batch=2, rounds=1, compared=7,
    rival_items=500,
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speed")
    with pytest.MonkeyPatch.context() as patch:
        small = speed.synthetic_searcher
        # The paper's size takes minutes; codes stay as many levels as it has.
        patch.setattr(
            speed,
            "synthetic_searcher",
            lambda name, *, seed, sizes=None: small("tiny", seed=seed, sizes=sizes or (3, *[16] * 8)),
        )
        # Processes of their own are what the last test is about.
        patch.setattr(speed, "ProcessPoolExecutor", lambda workers, **_: ThreadPoolExecutor(workers))
        measured = bench_speed(SETTINGS, folder, progress=Silent())
    assert not list(folder.iterdir())  # the tables were only for measuring
    return measured


def test_every_size_is_built(found):
    rows = [row for row in found.rows["builds"] if row["structure"] == "our IDs"]
    assert [row["items"] for row in rows] == [300, 900]
    for row in rows:
        assert 0 < row["ids"] <= row["items"]
        assert 12.9 < row["bytes_per_id"] < 13
        assert row["bytes_per_item"] > 13 * row["ids"] / row["items"]
        assert row["build_seconds"] > 0
        assert row["open_ms"] > 0
        assert row["peak_mib"] is None or row["peak_mib"] >= 0
    (trie,) = [row for row in found.rows["builds"] if row["structure"] == "pointer trie"]
    assert trie["bytes_per_id"] > 10 * rows[0]["bytes_per_id"]


def test_every_size_is_searched_in_every_way_alone_and_in_batches(found):
    rows = found.rows["queries"]
    ours = {(row["method"], row["items"], row["batch"]) for row in rows if row["method"] != EXACT}
    assert ours == {
        (name, items, batch)
        for name, sizes in {
            **dict.fromkeys((FULL, LEAF_STOP, SHALLOW, NUMBERS), (300, 900)),
            **dict.fromkeys((GENERATE, VOCABULARY), (300,)),
        }.items()
        for items in sizes
        for batch in (1, 2)
    }
    for row in rows:
        assert row["cpu_ms"] > 0
        assert (row["p50_ms"] is not None) == (row["batch"] == 1)


def test_the_ranking_is_that_of_generate(found):
    (row,) = found.rows["agreement"]
    assert (row["items"], row["compared"], row["share"]) == (300, 7, 1.0)


def test_exact_search_is_left_out_beyond_its_limit(found):
    (row,) = [row for row in found.rows["queries"] if row["method"] == EXACT]
    assert (row["items"], row["bytes_per_item"]) == (300, 4 * 768)


def test_there_is_a_table_of_each_kind(found):
    assert [table.name for table in found.tables] == ["queries", "builds", "agreement"]


def test_numbers_are_spelled_digit_by_digit():
    pool = NumberedPool(items=70_000)
    codes = np.concatenate([block.codes for block in pool.blocks()])
    assert pool.sizes == (10,) * 5
    assert codes[[0, 7, 65_536, 69_999]].tolist() == [
        [0] * 5,
        [0, 0, 0, 0, 7],
        [6, 5, 5, 3, 6],
        [6, 9, 9, 9, 9],
    ]
    assert len(np.unique(codes, axis=0)) == len(codes) == 70_000


def test_a_table_built_apart_is_the_same(tmp_path):
    pool = SyntheticPool(items=1000, sizes=(3, 20, 20))
    row = build_apart(pool, tmp_path / "apart")
    assert row["peak_mib"] is None or row["peak_mib"] > 0
    build_table(pool, tmp_path / "here")
    apart, here = IdTable.open(tmp_path / "apart"), IdTable.open(tmp_path / "here")
    for name in ("ids", "starts", "level_bounds", "bucket_starts", "items"):
        assert (getattr(apart, name) == getattr(here, name)).all()
