"""Search settings and calibration that are stored with an index."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float32, Float64
from pydantic import ConfigDict, Field, TypeAdapter

from genius_search.config import SearchConfig
from genius_search.records import Modality

DEPTH: Final = 10
"""Number of best hits that a hit is compared with, including itself."""
WORD: Final = re.compile(r"\w+")
MANY_WORDS: Final = 4
"""Queries of this many words and more are of one kind."""
STRICT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Stored = TypeVar("Stored", "Tuned", "Calibration")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Settings chosen by `genius tune`, with their measurements."""

    __pydantic_config__ = STRICT

    search: SearchConfig
    queries: int
    recall: float
    """Recall at 5: share of queries with a relevant item among the first five hits. If items were the
    queries: share of the first ten of ranking all items that are among the first ten hits."""
    share: float
    """Recall relative to ranking all items of the index in the same way."""
    cpu_ms: float
    """CPU time of a query in milliseconds, without the encoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindChoice(Choice):
    """The choice for one kind of query."""

    __pydantic_config__ = STRICT

    query: str
    """Modality of the queries."""
    item: str
    """Modality that is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned(Choice):
    """The choice for all queries of an index, and for each kind of them."""

    __pydantic_config__ = STRICT

    wish: str
    """The requested trade-off, in words."""
    data: str
    """The validation queries."""
    items: int
    """Items in the index at that time."""
    kinds: tuple[KindChoice, ...] = ()
    """Empty if all validation queries were of one kind."""

    def of_kind(self, query: Modality, item: Modality | str | None) -> SearchConfig:
        """Return the settings for a kind of query: those of all queries if it was not tuned."""
        own = (one.search for one in self.kinds if (one.query, one.item) == (query, item))
        return next(own, self.search)


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a hit's features in the log-odds."""

    __pydantic_config__ = STRICT

    score: float
    ahead: float
    """Weight of the lead over the next hit; only for the first hit."""
    behind: float
    """Weight of the (negative) distance to the first hit; for all other hits."""
    contrast: float
    """Weight of the distance to the mean of the other hits."""

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
    """Share of these hits that are relevant."""
    queries: float
    """Weighted number of hits."""


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
    """Brier score of always predicting the share of relevant hits."""
    coverage: float
    """Share of the queries for which a good match is reported."""
    precision: float
    """Share of these queries whose first hit is relevant."""
    refused: float
    """Share of the queries without relevant items in the index for which no good match is reported."""
    bins: tuple[Bin, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Relevance:
    """Cosines of related and unrelated texts, by which an encoder's scores are read."""

    __pydantic_config__ = STRICT

    related: float
    """Mean cosine of a query and a text that answers it."""
    unrelated: float
    """Mean cosine of a query and another text."""
    spread: Annotated[float, Field(gt=0)]
    """Standard deviation of the cosines of queries and other texts."""

    def rate(self, cosines: Float32[np.ndarray, " hits"], items: int) -> Float64[np.ndarray, " hits"]:
        """Return the relevance of hits, from 0 to 1.

        It is one half in the middle between the cosine of related texts and the highest that chance would
        give in an index of so many items; one standard deviation of unrelated texts above, it is 0.73.
        """
        by_chance = self.unrelated + self.spread * math.sqrt(2 * math.log(max(items, 2)))
        middle = (max(self.related, by_chance) + by_chance) / 2
        return np.asarray(1 / (1 + np.exp((middle - cosines.astype(np.float64)) / self.spread)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Log-odds of a hit as a sum of weighted features, fitted to some queries."""

    __pydantic_config__ = STRICT

    intercept: float
    weights: Weights
    alone: tuple[float, float]
    """Lead and contrast assumed for a single hit: the largest in the data."""
    lowest: float
    highest: float
    """The smallest and largest log-odds in the data; predictions are clipped to them."""
    threshold: float | None
    """Probability from which the first hit is a good match; None if no threshold reached the precision."""
    queries: int
    """Number of queries for fitting."""

    def probabilities(self, scores: Float32[np.ndarray, " hits"]) -> Float64[np.ndarray, " hits"]:
        """Return the probabilities of one query's hits.

        Parameters
        ----------
        scores
            Best first; at least :data:`DEPTH` of them if that many were found.
        """
        return self.of_features(hit_features(scores, self.alone))

    def of_features(self, features: Float64[np.ndarray, "hits 4"]) -> Float64[np.ndarray, " hits"]:
        """Return the probabilities of hits with these features."""
        log_odds = self.intercept + features @ self.weights.array
        return np.asarray(1 / (1 + np.exp(-np.clip(log_odds, self.lowest, self.highest))))

    def relevance(self, probabilities: Float64[np.ndarray, " hits"]) -> Float64[np.ndarray, " hits"]:
        """Shift the log-odds of probabilities so that the threshold becomes one half."""
        if self.threshold is None:
            return probabilities
        odds = probabilities / (1 - probabilities) * (1 - self.threshold) / self.threshold
        return np.asarray(odds / (1 + odds))


class QueryKind(NamedTuple):
    """Queries and items whose scores can be compared."""

    query: Modality
    item: Modality
    words: int
    """Words of the query, at most :data:`MANY_WORDS`, which queries with an image have too."""

    @staticmethod
    def of(text: str | None, *, has_image: bool, item: Modality, common: Collection[str] = ()) -> QueryKind:
        """Return the kind of a query that looks for items of a modality; ``common`` words do not count."""
        words = WORD.findall((text or "").lower())
        modality = Modality.of(has_image=has_image, has_text=bool((text or "").strip()))
        count = sum(word not in common for word in words)
        return QueryKind(modality, item, MANY_WORDS if has_image else max(1, min(count, MANY_WORDS)))


@dataclass(frozen=True, kw_only=True, slots=True)
class KindScale(Scale):
    """The scale of one kind of query and item."""

    __pydantic_config__ = STRICT

    query: str
    """Modality of the queries."""
    item: str
    """Modality of the items."""
    words: int
    """Words of the queries (:class:`QueryKind`)."""
    held_out: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration(Scale):
    """Calibration of hits' scores to probabilities, with its measurements.

    Its own scale is that of all labelled queries; it counts where ``kinds`` has none for such a query.
    """

    __pydantic_config__ = STRICT

    search: SearchConfig
    """Search settings of the calibrated hits."""
    wanted_precision: float
    """Requested share of relevant first hits above the threshold."""
    absent: float
    """Assumed share of queries without relevant items in the index."""
    data: str
    items: int
    """Items in the index at that time."""
    held_out: Outcome
    kinds: tuple[KindScale, ...] = ()
    common_words: tuple[str, ...] = ()
    """Words that are not counted where a query's kind is chosen."""

    def applies_to(self, config: SearchConfig) -> bool:
        """Return whether the calibration is valid for searches with these settings."""
        return _score_settings(config) == _score_settings(self.search)

    def scale(self, text: str | None, *, has_image: bool, item: Modality) -> Scale:
        """Return the scale of a query's kind, with the closest number of words, if there is any."""
        kind = QueryKind.of(text, has_image=has_image, item=item, common=self.common_words)
        alike = [one for one in self.kinds if (one.query, one.item) == (kind.query, kind.item)]
        return min(alike, key=lambda one: abs(one.words - kind.words), default=self)


def hit_features(
    scores: Float32[np.ndarray, " hits"], alone: tuple[float, float]
) -> Float64[np.ndarray, "hits 4"]:
    """Return score, lead, distance behind the first and contrast (:class:`Weights`) of each hit.

    Parameters
    ----------
    alone
        Lead and contrast of a single hit.
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
    for one in (body, *(kind for kind in body["kinds"] if "search" in kind)):
        one["search"] = {name: setting for name, setting in one["search"].items() if setting != usual[name]}
    return body


def from_dict(kind: type[Stored], body: object) -> Stored:
    """Read what :func:`to_dict` wrote.

    Raises
    ------
    ValueError
        The body has another form.
    """
    return TypeAdapter(kind).validate_json(json.dumps(body))
