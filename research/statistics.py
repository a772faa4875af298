"""Paired tests, which tell differences from chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Final, NamedTuple

import numpy as np
from scipy import stats

from genius_search.errors import BadData
from genius_search.evaluate import first_few
from research.table import Estimate

RESAMPLES: Final = 9_999
"""Permutations of a test; the smallest p is one in this many."""
BATCH: Final = 200
"""Resamples held in memory together."""

PerTask = Mapping[str, Mapping[str, float]]
"""Task -> query -> value."""


class Comparison(NamedTuple):
    """One system against another on the same queries."""

    difference: float
    """Interval of the means over tasks."""
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
    values: tuple[PerTask, PerTask]


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and, for several seeds, their standard deviation."""
    return Estimate(mean(values), stdev(values) if len(values) > 1 else None)


def mean_of_tasks(values: PerTask) -> float:
    """Return the mean over tasks, each counting the same."""
    return mean(mean(queries.values()) for queries in values.values())


def mean_of_seeds(seeds: Sequence[PerTask]) -> PerTask:
    """Return the mean over seeds for each query; raises BadData where the seeds have different queries."""
    for other in seeds[1:]:
        _check_same(seeds[0], other)
    return {
        task: {qid: mean(seed[task][qid] for seed in seeds) for qid in queries}
        for task, queries in seeds[0].items()
    }


def compare(first: PerTask, second: PerTask) -> Comparison:
    """Run Fisher's paired randomisation test; raises BadData where the two answered different queries."""
    _check_same(first, second)
    differences = [
        np.array([value - second[task][qid] for qid, value in queries.items()])
        for task, queries in first.items()
    ]
    # Weighted so that their sum is the difference of the means over tasks.
    weighted = np.concatenate([own / (len(own) * len(differences)) for own in differences])
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
    return Comparison(math.fsum(weighted), float(p), int(np.sum(weighted > 0)), int(np.sum(weighted < 0)))


def compare_all(pairs: Sequence[Pair]) -> list[Comparison | None]:
    """Compare every pair, p corrected by Holm over all; None where the two answered different queries."""
    found: list[Comparison | None] = []
    for pair in pairs:
        first, second = ({task: own.keys() for task, own in values.items()} for values in pair.values)
        found.append(compare(*pair.values) if first == second else None)
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


def _check_same(first: PerTask, second: PerTask) -> None:
    for task in {*first, *second}:
        differing = sorted(first.get(task, {}).keys() ^ second.get(task, {}).keys())
        if differing:
            raise BadData(
                f"{task}: {len(differing)} queries were answered by one system and not by the other "
                f"({first_few(differing)}); compare runs over the same queries"
            )
