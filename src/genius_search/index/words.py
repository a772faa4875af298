"""Words beside vectors: items rise that have a rare word of the query in their text or as their name."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from genius_search.errors import UsageError
from genius_search.index.hits import SearchHit, SearchResult
from genius_search.index.snapshot import Snapshot

DEPTH: Final = 100
"""Hits of the vectors that are ranked together with the items that have rare words."""
FEW: Final = 10
"""A word that more items have is not rare."""
RARE: Final = 100
"""Nor is a word without digits that more than one in so many items have, unless only one has it."""
WEIGHT: Final = 0.3
"""The weight of a word that one item has, as a share of the scores' range among the hits of the vectors.
Chosen on names and captions: more finds more names and fewer captions."""


class RareWords(NamedTuple):
    """Items that have rare words of a query."""

    weights: dict[str, float]
    """By item, the sum of its words' inverse document frequencies, log(N/n) / log(N)."""
    first: frozenset[str]
    """Those that have a rare word with a digit, such as IMG_2034 or a product code."""


NO_WORDS: Final = RareWords({}, frozenset())


def find_rare_words(snapshot: Snapshot, text: str) -> RareWords:
    """Look up the words of a text; without full-text search there are none."""
    num_items = max(2, snapshot.num_alive)
    weights: dict[tuple[int, int], float] = defaultdict(float)
    numbered: set[tuple[int, int]] = set()
    for word in dict.fromkeys(split_words(text)):
        has_digit = any(character.isdigit() for character in word)
        most = FEW if has_digit else min(FEW, max(1, num_items // RARE))
        places: list[tuple[int, int]] = []
        for number, segment in enumerate(snapshot.segments):
            try:
                rows = segment.items.rows_with(word, most + 1 - len(places))
            except UsageError:
                return NO_WORDS
            places += [(number, row) for row in rows]
            if len(places) > most:
                break
        if 0 < len(places) <= most:
            for place in places:
                weights[place] += math.log(max(num_items / len(places), 1)) / math.log(num_items)
            if has_digit:
                numbered.update(places)
    found = list(weights)
    segments, hit_rows = np.array(found, dtype=np.int64).reshape(-1, 2).T
    ids = dict(zip(found, (item.id for item in snapshot.items(segments, hit_rows)), strict=True))
    return RareWords(
        {ids[place]: weight for place, weight in weights.items()}, frozenset(ids[place] for place in numbered)
    )


def split_words(text: str) -> Iterator[str]:
    """Yield the letters and digits of each word, without folders and a file's ending.

    >>> list(split_words("trips/IMG_2034.png of a red kite"))
    ['IMG 2034', 'of', 'a', 'red', 'kite']
    """
    for word in text.split():
        stem = re.sub(r"\.[^\W\d]\w{1,4}$", "", word.rpartition("/")[2])
        if parts := re.findall(r"[^\W_]+", stem):
            yield " ".join(parts)


def raise_hits(result: SearchResult, others: Sequence[SearchHit], words: RareWords, k: int) -> SearchResult:
    """Add the weights of their words to the scores of hits, and return the best ``k``.

    ``others`` are hits from among the items with the words; their scores are like those of the result. Those
    that come first have no probability: a calibration knows scores of vectors alone.
    """
    scores = [hit.score for hit in result.hits]
    spread = max(scores, default=0) - min(scores, default=0)
    raised = []
    for hit in {hit.id: hit for hit in (*others, *result.hits)}.values():
        score = hit.score + WEIGHT * spread * words.weights.get(hit.id, 0.0)
        probability = None if hit.id in words.first else hit.probability
        raised.append(dataclasses.replace(hit, score=score, probability=probability))
    raised.sort(key=lambda hit: (hit.id in words.first, hit.score), reverse=True)
    hits = [dataclasses.replace(hit, rank=rank) for rank, hit in enumerate(raised[:k], start=1)]
    return SearchResult(hits, result.touched)
