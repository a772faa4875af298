"""What a score is worth: the probability that a hit is right, fitted to queries whose answers are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64
from pydantic import ConfigDict

from genius_search.config import SearchConfig
from genius_search.errors import BadData, UsageError
from genius_search.index.hits import SearchHit
from genius_search.index.hubness import FIRST, WEIGHTS, Hubness
from genius_search.index.request import SearchRequest
from genius_search.progress import Progress
from genius_search.records import TASKS

if TYPE_CHECKING:
    from genius_search.data.mbeir import MBeir
    from genius_search.index.index import Index

FEWEST_QUERIES: Final = 40
"""Fewer queries are not enough to fit to one half and measure the other."""
FEWEST: Final = 20
"""A threshold is not chosen by fewer first hits above it."""
HITS: Final = 10
"""Hits of a query that are fitted."""
ABSENT: Final = 0.2
"""Assumed share of queries that nothing in the index answers."""
LIKELY: Final = 0.5
"""A hit that is more likely wrong than right is never called a good match."""
SHRINKAGE: Final = 1.0
"""Half the squared weights, of standardised numbers, are added to the loss."""
STEPS: Final = 100
BATCH: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A logistic regression from scores to probabilities, with its measurements on other queries."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    intercept: float
    weights: tuple[float, float, float]
    """Of :func:`hit_numbers` in the log-odds. None is negative, so that no hit is less likely than one below
    it."""
    threshold: float | None
    """Probability from which the first hit is a good match; None if no threshold reaches the precision."""
    precision: float
    """Requested share of right first hits above the threshold."""
    search: SearchConfig
    """Search settings of the scores."""
    data: str
    """The queries."""
    items: int
    """Items in the index at that time."""
    queries: int
    """Queries that were measured; each counts with its right answers, and without them (:data:`ABSENT`)."""
    promised: float
    """Mean probability of the first hits."""
    right: float
    """Share of the first hits that are right."""
    good: float
    """Share of the queries with a good match."""
    good_and_right: float
    """Share of the good matches that are right."""
    refused: float
    """Share of the queries without right answers that have no good match."""

    def probabilities(self, scores: Float32[np.ndarray, " hits"]) -> Float64[np.ndarray, " hits"]:
        """Return the probabilities of one query's hits, best first; at least two if so many were found."""
        return _expit(self.intercept + hit_numbers(scores) @ np.array(self.weights))

    def applies_to(self, config: SearchConfig) -> bool:
        """Return whether searches with these settings have such scores."""
        return _score_settings(config) == _score_settings(self.search)


def hit_numbers(scores: Float32[np.ndarray, " hits"]) -> Float64[np.ndarray, "hits 3"]:
    """Return the score, the lead of the first hit over the second, and minus the distance to the first."""
    own = scores.astype(np.float64)
    numbers = np.zeros((len(own), 3))
    numbers[:, 0] = own
    numbers[:1, 1] = own[:1] - own[1:2] if len(own) > 1 else 0.0
    numbers[:, 2] = own - own[:1]
    return numbers


class Cases(NamedTuple):
    """Hits that are right or wrong, those of a query together."""

    numbers: Float64[np.ndarray, "hits 3"]
    is_right: Bool[np.ndarray, " hits"]
    weight: Float64[np.ndarray, " hits"]
    is_first: Bool[np.ndarray, " hits"]

    @staticmethod
    def of(hits: Sequence[SearchHit], right: frozenset[str], weight: float) -> Cases:
        """Return the hits of a query, best first."""
        count = len(hits)
        numbers = hit_numbers(np.array([hit.score for hit in hits], dtype=np.float32))
        is_right = np.array([hit.id in right for hit in hits], dtype=bool)
        return Cases(numbers, is_right, np.full(count, weight), np.arange(count) == 0)

    @staticmethod
    def join(cases: Sequence[Cases]) -> Cases:
        """Return the cases of several queries together."""
        return Cases(*(np.concatenate(columns) for columns in zip(*cases, strict=True)))


