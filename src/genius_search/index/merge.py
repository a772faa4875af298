"""Merge the hits of several modalities, or of several alternatives of a query, into one list."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Final, NamedTuple

from genius_search.index.hits import SearchHit

COMPARABLE_RANK: Final = 10
"""Scores of modalities are comparable if the best hit of each has at most this rank by score."""
EXCESS_PER_RANK: Final = 0.3
"""Subtracted from the excess of the second hit of a modality, twice from the third, and so on.

It mixes modalities whose scores are not comparable. With 0, the photo that words look for is less
often among the first five hits of CLIP (for .64 of the queries instead of .68). Larger values
change little."""
SAME_ITEM_COSINE: Final = 0.99
"""From this cosine on, an item counts as identical to the query; rounding loses up to .01."""


class ModalityHits(NamedTuple):
    """The hits of one modality, best first, as the columns that decide how modalities are merged.

    For a query "red kite" with two images and two texts, whose scores are not comparable::

        images   scores .31 .28    excess 2.1 0.4
        texts    scores .78 .75    excess 1.7 1.6

    The values that order the hits are the excesses minus 0, .3, .6, ...: 2.1 and 0.1 for the
    images, 1.7 and 1.3 for the texts. So the merged order is image, text, text, image.
    """

    scores: Sequence[float]
    """Scores as hits show them; they break ties."""
    comparable_scores: Sequence[float]
    """Scores that are compared with other modalities, where common words do not count."""
    best_scores: Sequence[float]
    """The best scores by meaning, at most :data:`COMPARABLE_RANK`; empty for log-probabilities."""
    is_same: Sequence[bool]
    """Whether each hit is identical to the query."""
    num_pinned: int = 0
    """Number of first hits that are pinned before the hits of other modalities."""
    probabilities: Sequence[float] | None = None
    """Probability of each hit; None if the probability of a hit is unknown."""
    excesses: Sequence[float] | None = None
    """Excess of each hit (:func:`genius_search.index.score.find_excess`); None if it is unknown."""

    @staticmethod
    def of_hits(
        hits: Sequence[SearchHit],
        comparable_scores: Sequence[float],
        best_scores: Sequence[float] = (),
    ) -> ModalityHits:
        """Return the columns of complete hits, such as those from the shards of a cluster."""
        probabilities = [hit.probability for hit in hits if hit.probability is not None]
        excesses = [hit.excess for hit in hits if hit.excess is not None]
        return ModalityHits(
            scores=[hit.score for hit in hits],
            comparable_scores=comparable_scores,
            best_scores=best_scores,
            is_same=[score >= SAME_ITEM_COSINE for score in comparable_scores],
            probabilities=probabilities if len(probabilities) == len(hits) else None,
            excesses=excesses if len(excesses) == len(hits) else None,
        )


def merge_modalities(modalities: Sequence[ModalityHits], k: int) -> list[int]:
    """Merge the hits of several modalities into one list, and return the numbers of ``k`` hits.

    The hits of all modalities are numbered from 0, those of a modality after those before it.

    Pinned hits come first, then hits that are identical to the query. The remaining hits are
    ordered

    - by probability, if the index is calibrated;
    - by score, if the best hit of each modality is among the first :data:`COMPARABLE_RANK` hits;
    - otherwise by how far they stand out among the best hits of their modality
      (:func:`genius_search.index.score.find_excess`). Encoders such as CLIP place images and texts
      in different regions, and scores alone would hide a modality. Each further hit of a modality
      must stand out more, by :data:`EXCESS_PER_RANK`.

    If the excess is unknown, the first hit of each modality comes first, then the second of each.
    Within a modality hits keep their order.
    """
    keys: list[tuple[bool, bool, float, int, float, int]] = []
    by_score = are_comparable(modalities)
    for hits in modalities:
        values = _order_values(hits, modalities, by_score=by_score)
        for position, value in enumerate(values):
            is_pinned = position < hits.num_pinned
            is_same = hits.is_same[position]
            score = hits.scores[position]
            keys.append((not is_pinned, not is_same, -value, position, -score, len(keys)))
    return [number for *_, number in sorted(keys)[:k]]


def are_comparable(modalities: Sequence[ModalityHits]) -> bool:
    """Return whether the scores of the modalities that have hits can be compared."""
    first_scores = [max(hits.best_scores) for hits in modalities if hits.best_scores]
    scores = sorted(chain.from_iterable(hits.best_scores for hits in modalities), reverse=True)
    return bool(scores) and min(first_scores) >= scores[:COMPARABLE_RANK][-1]


def _order_values(
    hits: ModalityHits, modalities: Sequence[ModalityHits], *, by_score: bool
) -> Sequence[float]:
    """Return the values that order the hits of a modality among others, in descending order.

    Values are sorted because words move hits within their modality, but do not move the modality
    as a whole.
    """
    nonempty = [modality for modality in modalities if modality.scores]
    if all(modality.probabilities is not None for modality in nonempty):
        return sorted(hits.probabilities or (), reverse=True)
    if by_score:
        return sorted(hits.comparable_scores, reverse=True)
    if any(modality.excesses is None for modality in nonempty):
        return [0.0] * len(hits.scores)
    excesses = sorted(hits.excesses or (), reverse=True)
    return [excess - EXCESS_PER_RANK * rank for rank, excess in enumerate(excesses)]


def interleave(hit_lists: Sequence[Sequence[SearchHit]], k: int) -> list[SearchHit]:
    """Merge the hits of alternatives into one list of ``k`` hits.

    The first hit of each list comes first, then the second of each. An item that is in several
    lists keeps the best of its positions.
    """
    best: dict[str, SearchHit] = {}
    for hits in zip_longest(*hit_lists):
        for hit in hits:
            if hit is not None:
                best.setdefault(hit.id, hit)
    return number_hits([*best.values()][:k])


def number_hits(hits: Sequence[SearchHit]) -> list[SearchHit]:
    """Return hits with ranks from 1."""
    return [dataclasses.replace(hit, rank=rank) for rank, hit in enumerate(hits, start=1)]
