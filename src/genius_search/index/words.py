"""Words of a query that items contain, beside the vectors.

Encoders hardly tell names and numbers apart, and for a single word they find its neighbours as
well. So items that contain words of the query are raised, by a share of the range of scores::

    raise = share * (best score - hundredth score)
    share = WORD_WEIGHT * sum of log(N / n) / log N over the words that the item contains

where n of the index's N items contain a word. If the largest share is below WORD_WEIGHT (1 for a
query of one word, 1/2 for one of two), all are scaled so that it is that. So a word counts by how
rare it is, and a single word puts its items first however many there are. BM25 also counts how
often an item has a word and how long its text is, and finds no more (``docs/lab/log.md``, "Words
beside vectors").

In this module the place of an item is one number, ``(segment << 32) + row``, so that arrays of
places can be compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Float64, Int64

from genius_search.index.snapshot import Snapshot

WORD_WEIGHT: Final = 0.3
"""Share of the range of scores by which a word that one item contains raises it. Chosen on
captions, names and a shop's products: more finds more names and fewer captions."""
MAX_WORD_ITEMS: Final = 1_000
"""A word that more items contain raises none. To look up as many takes .25 ms."""
MIN_ITEMS_PER_MATCH: Final = 10
"""Nor does a word that more than one in ten items contain, unless it is a rare code."""
MAX_RAISED_ITEMS: Final = 1_000
"""Of more items with words of the query, those with the largest shares are raised."""
MAX_SHARE_RATIO: Final = 3
"""Items whose share is less than a third of the largest are not raised, which would change little
and take time, unless they have a rare word."""
MIN_SHARE: Final = 1e-9
"""Smaller shares are not scaled: all items contain the words."""
MAX_QUERY_WORDS: Final = 32
"""Only the rare words of a longer query count: it describes what it looks for, and each word takes
time."""
MAX_RARE_ITEMS: Final = 10
"""A word that more items contain is not rare."""
MIN_ITEMS_PER_RARE_MATCH: Final = 100
"""Nor is a word that is no code if more than one in a hundred items contain it, and not only one."""
MAX_NAME_WORDS: Final = 2
"""Maximum number of words in a query that is a name, if one of them is rare."""
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
        """Return the same facts of items at other places, which may contain no word of the query."""
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


_NO_PLACES: Final = np.zeros(0, dtype=np.int64)
_NO_SHARES: Final = np.zeros(0)
NO_WORDS: Final = WordMatches(_NO_PLACES, _NO_SHARES, _NO_SHARES, _NO_SHARES > 0, _NO_SHARES > 0)
"""No item contains a word of the query."""


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
    max_items = count_frequent(snapshot) if is_short else MAX_RARE_ITEMS
    max_share = max(
        1, num_items // MIN_ITEMS_PER_MATCH
    )  # fewer than a rare code may have, if N < 100
    places_of_words = {
        word: places
        for word, places in _look_up(snapshot, words, max_items).items()
        if len(places) <= max_share or CODE.match(word)
    }
    if not any(map(len, places_of_words.values())):
        return NO_WORDS._replace(is_frequent=bool(words) and is_short and not places_of_words)
    counts = np.array([*map(len, places_of_words.values())])
    weights = (
        WORD_WEIGHT * np.log((num_items / counts.clip(min=1)).clip(min=1)) / math.log(num_items)
    )
    is_code = np.array([CODE.match(word) is not None for word in places_of_words])
    max_rare = np.where(is_code, MAX_RARE_ITEMS, max(1, num_items // MIN_ITEMS_PER_RARE_MATCH))
    is_rare = counts <= max_rare.clip(max=MAX_RARE_ITEMS)
    # One row for each word of each item, those of an item together.
    listed = np.concatenate([*places_of_words.values()])
    order = np.argsort(listed, kind="stable")  # merges the words' lists, which are sorted
    word_of = np.repeat(np.arange(len(counts)), counts)[order]
    starts = np.flatnonzero(np.diff(listed[order], prepend=-1))
    shares = np.add.reduceat(weights[word_of], starts)
    least_share = max(WORD_WEIGHT, 1 / len(words))
    matches = WordMatches(
        places=listed[order][starts],
        shares=shares * max(1.0, least_share / max(shares.max(), MIN_SHARE)),
        rare_shares=np.add.reduceat((weights * is_rare)[word_of], starts),
        has_code=np.logical_or.reduceat((is_code & is_rare)[word_of], starts),
        has_all=(np.diff(starts, append=len(listed)) == len(counts)) & is_short,
    )
    is_raised = (shares * MAX_SHARE_RATIO >= shares.max()) | (matches.rare_shares > 0)
    raised = np.flatnonzero(is_raised)
    order = np.lexsort((-shares[raised], ~matches.has_code[raised]))
    raised = np.sort(raised[order[:max_raised]])
    return matches._replace(
        places=matches.places[raised],
        shares=matches.shares[raised],
        rare_shares=matches.rare_shares[raised],
        has_code=matches.has_code[raised],
        has_all=matches.has_all[raised],
    )


def _look_up(
    snapshot: Snapshot, words: Sequence[str], max_items: int
) -> dict[str, Int64[np.ndarray, " items"]]:
    """Return the places of the items that contain each word, without words that more items do."""
    limit = count_frequent(snapshot)
    places_of_words = snapshot.known_words(words)
    unknown = [word for word in words if word not in places_of_words]
    if unknown:
        # A long query's frequent words are not read to their limit, so that is not remembered.
        looked_up = _read(snapshot, unknown, min(limit, max_items))
        places_of_words |= looked_up
        if max_items >= limit:
            snapshot.remember_words(looked_up)
    return {
        word: places
        for word in words
        if (places := places_of_words[word]) is not None and len(places) <= max_items
    }


def _read(
    snapshot: Snapshot, words: Sequence[str], max_items: int
) -> dict[str, Int64[np.ndarray, " items"] | None]:
    """Return the places of the items that contain each word; None if these are more."""
    parts: dict[str, list[Int64[np.ndarray, " items"]] | None] = {word: [] for word in words}
    for number, segment in enumerate(snapshot.segments):
        asked = [word for word, places in parts.items() if places is not None]
        rows_of_words = segment.items.rows_of_words(asked, max_items)
        for word, rows in zip(asked, rows_of_words, strict=True):
            places = parts[word]
            if rows is None or places is None or len(rows) + sum(map(len, places)) > max_items:
                parts[word] = None
            else:
                places.append(rows + place_of(number, 0))
    return {
        word: None if places is None else np.concatenate([_NO_PLACES, *places])
        for word, places in parts.items()
    }


def count_frequent(snapshot: Snapshot) -> int:
    """Return the largest number of items that contain a word that is not frequent."""
    share = snapshot.num_alive // MIN_ITEMS_PER_MATCH
    return min(MAX_WORD_ITEMS, max(MAX_RARE_ITEMS, share))


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
