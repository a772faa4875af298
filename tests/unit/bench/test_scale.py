from __future__ import annotations

import numpy as np
import pytest

from genius_search.errors import UsageError
from genius_search.lab.bench.results import Table
from genius_search.lab.bench.scale import (
    EXACT,
    FULL,
    LEAF_STOP,
    NUMBERS,
    SHALLOW,
    ScaleSettings,
    bench_scale,
    build_apart,
    build_here,
)
from genius_search.lab.bench.stand_ins import NumberedPool, SyntheticPool
from genius_search.progress import Silent
from genius_search.search.table import IdTable

SETTINGS = ScaleSettings(
    sizes=(900, 300), beam=3, small_beam=2, small_candidates=10, queries=1, small_queries=2, batch=2, rounds=1,
    flat_items=500, codes=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[dict[str, Table], list]:
    folder = tmp_path_factory.mktemp("scale")
    scale = bench_scale(SETTINGS, folder, progress=Silent())
    assert not list(folder.iterdir())  # the tables were only for measuring
    return {table.name: table for table in scale.tables}, scale.figures


def test_every_size_is_built(found):
    rows = found[0]["builds"].rows
    assert [row.items for row in rows] == [300, 900]
    for row in rows:
        assert 0 < row.ids <= row.items
        assert 12.9 < row.bytes_per_id < 13
        assert row.bytes_per_item > 13 * row.ids / row.items
        assert row.build_seconds > 0
        assert row.open_ms > 0
        assert row.peak_mib is None or row.peak_mib > 0


def test_every_size_is_searched_in_every_way_alone_and_in_batches(found):
    rows = found[0]["queries"].rows
    ours = {(row.method, row.items, row.batch) for row in rows if row.method != EXACT}
    assert ours == {
        (name, items, batch)
        for name in (FULL, LEAF_STOP, SHALLOW, NUMBERS)
        for items in SETTINGS.sizes
        for batch in (1, 2)
    }
    for row in rows:
        assert row.cpu_ms > 0
        assert (row.p50_ms is not None) == (row.batch == 1 and not row.calculated)


def test_exact_search_beyond_its_limit_is_calculated_and_says_so(found):
    rows = {row.items: row for row in found[0]["queries"].rows if row.method == EXACT}
    assert [rows[items].calculated for items in (300, 900)] == [False, True]
    assert rows[900].cpu_ms == pytest.approx(3 * rows[300].cpu_ms)
    assert rows[900].bytes_per_item == 4 * 768


def test_there_is_a_drawing_of_time_and_of_bytes(found):
    titles = [figure.title for figure in found[1]]
    assert titles[0].startswith("CPU time")
    assert titles[1].startswith("Bytes")
    assert all(figure.image.startswith(b"\x89PNG") for figure in found[1])


def test_what_cannot_be_measured_is_refused_before_anything_is():
    with pytest.raises(UsageError, match="nothing could be calculated from"):
        ScaleSettings(sizes=(200,), flat_items=100)
    with pytest.raises(UsageError, match="expected one size or more"):
        ScaleSettings(sizes=())


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
    build_apart(pool, tmp_path / "apart")
    build_here(pool, tmp_path / "here")
    apart, here = IdTable.open(tmp_path / "apart"), IdTable.open(tmp_path / "here")
    for name in ("ids", "starts", "level_bounds", "bucket_starts", "items"):
        assert (getattr(apart, name) == getattr(here, name)).all()
