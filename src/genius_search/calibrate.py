"""``genius calibrate``: learn from validation queries what the scores of an index's hits are worth."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from annotated_types import Gt, Lt
from jaxtyping import Bool, Float32, Float64
from scipy.optimize import LinearConstraint, minimize
from scipy.special import expit

from genius_search.config import SearchConfig, checked
from genius_search.data.mbeir import MBeir
from genius_search.errors import BadData, GeniusError
from genius_search.index.alternatives import split_alternatives
from genius_search.index.filters import Filter
from genius_search.index.index import Index
from genius_search.index.query import encode_queries, evidence_of
from genius_search.index.requests import SearchRequest
from genius_search.index.settings import (
    DEPTH,
    MANY_WORDS,
    WORD,
    Bin,
    Calibration,
    KindScale,
    Outcome,
    QueryKind,
    Scale,
    Weights,
    hit_features,
)
from genius_search.index.snapshot import Snapshot
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.records import Modality
from genius_search.search.find import find
from genius_search.search.rank import Wanted
from genius_search.search.table import Allowed
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
SHORT_QUERIES: Final = 300
"""Short queries of a kind, at most."""
REFUSED: Final = 0.1
"""Share of short queries with right answers that have no good match. Their labels miss other wordings, so
precision cannot set their threshold."""
COMMON: Final = 0.25
"""Words of more than this share of the text queries say little."""
RISES: Final = np.array([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
"""Sums of weights that are not negative. So the probability never falls when a score rises (of the first hit,
of another), and never rises down a list of hits."""
LIKELY: Final = 0.5
"""A hit that is more likely wrong than right is never called a good match."""
WITHOUT_CONTRAST: Final = (0, 1, 2)
WITH_CONTRAST: Final = (0, 1, 2, 3)

Place: TypeAlias = tuple[int, int]
"""Segment and row of an item."""


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


def brier(predictions: Predictions) -> float:
    """Return the Brier score: the mean squared error of the probabilities; 0 is perfect."""
    return float(
        np.average((predictions.probability - predictions.is_right) ** 2, weights=predictions.weight)
    )


def threshold_for(predictions: Predictions, precision: float, *, at_least: float) -> float | None:
    """Return the lowest threshold of at least ``at_least`` that reaches a precision, or None.

    Whatever is as probable as the threshold is accepted, too.
    """
    probability, is_right, weight = predictions.take(np.argsort(-predictions.probability, kind="stable"))
    last = np.flatnonzero(np.append(probability[1:] < probability[:-1], True))
    reached = ((weight * is_right).cumsum() / weight.cumsum())[last]
    enough = last[(reached >= precision) & (last + 1 >= FEWEST) & (probability[last] >= at_least)]
    return float(probability[enough[-1]]) if len(enough) else None


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


class LabelledQuery(NamedTuple):
    """A query and its right answers."""

    kind: QueryKind
    fused: Float32[np.ndarray, " dim"]
    evidence: Float32[np.ndarray, " dim"]
    """Its embedding in the space that items are ordered in."""
    right: frozenset[Place]
    among: frozenset[Place] | None = None
    """The items of which it is known whether they are right; None means all."""


def calibrate(index: Index, data: MBeir, config: CalibrateConfig, *, progress: Progress) -> Calibrated:
    """Fit and measure a calibration on validation queries, each searched with and without its right answers.

    The queries without their answers are the honest kind that nothing answers: their words and pictures are
    those of any other query. Half of the queries are fitted on, the other half is measured.

    Each kind of query and item with enough queries has a scale of its own: a text's scores with images lie
    elsewhere than those with texts, and a word's elsewhere than a caption's. Queries of up to three words are
    cut from the others (:func:`shorten`).

    Raises
    ------
    BadData
        too few queries have a right answer in the index.
    """
    config = checked(config)
    search_config = index.settings
    rerank: Literal["codes", "embeddings"] = "embeddings" if search_config.rerank == "embeddings" else "codes"
    found = validation_queries(index, data, config, rerank=rerank, progress=progress)
    if len(found.right) < FEWEST_QUERIES:
        raise BadData(
            f"{len(found.right)} queries of {data.root} (split {config.split}) have a right answer in "
            f"{index.folder}; at least {FEWEST_QUERIES} are needed to fit on one half and measure the other"
        )
    model, snapshot = index.current()
    common = common_words(query.text for query in found.queries if query.text)
    kinds = [
        QueryKind.of(query.text, has_image=query.image is not None, item=wanted, common=common)
        for query, wanted in zip(found.queries, found.wanted, strict=True)
    ]
    vectors = zip(found.fused.numpy(), found.evidence.numpy(), strict=True)
    queries = [
        LabelledQuery(kind, *both, right)
        for kind, both, right in zip(kinds, vectors, found.right, strict=True)
    ]
    num_labelled = len(queries)
    enough = {kind for kind, count in Counter(kinds).items() if count >= FEWEST_QUERIES}
    short = shorten(model, snapshot, found, common, search_config, seed=config.seed, progress=progress)
    queries += [query for query in short if query.kind not in enough]
    cases = _cases(model, snapshot, queries, search_config, config.batch, progress)
    labelled = cases.take(cases.query < num_labelled)
    general = fit(_half(labelled, 0), config.absent)
    groups = {
        kind: labelled.take(_is_of(kind, queries, labelled))
        for kind in dict.fromkeys(kinds)
        if kind in enough
    }
    scales = {
        kind: fit(_half(own, 0), config.absent)
        for kind, own in groups.items()
        if 0 < _half(own, 0).is_right.mean() < 1
    }

    def first(some: Cases) -> Predictions:
        own = some.take(some.is_first)
        probability = general.of_features(own.numbers)
        for kind, scale in scales.items():
            chosen = _is_of(kind, queries, own)
            probability[chosen] = scale.of_features(own.numbers[chosen])
        return Predictions(probability, own.is_right, own.weights(config.absent))

    threshold = threshold_for(first(_half(labelled, 0)), config.precision, at_least=LIKELY)

    def measure(some: Cases, threshold: float | None) -> Outcome:
        return _outcome(first(some), some.is_absent[some.is_first], threshold)

    thresholds = dict.fromkeys(scales, threshold)
    cut = cases.take(cases.query >= num_labelled)
    for kind in dict.fromkeys(query.kind for query in queries[num_labelled:]):
        own = cut.take(_is_of(kind, queries, cut))
        fitted_on = _half(own, 0)
        if len(np.unique(own.query)) >= FEWEST_QUERIES and 0 < fitted_on.is_right.mean() < 1:
            groups[kind], scales[kind] = own, fit(fitted_on, config.absent)
            present = first(fitted_on.take(~fitted_on.is_absent)).probability
            thresholds[kind] = min(float(np.quantile(present, REFUSED)), threshold or 1.0)

    calibration = Calibration(
        **_values(general) | {"threshold": threshold},
        search=search_config,
        wanted_precision=config.precision,
        absent=config.absent,
        data=f"{data.name} {config.split}",
        items=snapshot.num_alive,
        held_out=measure(_half(labelled, 1), threshold),
        common_words=common,
        kinds=tuple(
            KindScale(
                **_values(scale) | {"threshold": thresholds[kind]},
                **kind._asdict(),
                held_out=measure(_half(groups[kind], 1), thresholds[kind]),
            )
            for kind, scale in scales.items()
        ),
    )
    return Calibrated(calibration, found.left_out)


def _half(cases: Cases, number: int) -> Cases:
    """Return the hits of every second query."""
    return cases.take(cases.query % 2 == number)


def _values(scale: Scale) -> dict[str, Any]:
    return {field.name: getattr(scale, field.name) for field in dataclasses.fields(Scale)}


def _is_of(kind: QueryKind, queries: Sequence[LabelledQuery], cases: Cases) -> Bool[np.ndarray, " hits"]:
    """Return which hits are of queries of a kind."""
    return np.asarray(np.array([query.kind == kind for query in queries], dtype=bool)[cases.query])


def _outcome(
    predictions: Predictions, is_absent: Bool[np.ndarray, " cases"], threshold: float | None
) -> Outcome:
    """Measure the predictions for first hits."""
    bins = reliability(predictions)
    is_good = predictions.probability >= (np.inf if threshold is None else threshold)
    good = predictions.take(is_good)
    share = float(np.average(predictions.is_right, weights=predictions.weight))
    return Outcome(
        queries=int((~is_absent).sum()),
        error=calibration_error(bins),
        brier=brier(predictions),
        base_brier=share * (1 - share),
        coverage=float(good.weight.sum() / predictions.weight.sum()),
        precision=float(np.average(good.is_right, weights=good.weight)) if len(good.weight) else 0.0,
        refused=float((~is_good)[is_absent].mean()) if is_absent.any() else 0.0,
        bins=bins,
    )


def common_words(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the words that more than :data:`COMMON` of the texts have, such as articles."""
    counts, total = Counter[str](), 0
    for text in texts:
        counts.update(set(WORD.findall(text.lower())))
        total += 1
    return tuple(sorted(word for word, count in counts.items() if count > COMMON * total))


