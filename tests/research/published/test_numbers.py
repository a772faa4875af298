import numpy as np

from genius_search.data.mbeir import PAPER_ROWS
from research.published.numbers import (
    RESULTS,
    SIZES,
    UNION_SIZE,
    references,
)


def test_every_average_is_the_mean_of_its_rows():
    rows = RESULTS.dropna()
    assert len(rows) == 16
    np.testing.assert_allclose(rows[list(PAPER_ROWS)].mean(axis=1), rows["average"], atol=0.006)


def test_the_rows_are_m_beirs_and_the_union_is_all_of_them():
    assert tuple(SIZES) == PAPER_ROWS
    assert sum(size.pool for size in SIZES.values()) == UNION_SIZE
    assert sum(size.queries for size in SIZES.values()) == 190_573


def test_released_weights_come_first_among_the_references():
    found = references("mscoco_task3", "local", "exact-raw")
    assert [(one.weights, one.value) for one in found] == [("released", 92.02), ("paper", 92.3)]
    assert [one.weights for one in references("mscoco_task3", "local", "generative")] == ["paper"]
    assert [one.value for one in references("mscoco_task3", "global", "generative+raw")] == [90.7, 90.6]
    assert references("mscoco_task3", "local", "exact-codes") == []
    assert references("catalogue_task3", "local", "exact-raw") == []
