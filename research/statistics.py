"""Paired tests, which tell differences from chance."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from scipy import stats

from research.table import Estimate

RESAMPLES: Final = 9_999
"""Permutations of a test; the smallest p is one in this many."""
BATCH: Final = 200
"""Resamples held in memory together."""

PerQuery: TypeAlias = "pd.Series[float]"
"""A measure of each query; the index has two levels, the task and the query."""


class Comparison(NamedTuple):
    """One system against another on the same queries."""

    difference: float
    """Of the means over tasks."""
    p: float
    """Two-sided: how often random signs would make a difference as large."""
    better: int
    worse: int
    """Queries that the first answers better, or worse."""


class Pair(NamedTuple):
    """Two systems to compare, by their values of one measure."""

    first: str
    second: str
    measure: str
    queries: tuple[PerQuery, PerQuery]


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and, for several seeds, their standard deviation."""
    return Estimate(mean(values), stdev(values) if len(values) > 1 else None)


def compare(first: PerQuery, second: PerQuery) -> Comparison:
    """Run Fisher's paired randomisation test, of two systems that answered the same queries."""
    differences = first - second
    sizes = differences.groupby(level=0).transform("size")
    # Weighted so that their sum is the difference of the means over tasks.
    weighted = (differences / (sizes * differences.index.get_level_values(0).nunique())).to_numpy()
    changed = weighted[weighted != 0]
    p = 1.0  # of a single query that changed, too: its sign could have been the other
    if len(changed) > 1:
        p = stats.permutation_test(
            (changed, np.zeros_like(changed)),
            lambda x, y, axis: np.sum(x - y, axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=RESAMPLES,
            batch=BATCH,
            rng=np.random.default_rng(0),
        ).pvalue
    better, worse = int(np.sum(weighted > 0)), int(np.sum(weighted < 0))
    return Comparison(float(weighted.sum()), float(p), better, worse)


def compare_all(pairs: Sequence[Pair]) -> list[Comparison | None]:
    """Compare every pair, p corrected by Holm over all; None where the two answered different queries."""
    found = [
        compare(first, second) if set(first.index) == set(second.index) else None
        for first, second in (pair.queries for pair in pairs)
    ]
    corrected = iter(holm([one.p for one in found if one is not None]))
    return [None if one is None else one._replace(p=next(corrected)) for one in found]


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979): below 0.05 any of them is rarely a false alarm.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(values, kind="stable")
    scaled = np.minimum(1.0, np.array(values)[order] * np.arange(len(values), 0, -1))
    adjusted = np.empty(len(values))
    adjusted[order] = np.maximum.accumulate(scaled)
    return [float(p) for p in adjusted]
