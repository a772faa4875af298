from __future__ import annotations

import numpy as np
import pytest

from genius_search.search.table import PIECE, descending_bits, sorted_order


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_the_bits_of_a_typicality_fall_as_it_grows(kind):
    rising = np.array([-np.inf, -3.5, -1.0, -1e-7, 0.0, 1e-7, 0.25, 1.0, 60_000.0, np.inf], dtype=kind)
    bits = descending_bits(rising)
    assert bits.itemsize == rising.itemsize
    assert (bits[1:] < bits[:-1]).all()
    zero, minus_zero, unknown = descending_bits(np.array([0.0, -0.0, np.nan], dtype=kind))
    assert zero == minus_zero
    assert unknown == bits[0]


@pytest.mark.parametrize("largest", [0, 1, 5, 4095])
@pytest.mark.parametrize("shared", [0, 4, 9])
def test_many_items_with_long_runs_are_sorted_like_numpy_sorts_them(largest, shared):
    """More than two pieces; the first ``shared`` codes of all are equal, and every third item is a copy."""
    random = np.random.default_rng(largest)
    codes = random.integers(0, largest + 1, (2 * PIECE + 7, 9)).astype(np.int16)
    codes[:, :shared] = codes[0, :shared]
    codes[::3] = codes[random.integers(0, len(codes), len(codes[::3]))]
    typicality = random.integers(0, 50, len(codes)).astype(np.float16)
    expected = np.lexsort([-typicality, *codes.T[::-1]])
    assert np.array_equal(sorted_order(codes, typicality), expected)


def test_nothing_and_one_item_are_sorted():
    assert sorted_order(np.zeros((0, 3), dtype=np.int16), np.zeros(0, dtype=np.float16)).tolist() == []
    assert sorted_order(np.ones((1, 3), dtype=np.int16), np.zeros(1, dtype=np.float16)).tolist() == [0]
