import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from research.statistics import compare, correct_by_holm


def queries(values) -> pd.Series:
    index = pd.MultiIndex.from_product([["task"], [f"1:{number}" for number in range(len(values))]])
    return pd.Series(np.array(values, dtype=float), index=index)


def test_right_and_wrong_answers_are_compared_like_by_scipys_sign_test():
    random = np.random.default_rng(3)
    first, second = random.random(400) < 0.60, random.random(400) < 0.52
    comparison = compare(queries(first), queries(second))
    assert comparison.difference == pytest.approx(np.mean(first) - np.mean(second))
    better, worse = np.sum(first & ~second), np.sum(second & ~first)
    assert (comparison.better, comparison.worse) == (better, worse)
    expected = stats.binomtest(better, better + worse).pvalue
    assert comparison.p == pytest.approx(expected, abs=0.015)


def test_two_systems_that_agree_are_not_different_and_one_query_proves_nothing():
    same = queries([1.0, 0.0, 1.0])
    assert compare(same, same).p == 1.0
    assert compare(same, queries([1.0, 0.0, 0.0])).p == 1.0


@given(st.lists(st.floats(0, 1), max_size=20))
def test_holm_keeps_the_order_and_lowers_nothing(values):
    adjusted = correct_by_holm(values)
    assert all(a >= p and a <= 1 for a, p in zip(adjusted, values, strict=True))
    order = np.argsort(values, kind="stable")
    assert list(np.array(adjusted)[order]) == sorted(adjusted)
