from __future__ import annotations

import tempfile
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genius_search.search import table
from genius_search.search import table as chunks
from genius_search.search import table as keys
from genius_search.search import table as merge
from genius_search.search.table import IdTable, Source, TableWriter, merge_tables


class Part(NamedTuple):
    codes: np.ndarray
    typicality: np.ndarray
    alive: np.ndarray | None


@st.composite
def parts(draw) -> list[Part]:
    """Tables that share IDs and typicalities, some empty, some all dead."""
    levels = draw(st.integers(1, 3))
    largest = draw(st.sampled_from([0, 1, 3, table.LARGEST_CODE]))
    code = st.sampled_from(sorted({0, 1, largest // 2, largest}))
    drawn = []
    for _ in range(draw(st.integers(1, 4))):
        items = draw(st.integers(0, 12))
        rows = draw(
            st.lists(st.lists(code, min_size=levels, max_size=levels), min_size=items, max_size=items)
        )
        typicality = draw(st.lists(st.sampled_from([-0.5, 0.0, 1.0]), min_size=items, max_size=items))
        alive = draw(st.none() | st.lists(st.booleans(), min_size=items, max_size=items))
        drawn.append(
            Part(
                np.array(rows, dtype=np.int16).reshape(items, levels),
                np.array(typicality, dtype=np.float16),
                None if alive is None else np.array(alive, dtype=bool),
            )
        )
    return drawn


def what_a_plain_list_says(codes: np.ndarray, typicality: np.ndarray) -> list[tuple[list[int], list[int]]]:
    """IDs in order, each with its items."""
    order = sorted(range(len(codes)), key=lambda item: (codes[item].tolist(), -typicality[item], item))
    return [(id_, list(items)) for id_, items in groupby(order, key=lambda item: codes[item].tolist())]


def contents(built: IdTable) -> list[tuple[list[int], list[int]]]:
    return [(built.ids[row].tolist(), built.bucket(row).tolist()) for row in range(len(built))]


def arrays(built: IdTable) -> list[np.ndarray]:
    return [built.ids, built.starts, built.level_bounds, built.bucket_starts, built.items]


def same(one: IdTable, other: IdTable) -> bool:
    return all(
        left.dtype == right.dtype and np.array_equal(left, right)
        for left, right in zip(arrays(one), arrays(other), strict=True)
    )


@settings(max_examples=80)
@given(parts(), st.sampled_from([1, 400, 2_000, 1 << 20]), st.sampled_from([1, 2, 5, 1 << 16]))
def test_merging_equals_building_from_all_living_items_in_any_budget(drawn, memory_bytes, piece):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for module in (keys, table, chunks, merge):
            patch.setattr(module, "PIECE", piece)
        merged = merge_tables(
            [Source(IdTable.build(one.codes, one.typicality), one.typicality, one.alive) for one in drawn],
            Path(folder),
            memory_bytes=memory_bytes,
        )
        alive = [np.ones(len(one.codes), dtype=bool) if one.alive is None else one.alive for one in drawn]
        codes = np.concatenate([one.codes[kept] for one, kept in zip(drawn, alive, strict=True)])
        typicality = np.concatenate([one.typicality[kept] for one, kept in zip(drawn, alive, strict=True)])
        assert contents(merged) == what_a_plain_list_says(codes, typicality)
        assert same(merged, IdTable.build(codes, typicality))
        assert {path.name for path in Path(folder).iterdir()} == {
            f"{name}.npy" for name in ("ids", "starts", "level_bounds", "bucket_starts", "items")
        }


@settings(max_examples=40)
@given(parts(), st.sampled_from([400, 2_000, 1 << 20]))
def test_a_table_written_in_parts_equals_the_one_built_at_once(drawn, memory_bytes):
    with tempfile.TemporaryDirectory() as folder:
        writer = TableWriter(Path(folder), levels=drawn[0].codes.shape[1], memory_bytes=memory_bytes)
        for one in drawn:
            writer.add(one.codes, one.typicality)
        written = writer.finish()
        codes = np.concatenate([one.codes for one in drawn])
        typicality = np.concatenate([one.typicality for one in drawn])
        assert same(written, IdTable.build(codes, typicality))
        assert not any(path.is_dir() for path in Path(folder).iterdir())


@settings(max_examples=40)
@given(parts())
def test_a_table_of_many_rows_numbers_them_with_eight_bytes_and_says_the_same(drawn):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        small = IdTable.build(drawn[0].codes, drawn[0].typicality)
        patch.setattr(table, "MOST_SMALL_ROWS", -1)
        large = IdTable.build(drawn[0].codes, drawn[0].typicality)
        merged = merge_tables([Source(small, drawn[0].typicality, None)], Path(folder), memory_bytes=1_000)
        assert same(large, merged)
        assert large.starts.dtype == large.bucket_starts.dtype == large.items.dtype == np.int64
        assert contents(large) == contents(small)
        low, high = np.array([0]), np.array([len(small)])
        for level in range(small.num_levels):
            asked, expected = large.children(level, low, high), small.children(level, low, high)
            assert all(np.array_equal(one, other) for one, other in zip(asked, expected, strict=True))
            low, high = asked.low, asked.high


@given(parts(), st.sampled_from([1, 3, 1 << 16]), st.sampled_from([np.float16, np.float32, np.float64]))
def test_items_are_sorted_like_tuples_whatever_the_type_of_their_typicality(drawn, piece, kind):
    codes = np.concatenate([one.codes for one in drawn])
    typicality = np.concatenate([one.typicality for one in drawn]).astype(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "PIECE", piece)
        order = keys.sorted_order(codes, typicality).tolist()
    assert order == sorted(
        range(len(codes)), key=lambda item: (codes[item].tolist(), -typicality[item], item)
    )
