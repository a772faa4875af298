from __future__ import annotations

import numpy as np
import pytest

from genius_search.search.table import Allowed, IdTable, RankedBits, expand_ranges


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129, 1000])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_rows_of_a_range_are_counted_like_summing_the_mask(length, share):
    random = np.random.default_rng(length)
    mask = random.random(length) < share
    bits = RankedBits(mask)
    low, high = (
        np.triu_indices(length + 1)
        if length < 70
        else np.sort(random.integers(0, length + 1, (2, 500)), axis=0)
    )
    expected = [int(mask[first:last].sum()) for first, last in zip(low, high, strict=True)]
    assert bits.count(low, high).tolist() == expected


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_rows_of_ranges_are_listed_in_the_order_of_the_ranges(length, share):
    random = np.random.default_rng(length)
    mask = random.random(length) < share
    low, high = np.sort(random.integers(0, length + 1, (2, 30)), axis=0)
    found = RankedBits(mask).inside(low, high)
    every = expand_ranges(low, high)
    ranges = list(enumerate(zip(low.tolist(), high.tolist(), strict=True)))
    assert list(zip(*map(np.ndarray.tolist, every), strict=True)) == [
        (owner, row) for owner, (first, last) in ranges for row in range(first, last)
    ]
    assert list(zip(*map(np.ndarray.tolist, found), strict=True)) == [
        (owner, row) for owner, (first, last) in ranges for row in range(first, last) if mask[row]
    ]


def test_no_ranges_have_no_rows():
    none = np.zeros(0, dtype=np.int64)
    assert RankedBits(np.ones(70, dtype=bool)).inside(none, none).row.tolist() == []


def test_counts_have_the_shape_of_the_ranges_and_need_no_ranges_at_all():
    bits = RankedBits(np.ones(100, dtype=bool))
    low = np.array([[0, 64], [7, 100]])
    assert bits.count(low, low + np.array([[3, 30], [0, 0]])).tolist() == [[3, 30], [0, 0]]
    none = np.zeros(0, dtype=np.int64)
    assert bits.count(none, none).tolist() == []


def test_a_set_of_rows_takes_about_a_bit_and_a_half_a_row():
    assert RankedBits(np.ones(64_000, dtype=bool)).nbytes <= 64_064 * 1.5 / 8


def test_an_id_may_be_found_when_any_of_its_items_may():
    codes = np.array([[0, 1], [0, 0], [0, 1], [2, 1]])
    table = IdTable.build(codes, np.zeros(4, dtype=np.float32))
    for number in range(16):
        items = np.array([bool(number >> item & 1) for item in range(4)])
        allowed = Allowed.of(table, items)
        row = np.arange(3)
        by_id = allowed.ids.count(row, row + 1)
        assert by_id.tolist() == [items[1], items[0] or items[2], items[3]]
        assert (allowed.items == items).all()


def test_of_an_empty_table_nothing_may_be_found():
    table = IdTable.build(np.zeros((0, 2), dtype=np.int64), np.zeros(0, dtype=np.float32))
    allowed = Allowed.of(table, np.zeros(0, dtype=bool))
    assert allowed.ids.count(np.array([0]), np.array([0])).tolist() == [0]
