"""How far probabilities can be believed: reliability, Brier score, and what refusing costs."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

NUM_BINS: Final = 10
FEWEST: Final = 20
"""A threshold is not chosen by fewer queries above it."""


class Told(NamedTuple):
    """Probabilities that something is so, and whether it is."""

    probability: Float64[np.ndarray, " cases"]
    is_right: Bool[np.ndarray, " cases"]
    weight: Float64[np.ndarray, " cases"]

    def take(self, chosen: np.ndarray) -> Told:
        """Some of the cases."""
        return Told(*(values[chosen] for values in self))


class ReliabilityBin(NamedTuple):
    """Cases of about the same probability."""

    predicted: float
    observed: float
    weight: float


class Coverage(NamedTuple):
    """What comes of accepting every case from a probability on."""

    threshold: Float64[np.ndarray, " thresholds"]
    """Falling."""
    coverage: Float64[np.ndarray, " thresholds"]
    """Share of the cases that are accepted."""
    precision: Float64[np.ndarray, " thresholds"]
    """Share of those that are right."""
    cases: Float64[np.ndarray, " thresholds"]
    """How many are accepted, not weighted."""


def reliability(told: Told) -> list[ReliabilityBin]:
    """Cases by probability, in tenths; tenths without any are left out."""
    place = np.minimum((told.probability * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    found = []
    for number in range(NUM_BINS):
        here = told.take(place == number)
        if len(here.weight):
            found.append(
                ReliabilityBin(
                    float(np.average(here.probability, weights=here.weight)),
                    float(np.average(here.is_right, weights=here.weight)),
                    float(here.weight.sum()),
                )
            )
    return found


def calibration_error(bins: list[ReliabilityBin]) -> float:
    """How far predicted and observed lie apart, on average over the cases (expected calibration error)."""
    total = sum(one.weight for one in bins)
    return sum(one.weight * abs(one.predicted - one.observed) for one in bins) / total


def brier(told: Told) -> float:
    """Mean squared distance of the probabilities from what is so; 0 is perfect."""
    return float(np.average((told.probability - told.is_right) ** 2, weights=told.weight))


def accept(told: Told) -> Coverage:
    """What every possible threshold accepts, the highest first; equal probabilities go together."""
    order = np.argsort(-told.probability, kind="stable")
    probability, is_right, weight = told.take(order)
    accepted, right = weight.cumsum(), (weight * is_right).cumsum()
    last = np.append(probability[1:] < probability[:-1], True)
    cases = np.arange(1, len(weight) + 1, dtype=np.float64)
    return Coverage(
        probability[last], accepted[last] / accepted[-1:], right[last] / accepted[last], cases[last]
    )


def threshold_for(told: Told, precision: float, *, at_least: float) -> float | None:
    """The lowest probability, of those that are large enough, from which on so many are right; or None."""
    found = accept(told)
    is_enough = (found.precision >= precision) & (found.cases >= FEWEST) & (found.threshold >= at_least)
    enough = np.flatnonzero(is_enough)
    return float(found.threshold[enough[-1]]) if len(enough) else None
