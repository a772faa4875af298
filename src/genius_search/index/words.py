"""Find the items that contain words of a query, and how far each is raised.

Encoders hardly distinguish names or numbers, and for a single word they also find its neighbours.
Items that contain words of the query are therefore raised by a share of the range of scores::

    raise = share * (best score - hundredth score)
    share = WORD_WEIGHT * sum of log(N / n) / log N over the words that the item contains

where n of the index's N items contain a word. If the largest share is below max(WORD_WEIGHT, 1 / W)
for a query of W words, all shares are scaled so that the largest reaches it: 1 for a query of one
word, 1/2 for two words. A word therefore counts by its rarity, and a single word puts its items
first however many there are.

For example, with N = 10,000 items and the query "red zebra", where 500 items contain "red" and 2
contain "zebra"::

    "red"    0.3 * log(10,000 / 500) / log 10,000 = 0.098
    "zebra"  0.3 * log(10,000 / 2)   / log 10,000 = 0.277

An item with both words has the largest share, 0.375, and all shares are multiplied by 0.5 / 0.375.

BM25 also counts how often an item contains a word and how long its text is, and finds no more; the
figures are in ``docs/lab/log.md``.

In this module a location (segment, row) is encoded as one integer, ``(segment << 32) + row``, so
that arrays of locations can be sorted and compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Float64, Int64

from genius_search.index.snapshot import Snapshot

WORD_WEIGHT: Final = 0.3
"""Share of the range of scores that a word adds if only one item contains it. Chosen on captions,
names and the products of a shop: a larger weight finds more names and fewer captions."""
MAX_WORD_ITEMS: Final = 1_000
"""A word that more items contain raises none. Looking up a word at this limit takes .25 ms."""
MIN_ITEMS_PER_MATCH: Final = 10
"""A word raises no item if more than one in ten items contain it, unless it is a rare code."""
MAX_RAISED_ITEMS: Final = 1_000
"""If more items contain words of the query, those with the largest shares are raised."""
MAX_SHARE_RATIO: Final = 3
"""Items with less than a third of the largest share are not raised unless they contain a rare word:
raising them would change little and take time."""
MIN_SHARE: Final = 1e-9
"""Smaller shares are not scaled: they mean that all items contain the words."""
MAX_QUERY_WORDS: Final = 32
"""In a longer query only rare words count: it describes its target, and each word takes time."""
MAX_RARE_ITEMS: Final = 10
"""A word is rare if at most this many items contain it."""
MIN_ITEMS_PER_RARE_MATCH: Final = 100
"""A word that is no code is rare if at most one in a hundred items, or one item, contains it."""
MAX_NAME_WORDS: Final = 2
"""Maximum number of words in a query that is a name, if one of them is rare."""
CODE: Final = re.compile(r".*\d{4}|(?![\d ]*[a-z]{0,2}$)(?=.*\d)", re.IGNORECASE)
"""A word with digits that names something, such as IMG_2034, AX-105 or 4711.

Short numbers, with or without an ending (24, 2nd, 80s, 5km), count something and are no codes."""
SEGMENT_SHIFT: Final = 32
"""A packed location has the segment above this bit and the row below it."""


class WordMatches(NamedTuple):
    """Items that contain words of a query in their text or name.

    Row i of each array describes one item.
    """

    locations: Int64[np.ndarray, " items"]
    """Packed locations in ascending order; see :func:`pack_locations`."""
    shares: Float64[np.ndarray, " items"]
    """Share of the range of scores that is added to the item's score."""
    rare_shares: Float64[np.ndarray, " items"]
    """The part of the share that is due to rare words, without scaling."""
    has_code: Bool[np.ndarray, " items"]
    """Whether the item contains a rare code, such as a product number, and is pinned."""
    has_all: Bool[np.ndarray, " items"]
    """Whether the item contains all words of the query, frequent words excepted."""
    words: tuple[str, ...] = ()
    """The words of the query that are not frequent."""
    is_frequent: bool = False
    """Whether every word of the query is frequent, so that none raises an item."""

    def for_locations(self, locations: Int64[np.ndarray, " hits"]) -> Self:
        """Return the matches of the items at given locations, which may contain no word."""
        if not len(self.locations):
            shares = np.zeros(len(locations))
            return self._replace(
                locations=locations,
                shares=shares,
                rare_shares=shares,
                has_code=shares > 0,
                has_all=np.full(len(locations), self.is_frequent),
            )
        rows = self.locations.searchsorted(locations).clip(max=len(self.locations) - 1)
        is_match = self.locations[rows] == locations
        return self._replace(
            locations=locations,
            shares=self.shares[rows] * is_match,
            rare_shares=self.rare_shares[rows] * is_match,
            has_code=self.has_code[rows] & is_match,
            has_all=self.has_all[rows] & is_match,
        )

    def take(self, rows: Int64[np.ndarray, " rows"]) -> Self:
        """Return the matches in some rows."""
        return self._replace(
            locations=self.locations[rows],
            shares=self.shares[rows],
            rare_shares=self.rare_shares[rows],
            has_code=self.has_code[rows],
            has_all=self.has_all[rows],
        )

    def reach(
        self, locations: Int64[np.ndarray, " some"], least_share: float
    ) -> Bool[np.ndarray, " some"]:
        """Return which of some matches have at least a share of the range, or a code."""
        rows = self.locations.searchsorted(locations)
        return np.asarray((self.shares[rows] >= least_share) | self.has_code[rows])

    @property
    def has_rare(self) -> bool:
        """Whether a word of the query is rare."""
        return bool(self.rare_shares.any())


