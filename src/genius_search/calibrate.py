"""``genius calibrate``: learn from validation queries what the scores of an index's hits are worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import numpy as np
from annotated_types import Gt, Lt
from jaxtyping import Bool, Float64
from pydantic import ConfigDict
from scipy.optimize import LinearConstraint, minimize
from scipy.special import expit

from genius_search.config import Count, Natural, SearchConfig, checked
from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData
from genius_search.index.index import Index
from genius_search.index.settings import DEPTH, Bin, Calibration, Outcome, Weights, hit_features
from genius_search.index.snapshot import Snapshot
from genius_search.progress import Progress
from genius_search.search.beam import search
from genius_search.search.rank import Evidence, rank_items
from genius_search.search.table import Allowed, Restriction
from genius_search.tune import Asked, answerable

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


BATCH: Final = 32
"""Queries searched together; each has its own mask over the items when its answers are taken away."""
FEWEST_QUERIES: Final = 40
"""Fewer say nothing."""
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
"""No hit that is more likely wrong is called a good match, whatever the hits above it are worth."""
WITHOUT_CONTRAST: Final = (0, 1, 2)
WITH_CONTRAST: Final = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """What is fitted on, and for what."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    precision: Annotated[float, Gt(0), Lt(1)] = 0.8
    """Of the first hits that are called good matches so many are to be right. However little is asked for, a
    good match is more likely right than not."""

    absent: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Share of queries that nothing in the index answers, as you expect them to come."""

    split: str = "val"
    """Of the data set."""

    rows: tuple[str, ...] = ()
    """Of the data set, named as in its files; none named means all."""

    queries: Natural = 0
    """Of each row at most so many, spread evenly; 0 means all."""

    seed: Natural = 0
    """Of the choice of instructions."""

    batch: Count = BATCH


class Calibrated(NamedTuple):
    """What was found; nothing has been changed yet."""

    calibration: Calibration
    held_out: Told
    """The first hits of the queries that were not fitted on."""
    left_out: int
    """Queries whose right answers are not in the index."""


class Cases(NamedTuple):
    """Hits of queries, those of a query next to one another, and whether they are right."""

    numbers: Float64[np.ndarray, "hits 4"]
    is_right: Bool[np.ndarray, " hits"]
    is_first: Bool[np.ndarray, " hits"]
    is_absent: Bool[np.ndarray, " hits"]
    """Of queries whose right answers were taken away."""
    query: np.ndarray

    def take(self, chosen: np.ndarray) -> Cases:
        """Some of them."""
        return Cases(*(values[chosen] for values in self))

    def weights(self, absent: float) -> Float64[np.ndarray, " hits"]:
        """So that this share of the queries are those without an answer."""
        return np.where(self.is_absent, absent, 1 - absent)


def calibrate(index: Index, data: MBeir, config: CalibrateConfig, *, progress: Progress) -> Calibrated:
    """Search for every validation query twice, once without its right answers, and fit and measure.

    The queries without their answers are the honest kind that nothing answers: their words and pictures are
    those of any other query. Half of the queries are fitted on, the other half is measured.

    Raises
    ------
    BadData
        too few queries have a right answer in the index.
    """
    config = checked(config)
    search_config = index.settings
    asked = answerable(
        index,
        data,
        config.rows,
        split=config.split,
        max_queries=config.queries,
        seed=config.seed,
        rerank="embeddings" if search_config.rerank == "embeddings" else "codes",
        progress=progress,
    )
    if len(asked.right) < FEWEST_QUERIES:
        raise BadData(
            f"{len(asked.right)} queries of {data.root} (split {config.split}) have a right answer in "
            f"{index.folder}; at least {FEWEST_QUERIES} are needed to fit on one half and measure the other"
        )
    opened = index.snapshot
    cases = _cases(index, opened, asked, search_config, config.batch, progress)
    fitted = cases.take(cases.query % 2 == 0)
    measured = cases.take(cases.query % 2 == 1)
    return _calibrated(
        fit(fitted, config.absent),
        fitted,
        measured,
        config,
        search_config,
        data=f"{data.name} {config.split}",
        items=opened.num_alive,
        left_out=asked.left_out,
    )


class Fitted(NamedTuple):
    """A logistic regression over a hit's numbers."""

    intercept: float
    weights: Weights

    def log_odds(self, found: Float64[np.ndarray, "hits 4"]) -> Float64[np.ndarray, " hits"]:
        """Of hits."""
        return np.asarray(self.intercept + found @ self.weights.array)


