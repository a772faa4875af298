"""Published numbers agree with one another."""

import numpy as np

from research.published.numbers import RESULTS, SIZES, UNION_SIZE


def test_every_average_is_the_mean_of_its_rows():
    rows = RESULTS.dropna()
    assert len(rows) == 16
    np.testing.assert_allclose(rows[[*SIZES]].mean(axis=1), rows["average"], atol=0.006)


def test_the_union_has_the_size_of_all_local_pools():
    assert sum(size.pool for size in SIZES.values()) == UNION_SIZE
    assert sum(size.queries for size in SIZES.values()) == 190_573
