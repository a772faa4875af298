"""Division of texts of items and queries that are longer than an encoder reads into passages."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Final

from genius_search.encoders.base import Encoder, is_cut

WORDS: Final = 200
"""Words of a passage; fewer if the encoder reads fewer."""
OVERLAP: Final = 10
"""One in so many words of a passage is also in the next one."""
MAX_QUERY_PASSAGES: Final = 50
"""Maximum number of passages of a query, all of which are encoded before it is answered."""
_WORD: Final = re.compile(r"\S{1,40}")
"""Longer words are parts: some languages put no spaces between words."""
_log: Final = logging.getLogger(__name__)


def divide(encoder: Encoder, text: str, spell: Callable[[str], str]) -> list[tuple[int, int]]:
    """Return where the passages of a text begin and end, none longer than the encoder reads.

    There are none if it reads all of the text.

    Parameters
    ----------
    spell
        returns a text as the encoder is given it, for example with an instruction before it.
    """
    if not is_cut(encoder, spell(text)):
        return []
    words = [word.span() for word in _WORD.finditer(text)]
    size = WORDS
    while True:
        starts = range(0, max(1, len(words) - size // OVERLAP), size - size // OVERLAP)
        spans = [(words[at][0], words[min(at + size, len(words)) - 1][1]) for at in starts]
        if size == 1 or not any(is_cut(encoder, spell(text[start:end])) for start, end in spans):
            return spans
        size //= 2


def query_passages(encoder: Encoder, text: str, spell: Callable[[str], str]) -> list[str]:
    """Return what is encoded of a query: its text or the passages; warn of what is not read.

    Parameters
    ----------
    spell
        as of :func:`divide`; it is applied to what is returned.
    """
    spans = divide(encoder, text, spell)
    if not spans:
        return [spell(text)]
    passages = [spell(text[start:end]) for start, end in spans[:MAX_QUERY_PASSAGES]]
    if any(is_cut(encoder, passage) for passage in passages):
        _log.warning(
            "the encoder reads only the beginning of the query: its instruction is too long"
        )
        return [spell(text)]
    if len(spans) > MAX_QUERY_PASSAGES:
        end = spans[MAX_QUERY_PASSAGES - 1][1]
        limit = f"the first {end:,} of its {len(text):,} characters, {MAX_QUERY_PASSAGES} passages"
        _log.warning("the query is longer than what is searched for: %s; give a part of it", limit)
    return passages
