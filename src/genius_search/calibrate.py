"""``genius calibrate``: learn from validation queries what the scores of an index's hits are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, NamedTuple

import numpy as np
from annotated_types import Gt, Lt
from jaxtyping import Bool, Float64
from scipy.optimize import LinearConstraint, minimize
from scipy.special import expit

from genius_search.config import SearchConfig, checked
from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData
from genius_search.index.index import Index
from genius_search.index.settings import DEPTH, Bin, Calibration, Outcome, Weights, hit_features
from genius_search.index.snapshot import Snapshot
from genius_search.progress import Progress
from genius_search.search.beam import search
from genius_search.search.rank import Evidence, rank_items
from genius_search.search.table import Allowed, Restriction
from genius_search.tune import ValidationConfig, ValidationQueries, validation_queries

NUM_BINS: Final = 10
FEWEST: Final = 20
"""A threshold is not chosen by fewer queries above it."""
FEWEST_QUERIES: Final = 40
"""Fewer queries are not enough to fit and measure."""
WORTH: Final = 0.03
"""One more number is used when it lowers the cross-validated loss by this share at least."""
FOLDS: Final = 5
SHRINKAGE: Final = 1.0
"""Half the squared weights, of standardised numbers, are added to the loss."""
STEPS: Final = 500
RISES: Final = np.array([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
"""Sums of weights that are not negative. So the probability never falls when a score rises (of the first hit,
of another), and never rises down a list of hits."""
LIKELY: Final = 0.5
"""A hit that is more likely wrong than right is never called a good match."""
WITHOUT_CONTRAST: Final = (0, 1, 2)
WITH_CONTRAST: Final = (0, 1, 2, 3)


class Predictions(NamedTuple):
    """Predicted probabilities, whether each case is right, and its weight."""

    probability: Float64[np.ndarray, " cases"]
    is_right: Bool[np.ndarray, " cases"]
    weight: Float64[np.ndarray, " cases"]

    def take(self, chosen: np.ndarray) -> Predictions:
        """Return some of the cases."""
        return Predictions(*(values[chosen] for values in self))


class ReliabilityBin(NamedTuple):
    """Mean prediction and observed share of cases of about the same probability."""

    predicted: float
    observed: float
    weight: float


class Coverage(NamedTuple):
    """Coverage and precision when every case from a probability on is accepted."""

    threshold: Float64[np.ndarray, " thresholds"]
    """In descending order."""
    coverage: Float64[np.ndarray, " thresholds"]
    """Share of the cases that are accepted."""
    precision: Float64[np.ndarray, " thresholds"]
    """Share of those that are right."""
    cases: Float64[np.ndarray, " thresholds"]
    """Number of accepted cases, unweighted."""


def reliability(predictions: Predictions) -> list[ReliabilityBin]:
    """Group cases by probability, in tenths; empty tenths are left out."""
    place = np.minimum((predictions.probability * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    found = []
    for number in range(NUM_BINS):
        own = predictions.take(place == number)
        if len(own.weight):
            found.append(
                ReliabilityBin(
                    float(np.average(own.probability, weights=own.weight)),
                    float(np.average(own.is_right, weights=own.weight)),
                    float(own.weight.sum()),
                )
            )
    return found


def calibration_error(bins: list[ReliabilityBin]) -> float:
    """Return the expected calibration error: the mean distance of predicted and observed."""
    total = sum(one.weight for one in bins)
    return sum(one.weight * abs(one.predicted - one.observed) for one in bins) / total


def brier(predictions: Predictions) -> float:
    """Return the Brier score: the mean squared error of the probabilities; 0 is perfect."""
    return float(
        np.average((predictions.probability - predictions.is_right) ** 2, weights=predictions.weight)
    )


def accept(predictions: Predictions) -> Coverage:
    """Return coverage and precision at every threshold, the highest first."""
    order = np.argsort(-predictions.probability, kind="stable")
    probability, is_right, weight = predictions.take(order)
    accepted, right = weight.cumsum(), (weight * is_right).cumsum()
    last = np.append(probability[1:] < probability[:-1], True)
    cases = np.arange(1, len(weight) + 1, dtype=np.float64)
    return Coverage(
        probability[last], accepted[last] / accepted[-1:], right[last] / accepted[last], cases[last]
    )


def threshold_for(predictions: Predictions, precision: float, *, at_least: float) -> float | None:
    """Return the lowest threshold of at least ``at_least`` that reaches a precision, or None."""
    found = accept(predictions)
    is_enough = (found.precision >= precision) & (found.cases >= FEWEST) & (found.threshold >= at_least)
    enough = np.flatnonzero(is_enough)
    return float(found.threshold[enough[-1]]) if len(enough) else None


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(ValidationConfig):
    """Settings of a calibration."""

    precision: Annotated[float, Gt(0), Lt(1)] = 0.8
    """Share of the first hits called good matches that should be right. A good match is always more likely
    right than wrong, however low this is."""

    absent: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Expected share of queries that nothing in the index answers."""


