from __future__ import annotations

import numpy as np
import pytest

from genius_search.lab.bench.decode import HF, DecodeSettings, bench_decode, share_found
from genius_search.lab.bench.results import Table
from genius_search.lab.bench.stand_ins import stand_in
from genius_search.progress import Silent
from genius_search.search.beam import Beams

SETTINGS = DecodeSettings(
    items=400, queries=3, beam=6, rounds=1, compared=7, small_beam=3, small_candidates=20, profiled=2
)


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    subject = stand_in("tiny", seed=0, sizes=(3, 8, 8, 8))
    return {table.name: table for table in bench_decode(SETTINGS, subject, progress=Silent())}


def test_every_way_is_timed_beside_generate(tables):
    rows = {row.variant: row for row in tables["decode"].rows}
    assert rows[HF].cheaper == 1
    assert len(rows) == 6
    for row in rows.values():
        assert row.cpu_ms > 0
        assert row.cheaper is not None
        assert row.cheaper == pytest.approx(rows[HF].cpu_ms / row.cpu_ms)


def test_rankings_are_those_of_generate(tables):
    (row,) = tables["agreement"].rows
    assert row.compared == SETTINGS.compared
    assert row.share == 1


def test_the_leaf_stop_holds_all_that_the_full_search_finds(tables):
    rows = {row.variant: row for row in tables["decode"].rows}
    full = rows["level scores"]
    assert full.full_share == 1
    for name, row in rows.items():
        if "leaf stop" in name:
            assert row.full_share == 1
            assert row.leaves >= full.leaves
        if name != HF:
            assert 0 < row.constraint_share < 1
            assert 0 < row.other_share < 1 - row.constraint_share


def test_the_parts_of_a_query_add_up(tables):
    *parts, whole, plain = tables["profile"].rows
    assert sum(row.cpu_us for row in parts) == pytest.approx(whole.cpu_us, rel=1e-6)
    assert plain.part == "all, not watched"
    assert {"decoder: advance", "children", "best", "look-ups", "ordering"} <= {row.part for row in parts}


def beams(low, high) -> Beams:
    low, high = (np.array(rows, dtype=np.int64)[None, :, None] for rows in (low, high))
    return Beams(low, high, np.zeros((1, low.shape[1], 2), dtype=np.float32))


def test_the_share_found_counts_ids_under_prefixes():
    full = beams([3, 9, 5, 0], [4, 10, 6, 0])
    assert share_found(full, full) == 1
    assert share_found(full, beams([8, 2], [10, 4])) == pytest.approx(2 / 3)
    assert share_found(full, beams([6, 0], [9, 3])) == 0
    assert share_found(full, beams([0], [0])) == 0
