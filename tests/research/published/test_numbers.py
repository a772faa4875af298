import numpy as np

from research.published.numbers import (
    RESULTS,
    SIZES,
    UNION_SIZE,
)


def test_every_average_is_the_mean_of_its_rows():
    rows = RESULTS.dropna()
    assert len(rows) == 16
    np.testing.assert_allclose(rows[[*SIZES]].mean(axis=1), rows["average"], atol=0.006)


def test_the_rows_are_m_beirs_and_the_union_is_all_of_them():
    assert sum(size.pool for size in SIZES.values()) == UNION_SIZE
    assert sum(size.queries for size in SIZES.values()) == 190_573