class Calibrated(NamedTuple):
    """A fitted calibration; the index is unchanged."""

    calibration: Calibration
    held_out: Predictions
    """The first hits of the queries that were not fitted on."""
    left_out: int
    """Queries whose right answers are not in the index."""


class Cases(NamedTuple):
    """Hits of queries, those of a query together, and whether they are right."""

    numbers: Float64[np.ndarray, "hits 4"]
    is_right: Bool[np.ndarray, " hits"]
    is_first: Bool[np.ndarray, " hits"]
    is_absent: Bool[np.ndarray, " hits"]
    """Whether the query's right answers were taken away."""
    query: np.ndarray

    def take(self, chosen: np.ndarray) -> Cases:
        """Return some of the hits."""
        return Cases(*(values[chosen] for values in self))

    def weights(self, absent: float) -> Float64[np.ndarray, " hits"]:
        """Return weights such that this share of the queries has no answer."""
        return np.where(self.is_absent, absent, 1 - absent)


def calibrate(index: Index, data: MBeir, config: CalibrateConfig, *, progress: Progress) -> Calibrated:
    """Fit and measure a calibration on validation queries, each searched with and without its right answers.

    The queries without their answers are the honest kind that nothing answers: their words and pictures are
    those of any other query. Half of the queries are fitted on, the other half is measured.

    Raises
    ------
    BadData
        too few queries have a right answer in the index.
    """
    config = checked(config)
    search_config = index.settings
    rerank: Literal["codes", "embeddings"] = "embeddings" if search_config.rerank == "embeddings" else "codes"
    queries = validation_queries(index, data, config, rerank=rerank, progress=progress)
    if len(queries.right) < FEWEST_QUERIES:
        raise BadData(
            f"{len(queries.right)} queries of {data.root} (split {config.split}) have a right answer in "
            f"{index.folder}; at least {FEWEST_QUERIES} are needed to fit on one half and measure the other"
        )
    snapshot = index.snapshot
    found = _cases(index, snapshot, queries, search_config, config.batch, progress)
    cases, measured = found.take(found.query % 2 == 0), found.take(found.query % 2 == 1)
    fitted = fit(cases, config.absent)
    seen = fitted.log_odds(cases.numbers)
    lowest, highest = float(seen.min()), float(seen.max())

    def first(some: Cases) -> Predictions:
        own = some.take(some.is_first)
        log_odds = np.clip(fitted.log_odds(own.numbers), lowest, highest)
        return Predictions(1 / (1 + np.exp(-log_odds)), own.is_right, own.weights(config.absent))

    threshold = threshold_for(first(cases), config.precision, at_least=LIKELY)
    predictions = first(measured)
    bins = reliability(predictions)
    is_absent = measured.is_absent[measured.is_first]
    is_good = predictions.probability >= (np.inf if threshold is None else threshold)
    good = predictions.take(is_good)
    share = float(np.average(predictions.is_right, weights=predictions.weight))
    outcome = Outcome(
        queries=int((~is_absent).sum()),
        error=calibration_error(bins),
        brier=brier(predictions),
        base_brier=share * (1 - share),
        coverage=float(good.weight.sum() / predictions.weight.sum()),
        precision=float(np.average(good.is_right, weights=good.weight)) if len(good.weight) else 0.0,
        refused=float((~is_good)[is_absent].mean()),
        bins=tuple(Bin(*one) for one in bins),
    )
    calibration = Calibration(
        search=search_config,
        intercept=fitted.intercept,
        weights=fitted.weights,
        alone=(float(cases.numbers[:, 1].max()), float(cases.numbers[:, 3].max())),
        lowest=lowest,
        highest=highest,
        threshold=threshold,
        wanted_precision=config.precision,
        absent=config.absent,
        data=f"{data.name} {config.split}",
        queries=len(np.unique(cases.query)),
        items=snapshot.num_alive,
        held_out=outcome,
    )
    return Calibrated(calibration, predictions, queries.left_out)


class Fitted(NamedTuple):
    """A logistic regression over a hit's numbers."""

    intercept: float
    weights: Weights

    def log_odds(self, found: Float64[np.ndarray, "hits 4"]) -> Float64[np.ndarray, " hits"]:
        """Return the log-odds of hits."""
        return np.asarray(self.intercept + found @ self.weights.array)


