"""Calibration: queries with known answers turn the scores of an index into probabilities.

A calibration is a logistic regression from three numbers of a hit (its score, the lead of the first
hit over the second, and its distance from the first hit) to the probability that the hit is right::

    probability = 1 / (1 + exp(-(intercept + weights @ numbers)))

The same queries choose the density weight, whose default costs at most one standard error on any of
our four types of data. In some pools, for example of captions, a larger weight finds more.

Queries with answers (:func:`read_pairs`) come from the choices that an index has learned, a file
with one query per line, or a data set in M-BEIR's layout.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Float32, Float64

from genius_search.border import as_id_list, as_path, as_text
from genius_search.config import SearchSettings, default_search
from genius_search.data.mbeir import MBeir, read_json_lines, read_queries
from genius_search.errors import BadData, UsageError
from genius_search.index.items import Item
from genius_search.index.learned import CHOSEN_FIELD, read_choices
from genius_search.index.query import SnapshotSearcher
from genius_search.index.request import SearchRequest
from genius_search.index.score import hit_features
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import Calibration
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.records import Modality

PAIRS_FORMAT: Final = (
    "pairs are a .jsonl file of queries with lines such as "
    '{"text": "a red kite", "id": "kites/7.jpg"}, or a data set in M-BEIR\'s layout whose '
    "candidates have the items' ids"
)
"""The formats of :func:`read_pairs` as error messages state them."""
TRAINING_SPLIT: Final = "train"
WEIGHT_FACTORS: Final = (0.0, 0.5, 1.0, 1.5, 2.0)
"""Density weights that are compared, as multiples of the default."""
NUM_FIRST_HITS: Final = 5
"""A query is answered if one of this many first hits is right."""
MIN_CALIBRATION_QUERIES: Final = 40
"""Minimum number of queries to fit a calibration to one half and measure it on the other."""
MAX_CALIBRATION_QUERIES: Final = 10_000
"""Maximum number of queries; of more, a sample is drawn."""
MAX_FITTED_HITS: Final = 10
"""Maximum number of hits of a query that the regression is fitted to."""
MIN_ACCEPTED_HITS: Final = 20
"""Minimum number of first hits above a threshold."""
MIN_THRESHOLD: Final = 0.5
"""A hit that is more likely wrong than right is never a good match."""
ABSENT_SHARE: Final = 0.2
"""Assumed share of queries that no item in the index answers."""
SHRINKAGE: Final = 1.0
"""Half the squared weights of the standardised numbers, times this, are added to the loss."""
NEWTON_STEPS: Final = 30
MIN_REQUESTS_OF_KIND: Final = 20
"""Minimum number of requests to measure the words of one kind of query."""
WORD_COUNT_QUANTILE: Final = 0.03
"""Share of the requests that may have fewer words than the measured minimum."""
REQUESTS_PER_BATCH: Final = 32
"""Number of requests that are encoded together."""


class Pair(NamedTuple):
    """A query, and the ids of the items that answer it."""

    query: Item
    items: tuple[str, ...]
    vector: Float32[np.ndarray, " dim"] | None = None
    """The query's feature, if its text and image are not known."""


class Question(NamedTuple):
    """A request, and the ids of the items that answer it."""

    request: SearchRequest
    right_ids: frozenset[str]


class JudgedHits(NamedTuple):
    """The hits of a query, best first, with known relevance."""

    scores: Float32[np.ndarray, " hits"]
    is_right: Bool[np.ndarray, " hits"]


