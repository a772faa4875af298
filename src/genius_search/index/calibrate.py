"""What queries tell of an index: what a score is worth, and what the density should weigh.

A calibration is the probability that a hit is right. The weight of densities has a default that costs nothing
beyond one standard error on any of our four kinds of data; where more of it finds more, as among captions,
such queries show that. Without them, phrases of an index's own texts, or queries that it may answer or not,
tell what first hits score at least (:func:`measure_least_scores`).

Queries with answers (:func:`read_pairs`) are what the index has learned of its use, a file with a query a
line, or a data set in M-BEIR's layout.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Shaped

from genius_search.border import as_id_list, as_numbers, as_path, as_text
from genius_search.config import default_search
from genius_search.data.mbeir import MBeir, read_json_lines, read_queries
from genius_search.errors import BadData, UsageError
from genius_search.index.items import Item
from genius_search.index.learned import CHOSEN_FIELD, read_choices
from genius_search.index.query import SnapshotSearcher, count_words, hit_numbers, kind_of
from genius_search.index.request import SearchRequest
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import Calibration
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.records import Modality

if TYPE_CHECKING:
    from genius_search.index.index import Index

PAIRS_FORMAT: Final = (
    "pairs are a .jsonl file of queries with lines such as "
    '{"text": "a red kite", "id": "kites/7.jpg"}, or a data set in M-BEIR\'s layout whose candidates have '
    "the items' ids"
)
TRAINING_SPLIT: Final = "train"
WEIGHT_FACTORS: Final = (0.0, 0.5, 1.0, 1.5, 2.0)
"""Weights of densities that are compared, as multiples of the default."""
NUM_FIRST_HITS: Final = 5
"""Hits of a query that are looked at to compare them."""
MIN_CALIBRATION_QUERIES: Final = 40
"""Fewer queries are not enough to fit to one half and measure the other."""
FEWEST: Final = 20
"""A threshold is not chosen by fewer first hits above it."""
MAX_FITTED_HITS: Final = 10
"""Hits of a query that are fitted."""
MAX_CALIBRATION_QUERIES: Final = 10_000
"""Queries that are drawn, if there are more."""
ABSENT_SHARE: Final = 0.2
"""Assumed share of queries that nothing in the index answers."""
MIN_THRESHOLD: Final = 0.5
"""A hit that is more likely wrong than right is never called a good match."""
SHRINKAGE: Final = 1.0
"""Half the squared weights, of standardised numbers, are added to the loss."""
PHRASE_WORDS: Final = 3
"""Words of a phrase. With two, fewer queries about other things are refused; with five, more right ones."""
MAX_DRAWN_QUERIES: Final = 300
"""Most items that a phrase is drawn from, and most query vectors: a new index waits for their encoding."""
LOW_SCORE_QUANTILE: Final = 0.03
"""Share of the searches whose first hits score less."""
NEWTON_STEPS: Final = 30
REQUESTS_PER_BATCH: Final = 32


class Pair(NamedTuple):
    """A query, and the ids of the items that answer it."""

    query: Item
    items: tuple[str, ...]
    vector: Float32[np.ndarray, " dim"] | None = None
    """The query's feature, if no more is known of it."""


def read_pairs(index: Path, source: Path | None, *, split: str = TRAINING_SPLIT) -> list[Pair]:
    """Read queries and answers: what the index has learned, those of a file, or a split of a data set.

    Raises
    ------
    BadData
        A line of the file is no pair, or the data set has no such split.
    """
    if source is None:
        return [_from_choice(choice) for choice in read_choices(index)]
    source = as_path(source)
    if source.is_file():
        return [pair for _, pair in read_json_lines(source, lambda row: _parse_pair(row, source))]
    data = MBeir(source)
    files = (
        data.training_queries()
        if split == TRAINING_SPLIT
        else [row.queries for row in data.rows(split)]
    )
    pairs = []
    for query in chain.from_iterable(map(read_queries, files)):
        image = None if query.image is None else str(data.image_path(query.image))
        pairs.append(Pair(Item(query.qid, query.modality, query.text, image), query.positives))
    return pairs


