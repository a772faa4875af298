from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from genius_search.errors import BadData
from genius_search.search.table import RUNS, IdTable, Source, TableWriter, merge_tables


def source(items: int, *, levels: int = 3, seed: int = 0, largest: int = 50) -> Source:
    random = np.random.default_rng(seed)
    codes = random.integers(0, largest + 1, (items, levels)).astype(np.int16)
    typicality = random.random(items).astype(np.float16)
    return Source(IdTable.build(codes, typicality), typicality, None)


def ids_by_item(table: IdTable) -> np.ndarray:
    buckets = table.buckets(np.arange(len(table)))
    assert sorted(buckets.items.tolist()) == list(range(table.num_items))
    return table.ids[buckets.owner[buckets.items.argsort()]]


def test_a_single_item_is_merged(tmp_path):
    merged = merge_tables([source(1)], tmp_path, memory_bytes=1)
    assert (len(merged), merged.bucket(0).tolist()) == (1, [0])


def test_when_every_item_is_dead_the_table_is_empty(tmp_path):
    dead = source(30)._replace(alive=np.zeros(30, dtype=bool))
    merged = merge_tables([dead, source(0), dead], tmp_path, memory_bytes=500)
    assert (len(merged), merged.num_items, merged.num_levels) == (0, 0, 3)


def test_hundreds_of_items_are_numbered_anew_without_the_dead_ones(tmp_path):
    alive = np.random.default_rng(1).random(500) < 0.6
    one, other = source(500), source(40, seed=1)
    merged = merge_tables([one._replace(alive=alive), other], tmp_path, memory_bytes=10_000)
    expected = np.concatenate([ids_by_item(one.table)[alive], ids_by_item(other.table)])
    assert np.array_equal(ids_by_item(merged), expected)


def test_items_that_all_share_one_id_are_merged_in_order_of_typicality_in_little_memory(tmp_path):
    sources = [source(200, largest=0, seed=seed) for seed in range(3)]
    merged = merge_tables(sources, tmp_path, memory_bytes=3_000)
    typicality = np.concatenate([one.typicality for one in sources]).tolist()
    assert merged.bucket(0).tolist() == sorted(range(600), key=lambda item: (-typicality[item], item))


@pytest.mark.parametrize("largest", [0, 1, 4095])
def test_merging_and_writing_keep_to_their_memory(tmp_path, largest):
    """Whether all IDs are equal, or many, or none: each makes other parts of sorting large."""
    budget = 4_000_000
    random = np.random.default_rng(0)
    codes = random.integers(0, largest + 1, (200_000, 9)).astype(np.int16)
    typicality = random.random(len(codes)).astype(np.float16)
    sources = []
    for number, rows in enumerate(np.array_split(np.arange(len(codes)), 3)):
        IdTable.build(codes[rows], typicality[rows]).save(tmp_path / f"{number}")
        sources.append(Source(IdTable.open(tmp_path / f"{number}"), typicality[rows], None))
    tracemalloc.start()
    merge_tables(sources, tmp_path / "merged", memory_bytes=budget)
    merging = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    writer = TableWriter(tmp_path / "written", levels=9, memory_bytes=budget)
    for start in range(0, len(codes), 10_000):
        writer.add(codes[start : start + 10_000], typicality[start : start + 10_000])
    writer.finish()
    writing = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (merging < budget, writing < budget) == (True, True), (merging, writing)


def test_the_leftovers_of_a_killed_writer_are_not_part_of_the_next_table(tmp_path):
    killed = TableWriter(tmp_path, levels=2, memory_bytes=1)
    killed.add(np.ones((5, 2), dtype=np.int16), np.zeros(5, dtype=np.float16))
    assert any((tmp_path / RUNS).iterdir())
    writer = TableWriter(tmp_path, levels=2, memory_bytes=1)
    writer.add(np.array([[7, 7], [2, 2]]), np.zeros(2, dtype=np.float16))
    assert writer.finish().ids.tolist() == [[2, 2], [7, 7]]
    assert not (tmp_path / RUNS).exists()


def test_a_code_out_of_range_is_named_by_its_row_among_all_that_were_added(tmp_path):
    writer = TableWriter(tmp_path, levels=1, memory_bytes=1)
    writer.add(np.zeros((10, 1), dtype=np.int64), np.zeros(10, dtype=np.float16))
    with pytest.raises(BadData, match="item row 12 has code -4 at level 0"):
        writer.add(np.array([[1], [1], [-4]]), np.zeros(3, dtype=np.float16))
    with pytest.raises(BadData, match="2 codes, the table is of 1 levels"):
        writer.add(np.zeros((1, 2), dtype=np.int64), np.zeros(1, dtype=np.float16))


def odd_sources() -> list[tuple[list[Source], str]]:
    return [
        ([], "no table to merge"),
        ([source(2), source(2, levels=4)], r"\[3, 4\] levels"),
        (
            [source(2)._replace(typicality=np.zeros(3, dtype=np.float16))],
            "2 items and 3 values of typicality",
        ),
        (
            [source(1), source(2)._replace(alive=np.ones(1, dtype=bool))],
            "table 1 has 2 items and 1 values of alive",
        ),
    ]


@pytest.mark.parametrize(("sources", "message"), odd_sources())
def test_tables_that_do_not_fit_together_are_refused(tmp_path: Path, sources, message):
    with pytest.raises(BadData, match=message):
        merge_tables(sources, tmp_path, memory_bytes=1_000)
