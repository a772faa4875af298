"""Passages of texts that are longer than an encoder reads: an item has a vector and an ID for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

from genius_search.encoders.base import Encoder, is_cut
from genius_search.index.items import Item
from genius_search.records import Modality, format_text

WORDS: Final = 200
"""Words of a passage; fewer if the encoder reads fewer."""
OVERLAP: Final = 10
"""One in so many words of a passage is also in the next one."""
_WORD: Final = re.compile(r"\S{1,40}")
"""Longer words are parts: some languages put no spaces between words."""


class Passage(NamedTuple):
    """Where a passage is in the text of the item that it follows: characters from ``start`` to ``end``."""

    start: int
    end: int


Entry: TypeAlias = Item | Passage
"""Passages follow their item. That itself stands for the beginning of its text."""


def find_passages(encoder: Encoder, text: str) -> list[Passage]:
    """Return the passages of a text but the first, none longer than the encoder reads.

    There are none if it reads all of the text.
    """
    if not is_cut(encoder, format_text(text)):
        return []
    words = [word.span() for word in _WORD.finditer(text)]
    size = WORDS
    while True:
        starts = range(0, max(1, len(words) - size // OVERLAP), size - size // OVERLAP)
        found = [Passage(words[at][0], words[min(at + size, len(words)) - 1][1]) for at in starts]
        if size == 1 or not any(is_cut(encoder, format_text(text[start:end])) for start, end in found):
            return found[1:]
        size //= 2


def read_entries(
    entries: Iterable[Entry], complete: Callable[[Item], Item] = lambda item: item
) -> Iterator[Item]:
    """Yield what is encoded: each item, and each passage as an item of its own.

    ``complete`` adds to an item what is inside its file.
    """
    for entry in entries:
        if isinstance(entry, Item):
            item = entry
            yield item
        else:
            text = (complete(item).text or "")[entry.start : entry.end]
            yield Item(f"{item.id}\n{entry.start}", Modality.TEXT, text, stamp=item.stamp)