_NO_LOCATIONS: Final = np.zeros(0, dtype=np.int64)
_NO_SHARES: Final = np.zeros(0)
NO_WORD_MATCHES: Final = WordMatches(
    locations=_NO_LOCATIONS,
    shares=_NO_SHARES,
    rare_shares=_NO_SHARES,
    has_code=_NO_SHARES > 0,
    has_all=_NO_SHARES > 0,
)
"""No item contains a word of the query."""


def pack_locations(
    segments: Int64[np.ndarray, " items"], rows: Int64[np.ndarray, " items"]
) -> Int64[np.ndarray, " items"]:
    """Pack the segment and the row of each location into one integer."""
    return np.asarray((segments << SEGMENT_SHIFT) + rows)


def pack_location(segment: int, row: int) -> int:
    """Pack a segment and a row into one integer."""
    return (segment << SEGMENT_SHIFT) + row


def unpack_locations(
    locations: Int64[np.ndarray, " items"],
) -> tuple[Int64[np.ndarray, " items"], Int64[np.ndarray, " items"]]:
    """Return the segments and the rows of packed locations."""
    segments = locations >> SEGMENT_SHIFT
    return segments, locations - (segments << SEGMENT_SHIFT)


def rows_of_segment(
    segment: int, locations: Int64[np.ndarray, " items"]
) -> Int64[np.ndarray, " rows"]:
    """Return the rows of the locations in one segment; the locations are in ascending order."""
    segment_start = pack_location(segment, 0)
    low, high = locations.searchsorted([segment_start, pack_location(segment + 1, 0)])
    return locations[low:high] - segment_start


def find_word_matches(
    snapshot: Snapshot, text: str, *, max_raised: int = MAX_RAISED_ITEMS
) -> WordMatches:
    """Find the items that contain words of a text, and the shares that raise them."""
    words = split_words(text)
    is_short = len(words) <= MAX_QUERY_WORDS
    locations_of_words = _find_telling_words(snapshot, words)
    if not any(map(len, locations_of_words.values())):
        is_frequent = bool(words) and is_short and not locations_of_words
        return NO_WORD_MATCHES._replace(is_frequent=is_frequent)
    matches = _sum_shares(locations_of_words, num_items=max(2, snapshot.num_alive))
    if not is_short:  # only the rare words of a long query were looked up
        matches = matches._replace(has_all=np.zeros_like(matches.has_all))
    largest = matches.shares.max()
    scale = max(1.0, max(WORD_WEIGHT, 1 / len(words)) / max(largest, MIN_SHARE))
    is_raised = (matches.shares * MAX_SHARE_RATIO >= largest) | (matches.rare_shares > 0)
    rows = np.flatnonzero(is_raised)
    if len(rows) > max_raised:  # those with codes first, then by share
        best_first = np.lexsort((-matches.shares[rows], ~matches.has_code[rows]))
        rows = np.sort(rows[best_first[:max_raised]])
    matches = matches.take(rows)
    return matches._replace(shares=matches.shares * scale, words=(*locations_of_words,))