def calibrate(
    index: Index, data: MBeir, *, split: str = "val", precision: float = 0.8, progress: Progress
) -> Calibration:
    """Fit a calibration to every second query of a split, and measure it on the others.

    A query whose right answers are left out of its hits is the honest kind that nothing answers: its words
    and pictures are those of any other. The index is unchanged; see :meth:`Index.keep_calibration`.

    Parameters
    ----------
    data
        Queries whose right answers are items of the index, by their ids.
    precision
        Share of the first hits called good matches that should be right.

    Raises
    ------
    UsageError
        The precision is not between 0 and 1.
    BadData
        Fewer than :data:`FEWEST_QUERIES` queries have a right answer in the index.
    """
    if not 0 < precision < 1:
        raise UsageError(f"the precision is {precision}, it must be between 0 and 1, such as 0.8")
    config = index.settings
    queries = list(_labelled(index, data, split))
    if len(queries) < FEWEST_QUERIES:
        raise BadData(_too_few(index, data, split, len(queries)))
    cases: list[list[Cases]] = [[], []]
    progress.begin("search", len(queries))
    for start in range(0, len(queries), BATCH):
        own = queries[start : start + BATCH]
        found = index.search_many([request for request, _ in own], config=config)
        for number, ((_, right), hits) in enumerate(zip(own, found, strict=True), start):
            without = [hit for hit in hits if hit.id not in right]
            cases[number % 2].append(Cases.of(hits[:HITS], right, 1 - ABSENT))
            cases[number % 2].append(Cases.of(without[:HITS], right, ABSENT))
        progress.advance(start + len(own), {})
    fitted, measured = map(Cases.join, cases)
    intercept, weights = fit(fitted)
    log_odds = intercept + fitted.numbers @ weights
    firsts = fitted.is_first
    threshold = threshold_for(
        _expit(log_odds[firsts]), fitted.is_right[firsts], fitted.weight[firsts], precision=precision
    )
    _, is_right, weight, _ = first = Cases(*(column[measured.is_first] for column in measured))
    probability = _expit(intercept + first.numbers @ weights)
    is_good = probability >= (np.inf if threshold is None else threshold)
    is_absent = weight == ABSENT
    return Calibration(
        intercept=intercept,
        weights=(float(weights[0]), float(weights[1]), float(weights[2])),
        threshold=threshold,
        precision=precision,
        search=config,
        data=f"{data.name} {split}",
        items=index.snapshot.num_alive,
        queries=len(queries) // 2,
        promised=float(np.average(probability, weights=weight)),
        right=float(np.average(is_right, weights=weight)),
        good=float(np.average(is_good, weights=weight)),
        good_and_right=float(weight @ (is_good & is_right) / max(weight @ is_good, 1e-9)),
        refused=float((~is_good)[is_absent].mean()) if is_absent.any() else 0.0,
    )


def measure_hubness(index: Index, data: MBeir, *, split: str = "val", progress: Progress) -> Hubness:
    """Measure which weight of densities finds most of a split's right answers. The index is unchanged."""
    queries = list(_labelled(index, data, split))
    if len(queries) < FEWEST_QUERIES:
        raise BadData(_too_few(index, data, split, len(queries)))
    found: dict[float, list[bool]] = {weight: [] for weight in WEIGHTS}
    progress.begin("search", len(queries))
    for start in range(0, len(queries), BATCH):
        own = queries[start : start + BATCH]
        for weight, hits in index.search_by_weights([request for request, _ in own], WEIGHTS).items():
            found[weight] += [
                any(hit.id in right for hit in some[:FIRST])
                for some, (_, right) in zip(hits, own, strict=True)
            ]
        progress.advance(start + len(own), {})
    return Hubness.choose({weight: np.array(one) for weight, one in found.items()}, f"{data.name} {split}")


def _too_few(index: Index, data: MBeir, split: str, count: int) -> str:
    return (
        f"{count} queries of {data.root} (split {split}) have a right answer in {index.folder}; at least "
        f"{FEWEST_QUERIES} are needed to fit to one half and measure the other"
    )