def shorten(
    model: Genius,
    snapshot: Snapshot,
    queries: ValidationQueries,
    common: Collection[str],
    config: SearchConfig,
    *,
    seed: int,
    progress: Progress,
) -> list[LabelledQuery]:
    """Cut queries of one to three words, not counting common ones, from the text queries.

    An item is right if its text, or one of the text queries that it answers, has all these words. Images
    without such a query are not searched, because nothing is known about them.

    Returns
    -------
    list
        up to :data:`SHORT_QUERIES` of each kind; none if the encoder has no features for new texts.
    """
    described: dict[Place, set[str]] = defaultdict(set)
    texts: dict[Modality, list[list[str]]] = defaultdict(list)
    for query, wanted, right in zip(queries.queries, queries.wanted, queries.right, strict=True):
        if query.image is None and query.text:
            texts[wanted].append(WORD.findall(query.text.lower()))
            for place in right:
                described[place].update(texts[wanted][-1])
    drawn = [
        (wanted, text)
        for wanted, rows in texts.items()
        for words in range(1, MANY_WORDS)
        for text in _cut(rows, words, common, random.Random(f"{seed} {wanted} {words}"))
    ]
    requests = [SearchRequest(text=text, modality=wanted) for wanted, text in drawn]
    try:
        encoded = encode_queries(model, snapshot, requests, config)
    except GeniusError as error:
        progress.say(
            f"short queries will be judged like those of {len(queries.right):,} labelled ones: {error}"
        )
        return []
    found = []
    for (wanted, text), one in zip(drawn, encoded, strict=True):
        own = [word for word in text.split() if word not in common]
        places = {place for place, words in described.items() if words.issuperset(own)}
        places |= _containing(snapshot, " ".join(own), wanted)
        among = frozenset(described) if wanted is Modality.IMAGE else None
        kind = QueryKind.of(text, has_image=False, item=wanted, common=common)
        found.append(LabelledQuery(kind, one.embedding, one.evidence, frozenset(places), among))
    return found