def _find_telling_words(
    snapshot: Snapshot, words: Sequence[str]
) -> dict[str, Int64[np.ndarray, " items"]]:
    """Return the locations of the items that contain each word, without frequent words.

    Of a query with more than :data:`MAX_QUERY_WORDS` words only rare words are returned.
    """
    is_short = len(words) <= MAX_QUERY_WORDS
    max_items = max_items_of_word(snapshot) if is_short else MAX_RARE_ITEMS
    # In an index of fewer than 100 items, this is less than MAX_RARE_ITEMS, which codes may have.
    max_items_of_plain_word = max(1, max(2, snapshot.num_alive) // MIN_ITEMS_PER_MATCH)
    return {
        word: locations
        for word, locations in _look_up(snapshot, words, max_items).items()
        if len(locations) <= max_items_of_plain_word or CODE.match(word)
    }


def _sum_shares(
    locations_of_words: Mapping[str, Int64[np.ndarray, " items"]], num_items: int
) -> WordMatches:
    """Return all items that contain a word, with the sum of the shares of their words.

    The lists of two words, for example, are joined, sorted by location and summed by item::

        locations_of_words   red: 3 8      kite: 8 9
        sorted_locations     3    8    8    9
        word_numbers         0    0    1    1
        item_starts          0    1         3
    """
    counts = np.array([*map(len, locations_of_words.values())])
    log_rarity = np.log((num_items / counts.clip(min=1)).clip(min=1))
    weights = WORD_WEIGHT * log_rarity / math.log(num_items)
    is_code = np.array([CODE.match(word) is not None for word in locations_of_words])
    max_rare = np.where(is_code, MAX_RARE_ITEMS, max(1, num_items // MIN_ITEMS_PER_RARE_MATCH))
    is_rare = counts <= max_rare.clip(max=MAX_RARE_ITEMS)
    joined = np.concatenate([*locations_of_words.values()])
    order = np.argsort(joined, kind="stable")  # merges the lists, which are sorted
    sorted_locations = joined[order]
    word_numbers = np.repeat(np.arange(len(counts)), counts)[order]
    is_first = np.ones(len(joined), dtype=bool)
    np.not_equal(sorted_locations[1:], sorted_locations[:-1], out=is_first[1:])
    item_starts = np.flatnonzero(is_first)
    words_per_item = np.append(item_starts[1:], len(joined)) - item_starts
    rare_shares = np.zeros(len(item_starts))
    has_code = np.zeros(len(item_starts), dtype=bool)
    if is_rare.any():  # most queries have no rare word
        rare_shares = np.add.reduceat((weights * is_rare)[word_numbers], item_starts)
        has_code = np.logical_or.reduceat((is_code & is_rare)[word_numbers], item_starts)
    return WordMatches(
        locations=sorted_locations[item_starts],
        shares=np.add.reduceat(weights[word_numbers], item_starts),
        rare_shares=rare_shares,
        has_code=has_code,
        has_all=words_per_item == len(counts),
    )


def _look_up(
    snapshot: Snapshot, words: Sequence[str], max_items: int
) -> dict[str, Int64[np.ndarray, " items"]]:
    """Return the locations of the items that contain each word, without words of more items.

    The result of each look-up is cached in the snapshot.
    """
    limit = max_items_of_word(snapshot)
    locations_of_words = snapshot.cached_words(words)
    uncached = [word for word in words if word not in locations_of_words]
    if uncached:
        looked_up = _read_locations(snapshot, uncached, min(limit, max_items))
        locations_of_words |= looked_up
        # The frequent words of a long query are not read up to their limit, so they are not cached.
        if max_items >= limit:
            snapshot.cache_words(looked_up)
    matches = {}
    for word in words:
        locations = locations_of_words[word]
        if locations is not None and len(locations) <= max_items:
            matches[word] = locations
    return matches


def _read_locations(
    snapshot: Snapshot, words: Sequence[str], max_items: int
) -> dict[str, Int64[np.ndarray, " items"] | None]:
    """Read the locations of the items that contain each word; None if more than ``max_items``."""
    parts: dict[str, list[Int64[np.ndarray, " items"]] | None] = {word: [] for word in words}
    for number, segment in enumerate(snapshot.segments):
        infrequent = [word for word, locations in parts.items() if locations is not None]
        rows_of_words = segment.items.rows_of_words(infrequent, max_items)
        for word, rows in zip(infrequent, rows_of_words, strict=True):
            earlier = parts[word]
            if rows is None or earlier is None or len(rows) + sum(map(len, earlier)) > max_items:
                parts[word] = None
            else:
                earlier.append(rows + pack_location(number, 0))
    return {
        word: None if locations is None else np.concatenate([_NO_LOCATIONS, *locations])
        for word, locations in parts.items()
    }


def max_items_of_word(snapshot: Snapshot) -> int:
    """Return the maximum number of items that may contain a word before it counts as frequent."""
    share = snapshot.num_alive // MIN_ITEMS_PER_MATCH
    return min(MAX_WORD_ITEMS, max(MAX_RARE_ITEMS, share))


# Folders ("trips/", but not "24/7") and an extension (".png", but not ".5"). Folders are matched at
# the beginning alone, as otherwise the time would grow with the square of the word's length.
_FOLDERS_AND_EXTENSION: Final = re.compile(r"^(?:.*[^\d/]/)?(?:.*/(?!\d+$))?|\.[^\W\d]\w{1,4}$")


def split_words(text: str) -> list[str]:
    """Return the distinct words of a text, without the folders and the extension of file names.

    Only letters and digits are kept; a word with other characters becomes several, as in a phrase.

    >>> split_words("trips/IMG_2034.png of a red kite, 24/7")
    ['IMG 2034', 'of', 'a', 'red', 'kite', '24 7']
    """
    words: dict[str, str] = {}
    for word in text.split():
        letters = word
        if not word.isalnum():
            letters = " ".join(re.findall(r"[^\W_]+", _FOLDERS_AND_EXTENSION.sub("", word)))
        if letters:
            words.setdefault(letters.lower(), letters)
    return [*words.values()]
