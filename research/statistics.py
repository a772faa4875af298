"""Paired tests: whether a difference between two systems could be chance."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from scipy import stats

from research.table import Estimate

RESAMPLES: Final = 9_999
"""Random permutations of a test; the smallest possible p is 1 / (RESAMPLES + 1)."""
RESAMPLES_PER_BATCH: Final = 200
"""Permutations that are in memory at the same time."""

PerQuery: TypeAlias = "pd.Series[float]"
"""Values of a measure; the index has two levels, the task and the query."""


class Comparison(NamedTuple):
    """Result of a test of two systems on the same queries."""

    difference: float
    """Difference of the means over tasks."""
    p: float
    """Probability of at least this difference, in either direction, under random signs."""
    better: int
    """Number of queries that the first system answers better."""
    worse: int
    """Number of queries that the first system answers worse."""


class Pair(NamedTuple):
    """Two systems to compare by one measure."""

    first: str
    second: str
    measure: str
    queries: tuple[PerQuery, PerQuery]


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and, if there are several values, their standard deviation."""
    return Estimate(mean(values), stdev(values) if len(values) > 1 else None)


def compare(first: PerQuery, second: PerQuery) -> Comparison:
    """Run Fisher's paired randomisation test on two systems that answered the same queries."""
    differences = first - second
    sizes = differences.groupby(level=0).transform("size")
    # Weighted so that their sum is the difference of the means over tasks.
    weighted = (differences / (sizes * differences.index.get_level_values(0).nunique())).to_numpy()
    changed = weighted[weighted != 0]
    p = 1.0  # even if one query changed: its sign alone could be chance
    if len(changed) > 1:
        p = stats.permutation_test(
            (changed, np.zeros_like(changed)),
            lambda x, y, axis: np.sum(x - y, axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=RESAMPLES,
            batch=RESAMPLES_PER_BATCH,
            rng=np.random.default_rng(0),
        ).pvalue
    better, worse = int(np.sum(weighted > 0)), int(np.sum(weighted < 0))
    return Comparison(float(weighted.sum()), float(p), better, worse)


def compare_all(pairs: Sequence[Pair]) -> list[Comparison | None]:
    """Compare every pair and correct all p-values by Holm; None if a pair's queries differ."""
    comparisons = [
        compare(first, second) if set(first.index) == set(second.index) else None
        for first, second in (pair.queries for pair in pairs)
    ]
    corrected = iter(correct_by_holm([test.p for test in comparisons if test is not None]))
    return [None if test is None else test._replace(p=next(corrected)) for test in comparisons]


def correct_by_holm(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for the number of tests (Holm 1979).

    The probability that any corrected value is below 0.05 by chance is at most 0.05.

    >>> correct_by_holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(values, kind="stable")
    scaled = np.minimum(1.0, np.array(values)[order] * np.arange(len(values), 0, -1))
    adjusted = np.empty(len(values))
    adjusted[order] = np.maximum.accumulate(scaled)
    return [float(p) for p in adjusted]