def _cut(rows: Sequence[list[str]], words: int, common: Collection[str], rng: random.Random) -> list[str]:
    """Cut a text of so many telling words from each row; return the distinct ones."""
    texts: dict[str, None] = {}
    for row in rng.sample(rows, len(rows)):
        telling = [place for place, word in enumerate(row) if word not in common]
        if len(telling) >= words:
            first = rng.randint(0, len(telling) - words)
            texts[" ".join(row[telling[first] : telling[first + words - 1] + 1])] = None
    return [text for text in texts if not split_alternatives(text)][:SHORT_QUERIES]


def _containing(snapshot: Snapshot, words: str, modality: Modality) -> set[Place]:
    """Return the items of a modality whose text has all the words."""
    if modality is Modality.IMAGE:
        return set()
    allowed = snapshot.restriction(Filter(match=words, modality=modality))
    return {
        (number, row)
        for number, one in enumerate(allowed)
        if one is not None
        for row in one.items.nonzero()[0].tolist()
    }


def fit(cases: Cases, absent: float) -> Scale:
    """Fit a scale, with the contrast if it lowers the loss enough.

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


def _best(cases: Cases, absent: float, used: Sequence[int]) -> Scale:
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
    intercept = float(found[0] - raw @ mean)
    seen = intercept + cases.numbers @ raw
    return Scale(
        intercept=intercept,
        weights=Weights(*raw.tolist()),
        alone=(float(cases.numbers[:, 1].max()), float(cases.numbers[:, 3].max())),
        lowest=float(seen.min()),
        highest=float(seen.max()),
        threshold=None,
        queries=len(np.unique(cases.query)),
    )


def _loss(scale: Scale, cases: Cases, absent: float) -> float:
    """Return the weighted log loss."""
    log_odds = scale.intercept + cases.numbers @ scale.weights.array
    return float(cases.weights(absent) @ (np.logaddexp(0, log_odds) - cases.is_right * log_odds))


def _cases(
    model: Genius,
    snapshot: Snapshot,
    queries: Sequence[LabelledQuery],
    config: SearchConfig,
    batch: int,
    progress: Progress,
) -> Cases:
    """Return the first hits of every query, with its right answers in the index and without."""
    found = []
    progress.begin("search", len(queries))
    for start in range(0, len(queries), batch):
        own = queries[start : start + batch]
        for is_absent in (False, True):
            answers = find(
                lambda: model.decoder_for(config),
                model.fast_for(config),
                snapshot.search_segments,
                np.stack([query.fused for query in own]),
                [_wanted(model, snapshot, query, config, is_absent=is_absent) for query in own],
                config,
                evidence=evidence_of(model, snapshot),
                embeddings=[query.evidence for query in own],
            )
            for number, (query, (ranking, _)) in enumerate(zip(own, answers, strict=True), start):
                places = zip(ranking.segments.tolist(), ranking.items.tolist(), strict=True)
                count = len(ranking.items)
                found.append(
                    Cases(
                        hit_features(ranking.scores, (0.0, 0.0)),
                        np.array([place in query.right for place in places], dtype=bool),
                        np.arange(count) == 0,
                        np.full(count, is_absent),
                        np.full(count, number),
                    )
                )
        progress.advance(start + len(own), {})
    return Cases(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


def _wanted(
    model: Genius, snapshot: Snapshot, query: LabelledQuery, config: SearchConfig, *, is_absent: bool
) -> Wanted:
    """Return the conditions of a query: items of its modality, without the right ones if they are absent."""
    level0 = model.level0_codes(query.kind.item) if model.level0_is_exact else frozenset()
    restriction = None
    if is_absent or query.among is not None:
        masks = []
        for number, segment in enumerate(snapshot.segments):
            alive = segment.alive()
            mask = np.ones(segment.table.num_items, dtype=bool) if alive is None else alive.copy()
            if query.among is not None:
                mask[:] = False
                mask[[row for part, row in query.among if part == number]] = True
            if is_absent:
                mask[[row for part, row in query.right if part == number]] = False
            masks.append(Allowed.of(segment.table, mask))
        restriction = tuple(masks)
    return Wanted(max(config.beam, DEPTH), DEPTH, level0, restriction)
