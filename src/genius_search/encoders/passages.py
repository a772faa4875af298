"""Division of long texts into passages that an encoder reads without truncation."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Final

from genius_search.encoders.base import Encoder, is_cut

MAX_PASSAGE_WORDS: Final = 200
"""Maximum number of words in a passage; it is halved where the encoder would truncate passages."""
OVERLAP_DIVISOR: Final = 10
"""Neighbouring passages share a tenth of their words."""
MAX_QUERY_PASSAGES: Final = 50
"""Maximum number of passages of a query, all of which are encoded before it is answered."""
_WORD: Final = re.compile(r"\S{1,40}")
"""A word, or 40 characters of a longer one: some languages put no spaces between words."""
_log: Final = logging.getLogger(__name__)


def divide(encoder: Encoder, text: str, spell: Callable[[str], str]) -> list[tuple[int, int]]:
    """Return start and end of each passage of a text; none if the encoder reads the whole text.

    Parameters
    ----------
    encoder
        The encoder.
    text
        The text.
    spell
        A function that returns a text as it is passed to the encoder, for example with an
        instruction.
    """
    if not is_cut(encoder, spell(text)):
        return []
    words = [word.span() for word in _WORD.finditer(text)]
    spans = []
    first, size = 0, MAX_PASSAGE_WORDS
    while first < len(words):
        # A passage of 200 words begins at the word 0, the next one at 180, ...
        size = min(2 * size, MAX_PASSAGE_WORDS)
        start, end = words[first][0], words[min(first + size, len(words)) - 1][1]
        while size > 1 and is_cut(encoder, spell(text[start:end])):
            size //= 2
            end = words[min(first + size, len(words)) - 1][1]
        spans.append((start, end))
        if first + size >= len(words):
            break
        first += size - size // OVERLAP_DIVISOR
    return spans


def query_passages(encoder: Encoder, text: str, spell: Callable[[str], str]) -> list[str]:
    """Return the texts that are encoded for a query: its text, or its passages.

    A warning names the part of the query that is not encoded, if there is one.

    Parameters
    ----------
    encoder, text
        The encoder, and the text of the query.
    spell
        The function of :func:`divide`; it is applied to the texts that are returned.
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
        _log.warning("only the beginning of the query is searched for: %s; shorten it", limit)
    return passages
