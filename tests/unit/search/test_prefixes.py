from __future__ import annotations

import numpy as np
import pytest

from genius_search.search.table import Allowed, IdTable, Part, children_in_parts, count_ids


def part_of(ids: list[tuple[int, ...]]) -> Part:
    codes = np.array(ids, dtype=np.int64).reshape(len(ids), -1 if ids else 2)
    return Part(IdTable.build(codes, np.zeros(len(ids), dtype=np.float32)))


FIRST = [(0, 1), (0, 4), (2, 0)]
SECOND = [(0, 4), (1, 1), (2, 3)]


def roots(parts: list[Part]) -> tuple[np.ndarray, np.ndarray]:
    high = np.array([[len(part.table) for part in parts]])
    return np.zeros_like(high), high


def test_parts_continue_a_prefix_together_each_with_its_own_rows():
    parts = [part_of(FIRST), part_of(SECOND)]
    level0 = children_in_parts(parts, 0, *roots(parts))
    assert level0.parent.tolist() == [0, 0, 0]
    assert level0.code.tolist() == [0, 1, 2]
    assert (level0.high - level0.low).tolist() == [[2, 1], [0, 1], [1, 1]]
    level1 = children_in_parts(parts, 1, level0.low, level0.high)
    assert list(zip(level1.parent.tolist(), level1.code.tolist(), strict=True)) == [
        (0, 1),
        (0, 4),
        (1, 1),
        (2, 0),
        (2, 3),
    ]
    assert (level1.high - level1.low).tolist() == [[1, 0], [1, 1], [0, 1], [1, 0], [0, 1]]
    assert [parts[0].table.ids[low].tolist() for low, _ in level1.low[[0, 1, 3]]] == [
        list(id_) for id_ in FIRST
    ]
    assert [parts[1].table.ids[low].tolist() for _, low in level1.low[[1, 2, 4]]] == [
        list(id_) for id_ in SECOND
    ]


@pytest.mark.parametrize("ids", [[FIRST], [FIRST, FIRST], [FIRST, []], [[], FIRST, []]])
def test_parts_that_add_nothing_change_nothing(ids):
    parts = [part_of(own) for own in ids]
    alone = children_in_parts([part_of(FIRST)], 0, *roots([part_of(FIRST)]))
    together = children_in_parts(parts, 0, *roots(parts))
    assert together.parent.tolist() == alone.parent.tolist()
    assert together.code.tolist() == alone.code.tolist()


def test_prefixes_that_are_empty_in_every_part_have_no_continuations():
    parts = [part_of(FIRST), part_of([])]
    nothing = np.zeros((3, 2), dtype=np.int64)
    found = children_in_parts(parts, 1, nothing, nothing)
    assert (found.parent.tolist(), found.low.shape) == ([], (0, 2))


def test_ids_are_counted_under_the_restriction_of_the_query_that_asks():
    parts = [part_of(FIRST), part_of(SECOND)]
    level0 = children_in_parts(parts, 0, *roots(parts))
    low, high = np.tile(level0.low, (3, 1)), np.tile(level0.high, (3, 1))
    first = Allowed.of(parts[0].table, np.array([True, False, False]))
    restrictions = [None, (first, None), (first, Allowed.of(parts[1].table, np.zeros(3, dtype=bool)))]
    owner = np.repeat([2, 0, 1], 3)
    assert count_ids(low, high, restrictions, owner).tolist() == [1, 0, 0, 3, 1, 2, 2, 1, 1]
    assert count_ids(low[:3], high[:3], [], owner[:3]).tolist() == [3, 1, 2]