def fit(cases: Cases, absent: float) -> Fitted:
    """The regression with the contrast if it is worth it, else without.

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
    """Of the regressions over these numbers by which a better score is never worth less, the best."""
    weight = cases.weights(absent)
    mean, scale = cases.numbers.mean(axis=0), cases.numbers.std(axis=0) + 1e-12
    design = np.column_stack([np.ones(len(weight)), (cases.numbers - mean) / scale])

    def loss(told: Float64[np.ndarray, " weights"]) -> tuple[float, Float64[np.ndarray, " weights"]]:
        said = design @ told
        value = weight @ (np.logaddexp(0, said) - cases.is_right * said)
        slope = design.T @ (weight * (expit(said) - cases.is_right))
        value += SHRINKAGE / 2 * (told[1:] ** 2).sum()
        slope[1:] += SHRINKAGE * told[1:]
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
    """Log loss."""
    said = fitted.log_odds(cases.numbers)
    return float(cases.weights(absent) @ (np.logaddexp(0, said) - cases.is_right * said))


def _calibrated(
    fitted: Fitted,
    cases: Cases,
    measured: Cases,
    config: CalibrateConfig,
    search_config: SearchConfig,
    *,
    data: str,
    items: int,
    left_out: int,
) -> Calibrated:
    """Choose the threshold on what was fitted, and measure everything on the rest."""
    seen = fitted.log_odds(cases.numbers)
    lowest, highest = float(seen.min()), float(seen.max())

    def first(some: Cases) -> Told:
        own = some.take(some.is_first)
        said = np.clip(fitted.log_odds(own.numbers), lowest, highest)
        return Told(1 / (1 + np.exp(-said)), own.is_right, own.weights(config.absent))

    threshold = threshold_for(first(cases), config.precision, at_least=LIKELY)
    told = first(measured)
    bins = reliability(told)
    is_absent = measured.is_absent[measured.is_first]
    is_good = np.zeros(len(told.weight), dtype=bool) if threshold is None else told.probability >= threshold
    good = told.take(is_good)
    share = float(np.average(told.is_right, weights=told.weight))
    outcome = Outcome(
        queries=int((~is_absent).sum()),
        error=calibration_error(bins),
        brier=brier(told),
        base_brier=share * (1 - share),
        coverage=float(good.weight.sum() / told.weight.sum()),
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
        data=data,
        queries=len(np.unique(cases.query)),
        items=items,
        held_out=outcome,
    )
    return Calibrated(calibration, told, left_out)


def _cases(
    index: Index,
    opened: Snapshot,
    asked: Asked,
    config: SearchConfig,
    batch: int,
    progress: Progress,
) -> Cases:
    """The first hits of every query, with its right answers in the index and without."""
    found = []
    progress.begin("search", len(asked.right))
    for here in asked.batches(batch):
        without = [_without(opened, right) for right in asked.right[here]]
        for is_absent, restrictions in ((False, [None] * len(without)), (True, without)):
            found += list(_found(index, opened, asked, here, config, restrictions, is_absent=is_absent))
        progress.advance(here.stop, {})
    return Cases(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


def _found(
    index: Index,
    opened: Snapshot,
    asked: Asked,
    here: slice,
    config: SearchConfig,
    restrictions: Sequence[Restriction | None],
    *,
    is_absent: bool,
) -> Iterator[Cases]:
    is_raw = opened.manifest.embeddings == "raw"
    evidence = Evidence(index.model.ranker, opened.vectors, is_raw, opened.densities)
    fused = asked.fused[here]
    beams = search(
        index.model.decoder,
        opened.parts,
        fused,
        config,
        restrictions=restrictions,
        widths=[max(config.beam, DEPTH)] * len(fused),
    )
    for number, query in enumerate(asked.evidence[here]):
        answer = rank_items(
            opened.parts,
            beams,
            number,
            query,
            config=config,
            evidence=evidence,
            k=DEPTH,
            restriction=restrictions[number],
            for_codes=fused[number],
        )
        right = asked.right[here.start + number]
        places = zip(answer.parts.tolist(), answer.items.tolist(), strict=True)
        count = len(answer.items)
        yield Cases(
            hit_features(answer.scores, (0.0, 0.0)),
            np.array([place in right for place in places], dtype=bool),
            np.arange(count) == 0,
            np.full(count, is_absent),
            np.full(count, here.start + number),
        )


def _without(opened: Snapshot, right: frozenset[tuple[int, int]]) -> Restriction:
    """Everything that is alive but these items."""
    allowed = []
    for number, segment in enumerate(opened.segments):
        mask = segment.alive()
        if mask is None:
            mask = np.ones(segment.table.num_items, dtype=bool)
        mask[[row for part, row in right if part == number]] = False
        allowed.append(Allowed.of(segment.table, mask))
    return tuple(allowed)
