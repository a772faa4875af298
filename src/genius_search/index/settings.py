"""Search settings and calibration that are stored with an index."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from jaxtyping import Float32, Float64
from pydantic import ConfigDict, TypeAdapter

from genius_search.config import SearchConfig

DEPTH: Final = 10
"""Number of best hits, itself included, that a hit is compared with."""
STRICT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Stored = TypeVar("Stored", "Tuned", "Calibration")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The settings that `genius tune` chose, and what it measured."""

    __pydantic_config__ = STRICT

    search: SearchConfig
    wish: str
    """The requested trade-off, in words."""
    data: str
    """The queries that it was measured with."""
    queries: int
    items: int
    """Items in the index at that time."""
    recall: float
    """Share of queries with a right answer among the first five hits."""
    share: float
    """The same relative to ordering all items by the same evidence."""
    cpu_ms: float
    """CPU time of a query in milliseconds, without the encoder."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The log-odds that a unit of each feature of a hit adds."""

    __pydantic_config__ = STRICT

    score: float
    ahead: float
    """For the lead over the next hit; the first hit only."""
    behind: float
    """For the distance to the first hit, which is negative; all other hits."""
    contrast: float
    """For the distance to the mean of the other hits."""

    @property
    def array(self) -> Float64[np.ndarray, " 4"]:
        """The weights in this order."""
        return np.array(dataclasses.astuple(self))


@dataclass(frozen=True, slots=True)
class Bin:
    """Hits of about the same probability."""

    __pydantic_config__ = STRICT

    predicted: float
    """Their mean probability."""
    observed: float
    """The share of them that are right."""
    queries: float
    """Their number; weighted, so not an integer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measurements on the first hits of held-out queries."""

    __pydantic_config__ = STRICT

    queries: int
    error: float
    """Expected calibration error: the mean distance between probability and share of right hits."""
    brier: float
    """Mean squared distance between probability and outcome."""
    base_brier: float
    """The same for always predicting the share of right hits."""
    coverage: float
    """Share of the queries for which a good match is reported."""
    precision: float
    """Share of those whose first hit is right."""
    refused: float
    """Share of the queries without their right answers for which no good match is reported."""
    bins: tuple[Bin, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A map from scores of hits to probabilities, with the data it was fitted and measured on."""

    __pydantic_config__ = STRICT

    search: SearchConfig
    """How the hits were found and ordered."""
    intercept: float
    weights: Weights
    alone: tuple[float, float]
    """Lead and contrast of a hit that is alone: the largest in the data."""
    lowest: float
    highest: float
    """The smallest and largest log-odds in the data; predictions are clipped to them."""
    threshold: float | None
    """Probability of the first hit from which on it is a good match; None: no threshold was good enough."""
    wanted_precision: float
    """The requested share of right first hits above the threshold."""
    absent: float
    """Assumed share of queries without any answer in the index."""
    data: str
    queries: int
    """Number of queries that it was fitted on."""
    items: int
    """Items in the index at that time."""
    held_out: Outcome

    def applies_to(self, config: SearchConfig) -> bool:
        """Return whether hits ordered with these settings have scores of the same kind."""
        return _score_settings(config) == _score_settings(self.search)

    def probabilities(self, scores: Float32[np.ndarray, " hits"]) -> Float64[np.ndarray, " hits"]:
        """Return the probabilities of one query's hits.

        Parameters
        ----------
        scores
            Best first; at least :data:`DEPTH` of them if that many were found.
        """
        log_odds = self.intercept + hit_features(scores, self.alone) @ self.weights.array
        return np.asarray(1 / (1 + np.exp(-np.clip(log_odds, self.lowest, self.highest))))

    def is_good(self, probability: float) -> bool:
        """Return whether a first hit of this probability is a good match."""
        return self.threshold is not None and probability >= self.threshold


def hit_features(
    scores: Float32[np.ndarray, " hits"], alone: tuple[float, float]
) -> Float64[np.ndarray, "hits 4"]:
    """Return score, lead, distance behind the first and contrast (:class:`Weights`) of each hit.

    Parameters
    ----------
    alone
        Lead and contrast of a hit without others beside it.
    """
    own = scores.astype(np.float64)
    features = np.zeros((len(own), 4))
    features[:, 0] = own
    if len(own) < 2:
        features[:, 1], features[:, 3] = alone
        return features
    features[0, 1] = own[0] - own[1]
    features[1:, 2] = own[1:] - own[0]
    best = own[:DEPTH]
    others = np.full(len(own), best[: DEPTH - 1].mean())
    others[: len(best)] = (best.sum() - best) / (len(best) - 1)
    features[:, 3] = own - others
    return features


def _score_settings(config: SearchConfig) -> tuple[object, ...]:
    """Return the settings that the scores of hits depend on."""
    is_generated = config.rerank == "none"
    return (
        config.rerank,
        0.0 if is_generated else config.generator_weight,
        0.0 if is_generated else config.density_weight,
        config.scores if is_generated or config.generator_weight else None,
    )


def to_dict(value: Tuned | Calibration) -> dict[str, Any]:
    """Return a JSON-able dict; of the search settings only those that differ from the defaults."""
    body: dict[str, Any] = dataclasses.asdict(value)
    usual = dataclasses.asdict(SearchConfig())
    body["search"] = {name: setting for name, setting in body["search"].items() if setting != usual[name]}
    return body


def from_dict(kind: type[Stored], body: object) -> Stored:
    """Read what :func:`to_dict` wrote.

    Raises
    ------
    ValueError
        It is something else.
    """
    return TypeAdapter(kind).validate_json(json.dumps(body))
