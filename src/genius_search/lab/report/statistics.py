"""Which differences are more than chance: paired tests between systems, corrected for how many there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev
from typing import Final, NamedTuple

import numpy as np
from scipy import stats

from genius_search.errors import BadData
from genius_search.lab.report.table import Cell, Estimate, Table
from genius_search.lab.runs import some

RESAMPLES: Final = 9_999
"""Of a test: its smallest p is one in so many."""
DRAWS: Final = 1_999
"""Of a bootstrap: an interval of 95 % rests on fifty at either end."""
BATCH: Final = 200
"""Resamples held in memory together."""
LEVEL: Final = 0.95

PerTask = Mapping[str, Mapping[str, float]]
"""Task -> query -> value."""


class Interval(NamedTuple):
    """Between which values a mean lies, 95 times of 100."""

    low: float
    high: float


class Comparison(NamedTuple):
    """One system against another on the same queries."""

    difference: float
    """Of the means over tasks."""
    p: float
    """How often signs drawn at random would make a difference as large: two-sided."""
    better: int
    worse: int
    """Queries that the first answers better, or worse."""


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean and, of several seeds, their standard deviation."""
    return Estimate(mean(values), stdev(values) if len(values) > 1 else None)


def mean_of_tasks(values: PerTask) -> float:
    """Every task counts the same."""
    return mean(mean(own.values()) for own in values.values())


def mean_of_seeds(seeds: Sequence[PerTask]) -> PerTask:
    """For each query its mean over seeds, which have to have the same queries.

    Raises
    ------
    BadData
        they have not.
    """
    for other in seeds[1:]:
        _check_same(seeds[0], other)
    return {
        task: {qid: mean(seed[task][qid] for seed in seeds) for qid in values}
        for task, values in seeds[0].items()
    }


def interval(values: PerTask, *, seed: int = 0) -> Interval:
    """Percentile bootstrap: the queries of each task are drawn anew from themselves (scipy's)."""
    samples = [np.array(list(own.values())) for own in values.values()]
    # Whatever is drawn from a single query is that query; scipy wants two.
    samples = [np.repeat(sample, 2) if len(sample) == 1 else sample for sample in samples]
    if all(np.ptp(sample) == 0 for sample in samples):
        value = mean_of_tasks(values)
        return Interval(value, value)

    def statistic(*drawn: np.ndarray, axis: int) -> np.ndarray:
        means: np.ndarray = np.mean([np.mean(own, axis=axis) for own in drawn], axis=0)
        return means

    found = stats.bootstrap(
        samples,
        statistic,
        n_resamples=DRAWS,
        batch=BATCH,
        vectorized=True,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(found.low), float(found.high))


def compare(first: PerTask, second: PerTask, *, seed: int = 0) -> Comparison:
    """Fisher's paired randomisation (scipy's): whether the two could have been exchanged in each query.

    Raises
    ------
    BadData
        they did not answer the same queries.
    """
    _check_same(first, second)
    differences = [
        np.array([values[qid] - second[task][qid] for qid in values]) for task, values in first.items()
    ]
    # Weighted so that their sum is the difference of the means over tasks.
    weighted = np.concatenate([own / (len(own) * len(differences)) for own in differences])
    moved = weighted[weighted != 0]
    p = 1.0  # also of one query that moved: its sign could have been the other
    if len(moved) > 1:
        p = stats.permutation_test(
            (moved, np.zeros_like(moved)),
            lambda x, y, axis: np.sum(x - y, axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=RESAMPLES,
            batch=BATCH,
            rng=np.random.default_rng(seed),
        ).pvalue
    return Comparison(math.fsum(weighted), float(p), int(np.sum(weighted > 0)), int(np.sum(weighted < 0)))


def same_queries(first: PerTask, second: PerTask) -> bool:
    """Whether two systems answered the same, so that they can be compared query by query."""
    return {task: own.keys() for task, own in first.items()} == {
        task: own.keys() for task, own in second.items()
    }


def holm(values: Sequence[float]) -> list[float]:
    """The p-values of several comparisons, corrected for how many they are (Holm 1979).

    Any of them below 0.05 is then a false alarm 5 times of 100 at most.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - place) * values[index]))
        adjusted[index] = largest
    return adjusted


def _check_same(first: PerTask, second: PerTask) -> None:
    for task in {*first, *second}:
        differing = sorted(first.get(task, {}).keys() ^ second.get(task, {}).keys())
        if differing:
            raise BadData(
                f"{task}: {len(differing)} queries were answered by one system and not by the other "
                f"({some(differing)}); compare runs over the same queries"
            )


class Pair(NamedTuple):
    """Two systems on the same queries."""

    first: str
    second: str
    measure: str
    values: tuple[PerTask, PerTask]


class Tested(NamedTuple):
    """A pair with its test."""

    pair: Pair
    found: Comparison
    p: float
    """Corrected for all pairs that were tested together."""


def compared(pairs: Sequence[Pair], advance: Callable[[int], None] | None = None) -> list[Tested | None]:
    """Every pair, Holm's correction over all of them; nothing where the two answered different queries.

    ``advance`` is told how many are done.
    """
    found: list[Comparison | None] = []
    for pair in pairs:
        found.append(compare(*pair.values) if same_queries(*pair.values) else None)
        if advance is not None:
            advance(len(found))
    corrected = iter(holm([one.p for one in found if one is not None]))
    return [
        None if one is None else Tested(pair, one, next(corrected))
        for pair, one in zip(pairs, found, strict=True)
    ]


def significance_table(
    pairs: Sequence[Pair], *, name: str, title: str, advance: Callable[[int], None] | None = None
) -> Table | None:
    """A line for each pair that answered the same queries; nothing without any pair."""
    if not pairs:
        return None
    found = compared(pairs, advance)
    apart = sorted(
        {f"{pair.first} against {pair.second}" for pair, one in zip(pairs, found, strict=True) if one is None}
    )
    left_out = f" Not tested, since they answered different queries: {'; '.join(apart)}." if apart else ""
    lines: list[tuple[Cell, ...]] = [
        (
            one.pair.first,
            one.pair.second,
            one.pair.measure,
            f"{100 * one.found.difference:+.1f}".replace("-", "−"),
            one.found.better,
            one.found.worse,
            shown_p(one.p),
            "yes" if one.p < 0.05 else "no",
        )
        for one in found
        if one is not None
    ]
    return Table(
        name=name,
        title=title,
        note="Difference in points; queries that the first answers better and worse (the mean over seeds); "
        "p of the paired randomisation test over queries, two-sided, corrected by Holm for all lines of this "
        "table. It says nothing of other seeds: their spread stands beside the means." + left_out,
        headings=("system", "against", "measure", "difference", "better", "worse", "p", "below 0.05"),
        lines=lines,
        text_columns=3,
    )


def shown_p(p: float) -> str:
    """Not smaller than the number of resamples can tell."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
