"""A table is what sorting plain tuples gives, whatever the types; merging tables equals building one."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genius_search.search import table
from genius_search.search.table import LARGEST_CODE, IdTable

ARRAYS = ("ids", "starts", "level_bounds", "bucket_starts", "items")


@st.composite
def pools(draw) -> tuple[np.ndarray, np.ndarray]:
    """Codes and typicality of items that share both often; sometimes of no item."""
    levels = draw(st.integers(1, 3))
    largest = draw(st.sampled_from([0, 1, 3, LARGEST_CODE]))
    code = st.sampled_from(sorted({0, 1, largest // 2, largest}))
    items = draw(st.integers(0, 30))
    rows = draw(st.lists(st.lists(code, min_size=levels, max_size=levels), min_size=items, max_size=items))
    typicality = draw(st.lists(st.sampled_from([-0.5, 0.0, 1.0]), min_size=items, max_size=items))
    kind = draw(st.sampled_from([np.float16, np.float32, np.float64]))
    return np.array(rows, dtype=np.int16).reshape(items, levels), np.array(typicality, dtype=kind)


def contents(built: IdTable) -> list[tuple[list[int], list[int]]]:
    return [(built.ids[row].tolist(), built.bucket(row).tolist()) for row in range(len(built))]


@settings(max_examples=80)
@given(pools())
def test_ids_and_their_items_are_sorted_like_tuples(pool):
    codes, typicality = pool
    order = sorted(range(len(codes)), key=lambda item: (codes[item].tolist(), -typicality[item], item))
    expected = [(id_, list(items)) for id_, items in groupby(order, key=lambda item: codes[item].tolist())]
    assert contents(IdTable.build(codes, typicality)) == expected


@settings(max_examples=80)
@given(pools(), st.data())
def test_a_table_built_again_from_some_of_its_items_equals_the_one_built_from_them(pool, data):
    codes, typicality = pool
    alive = np.array(data.draw(st.lists(st.booleans(), min_size=len(codes), max_size=len(codes))), dtype=bool)
    built = IdTable.build(codes, typicality)
    again = IdTable.build(built.ids[built.rows()][alive], typicality[alive])
    expected = IdTable.build(codes[alive], typicality[alive])
    for name in ARRAYS:
        assert np.array_equal(getattr(again, name), getattr(expected, name))


@settings(max_examples=40)
@given(pools())
def test_a_table_of_many_rows_numbers_them_with_eight_bytes_and_says_the_same(pool):
    small = IdTable.build(*pool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "MAX_INT32_ROWS", -1)
        large = IdTable.build(*pool)
    assert large.starts.dtype == large.bucket_starts.dtype == large.items.dtype == np.int64
    assert contents(large) == contents(small)
    low, high = np.array([0]), np.array([len(small)])
    for level in range(small.num_levels):
        found, expected = large.children(level, low, high), small.children(level, low, high)
        assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
        low, high = found.low, found.high