def _from_choice(choice: dict[str, Any]) -> Pair:
    query = Item("", Modality.TEXT, choice.get("text"))
    vector = None if "text" in choice else np.array(choice["vector"], dtype=np.float32)
    return Pair(query, (choice[CHOSEN_FIELD],), vector)


def _parse_pair(row: dict[str, Any], source: Path) -> Pair:
    """Read a line: ``text``, ``image`` or both, and ``id``, one or a list; or ``chosen``."""
    text, image, answers = row.get("text"), row.get("image"), row.get("id", row.get("chosen"))
    if answers is None or answers == []:
        raise BadData("needs an id, the right item's, or a list of several")
    ids = as_id_list(answers)
    if not all(
        part is None or (isinstance(part, str) and part.strip()) for part in (text, image)
    ) or (text is None and image is None):
        raise BadData("needs a text, an image (a file's name), or both")
    modality = Modality.of(has_image=image is not None, has_text=text is not None)
    place = None if image is None else str(source.parent / as_path(image))
    text = None if text is None else as_text(text, "the text")
    return Pair(Item("", modality, text, place), tuple(ids))


def density_weights_around(usual: float) -> list[float]:
    """Return the weights of densities that are compared, the default first."""
    return [usual, *(factor * usual for factor in WEIGHT_FACTORS if factor != 1)]


def choose_density_weight(
    is_found: Mapping[float, Bool[np.ndarray, " queries"]], usual: float
) -> float:
    """Choose a weight: the default, unless another finds more by over a standard error of the difference.

    Parameters
    ----------
    is_found
        whether the first :data:`NUM_FIRST_HITS` hits of each query have a right answer, by weight; the same queries
        for each of :func:`density_weights_around` the default ``usual``.
    """
    return max(
        (usual, *is_found), key=lambda weight: significant_gain(is_found[weight], is_found[usual])
    )


def significant_gain(
    found: Bool[np.ndarray, " queries"], before: Bool[np.ndarray, " queries"]
) -> float:
    """Return how many more of the same queries are answered, as a share; 0 if that may be chance.

    A gain counts if it exceeds a standard error of the difference. That of a single query is as large.
    """
    gains = found.astype(float) - before
    gain, error = float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(len(gains)))
    return gain if gain > error * (1 + 1e-6) else 0.0


