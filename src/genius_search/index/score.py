"""Scores of the hits of one query: raised by choices and words, with probabilities.

The functions are pure: they take :class:`Candidates`, the ranked items of a query, and return new
ones. A query with words and choices goes through all of them::

    Candidates of a ranking → raise_chosen → raise_words → add_probabilities → top_k
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from genius_search.index.request import SearchRequest
from genius_search.index.store import Calibration
from genius_search.index.words import WordMatches
from genius_search.records import Modality
from genius_search.search.rank import Ranking

RANGE_DEPTH: Final = 100
"""Words raise items by a share of the range of scores: the best score minus the score at this
depth. The excess of a hit over the other hits of its modality is measured down to it, too."""
ITEMS_PER_TAIL_HIT: Final = 5
"""In a modality with fewer than 5 · :data:`RANGE_DEPTH` items, the tail is a fifth of the items."""
MIN_TAIL_HITS: Final = 2
"""Minimum number of hits in a tail; a modality with fewer has no excesses."""
RAISE_SPREADS: Final = 8.0
"""An item may be raised up to this many spreads of the query's products above the best hit."""


class Candidates(NamedTuple):
    """Ranked items of a query, and their scores; row i of each column is about item i.

    An example with one choice and one rare word::

        item            a      b      c      d
        ranking.scores  .80    .70    .60    .50      by meaning
        meaning         .80    .70    .95    .50      c was chosen for a similar query
        scores          .80    .70    .95    .56      d contains the word
    """

    ranking: Ranking
    """The items, with the scores of the search."""
    meaning: Float[np.ndarray, " hits"]
    """Scores by meaning, raised by choices."""
    scores: Float[np.ndarray, " hits"]
    """Scores by meaning, raised by choices and words; they order the hits."""
    compared: Float[np.ndarray, " hits"]
    """Scores that are compared with other modalities: raised by choices and rare words."""
    words: WordMatches | None = None
    """The words of the query in each item; None if words do not count."""
    probabilities: Float64[np.ndarray, " hits"] | None = None
    """Probabilities that items are relevant, NaN for pinned items; None without calibration."""
    excess: Float64[np.ndarray, " hits"] | None = None
    """Excess over the other hits of the modality (:func:`find_excess`); None if it is unknown."""

    @property
    def num_pinned(self) -> int:
        """Number of items that contain a code of the query; in sorted candidates they are first."""
        return 0 if self.words is None else int(self.words.has_code.sum())

    def take(self, rows: Int64[np.ndarray, " rows"]) -> Candidates:
        """Return the candidates at some rows."""
        return Candidates(
            ranking=self.ranking.take(rows),
            meaning=self.meaning[rows],
            scores=self.scores[rows],
            compared=self.compared[rows],
            words=None if self.words is None else self.words.take(rows),
            probabilities=None if self.probabilities is None else self.probabilities[rows],
            excess=None if self.excess is None else self.excess[rows],
        )


def raise_chosen(
    candidates: Candidates, shares: Float32[np.ndarray, " hits"], spread: float
) -> Candidates:
    """Raise the items that were chosen for similar queries, by the shares of choices."""
    meaning = raise_by_shares(candidates.ranking.scores, shares, spread)
    return candidates._replace(meaning=meaning, scores=meaning, compared=meaning)


def raise_by_shares(
    scores: Float32[np.ndarray, "*queries items"],
    shares: Float32[np.ndarray, "*queries items"],
    spread: Float32[np.ndarray, "*queries"] | float,
) -> Float32[np.ndarray, "*queries items"]:
    """Move each item by its share of the way to a score above the best.

    score' = score + share · (max score + 8 · spread − score), 8 being :data:`RAISE_SPREADS`.
    """
    best = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    above = best + RAISE_SPREADS * np.asarray(spread)[..., None]
    return np.asarray(scores + shares * (above - scores), dtype=np.float32)


def raise_words(candidates: Candidates, words: WordMatches, score_range: float) -> Candidates:
    """Raise the items that contain words of the query, by shares of the range of scores.

    Parameters
    ----------
    words
        matches of the candidates, row by row.
    score_range
        the best score by meaning minus the score at :data:`RANGE_DEPTH`.
    """
    return candidates._replace(
        scores=candidates.meaning + score_range * words.shares,
        compared=candidates.meaning + score_range * words.rare_shares,
        words=words,
    )


