import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from research.statistics import (
    compare,
    estimate,
    holm,
    interval,
    mean_of_seeds,
    mean_of_tasks,
)


def queries(values) -> dict[str, float]:
    return {f"1:{number}": float(value) for number, value in enumerate(values)}


def test_the_interval_of_a_share_is_that_of_the_normal_approximation():
    right = [1.0] * 300 + [0.0] * 100
    low, high = interval({"task": queries(right)})
    error = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    assert low == pytest.approx(0.75 - error, abs=0.006)
    assert high == pytest.approx(0.75 + error, abs=0.006)


def test_tasks_count_the_same_and_are_drawn_apart():
    values = {"large": queries([1.0] * 300), "small": queries([0.0, 1.0] * 10)}
    assert mean_of_tasks(values) == pytest.approx(0.75)
    low, high = interval(values)
    # All the uncertainty is that of the small task, halved: 1.96 * 0.5 / sqrt(20) / 2.
    assert (high - low) / 2 == pytest.approx(0.5 * 1.96 * 0.5 / np.sqrt(20), abs=0.03)


def test_a_task_of_one_query_is_that_query_however_it_is_drawn():
    alone = {"large": queries([0.0, 1.0] * 50), "single": queries([1.0])}
    low, high = interval(alone)
    low_without, high_without = interval({"large": alone["large"]})
    assert (low, high) == pytest.approx(((low_without + 1) / 2, (high_without + 1) / 2), abs=0.02)


def test_what_never_differs_has_no_width():
    assert interval({"task": queries([1.0] * 5)}) == (1.0, 1.0)


def test_answers_that_are_right_or_wrong_are_compared_as_by_scipys_sign_test():
    random = np.random.default_rng(3)
    first, second = random.random(400) < 0.60, random.random(400) < 0.52
    found = compare({"task": queries(first)}, {"task": queries(second)})
    assert found.difference == pytest.approx(np.mean(first) - np.mean(second))
    assert found.better == np.sum(first & ~second)
    assert found.worse == np.sum(second & ~first)
    assert found.p == pytest.approx(
        stats.binomtest(found.better, found.better + found.worse).pvalue, abs=0.015
    )


def test_two_systems_that_agree_are_not_different_and_one_query_proves_nothing():
    same = {"task": queries([1.0, 0.0, 1.0])}
    assert compare(same, same).p == 1.0
    assert compare(same, {"task": queries([1.0, 0.0, 0.0])}).p == 1.0


def test_seeds_are_averaged_query_by_query():
    seeds = [{"task": {"1:1": 1.0, "1:2": 0.0}}, {"task": {"1:1": 0.0, "1:2": 0.0}}]
    assert mean_of_seeds(seeds) == {"task": {"1:1": 0.5, "1:2": 0.0}}
    assert estimate([1.0, 3.0]).sd == pytest.approx(np.sqrt(2))
    assert estimate([1.0]).sd is None


def test_holm_multiplies_the_smallest_most():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


@given(st.lists(st.floats(0, 1), max_size=20))
def test_holm_keeps_the_order_and_lowers_nothing(values):
    adjusted = holm(values)
    assert all(a >= p and a <= 1 for a, p in zip(adjusted, values, strict=True))
    order = np.argsort(values, kind="stable")
    assert list(np.array(adjusted)[order]) == sorted(adjusted)