def calibrate(
    index: Index,
    pairs: Path | None,
    *,
    split: str = "val",
    precision: float = 0.8,
    progress: Progress,
) -> Calibration:
    """Choose the weight of densities, fit a calibration to every second query, and measure it on the others.

    A query whose right answers are left out of its hits is the honest kind that nothing answers: its words
    and pictures are those of any other. The index is unchanged; see :meth:`Index.keep_calibration`.

    Parameters
    ----------
    pairs
        Queries whose right answers are items of the index, by their ids: a data set in M-BEIR's layout, of
        which the ``split`` is read, or a ``.jsonl`` file (:func:`read_pairs`); None for the choices that the
        index has learned.
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
    name = "learned choices" if pairs is None else f"{pairs.name} {split}"
    given = [*_merge_answers(read_pairs(index.folder, pairs, split=split))]
    if len(given) > MAX_CALIBRATION_QUERIES:
        given = random.Random(0).sample(given, MAX_CALIBRATION_QUERIES)
    model, snapshot = index.current()
    queries = [*_requests(snapshot, given)]
    if len(queries) < MIN_CALIBRATION_QUERIES:
        raise BadData(
            f"{len(queries)} queries of {name} have a right answer in {index.folder}; "
            f"at least {MIN_CALIBRATION_QUERIES} are needed to fit to one half and measure the other"
        )
    usual = default_search(snapshot.num_rows).density_weight
    density_weights = density_weights_around(usual)
    answers: dict[float, list[tuple[np.ndarray, np.ndarray]]] = {
        weight: [] for weight in density_weights
    }
    progress.begin("search", len(queries))
    for start in range(0, len(queries), REQUESTS_PER_BATCH):
        some = queries[start : start + REQUESTS_PER_BATCH]
        encoded = SnapshotSearcher(model, snapshot).encode([request for request, _ in some])
        for weight in density_weights:
            searcher = SnapshotSearcher(
                model, snapshot, replace(index.settings, density_weight=weight)
            )
            for result, (_, right) in zip(searcher.search_encoded(encoded), some, strict=True):
                scores = np.array([hit.score for hit in result.hits], dtype=np.float32)
                answers[weight].append(
                    (scores, np.array([hit.id in right for hit in result.hits], dtype=bool))
                )
        progress.advance(start + len(some), {})
    is_found = {
        weight: np.array([is_right[:NUM_FIRST_HITS].any() for _, is_right in found])
        for weight, found in answers.items()
    }
    density_weight = choose_density_weight(is_found, usual)
    rows = []
    for number, (scores, is_right) in enumerate(answers[density_weight]):
        for kept, weight in ((np.ones_like(is_right), 1 - ABSENT_SHARE), (~is_right, ABSENT_SHARE)):
            numbers = hit_numbers(scores[kept][:MAX_FITTED_HITS])
            constant = np.tile([weight, number % 2], (len(numbers), 1))
            is_first = np.arange(len(numbers)) == 0
            rows.append(
                np.column_stack([numbers, is_right[kept][:MAX_FITTED_HITS], is_first, constant])
            )
    cases = np.concatenate(rows)
    is_first, half = cases[:, 4] == 1, cases[:, 6]
    intercept, weights = fit_logistic_regression(*_columns(cases[half == 0]))
    numbers, is_right, shares = _columns(cases[is_first & (half == 0)])
    threshold = choose_threshold(
        expit(intercept + numbers @ weights), is_right, shares, precision=precision
    )
    numbers, is_right, shares = _columns(cases[is_first & (half == 1)])
    probability = expit(intercept + numbers @ weights)
    is_good = probability >= (np.inf if threshold is None else threshold)
    is_absent = shares == ABSENT_SHARE
    return Calibration(
        intercept=intercept,
        weights=(float(weights[0]), float(weights[1]), float(weights[2])),
        threshold=threshold,
        search=replace(index.settings, density_weight=density_weight),
        queries=len(queries) // 2,
        promised=float(np.average(probability, weights=shares)),
        right=float(np.average(is_right, weights=shares)),
        good=float(np.average(is_good, weights=shares)),
        good_and_right=float(shares @ (is_good & is_right) / max(shares @ is_good, 1e-9)),
        refused=float((~is_good)[is_absent].mean()) if is_absent.any() else 0.0,
        fewest_words=min_words_by_query_kind(request for request, _ in queries),
    )


def min_words_by_query_kind(requests: Iterable[SearchRequest]) -> dict[str, int]:
    """Return the number of words that nearly all requests have at least, by the kind of query."""
    words: dict[str, list[int]] = defaultdict(list)
    for request in requests:
        words[kind_of(request)].append(count_words(request))
    return {
        kind: int(np.quantile(counts, LOW_SCORE_QUANTILE, method="lower"))
        for kind, counts in words.items()
        if len(counts) >= FEWEST
    }


def _requests(
    snapshot: Snapshot, pairs: Iterable[Pair]
) -> Iterator[tuple[SearchRequest, frozenset[str]]]:
    """Yield a request for each modality of a query's answers that the index has, with those answers."""
    for query, items, vector in pairs:
        modalities: dict[Modality, set[str]] = defaultdict(set)
        for item, known in snapshot.item_states(items).items():
            modalities[snapshot.item_at(known.location).modality].add(item)
        for modality, right in modalities.items():
            request = SearchRequest(
                text=query.text,
                image=query.image,
                vector=vector,
                modality=modality,
                hybrid=False,
                k=MAX_FITTED_HITS + len(right),
            )
            yield request, frozenset(right)


def _merge_answers(pairs: Iterable[Pair]) -> Iterable[Pair]:
    """Return each query once, with all of its answers: what was chosen for it at different times."""
    merged: dict[Hashable, Pair] = {}
    for pair in pairs:
        key = (pair.query, None if pair.vector is None else pair.vector.tobytes())
        before = merged.get(key, pair).items
        merged[key] = pair._replace(items=tuple(dict.fromkeys([*before, *pair.items])))
    return merged.values()


