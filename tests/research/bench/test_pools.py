from __future__ import annotations

import itertools

import numpy as np
import pytest

from genius_search.errors import UsageError
from research.bench.pools import BLOCK, SyntheticPool

SIZES = (3, 64, 64, 64, 64)


def codes_of(**given) -> np.ndarray:
    return np.concatenate([block.codes for block in SyntheticPool(sizes=SIZES, **given).blocks()])


def test_a_pool_depends_on_nothing_but_its_seed():
    first = codes_of(items=500, seed=3)
    assert np.array_equal(first, codes_of(items=500, seed=3))
    assert not np.array_equal(first, codes_of(items=500, seed=4))


def test_a_small_pool_is_the_beginning_of_a_larger_one():
    larger = codes_of(items=BLOCK + 100)
    assert larger.shape == (BLOCK + 100, len(SIZES))
    assert np.array_equal(codes_of(items=700), larger[:700])


def test_every_code_of_a_level_occurs_and_no_other():
    codes = codes_of(items=BLOCK)
    for column, size in zip(codes.T, SIZES, strict=True):
        assert np.array_equal(np.unique(column), np.arange(size))


def test_a_skewed_pool_has_copies_near_duplicates_and_favourites_that_depend_on_the_prefix():
    codes = codes_of(items=BLOCK)
    long = (3, *[4096] * 8)
    (block,) = SyntheticPool(items=BLOCK, sizes=long).blocks()
    distinct = len(np.unique(block.codes, axis=0))
    without_ends = len(np.unique(block.codes[:, :-2], axis=0))
    assert 0.95 * BLOCK < distinct < 0.99 * BLOCK
    assert 0.80 * BLOCK < without_ends < 0.92 * BLOCK
    favourites = set()
    for first, second in itertools.product(range(3), range(4)):
        under = codes[(codes[:, 0] == first) & (codes[:, 1] == second), 2]
        counts = np.bincount(under, minlength=64)
        assert counts.max() > 5 * np.median(counts)
        favourites.add(int(counts.argmax()))
    assert len(favourites) > 4


def test_typicalities_are_cosines():
    (block,) = SyntheticPool(items=100, sizes=SIZES).blocks()
    assert block.code_cosine.dtype == np.float16
    assert ((block.code_cosine >= 0.5) & (block.code_cosine <= 1)).all()


@pytest.mark.parametrize(("items", "sizes"), [(0, (3,)), (5, ()), (5, (0, 3)), (5, (40_000,))])
def test_what_cannot_be_a_pool_is_refused(items, sizes):
    with pytest.raises(UsageError, match="expected"):
        SyntheticPool(items=items, sizes=sizes)