class Cases(NamedTuple):
    """Hits to fit and measure a calibration; row i of each array describes one hit."""

    numbers: Float64[np.ndarray, "hits 3"]
    """See :func:`~genius_search.index.score.hit_features`."""
    is_right: Bool[np.ndarray, " hits"]
    is_first: Bool[np.ndarray, " hits"]
    """Whether it is the first hit of its query."""
    is_absent: Bool[np.ndarray, " hits"]
    """Whether the right answers were removed from the hits of its query."""
    is_held_out: Bool[np.ndarray, " hits"]
    """Whether the calibration is measured on its query, rather than fitted to it."""

    @property
    def weights(self) -> Float64[np.ndarray, " hits"]:
        """Each query counts twice, with and without its right answers, in the assumed shares."""
        return np.where(self.is_absent, ABSENT_SHARE, 1 - ABSENT_SHARE)

    def select(self, mask: Bool[np.ndarray, " hits"]) -> Self:
        """Return the cases that a mask selects."""
        return type(self)(*(column[mask] for column in self))

    @staticmethod
    def concatenate(parts: Iterable[Cases]) -> Cases:
        """Join the cases of several queries."""
        return Cases(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def calibrate(
    model: Genius,
    snapshot: Snapshot,
    settings: SearchSettings,
    pairs: Iterable[Pair],
    *,
    source: str = "the pairs",
    precision: float = 0.8,
    progress: Progress,
) -> Calibration:
    """Choose the density weight, fit a calibration to half of the queries, and measure it.

    The other half measures it. Each query is also used without its right answers, as a query that
    no item answers: its words and pictures are typical, unlike those of an invented query. The
    index does not change; :meth:`genius_search.Index.calibrate` stores the result.

    Parameters
    ----------
    settings
        Search settings of the index; its density weight is replaced.
    pairs
        Queries whose right answers are items of the index, by their ids (:func:`read_pairs`).
    source
        Name of the pairs in an error message.
    precision
        Share of the first hits called good matches that should be right.

    Raises
    ------
    UsageError
        The precision is not between 0 and 1.
    BadData
        Fewer than :data:`MIN_CALIBRATION_QUERIES` queries have a right answer in the index.
    """
    if not 0 < precision < 1:
        raise UsageError(f"the precision is {precision}, it must be between 0 and 1, such as 0.8")
    questions = _draw_questions(snapshot, pairs)
    if len(questions) < MIN_CALIBRATION_QUERIES:
        raise BadData(
            f"{len(questions)} queries of {source} have a right answer in the index; at least "
            f"{MIN_CALIBRATION_QUERIES} are needed to fit to one half and measure the other"
        )
    default_weight = default_search(snapshot.num_rows).density_weight
    settings_by_weight = {
        weight: replace(settings, density_weight=weight)
        for weight in density_weights_around(default_weight)
    }
    hits_by_weight = _search(model, snapshot, settings_by_weight, questions, progress)
    density_weight = choose_density_weight(
        {weight: _is_answered(hits) for weight, hits in hits_by_weight.items()}, default_weight
    )
    return _fit_and_measure(
        questions,
        _label_cases(hits_by_weight[density_weight]),
        settings_by_weight[density_weight],
        precision=precision,
    )


def _draw_questions(snapshot: Snapshot, pairs: Iterable[Pair]) -> list[Question]:
    """Return the requests of at most :data:`MAX_CALIBRATION_QUERIES` queries."""
    merged = [*_merge_answers(pairs)]
    if len(merged) > MAX_CALIBRATION_QUERIES:
        merged = random.Random(0).sample(merged, MAX_CALIBRATION_QUERIES)
    return [*_questions(snapshot, merged)]


def _merge_answers(pairs: Iterable[Pair]) -> Iterable[Pair]:
    """Return each query once, with all items that were chosen for it at different times."""
    merged: dict[Hashable, Pair] = {}
    for pair in pairs:
        key = (pair.query, None if pair.vector is None else pair.vector.tobytes())
        earlier_items = merged.get(key, pair).items
        items = dict.fromkeys([*earlier_items, *pair.items])
        merged[key] = pair._replace(items=tuple(items))
    return merged.values()


def _questions(snapshot: Snapshot, pairs: Iterable[Pair]) -> Iterator[Question]:
    """Yield a question for each query and each modality of its answers in the index."""
    for query, items, vector in pairs:
        ids_by_modality: dict[Modality, set[str]] = defaultdict(set)
        for item_id, state in snapshot.item_states(items).items():
            ids_by_modality[snapshot.item_at(state.location).modality].add(item_id)
        for modality, right_ids in ids_by_modality.items():
            request = SearchRequest(
                text=query.text,
                image=query.image,
                vector=vector,
                modality=modality,
                hybrid=False,
                k=MAX_FITTED_HITS + len(right_ids),
            )
            yield Question(request, frozenset(right_ids))


def _search(
    model: Genius,
    snapshot: Snapshot,
    settings_by_weight: Mapping[float, SearchSettings],
    questions: Sequence[Question],
    progress: Progress,
) -> dict[float, list[JudgedHits]]:
    """Search for each question with each density weight; each query is encoded once."""
    hits_by_weight: dict[float, list[JudgedHits]] = {weight: [] for weight in settings_by_weight}
    progress.begin("search", len(questions))
    for start in range(0, len(questions), REQUESTS_PER_BATCH):
        batch = questions[start : start + REQUESTS_PER_BATCH]
        encoded = SnapshotSearcher(model, snapshot).encode([request for request, _ in batch])
        for weight, settings in settings_by_weight.items():
            results = SnapshotSearcher(model, snapshot, settings).search_encoded(encoded)
            for result, (_, right_ids) in zip(results, batch, strict=True):
                scores = np.array([hit.score for hit in result.hits], dtype=np.float32)
                is_right = np.array([hit.id in right_ids for hit in result.hits], dtype=bool)
                hits_by_weight[weight].append(JudgedHits(scores, is_right))
        progress.advance(start + len(batch), {})
    return hits_by_weight


def _is_answered(hits: Iterable[JudgedHits]) -> Bool[np.ndarray, " queries"]:
    return np.array([is_right[:NUM_FIRST_HITS].any() for _, is_right in hits])


def density_weights_around(default: float) -> list[float]:
    """Return the density weights to compare, the default first."""
    return [default, *(factor * default for factor in WEIGHT_FACTORS if factor != 1)]


def choose_density_weight(
    is_answered: Mapping[float, Bool[np.ndarray, " queries"]], default: float
) -> float:
    """Return the default, or the weight that answers most queries if the gain is significant.

    Parameters
    ----------
    is_answered
        For each of :func:`density_weights_around`, whether each query has a right answer among its
        first :data:`NUM_FIRST_HITS` hits; the queries are the same for each weight.
    """

    def gain(weight: float) -> float:
        return significant_gain(is_answered[weight], is_answered[default])

    return max((default, *is_answered), key=gain)


def significant_gain(
    after: Bool[np.ndarray, " queries"], before: Bool[np.ndarray, " queries"]
) -> float:
    """Return by how much the share of answered queries grew; 0 if that may be chance.

    A gain is significant if it exceeds one standard error of the difference. A gain of a single
    query is as large as its error, so rounding must not decide about it.
    """
    differences = after.astype(float) - before
    gain = float(differences.mean())
    standard_error = float(differences.std(ddof=1) / np.sqrt(len(differences)))
    return gain if gain > standard_error * (1 + 1e-6) else 0.0


def _label_cases(hits: Sequence[JudgedHits]) -> Cases:
    """Return the cases of all queries; every second query is held out.

    Each query yields its first hits, and its first hits without the right answers::

        right answers   x . x .          hits 1 to 4 of a query
        present         1 0 1 0
        absent            0   0          hits 2 and 4, as if they were the first two
    """
    parts = []
    for query_number, (scores, is_right) in enumerate(hits):
        for is_absent in (False, True):
            is_present = ~is_right if is_absent else np.ones_like(is_right)
            numbers = hit_features(scores[is_present][:MAX_FITTED_HITS])
            num_hits = len(numbers)
            part = Cases(
                numbers=numbers,
                is_right=is_right[is_present][:MAX_FITTED_HITS],
                is_first=np.arange(num_hits) == 0,
                is_absent=np.full(num_hits, is_absent),
                is_held_out=np.full(num_hits, query_number % 2 == 1),
            )
            parts.append(part)
    return Cases.concatenate(parts)


def _fit_and_measure(
    questions: Sequence[Question], cases: Cases, settings: SearchSettings, *, precision: float
) -> Calibration:
    """Fit regression and threshold to one half of the cases, and measure both on the other half."""
    fitted = cases.select(~cases.is_held_out)
    intercept, weights = fit_logistic_regression(fitted.numbers, fitted.is_right, fitted.weights)
    first_hits = fitted.select(fitted.is_first)
    threshold = choose_threshold(
        expit(intercept + first_hits.numbers @ weights),
        first_hits.is_right,
        first_hits.weights,
        precision=precision,
    )
    measured = cases.select(cases.is_first & cases.is_held_out)
    shares = measured.weights
    probability = expit(intercept + measured.numbers @ weights)
    is_good = probability >= (np.inf if threshold is None else threshold)
    good_and_right = shares @ (is_good & measured.is_right) / max(shares @ is_good, 1e-9)
    refused = float((~is_good)[measured.is_absent].mean()) if measured.is_absent.any() else 0.0
    return Calibration(
        intercept=intercept,
        weights=(float(weights[0]), float(weights[1]), float(weights[2])),
        threshold=threshold,
        search=settings,
        queries=len(questions) // 2,
        promised=float(np.average(probability, weights=shares)),
        right=float(np.average(measured.is_right, weights=shares)),
        good=float(np.average(is_good, weights=shares)),
        good_and_right=float(good_and_right),
        refused=refused,
        fewest_words=min_words_by_query_kind(request for request, _ in questions),
    )


def fit_logistic_regression(
    numbers: Float64[np.ndarray, "hits 3"],
    is_right: Bool[np.ndarray, " hits"],
    hit_weights: Float64[np.ndarray, " hits"],
) -> tuple[float, Float64[np.ndarray, " 3"]]:
    """Fit a logistic regression without negative weights; return intercept and weights.

    Newton's method minimises the weighted log loss plus the shrinkage, with p the probabilities
    and X the standardised numbers with a column of ones::

        gradient = X^T (hit_weights * (p - is_right)) + shrinkage * w
        Hessian  = X^T diag(hit_weights * p * (1 - p)) X + diag(shrinkage)
        w       -= Hessian^-1 gradient

    While a weight is negative, the number with the most negative one is removed.
    """
    mean = numbers.mean(axis=0)
    scale = numbers.std(axis=0) + 1e-12
    columns = list(range(numbers.shape[1]))
    while True:
        design = np.column_stack([np.ones(len(numbers)), ((numbers - mean) / scale)[:, columns]])
        shrinkage = np.array([1e-3, *[SHRINKAGE] * len(columns)])
        solution = np.zeros(design.shape[1])  # intercept, then a weight for each column
        for _ in range(NEWTON_STEPS):
            probability = expit(design @ solution)
            gradient = design.T @ (hit_weights * (probability - is_right)) + shrinkage * solution
            curvature = hit_weights * probability * (1 - probability)
            hessian = (design.T * curvature) @ design + np.diag(shrinkage)
            solution -= np.linalg.solve(hessian, gradient)
        if solution[1:].min(initial=0) >= 0:
            break
        columns.pop(int(solution[1:].argmin()))
    weights = np.zeros(numbers.shape[1])
    weights[columns] = solution[1:] / scale[columns]
    return float(solution[0] - weights @ mean), weights


def expit(log_odds: Float64[np.ndarray, " hits"]) -> Float64[np.ndarray, " hits"]:
    """Return the probabilities that belong to log-odds."""
    return np.asarray(1 / (1 + np.exp(-log_odds)))


def choose_threshold(
    probability: Float64[np.ndarray, " hits"],
    is_right: Bool[np.ndarray, " hits"],
    hit_weights: Float64[np.ndarray, " hits"],
    *,
    precision: float,
) -> float | None:
    """Return the lowest probability from which on enough hits are right; None if there is none.

    The threshold is at least :data:`MIN_THRESHOLD` and accepts :data:`MIN_ACCEPTED_HITS` hits. Hits
    that are as probable as the threshold are accepted, too.
    """
    order = np.argsort(-probability, kind="stable")
    probability = probability[order]
    hit_weights = hit_weights[order]
    weights_of_right = hit_weights * is_right[order]
    # A threshold between equal probabilities is none: consider the last hit of each probability.
    last = np.flatnonzero(np.append(probability[1:] < probability[:-1], True))
    precisions = (weights_of_right.cumsum() / hit_weights.cumsum())[last]
    is_possible = (
        (precisions >= precision)
        & (last + 1 >= MIN_ACCEPTED_HITS)
        & (probability[last] >= MIN_THRESHOLD)
    )
    possible = last[is_possible]
    return float(probability[possible[-1]]) if len(possible) else None


def min_words_by_query_kind(requests: Iterable[SearchRequest]) -> dict[str, int]:
    """Return the minimum number of words in nearly all requests, for each kind of query."""
    word_counts: dict[str, list[int]] = defaultdict(list)
    for request in requests:
        word_counts[request.query_type].append(request.num_words)
    return {
        query_kind: int(np.quantile(counts, WORD_COUNT_QUANTILE, method="lower"))
        for query_kind, counts in word_counts.items()
        if len(counts) >= MIN_REQUESTS_OF_KIND
    }


def describe_source(source: Path | None, split: str) -> str:
    """Return the name of pairs in messages."""
    return "learned choices" if source is None else f"{source.name} {split}"


def read_pairs(index: Path, source: Path | None, *, split: str = TRAINING_SPLIT) -> list[Pair]:
    """Read queries with answers.

    Parameters
    ----------
    index
        Folder of an index.
    source
        A ``.jsonl`` file with a query per line, or a data set in M-BEIR's layout; None for the
        choices that the index has learned.
    split
        Split of the data set.

    Raises
    ------
    BadData
        A line of the file is no pair, or the data set has no such split.
    """
    if source is None:
        return [_pair_of_choice(choice) for choice in read_choices(index)]
    source = as_path(source)
    if source.is_file():
        return [pair for _, pair in read_json_lines(source, lambda row: _parse_pair(row, source))]
    data = MBeir(source)
    if split == TRAINING_SPLIT:
        files = data.training_queries()
    else:
        files = [row.queries for row in data.rows(split)]
    pairs = []
    for query in chain.from_iterable(map(read_queries, files)):
        image = None if query.image is None else str(data.image_path(query.image))
        pairs.append(Pair(Item(query.qid, query.modality, query.text, image), query.positives))
    return pairs


def _pair_of_choice(choice: dict[str, Any]) -> Pair:
    query = Item("", Modality.TEXT, choice.get("text"))
    vector = None if "text" in choice else np.array(choice["vector"], dtype=np.float32)
    return Pair(query, (choice[CHOSEN_FIELD],), vector)


def _parse_pair(row: dict[str, Any], source: Path) -> Pair:
    """Parse a line of a file: a text, an image or both, and the ids of the right items.

    The ids have the key ``id``, or ``chosen`` as in a log of choices::

        {"text": "a red kite", "id": ["kites/7.jpg", "kites/9.jpg"]}
        {"image": "query.jpg", "chosen": "kites/7.jpg"}
    """
    text = row.get("text")
    image = row.get("image")
    answers = row.get("id", row.get(CHOSEN_FIELD))
    if answers is None or answers == []:
        raise BadData("needs an id, the right item's, or a list of several")
    ids = as_id_list(answers)
    if (text is None and image is None) or not (_is_text_or_none(text) and _is_text_or_none(image)):
        raise BadData("needs a text, an image (a file's name), or both")
    modality = Modality.of(has_image=image is not None, has_text=text is not None)
    image_path = None if image is None else str(source.parent / as_path(image))
    text = None if text is None else as_text(text, "the text")
    return Pair(Item("", modality, text, image_path), tuple(ids))


def _is_text_or_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and bool(value.strip()))
