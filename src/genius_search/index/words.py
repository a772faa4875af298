"""Words of a query that items contain, beside the vectors.

Encoders hardly tell names and numbers apart, and for a single word they find its neighbours as
well. So items that contain words of the query are raised, by a share of the range of scores::

    raise = share * (best score - hundredth score)
    share = WORD_WEIGHT * sum of log(N / n) / log N over the words that the item contains

where n of the index's N items contain a word. If the largest share is below WORD_WEIGHT, all are
scaled so that it is that. So a word counts by how rare it is, and a single word raises its items
however many there are. BM25 also counts how often an item has a word and how long its text is,
and finds no more (``docs/lab/log.md``, "Words beside vectors").

In this module the place of an item is one number, ``(segment << 32) + row``, so that arrays of
places can be compared.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Float64, Int64

from genius_search.index.snapshot import Snapshot

WORD_WEIGHT: Final = 0.3
"""Share of the range of scores by which a word that one item contains raises it. Chosen on
captions, names and a shop's products: more finds more names and fewer captions."""
MAX_WORD_ITEMS: Final = 1_000
"""A word that more items contain raises none; looking up as many takes a quarter of a millisecond."""
MIN_ITEMS_PER_MATCH: Final = 10
"""Nor does a word that more than one in ten items contain, if these are more than
:data:`MAX_RARE_ITEMS`."""
MAX_RAISED_ITEMS: Final = 1_000
"""Of more items with words of the query, those with the largest shares are raised."""
MAX_QUERY_WORDS: Final = 32
"""Only the rare words of a longer query count: it describes what it looks for, and each word takes
time."""
MAX_RARE_ITEMS: Final = 10
"""A word that more items contain is not rare."""
MIN_ITEMS_PER_RARE_MATCH: Final = 100
"""Nor is a word without a code that more than one in a hundred items contain, unless only one does."""
MAX_NAME_WORDS: Final = 2
"""Maximum number of words in a query that is a name, if one of them is rare."""
MAX_FREQUENT_WORDS: Final = 10_000
"""Frequent words that are remembered, since finding that a word is frequent takes most of the time."""
CODE: Final = re.compile(r".*\d{4}|(?![\d ]*[a-z]{0,2}$)(?=.*\d)", re.IGNORECASE)
"""A word with digits that names something. Short numbers, also with an ending (2nd, 80s, 5km), count it."""
SEGMENT_SHIFT: Final = 32


class WordMatches(NamedTuple):
    """Items that contain words of a query, in their text or as their name.

    Row i of each array is about one of them.
    """

    places: Int64[np.ndarray, " items"]
    """In ascending order; see :func:`places_of`."""
    shares: Float64[np.ndarray, " items"]
    """By what share of the range of scores the item is raised."""
    rare_shares: Float64[np.ndarray, " items"]
    """The part of it that is due to rare words, without scaling."""
    has_code: Bool[np.ndarray, " items"]
    """Whether the item has a rare code, such as IMG_2034 or a product's number, and comes first."""
    has_all: Bool[np.ndarray, " items"]
    """Whether the item contains all words of the query, frequent ones aside."""
    is_frequent: bool = False
    """Whether each word of the query is frequent, so that none raises an item."""

    def at(self, places: Int64[np.ndarray, " hits"]) -> Self:
        """Return the same facts of the items at other places, most of which may have no word of the query."""
        if not len(self.places):
            shares = np.zeros(len(places))
            return self._replace(
                places=places,
                shares=shares,
                rare_shares=shares,
                has_code=shares > 0,
                has_all=np.full(len(places), self.is_frequent),
            )
        rows = self.places.searchsorted(places).clip(max=len(self.places) - 1)
        is_match = self.places[rows] == places
        return self._replace(
            places=places,
            shares=self.shares[rows] * is_match,
            rare_shares=self.rare_shares[rows] * is_match,
            has_code=self.has_code[rows] & is_match,
            has_all=self.has_all[rows] & is_match,
        )

    @property
    def has_rare(self) -> bool:
        """Whether a word of the query is rare."""
        return bool(self.rare_shares.any())


_EMPTY: Final = np.zeros(0)
NO_WORDS: Final = WordMatches(_EMPTY.astype(np.int64), _EMPTY, _EMPTY, _EMPTY > 0, _EMPTY > 0)


def places_of(
    segments: Int64[np.ndarray, " items"], rows: Int64[np.ndarray, " items"]
) -> Int64[np.ndarray, " items"]:
    """Return the places of rows of segments."""
    return np.asarray((segments << SEGMENT_SHIFT) + rows)