def add_probabilities(candidates: Candidates, calibration: Calibration) -> Candidates:
    """Add the probabilities that items are relevant.

    A calibration does not know words, so probabilities ignore them, and pinned items have none. An
    item that choices raise is as likely as if it alone were raised, and the other items are as
    likely as before.
    """
    scores = candidates.ranking.scores
    order = np.argsort(-scores, kind="stable")
    probabilities = np.empty(len(scores))
    probabilities[order] = probabilities_of(calibration, hit_features(scores[order]))
    if candidates.meaning is not scores:
        meaning = candidates.meaning
        lead = meaning.astype(np.float64) - scores.max(initial=-np.inf)
        features = np.stack([meaning, lead.clip(min=0), lead.clip(max=0)], axis=1)
        raised = np.maximum(probabilities, probabilities_of(calibration, features))
        probabilities = np.where(meaning > scores, raised, probabilities)
    if candidates.words is not None:
        probabilities[candidates.words.has_code] = np.nan
    return candidates._replace(probabilities=probabilities)


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Return the best k candidates: pinned items first, then by score."""
    if candidates.words is None:
        order = np.argsort(-candidates.scores, kind="stable")
    else:
        words = candidates.words
        order = np.lexsort((-words.shares, -candidates.scores, ~words.has_code))
    return candidates.take(order[:k])


def concatenate(parts: list[Candidates]) -> Candidates:
    """Return the candidates of several modalities, one after the other."""
    rankings = [part.ranking for part in parts]
    ranking = rankings[0]
    for other in rankings[1:]:
        ranking = join_rankings(ranking, other)
    words = [part.words for part in parts if part.words is not None]
    probabilities = [part.probabilities for part in parts if part.probabilities is not None]
    return Candidates(
        ranking=ranking._replace(touched=sum(part.touched for part in rankings)),
        meaning=np.concatenate([part.meaning for part in parts]),
        scores=np.concatenate([part.scores for part in parts]),
        compared=np.concatenate([part.compared for part in parts]),
        words=_join_words(words) if words else None,
        probabilities=np.concatenate(probabilities) if probabilities else None,
        excess=np.concatenate(
            [
                np.full(len(part.scores), np.nan) if part.excess is None else part.excess
                for part in parts
            ]
        ),
    )


def _join_words(parts: list[WordMatches]) -> WordMatches:
    """Return the matches of several modalities, one after the other."""
    return WordMatches(
        locations=np.concatenate([part.locations for part in parts]),
        shares=np.concatenate([part.shares for part in parts]),
        rare_shares=np.concatenate([part.rare_shares for part in parts]),
        has_code=np.concatenate([part.has_code for part in parts]),
        has_all=np.concatenate([part.has_all for part in parts]),
        words=parts[0].words,
        is_frequent=parts[0].is_frequent,
    )


def join_rankings(first: Ranking, second: Ranking) -> Ranking:
    """Return the hits of two rankings, with the number of candidates of the first."""
    columns = zip(first[:-1], second[:-1], strict=True)
    return Ranking._make([*map(np.concatenate, columns), first.touched])


def find_excess(
    scores: Float[np.ndarray, " hits"], raised: Float[np.ndarray, " raised"], num_items: int
) -> Float64[np.ndarray, " raised"] | None:
    """Return how far scores stand out from the tail of the best scores of a modality.

    With u the k-th best score, and m the mean of the better scores minus u, a score s has the
    excess::

        (s − u) / m − log k

    Scores by chance have an exponential tail, so about exp(−excess) items reach this score by
    chance. The excess is comparable between modalities, whatever the scale of their scores.

    Parameters
    ----------
    scores
        the best scores of the modality.
    raised
        scores whose excess is returned; words and choices may have raised them.
    num_items
        number of the items of the modality.

    Returns
    -------
    None if there are too few items.
    """
    size = min(RANGE_DEPTH, num_items // ITEMS_PER_TAIL_HIT)
    best = np.sort(scores)[::-1][: size + 1].astype(np.float64)
    if size < MIN_TAIL_HITS or len(best) <= size or best[0] <= best[-1]:
        return None
    mean = float((best[:-1] - best[-1])[1:].mean()) or float(best[0] - best[-1])
    return np.asarray((raised - best[-1]) / mean - math.log(size))


def probabilities_of(
    calibration: Calibration, features: Float64[np.ndarray, "hits 3"]
) -> Float64[np.ndarray, " hits"]:
    """Return the probabilities of hits from their features (:func:`hit_features`)."""
    log_odds = calibration.intercept + features @ np.array(calibration.weights)
    return np.asarray(1 / (1 + np.exp(-log_odds)))


def hit_features(scores: Float32[np.ndarray, " hits"]) -> Float64[np.ndarray, "hits 3"]:
    """Return the features of hits from which a calibration computes probabilities.

    Parameters
    ----------
    scores
        of one query's hits, best first; at least two if two items were found.

    Returns
    -------
    The score; for the first hit, its lead over the second; and minus the distance to the first.
    Scores of .8, .7 and .5 give::

        .8   .1   0
        .7   0   −.1
        .5   0   −.3
    """
    wide = scores.astype(np.float64)
    features = np.zeros((len(wide), 3))
    features[:, 0] = wide
    features[:1, 1] = wide[:1] - wide[1:2] if len(wide) > 1 else 0.0
    features[:, 2] = wide - wide[:1]
    return features


def query_type(request: SearchRequest) -> str:
    """Return the type of a request's query: a modality, ``vector``, or ``parts``."""
    if len(request.query) != 1 or request.parts:
        return "parts"
    [part] = request.query
    if part.vector is not None:
        return "vector"
    return Modality.of(has_image=part.image is not None, has_text=bool(part.text)).value


def count_words(request: SearchRequest) -> int:
    """Return the number of words of a request's text."""
    return len((request.text or "").split())


def covers_request(calibration: Calibration, request: SearchRequest) -> bool:
    """Return whether a calibration was measured on queries like this request.

    The measured queries had no conditions, which leave out wrong answers. Shorter queries have more
    right answers than the measured ones.
    """
    fewest_words = calibration.fewest_words.get(query_type(request))
    has_conditions = request.filter is not None
    return not has_conditions and fewest_words is not None and count_words(request) >= fewest_words