def _labelled(index: Index, data: MBeir, split: str) -> Iterator[tuple[SearchRequest, frozenset[str]]]:
    """Yield the queries that have a right answer in the index, with those answers."""
    from genius_search.data.mbeir import read_judgements, read_queries  # noqa: PLC0415  not to search

    snapshot = index.snapshot
    for row in data.rows(split):
        queries = list(read_queries(row.queries))
        judged = read_judgements(row, [query.qid for query in queries])
        there = set(snapshot.stamps([did for query in queries for did in judged[query.qid]]))
        for query in queries:
            right = frozenset(did for did, grade in judged[query.qid].items() if grade > 0 and did in there)
            if right:
                request = SearchRequest(
                    text=query.text,
                    image=None if query.image is None else data.image_path(query.image),
                    modality=TASKS[row.task_id][1],
                    hybrid=False,
                    k=HITS + len(right),
                )
                yield request, right


def fit(cases: Cases) -> tuple[float, Float64[np.ndarray, " 3"]]:
    """Fit a logistic regression whose weights are not negative; return intercept and weights."""
    mean, scale = cases.numbers.mean(axis=0), cases.numbers.std(axis=0) + 1e-12
    standard = (cases.numbers - mean) / scale
    weights, used = np.zeros(3), [0, 1, 2]
    intercept, fitted = _fit_logistic(standard, cases)
    while len(fitted) and fitted.min() < 0:
        used.pop(int(fitted.argmin()))
        intercept, fitted = _fit_logistic(standard[:, used], cases)
    weights[used] = fitted / scale[used]
    return float(intercept - weights @ mean), weights


def _fit_logistic(
    numbers: Float64[np.ndarray, "hits numbers"], cases: Cases
) -> tuple[float, Float64[np.ndarray, " numbers"]]:
    """Fit a logistic regression by Newton's method; return its intercept and weights."""
    design = np.column_stack([np.ones(len(numbers)), numbers])
    shrinkage = np.array([1e-3, *[SHRINKAGE] * numbers.shape[1]])
    found = np.zeros(design.shape[1])
    for _ in range(STEPS):
        likely = _expit(design @ found)
        slope = design.T @ (cases.weight * (likely - cases.is_right)) + shrinkage * found
        bend = (design.T * (cases.weight * likely * (1 - likely))) @ design + np.diag(shrinkage)
        step = np.linalg.solve(bend, slope)
        found -= step
        if np.abs(step).max() < 1e-9:
            break
    return float(found[0]), found[1:]


def threshold_for(
    probability: Float64[np.ndarray, " hits"],
    is_right: Bool[np.ndarray, " hits"],
    weight: Float64[np.ndarray, " hits"],
    *,
    precision: float,
) -> float | None:
    """Return the lowest threshold, at least :data:`LIKELY`, that reaches a precision; None if there is none.

    Whatever is as probable as the threshold is accepted, too.
    """
    order = np.argsort(-probability, kind="stable")
    ordered, right, weights = probability[order], is_right[order], weight[order]
    last = np.flatnonzero(np.append(ordered[1:] < ordered[:-1], True))
    reached = ((weights * right).cumsum() / weights.cumsum())[last]
    enough = last[(reached >= precision) & (last + 1 >= FEWEST) & (ordered[last] >= LIKELY)]
    return float(ordered[enough[-1]]) if len(enough) else None


def _expit(log_odds: Float64[np.ndarray, " hits"]) -> Float64[np.ndarray, " hits"]:
    return np.asarray(1 / (1 + np.exp(-log_odds)))


def _score_settings(config: SearchConfig) -> tuple[object, ...]:
    """Return the settings that the scores of hits depend on."""
    is_generated = config.rerank == "none"
    return (
        config.rerank,
        0.0 if is_generated else config.generator_weight,
        0.0 if is_generated else config.density_weight,
        config.scores if is_generated or config.generator_weight else None,
    )
