"""Scores of the candidates of one query: raised by choices and words, with probabilities.

The functions are pure: they take :class:`~genius_search.search.rank.Candidates`, the ranked items
of a query, and return new ones. A query with words and choices goes through all of them::

    candidates of the search → raise_chosen → raise_words → add_probabilities → top_k
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Float32, Float64

from genius_search.index.request import SearchRequest
from genius_search.index.store import Calibration
from genius_search.index.words import WordMatches
from genius_search.search.rank import Candidates

RANGE_DEPTH: Final = 100
"""Words raise items by a share of the range of scores: the best score minus the score at this
depth. The excess of a hit over the other hits of its modality is measured down to it, too."""
ITEMS_PER_TAIL_HIT: Final = 5
"""In a modality with fewer than 5 · :data:`RANGE_DEPTH` items, the tail is a fifth of the items."""
MIN_TAIL_HITS: Final = 2
"""Minimum number of hits in a tail; a modality with fewer has no excesses."""
SEARCH_COLUMNS: Final = ("segments", "items", "id_rows", "scores", "beams", "log_probabilities")
"""Columns of candidates that a search fills."""
RAISE_SPREADS: Final = 8.0
"""An item may be raised up to this many spreads of the query's products above the best hit."""


def raise_chosen(
    candidates: Candidates, shares: Float32[np.ndarray, " hits"], spread: float
) -> Candidates:
    """Raise the items that were chosen for similar queries, by the shares of choices."""
    return candidates._replace(scores=raise_by_shares(candidates.scores, shares, spread))


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


def raise_words(candidates: Candidates, matches: WordMatches, score_range: float) -> Candidates:
    """Raise the items that contain words of the query, by shares of the range of scores.

    Parameters
    ----------
    matches
        matches of the candidates, row by row.
    score_range
        the best score by meaning minus the score at :data:`RANGE_DEPTH`.
    """
    meaning = candidates.scores
    return candidates._replace(
        scores=meaning + score_range * matches.shares,
        meaning=meaning,
        comparable=meaning + score_range * matches.rare_shares,
    )


def add_probabilities(
    candidates: Candidates,
    search_scores: Float32[np.ndarray, " hits"],
    calibration: Calibration,
    matches: WordMatches | None,
) -> Candidates:
    """Add the probabilities that items are relevant.

    A calibration does not know words, so probabilities ignore them, and pinned items have none. An
    item that choices raise is as likely as if it alone were raised, and the other items are as
    likely as before.

    Parameters
    ----------
    search_scores
        scores of the candidates in the search, before any was raised.
    matches
        matches of the candidates, row by row; None if words do not count.
    """
    order = np.argsort(-search_scores, kind="stable")
    probabilities = np.empty(len(search_scores))
    probabilities[order] = probabilities_of(calibration, hit_features(search_scores[order]))
    meaning = scores_by_meaning(candidates)
    if meaning is not search_scores:
        lead = meaning.astype(np.float64) - search_scores.max(initial=-np.inf)
        features = np.stack([meaning, lead.clip(min=0), lead.clip(max=0)], axis=1)
        raised = np.maximum(probabilities, probabilities_of(calibration, features))
        probabilities = np.where(meaning > search_scores, raised, probabilities)
    if matches is not None:
        probabilities[matches.has_code] = np.nan
    return candidates._replace(probabilities=probabilities)


def scores_by_meaning(candidates: Candidates) -> Float[np.ndarray, " hits"]:
    """Return the scores without what words add."""
    return candidates.scores if candidates.meaning is None else candidates.meaning


def comparable_scores(candidates: Candidates) -> Float[np.ndarray, " hits"]:
    """Return the scores that are compared with other modalities."""
    return candidates.scores if candidates.comparable is None else candidates.comparable


def top_k(candidates: Candidates, k: int, matches: WordMatches | None = None) -> Candidates:
    """Return the best k candidates: pinned items first, then by score.

    Parameters
    ----------
    matches
        matches of the candidates, row by row; None if words do not count.
    """
    if matches is None:
        order = np.argsort(-candidates.scores, kind="stable")
    else:
        order = np.lexsort((-matches.shares, -candidates.scores, ~matches.has_code))
    return candidates.take(order[:k])


def concatenate(parts: Sequence[Candidates]) -> Candidates:
    """Return the candidates of several modalities, one after the other.

    A modality whose candidates have no excess or probabilities gets NaN. Its scores by meaning are
    its scores if words raise none of its items.
    """
    joined = parts[0]
    for other in parts[1:]:
        joined = append_candidates(joined, other)
    return joined._replace(
        num_ranked=sum(part.num_ranked for part in parts),
        meaning=np.concatenate([scores_by_meaning(part) for part in parts]),
        comparable=np.concatenate([comparable_scores(part) for part in parts]),
        probabilities=_join_columns(parts, [part.probabilities for part in parts]),
        excess=_join_columns(parts, [part.excess for part in parts]),
    )


def _join_columns(
    parts: Sequence[Candidates], columns: Sequence[Float64[np.ndarray, " _"] | None]
) -> Float64[np.ndarray, " hits"] | None:
    """Return the values of all parts, NaN for a part without them; None if no part has any."""
    if all(column is None for column in columns):
        return None
    return np.concatenate(
        [
            np.full(len(part.items), np.nan) if column is None else column
            for part, column in zip(parts, columns, strict=True)
        ]
    )


def append_candidates(first: Candidates, second: Candidates) -> Candidates:
    """Return the candidates of a search, followed by others, before any is raised."""
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(first, name), getattr(second, name)])
        for name in SEARCH_COLUMNS
    }
    return first._replace(**columns)


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
        number of the modality's items that the search ranked.

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


def covers_request(calibration: Calibration, request: SearchRequest) -> bool:
    """Return whether a calibration was measured on queries like this request.

    The measured queries had no conditions, which leave out wrong answers. Shorter queries have more
    right answers than the measured ones.
    """
    fewest_words = calibration.fewest_words.get(request.query_type)
    has_conditions = request.filter is not None
    return not has_conditions and fewest_words is not None and request.num_words >= fewest_words