def _columns(hits: Float64[np.ndarray, "hits 7"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the numbers of hits, whether each is right, and their weights."""
    return hits[:, :3], hits[:, 3].astype(bool), hits[:, 5]


def fit_logistic_regression(
    numbers: Float64[np.ndarray, "hits 3"],
    is_right: Bool[np.ndarray, " hits"],
    weight: Float64[np.ndarray, " hits"],
) -> tuple[float, Float64[np.ndarray, " 3"]]:
    """Fit a logistic regression whose weights are not negative; return intercept and weights.

    By Newton's method, without the number whose weight is the most negative until there is none.
    """
    mean, scale = numbers.mean(axis=0), numbers.std(axis=0) + 1e-12
    used = list(range(numbers.shape[1]))
    while True:
        design = np.column_stack([np.ones(len(numbers)), ((numbers - mean) / scale)[:, used]])
        shrinkage = np.array([1e-3, *[SHRINKAGE] * len(used)])
        found = np.zeros(design.shape[1])
        for _ in range(NEWTON_STEPS):
            likely = expit(design @ found)
            slope = design.T @ (weight * (likely - is_right)) + shrinkage * found
            bend = (design.T * (weight * likely * (1 - likely))) @ design + np.diag(shrinkage)
            found -= np.linalg.solve(bend, slope)
        if found[1:].min(initial=0) >= 0:
            break
        used.pop(int(found[1:].argmin()))
    weights = np.zeros(numbers.shape[1])
    weights[used] = found[1:] / scale[used]
    return float(found[0] - weights @ mean), weights


def expit(log_odds: Float64[np.ndarray, " hits"]) -> Float64[np.ndarray, " hits"]:
    """Return the probabilities of log-odds."""
    return np.asarray(1 / (1 + np.exp(-log_odds)))


def choose_threshold(
    probability: Float64[np.ndarray, " hits"],
    is_right: Bool[np.ndarray, " hits"],
    weight: Float64[np.ndarray, " hits"],
    *,
    precision: float,
) -> float | None:
    """Return the lowest threshold, at least :data:`MIN_THRESHOLD`, that reaches a precision; None if there is none.

    Whatever is as probable as the threshold is accepted, too.
    """
    order = np.argsort(-probability, kind="stable")
    ordered, right, weights = probability[order], is_right[order], weight[order]
    last = np.flatnonzero(np.append(ordered[1:] < ordered[:-1], True))
    reached = ((weights * right).cumsum() / weights.cumsum())[last]
    enough = last[(reached >= precision) & (last + 1 >= FEWEST) & (ordered[last] >= MIN_THRESHOLD)]
    return float(ordered[enough[-1]]) if len(enough) else None


def measure_least_scores(
    model: Genius, snapshot: Snapshot, query_vectors: Shaped[np.ndarray, ...] | None
) -> dict[str, float]:
    """Return what all but a few in a hundred first hits score at least, by their modality.

    Without ``query_vectors``, which are the features of texts, phrases of the items' texts are searched for,
    and each finds other items than its own. Which of the queries are answered need not be known, for these
    score more than the others.
    """
    random = np.random.default_rng(0)
    rows = random.permutation(snapshot.segments[0].num_items)[:MAX_DRAWN_QUERIES]
    items = [] if query_vectors is not None else snapshot.items_at(np.zeros_like(rows), rows)
    vectors: Iterable[np.ndarray] = ()
    if query_vectors is not None:
        vectors = random.permutation(as_numbers(query_vectors, "the query vectors"))[
            :MAX_DRAWN_QUERIES
        ]
    least = {}
    for modality in snapshot.modalities:
        ask = partial(SearchRequest, modality=modality, hybrid=False, k=2)
        asked = [("", ask(vector=vector)) for vector in vectors]
        for item in items:
            words = (item.text or "").split()
            if item.modality is modality and len(words) >= PHRASE_WORDS:
                start = int(random.integers(len(words) - PHRASE_WORDS + 1))
                asked.append((item.id, ask(text=" ".join(words[start : start + PHRASE_WORDS]))))
        if len(asked) >= MIN_CALIBRATION_QUERIES:
            found = SnapshotSearcher(model, snapshot).search([request for _, request in asked])
            pairs = zip(asked, found, strict=True)
            others = [[hit.score for hit in hits if hit.id != name] for (name, _), hits in pairs]
            least[modality.value] = float(
                np.quantile([scores[0] for scores in others if scores], LOW_SCORE_QUANTILE)
            )
    return least
