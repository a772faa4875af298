from __future__ import annotations

import numpy as np
import pytest

from genius.errors import BadData
from genius.search.table import LARGEST_CODE, IdTable


def table_of(codes: list[list[int]], typicality: list[float] | None = None) -> IdTable:
    return IdTable.build(
        np.array(codes, dtype=np.int64),
        np.array(typicality or [0.0] * len(codes), dtype=np.float32),
    )


def test_one_item_is_a_table_of_one_id():
    table = table_of([[2, 0, 7]])
    assert (len(table), table.num_levels, table.num_items, table.nbytes) == (1, 3, 1, 6)
    children = table.children(1, np.array([0]), np.array([1]))
    assert [part.tolist() for part in children] == [[0], [0], [0], [1]]
    assert table.bucket(0).tolist() == [0]


def test_items_that_all_share_one_id_are_one_bucket_by_typicality_then_by_row():
    table = table_of([[1, 1]] * 4, [0.1, 0.9, 0.1, 0.5])
    assert len(table) == 1
    assert table.bucket(0).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("code", [-1, LARGEST_CODE + 1])
def test_a_code_out_of_range_is_refused_and_the_range_is_named(code):
    with pytest.raises(BadData, match=f"0 … {LARGEST_CODE}"):
        table_of([[0, code]])


def test_the_largest_code_is_kept():
    assert table_of([[LARGEST_CODE]]).ids.tolist() == [[LARGEST_CODE]]


def test_a_table_of_nothing_has_no_children():
    table = IdTable.build(np.zeros((0, 2), dtype=np.int64), np.zeros(0, dtype=np.float32))
    children = table.children(0, np.array([0]), np.array([0]))
    assert len(table) == table.num_items == 0
    assert all(len(part) == 0 for part in children)