def fit(cases: Cases, absent: float) -> Fitted:
    """Fit the regression, with the contrast if it lowers the loss enough.

    What the contrast says depends on how densely a pool is filled, more than the other numbers do: without
    it a calibration stays truer while the index grows. So it has to earn its place by cross-validation.
    """
    fold = cases.query // 2 % FOLDS
    loss = {}
    for used in (WITHOUT_CONTRAST, WITH_CONTRAST):
        losses = []
        for number in range(FOLDS):
            rest, own = cases.take(fold != number), cases.take(fold == number)
            if len(own.query) and rest.is_right.any():
                losses.append(_loss(_best(rest, absent, used), own, absent))
        loss[used] = float(np.sum(losses))
    is_worth_it = loss[WITH_CONTRAST] < (1 - WORTH) * loss[WITHOUT_CONTRAST]
    return _best(cases, absent, WITH_CONTRAST if is_worth_it else WITHOUT_CONTRAST)


def _best(cases: Cases, absent: float, used: Sequence[int]) -> Fitted:
    """Fit a regression over some numbers under which a better score is never worth less."""
    weight = cases.weights(absent)
    mean, scale = cases.numbers.mean(axis=0), cases.numbers.std(axis=0) + 1e-12
    design = np.column_stack([np.ones(len(weight)), (cases.numbers - mean) / scale])

    def loss(coefficients: Float64[np.ndarray, " weights"]) -> tuple[float, Float64[np.ndarray, " weights"]]:
        log_odds = design @ coefficients
        value = weight @ (np.logaddexp(0, log_odds) - cases.is_right * log_odds)
        slope = design.T @ (weight * (expit(log_odds) - cases.is_right))
        value += SHRINKAGE / 2 * (coefficients[1:] ** 2).sum()
        slope[1:] += SHRINKAGE * coefficients[1:]
        return value / weight.sum(), slope / weight.sum()

    found = minimize(
        loss,
        np.zeros(design.shape[1]),
        jac=True,
        method="SLSQP",
        bounds=[(None, None), *((None, None) if number in used else (0, 0) for number in range(len(scale)))],
        constraints=LinearConstraint(np.column_stack([np.zeros(len(RISES)), RISES / scale]), 0, np.inf),
        options={"ftol": 1e-10, "maxiter": STEPS},
    ).x
    raw = found[1:] / scale
    return Fitted(float(found[0] - raw @ mean), Weights(*raw.tolist()))


def _loss(fitted: Fitted, cases: Cases, absent: float) -> float:
    """Return the weighted log loss."""
    log_odds = fitted.log_odds(cases.numbers)
    return float(cases.weights(absent) @ (np.logaddexp(0, log_odds) - cases.is_right * log_odds))


def _cases(
    index: Index,
    snapshot: Snapshot,
    queries: ValidationQueries,
    config: SearchConfig,
    batch: int,
    progress: Progress,
) -> Cases:
    """Return the first hits of every query, with its right answers in the index and without."""
    found = []
    evidence = Evidence(
        index.model.ranker, snapshot.vectors, snapshot.manifest.embeddings == "raw", snapshot.densities
    )
    progress.begin("search", len(queries.right))
    for own in queries.batches(batch):
        without = [_without(snapshot, right) for right in queries.right[own]]
        fused = queries.fused[own]
        for restrictions in ([None] * len(without), without):
            beams = search(
                index.model.decoder,
                snapshot.parts,
                fused,
                config,
                restrictions=restrictions,
                widths=[max(config.beam, DEPTH)] * len(fused),
            )
            for number, (query, right) in enumerate(
                zip(queries.evidence[own], queries.right[own], strict=True)
            ):
                ranking = rank_items(
                    snapshot.parts,
                    beams,
                    number,
                    query,
                    config=config,
                    evidence=evidence,
                    k=DEPTH,
                    restriction=restrictions[number],
                    for_codes=fused[number],
                )
                places = zip(ranking.parts.tolist(), ranking.items.tolist(), strict=True)
                count = len(ranking.items)
                found.append(
                    Cases(
                        hit_features(ranking.scores, (0.0, 0.0)),
                        np.array([place in right for place in places], dtype=bool),
                        np.arange(count) == 0,
                        np.full(count, restrictions is without),
                        np.full(count, own.start + number),
                    )
                )
        progress.advance(own.stop, {})
    return Cases(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


def _without(snapshot: Snapshot, right: frozenset[tuple[int, int]]) -> Restriction:
    """Return a restriction to all items but these."""
    allowed = []
    for number, segment in enumerate(snapshot.segments):
        mask = segment.alive()
        if mask is None:
            mask = np.ones(segment.table.num_items, dtype=bool)
        mask[[row for part, row in right if part == number]] = False
        allowed.append(Allowed.of(segment.table, mask))
    return tuple(allowed)
