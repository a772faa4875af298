"""How far probabilities can be believed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

NUM_BINS: Final = 10


class Bin(NamedTuple):
    """Cases of about the same probability."""

    predicted: float
    """Their mean probability."""
    observed: float
    """Share of these cases that are right."""
    queries: float
    """Weighted number of cases."""


class Predictions(NamedTuple):
    """Predicted probabilities, whether each case is right, and its weight."""

    probability: Float64[np.ndarray, " cases"]
    is_right: Bool[np.ndarray, " cases"]
    weight: Float64[np.ndarray, " cases"]

    def take(self, chosen: np.ndarray) -> Predictions:
        """Return some of the cases."""
        return Predictions(*(values[chosen] for values in self))


def reliability(predictions: Predictions) -> tuple[Bin, ...]:
    """Group cases by probability, in tenths; empty tenths are left out."""
    place = np.minimum((predictions.probability * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    return tuple(
        Bin(
            float(np.average(own.probability, weights=own.weight)),
            float(np.average(own.is_right, weights=own.weight)),
            float(own.weight.sum()),
        )
        for own in (predictions.take(place == number) for number in np.unique(place))
    )


def calibration_error(bins: Sequence[Bin]) -> float:
    """Return the expected calibration error: the mean distance of predicted and observed."""
    total = sum(one.queries for one in bins)
    return sum(one.queries * abs(one.predicted - one.observed) for one in bins) / total