def place_of(segment: int, row: int) -> int:
    """Return the place of a row of a segment."""
    return (segment << SEGMENT_SHIFT) + row


def split_places(
    places: Int64[np.ndarray, " items"],
) -> tuple[Int64[np.ndarray, " items"], Int64[np.ndarray, " items"]]:
    """Return the segments and the rows of places."""
    segments = places >> SEGMENT_SHIFT
    return segments, places - (segments << SEGMENT_SHIFT)


def rows_in(segment: int, places: Int64[np.ndarray, " items"]) -> Int64[np.ndarray, " rows"]:
    """Return the rows of those places that are in a segment; the places are in ascending order."""
    low, high = places.searchsorted([place_of(segment, 0), place_of(segment + 1, 0)])
    return places[low:high] - place_of(segment, 0)


def find_words(snapshot: Snapshot, text: str, *, max_raised: int = MAX_RAISED_ITEMS) -> WordMatches:
    """Look up the items that contain words of a text."""
    words = split_words(text)
    num_items = max(2, snapshot.num_alive)
    is_short = len(words) <= MAX_QUERY_WORDS
    max_items = MAX_RARE_ITEMS
    if is_short:
        max_items = min(MAX_WORD_ITEMS, max(MAX_RARE_ITEMS, num_items // MIN_ITEMS_PER_MATCH))
    places_of_words = _look_up(snapshot, words, max_items, remember=is_short)
    weights, counts, rare_weights, codes = [], [], [], []
    for word, places in places_of_words.items():
        is_code = CODE.match(word) is not None
        max_rare = MAX_RARE_ITEMS
        if not is_code:
            max_rare = min(max_rare, max(1, num_items // MIN_ITEMS_PER_RARE_MATCH))
        weight = math.log(max(num_items / max(1, len(places)), 1)) / math.log(num_items)
        is_rare = len(places) <= max_rare
        counts.append(len(places))
        weights.append(WORD_WEIGHT * weight)
        rare_weights.append(WORD_WEIGHT * weight * is_rare)
        if is_code and is_rare:
            codes.append(places)
    listed = np.concatenate([np.zeros(0, dtype=np.int64), *places_of_words.values()])
    places, positions = np.unique(listed, return_inverse=True)
    shares = np.bincount(positions, np.repeat(weights, counts), minlength=len(places))
    largest = shares.max(initial=0.0)
    matches = WordMatches(
        places=places,
        shares=shares * (WORD_WEIGHT / largest) if 0 < largest < WORD_WEIGHT else shares,
        rare_shares=np.bincount(positions, np.repeat(rare_weights, counts), minlength=len(places)),
        has_code=np.isin(places, np.concatenate([places[:0], *codes])),
        has_all=(np.bincount(positions, minlength=len(places)) == len(counts)) & is_short,
        is_frequent=bool(words) and is_short and not counts,
    )
    if len(places) <= max_raised:
        return matches
    return matches.at(np.sort(places[np.argsort(-shares, kind="stable")[:max_raised]]))


def _look_up(
    snapshot: Snapshot, words: list[str], max_items: int, *, remember: bool
) -> dict[str, Int64[np.ndarray, " items"]]:
    """Return the places of the items that contain each word, without words that are frequent."""
    frequent = snapshot.frequent_words
    listed: dict[str, list[Int64[np.ndarray, " items"]]] = {
        word: [np.zeros(0, dtype=np.int64)] for word in words if word not in frequent
    }
    for number, segment in enumerate(snapshot.segments):
        words = [*listed]
        rows_of_words = segment.items.rows_of_words(words, max_items)
        for word, rows in zip(words, rows_of_words, strict=True):
            if rows is not None:
                listed[word].append(rows + (number << SEGMENT_SHIFT))
            if rows is None or sum(map(len, listed[word])) > max_items:
                del listed[word]
                if remember and len(frequent) < MAX_FREQUENT_WORDS:
                    frequent.add(word)
    return {word: np.concatenate(places) for word, places in listed.items()}


def split_words(text: str) -> list[str]:
    """Return the letters and digits of each word, once, without folders and a file's ending.

    >>> split_words("trips/IMG_2034.png of a red kite, 24/7")
    ['IMG 2034', 'of', 'a', 'red', 'kite', '24 7']
    """
    words: dict[str, str] = {}
    for word in text.split():
        letters = word
        if not word.isalnum():
            stem = re.sub(r".*/(?!\d+$)|.*[^\d/]/|\.[^\W\d]\w{1,4}$", "", word)
            letters = " ".join(re.findall(r"[^\W_]+", stem))
        if letters:
            words.setdefault(letters.lower(), letters)
    return [*words.values()]
