from __future__ import annotations

from itertools import groupby

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from genius_search.search.table import Allowed, IdTable


@st.composite
def coded_items(draw) -> tuple[np.ndarray, np.ndarray]:
    """Codes of few values, so that prefixes and whole IDs are shared often; typicalities with ties."""
    items = draw(st.integers(1, 40))
    levels = draw(st.integers(1, 4))
    code = st.integers(0, draw(st.integers(0, 4)))
    rows = draw(
        st.lists(st.lists(code, min_size=levels, max_size=levels), min_size=items, max_size=items)
    )
    code_cosine = draw(
        st.lists(st.sampled_from([-0.5, 0.0, 0.25, 1.0]), min_size=items, max_size=items)
    )
    return np.array(rows, dtype=np.int64), np.array(code_cosine, dtype=np.float32)


def rows_that_begin_with(ids: list[tuple[int, ...]], prefix: tuple[int, ...]) -> list[int]:
    return [row for row, id_ in enumerate(ids) if id_[: len(prefix)] == prefix]


@given(coded_items(), st.data())
def test_prefixes_may_come_in_any_order_repeated_and_with_empty_ranges_between(drawn, data):
    codes, code_cosine = drawn
    table = IdTable.build(codes, code_cosine)
    level = data.draw(st.integers(0, codes.shape[1] - 1))
    ids = [tuple(row) for row in table.ids.tolist()]
    prefixes = [None, *sorted({id_[:level] for id_ in ids})]
    asked = data.draw(st.lists(st.sampled_from(prefixes), max_size=6))
    ranges = [[] if prefix is None else rows_that_begin_with(ids, prefix) for prefix in asked]
    low = np.array([rows[0] if rows else 0 for rows in ranges], dtype=np.int64)
    high = np.array([rows[-1] + 1 if rows else 0 for rows in ranges], dtype=np.int64)
    children = table.children(level, low, high)
    for place, rows in enumerate(ranges):
        own = children.parent == place
        assert children.code[own].tolist() == sorted({ids[row][level] for row in rows})
        covered = [
            row
            for first, last in zip(children.low[own], children.high[own], strict=True)
            for row in range(first, last)
        ]
        assert covered == rows


@given(coded_items(), st.data())
def test_ids_are_allowed_if_one_of_their_items_is(drawn, data):
    table = IdTable.build(*drawn)
    items = np.array(
        data.draw(st.lists(st.booleans(), min_size=table.num_items, max_size=table.num_items))
    )
    allowed = Allowed.of(table, items)
    _, rows = allowed.ids.inside(np.array([0]), np.array([len(table)]))
    bounds = table.bucket_starts.tolist()
    ids = [
        row for row in range(len(table)) if items[table.items[bounds[row] : bounds[row + 1]]].any()
    ]
    assert rows.tolist() == ids


ARRAYS = ("ids", "starts", "level_bounds", "bucket_starts", "items")


@st.composite
def pools(draw) -> tuple[np.ndarray, np.ndarray]:
    """Codes and code cosines of items that share both often; sometimes of no item."""
    levels = draw(st.integers(1, 3))
    largest = draw(st.sampled_from([0, 1, 3, 32_767]))
    code = st.sampled_from(sorted({0, 1, largest // 2, largest}))
    items = draw(st.integers(0, 30))
    rows = draw(
        st.lists(st.lists(code, min_size=levels, max_size=levels), min_size=items, max_size=items)
    )
    code_cosine = draw(st.lists(st.sampled_from([-0.5, 0.0, 1.0]), min_size=items, max_size=items))
    kind = draw(st.sampled_from([np.float16, np.float32, np.float64]))
    return np.array(rows, dtype=np.int16).reshape(items, levels), np.array(code_cosine, dtype=kind)


def contents(built: IdTable) -> list[tuple[list[int], list[int]]]:
    owner, items = built.buckets(np.arange(len(built)))
    return [(built.ids[row].tolist(), items[owner == row].tolist()) for row in range(len(built))]


@given(pools())
def test_ids_and_their_items_are_sorted_like_tuples(pool):
    codes, code_cosine = pool
    order = sorted(
        range(len(codes)), key=lambda item: (codes[item].tolist(), -code_cosine[item], item)
    )
    expected = [
        (id_, list(items)) for id_, items in groupby(order, key=lambda item: codes[item].tolist())
    ]
    assert contents(IdTable.build(codes, code_cosine)) == expected


@given(pools(), st.data())
def test_a_table_built_again_from_some_of_its_items_equals_the_one_built_from_them(pool, data):
    codes, code_cosine = pool
    alive = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(codes), max_size=len(codes))), dtype=bool
    )
    built = IdTable.build(codes, code_cosine)
    again = IdTable.build(built.ids[built.rows_of_items][alive], code_cosine[alive])
    expected = IdTable.build(codes[alive], code_cosine[alive])
    for name in ARRAYS:
        assert np.array_equal(getattr(again, name), getattr(expected, name))
