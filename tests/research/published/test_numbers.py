import math

import pytest

from genius_search.data.mbeir import PAPER_ROWS
from research.published.numbers import (
    CAPTION_RESULTS,
    MISPRINTS,
    RESULTS,
    SIZES,
    UNION_SIZE,
    expected_size,
    references,
)


@pytest.mark.parametrize("result", [one for one in RESULTS if one.rows], ids=lambda one: one.system)
def test_every_average_is_the_mean_of_its_rows(result):
    assert len(result.rows) == len(PAPER_ROWS)
    assert math.fsum(result.rows) / len(PAPER_ROWS) == pytest.approx(result.average, abs=0.006)


def test_the_rows_are_m_beirs_and_the_union_is_all_of_them():
    assert tuple(SIZES) == PAPER_ROWS
    assert sum(size.pool for size in SIZES.values()) == UNION_SIZE
    assert sum(size.queries for size in SIZES.values()) == 190_573


@pytest.mark.parametrize("misprint", MISPRINTS, ids=str)
def test_the_right_number_is_kept_and_the_misprint_is_noted(misprint):
    found = [
        one
        for one in RESULTS
        if (one.system, one.pool, one.weights) == (misprint.system, misprint.pool, misprint.weights)
    ]
    (result,) = found
    assert result.value(misprint.row) == misprint.right != misprint.printed
    assert str(misprint.printed) in result.misprint(misprint.row)


def test_released_weights_come_first_among_the_references():
    found = references("mscoco_task3", "local", "exact-raw")
    assert [(one.weights, one.value) for one in found] == [("released", 92.02), ("paper", 92.3)]
    assert [one.weights for one in references("mscoco_task3", "local", "generative")] == ["paper"]
    assert [one.value for one in references("mscoco_task3", "global", "generative+raw")] == [90.7, 90.6]
    assert references("mscoco_task3", "local", "exact-codes") == []
    assert references("catalogue_task3", "local", "exact-raw") == []


def test_sizes_are_those_of_the_rows_own_pool_and_of_the_union():
    assert expected_size("cirr_task7", "local") == (4_170, 21_551)
    assert expected_size("cirr_task7", "global") == (4_170, UNION_SIZE)
    assert expected_size("catalogue_task7", "local") is None


def test_recall_grows_with_rank_in_every_caption_result():
    for one in CAPTION_RESULTS:
        assert list(one.recalls) == sorted(one.recalls)
