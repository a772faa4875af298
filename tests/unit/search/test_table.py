from __future__ import annotations

import numpy as np
import pytest

from genius_search.index.writer import save_table
from genius_search.search.table import IdTable, RankedBits


def table_of(codes: list[list[int]], code_cosine: list[float] | None = None) -> IdTable:
    return IdTable.build(
        np.array(codes, dtype=np.int64),
        np.array(code_cosine or [0.0] * len(codes), dtype=np.float32),
    )


def random_table(items: int, levels: int = 9) -> IdTable:
    random = np.random.default_rng(0)
    codes = random.integers(0, 40, (items, levels)).astype(np.int16)
    return IdTable.build(codes, random.random(items).astype(np.float16))


def items_of(table: IdTable, row: int) -> list[int]:
    return table.buckets(np.array([row])).row.tolist()


def test_items_that_share_an_id_are_one_bucket_by_code_cosine_then_by_row_and_unknown_ones_come_last():
    table = table_of([[1, 1]] * 5, [float("nan"), 0.0, -0.0, -3.0, 0.0])
    assert len(table) == 1
    assert items_of(table, 0) == [1, 2, 4, 3, 0]


def test_a_code_takes_a_byte_and_the_place_of_an_id_four(tmp_path):
    table = random_table(2_000)
    save_table(table, tmp_path)
    assert len(table) == 2_000
    assert table.nbytes == 13 * 2_000 - 4
    assert (
        sum((tmp_path / f"{name}.npy").stat().st_size for name in ("ids", "starts")) <= 14 * 2_000
    )


@pytest.mark.parametrize(("largest", "size"), [(255, 1), (256, 2), (32_767, 2)])
def test_a_code_beyond_255_makes_the_codes_of_its_table_two_bytes(largest, size):
    table = table_of([[0, largest], [1, 3]])
    assert table.ids.itemsize == size
    assert table.ids.tolist() == [[0, largest], [1, 3]]
    assert table.children(1, np.array([0]), np.array([1])).code.tolist() == [largest]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 129, 1000])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
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


@pytest.mark.parametrize("length", [1, 64, 65, 1000])
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_rows_of_ranges_are_listed_in_the_order_of_the_ranges(length, share):
    random = np.random.default_rng(length)
    mask = random.random(length) < share
    low, high = np.sort(random.integers(0, length + 1, (2, 30)), axis=0)
    found = RankedBits(mask).inside(low, high)
    ranges = list(enumerate(zip(low.tolist(), high.tolist(), strict=True)))
    assert list(zip(*map(np.ndarray.tolist, found), strict=True)) == [
        (owner, row) for owner, (first, last) in ranges for row in range(first, last) if mask[row]
    ]
