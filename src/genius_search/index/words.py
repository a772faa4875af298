"""Words beside vectors: items whose text has rare words of the query rise (``hybrid="words"``)."""

from __future__ import annotations

import dataclasses
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from genius_search.index.hits import SearchHit, SearchResult
from genius_search.index.snapshot import Snapshot
from genius_search.search.table import Restriction

DEPTH: Final = 100
"""Hits of the vectors, and items with most of the words, that are ranked together."""
RARE: Final = 0.01
"""A word in a larger share of the items counts nothing, and is not looked up to its end."""
FEW: Final = 10
"""A word in so many items is rare in a small index, too."""
WEIGHT: Final = 0.3
"""The weight of a word that one item has, as a share of the scores' range among the hits of the vectors.
Chosen on names and captions: more finds more names and fewer captions."""


class RareWords(NamedTuple):
    """The rare words of a text, and items that have them."""

    weights: dict[str, float]
    """By word, between 0 and 1: the inverse document frequency, log(N/n) / log(N)."""
    item_ids: frozenset[str]
    """Those with the largest weights, at most :data:`DEPTH`."""


def find_rare_words(snapshot: Snapshot, text: str, restriction: Restriction | None) -> RareWords:
    """Look up the words of a text.

    Raises
    ------
    UsageError
        This SQLite, or the one that wrote the index, lacks full-text search.
    """
    num_items = max(2, snapshot.num_alive)
    most = max(FEW, int(RARE * num_items))
    weights: dict[str, float] = {}
    totals = [np.zeros(segment.table.num_items, dtype=np.float32) for segment in snapshot.segments]
    for word in dict.fromkeys(split_words(text)):
        places, count = [], 0
        for segment in snapshot.segments:
            places.append(segment.items.rows_with(word, most + 1 - count))
            count += len(places[-1])
            if count > most:
                break
        if 0 < count <= most:
            share = min(1.0, count / num_items)  # deleted items count, too
            weights[word] = math.log(1 / share) / math.log(num_items)
            for total, rows in zip(totals, places, strict=True):
                total[rows] += weights[word]
    found: list[tuple[float, int, int]] = []
    allowed = restriction or (None,) * len(totals)
    for number, (segment, total, own) in enumerate(zip(snapshot.segments, totals, allowed, strict=True)):
        total[segment.dead] = 0
        if own is not None:
            total[~own.items] = 0
        rows = np.flatnonzero(total)
        best_rows = rows[np.argsort(-total[rows], kind="stable")[:DEPTH]]
        found += [(-float(total[row]), number, int(row)) for row in best_rows]
    best = np.array([place for _, *place in sorted(found)[:DEPTH]], dtype=np.int64).reshape(-1, 2)
    return RareWords(weights, frozenset(item.id for item in snapshot.items(best[:, 0], best[:, 1])))


def split_words(text: str) -> list[str]:
    """Split a text at all characters but letters and digits, without case and accents."""
    plain = text.casefold()
    if not plain.isascii():
        decomposed = unicodedata.normalize("NFKD", plain)
        plain = "".join(one for one in decomposed if not unicodedata.combining(one))
    return re.findall(r"[^\W_]+", plain)


def raise_hits(
    result: SearchResult, others: Sequence[SearchHit], weights: dict[str, float], k: int
) -> SearchResult:
    """Add the weights of the words that hits have to their scores, and return the best ``k``.

    ``others`` are hits from among the items with the words; their scores are like those of the result.
    """
    scores = [hit.score for hit in result.hits]
    spread = max(scores, default=0) - min(scores, default=0)
    raised = []
    for hit in {hit.id: hit for hit in (*others, *result.hits)}.values():  # scores of one search are alike
        words = set(split_words(hit.text or ""))
        weight = sum(weight for word, weight in weights.items() if word in words)
        raised.append((hit.score + WEIGHT * spread * weight, weight, hit))
    raised.sort(key=lambda one: one[:2], reverse=True)
    hits = [
        dataclasses.replace(hit, rank=rank, score=score)
        for rank, (score, _, hit) in enumerate(raised[:k], start=1)
    ]
    return SearchResult(hits, result.touched)
