"""Probabilities in place of scores: how likely a hit answers the query, and whether any does.

A score says little by itself: what is a good one depends on the model, on the evidence that orders the hits
and on what else is in the pool. A logistic regression over four numbers of a hit, fitted on queries whose
answers are known, says what it is worth (:mod:`genius.stages.calibrate`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64

from genius.config import SearchConfig, from_json, to_json

DEPTH: Final = 10
"""A hit is seen beside the best others: so many of them, itself included."""


class Weights(NamedTuple):
    """What a unit of each number adds to the log-odds."""

    score: float
    ahead: float
    """Of the lead over the next hit; for the first hit only."""
    behind: float
    """Of the distance to the first hit, which is negative; for all others."""
    contrast: float
    """Of the distance to the mean of the other hits."""


class Bin(NamedTuple):
    """Hits whose probabilities are about the same."""

    predicted: float
    """Their mean probability."""
    observed: float
    """The share of them that are right."""
    queries: float
    """How many there are; weighted, so no whole number."""


class Outcome(NamedTuple):
    """What was measured on the first hits of queries that were not fitted on."""

    queries: int
    error: float
    """Expected calibration error: how far probability and share of right ones lie apart, on average."""
    brier: float
    """Mean squared distance of the probabilities from what is so."""
    base_brier: float
    """The same of always saying the share that is right."""
    coverage: float
    """Share of the queries that are said to have a good match."""
    precision: float
    """Share of those whose first hit is right."""
    refused: float
    """Share of the queries without their right answers that are said to have no good match."""
    bins: tuple[Bin, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What turns the scores of hits into probabilities, and what it was fitted and measured on."""

    search: SearchConfig
    """How the hits were found and ordered."""
    intercept: float
    weights: Weights
    alone: tuple[float, float]
    """What stands for lead and contrast where nothing else is found: the largest that were seen."""
    lowest: float
    highest: float
    """The smallest and largest log-odds that were seen; no hit gets less or more."""
    threshold: float | None
    """From this probability of the first hit on there is a good match; None: no threshold was good enough."""
    wanted_precision: float
    """The share of right first hits that was asked of the threshold."""
    absent: float
    """Share of queries without any answer in the index that it assumes."""
    data: str
    queries: int
    """That it was fitted on; others were measured on."""
    items: int
    """In the index at that time."""
    held_out: Outcome

    def applies_to(self, config: SearchConfig) -> bool:
        """Whether hits that are ordered so have scores of the same kind."""
        return _ranking(config) == _ranking(self.search)

    def probabilities(self, scores: Float32[np.ndarray, " hits"]) -> Float64[np.ndarray, " hits"]:
        """Of the hits of one query, best first; at least :data:`DEPTH` of them if so many were found."""
        return np.asarray(1 / (1 + np.exp(-self.log_odds(numbers(scores, self.alone)))))

    def log_odds(self, found: Float64[np.ndarray, "hits 4"]) -> Float64[np.ndarray, " hits"]:
        """Of hits by their numbers."""
        said = self.intercept + found @ np.array(self.weights)
        return np.asarray(np.clip(said, self.lowest, self.highest))

    def is_good(self, probability: float) -> bool:
        """Whether a first hit of this probability is a good match."""
        return self.threshold is not None and probability >= self.threshold


def numbers(
    scores: Float32[np.ndarray, " hits"], alone: tuple[float, float]
) -> Float64[np.ndarray, "hits 4"]:
    """Of each hit: score, lead, distance behind the first, and contrast (:class:`Weights`).

    Parameters
    ----------
    alone
        lead and contrast of a hit beside which there is none.
    """
    own = scores.astype(np.float64)
    found = np.zeros((len(own), len(Weights._fields)))
    found[:, 0] = own
    if len(own) < 2:
        found[:, 1], found[:, 3] = alone
        return found
    found[0, 1] = own[0] - own[1]
    found[1:, 2] = own[1:] - own[0]
    best = own[:DEPTH]
    others = np.full(len(own), best[: DEPTH - 1].mean())
    others[: len(best)] = (best.sum() - best) / (len(best) - 1)
    found[:, 3] = own - others
    return found


def _ranking(config: SearchConfig) -> tuple[object, ...]:
    """What the scores of hits depend on."""
    is_generated = config.rerank == "none"
    return (
        config.rerank,
        0.0 if is_generated else config.mix,
        0.0 if is_generated else config.hubness,
        config.scores if is_generated or config.mix else None,
    )


def calibration_to_json(calibration: Calibration) -> dict[str, Any]:
    """As ``index.json`` keeps it; of the settings only those that are not the usual ones."""
    usual = to_json(SearchConfig())
    chosen = {name: value for name, value in to_json(calibration.search).items() if value != usual[name]}
    held_out = {
        **calibration.held_out._asdict(),
        "bins": [one._asdict() for one in calibration.held_out.bins],
    }
    plain = {field.name: getattr(calibration, field.name) for field in dataclasses.fields(calibration)}
    return {
        **plain,
        "search": chosen,
        "weights": calibration.weights._asdict(),
        "alone": list(calibration.alone),
        "held_out": held_out,
    }


def calibration_from_json(told: object) -> Calibration:
    """What :func:`calibration_to_json` wrote.

    Raises
    ------
    UsageError, TypeError, ValueError, KeyError
        it is something else.
    """
    names = {field.name for field in dataclasses.fields(Calibration)}
    if not isinstance(told, Mapping) or set(told) != names:
        raise ValueError("a calibration is told that has other parts than ours")
    held_out = dict(told["held_out"])
    bins = tuple(Bin(**{name: float(value) for name, value in one.items()}) for one in held_out.pop("bins"))
    rest = {name: float(value) for name, value in held_out.items() if name != "queries"}
    ahead, contrast = map(float, told["alone"])
    read = Calibration(
        search=from_json(SearchConfig, told["search"]),
        intercept=float(told["intercept"]),
        weights=Weights(**{name: float(value) for name, value in told["weights"].items()}),
        alone=(ahead, contrast),
        lowest=float(told["lowest"]),
        highest=float(told["highest"]),
        threshold=None if told["threshold"] is None else float(told["threshold"]),
        wanted_precision=float(told["wanted_precision"]),
        absent=float(told["absent"]),
        data=str(told["data"]),
        queries=int(told["queries"]),
        items=int(told["items"]),
        held_out=Outcome(queries=int(held_out["queries"]), **rest, bins=bins),
    )
    said = (read.intercept, read.lowest, read.highest, *read.weights, *read.alone)
    if not np.isfinite(said).all():
        raise ValueError("a calibration holds a number that is not finite")
    return read
