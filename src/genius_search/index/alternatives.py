"""Queries with several answers: "a red bicycle, or a dog on a beach"."""

from __future__ import annotations

import re
from typing import Final

MOST: Final = 4
"""Most alternatives that a text is split into; each is searched for by itself."""
_OR: Final = re.compile(r"(\s*,)?\s+or\s+", re.IGNORECASE)
_COMMA: Final = re.compile(r"\s*,\s*")
_DETERMINER: Final = re.compile(r"(?:an?|the|some|several|many|one|two|three|four|five)\s", re.IGNORECASE)
_FEW_WORDS: Final = 2


def split_alternatives(text: str) -> list[str]:
    """Return the alternatives that an English text names, or nothing if it does not clearly name several.

    It does if the texts around each "or" are of similar length and

    - all begin with a determiner: "a dog, a cat or the red car";
    - or follow a comma and contain none, with three words or more if one has a determiner: "a dog on a lawn,
      or children playing";
    - or none has a determiner and each has one word, or each several: "left arrow or check mark".

    "A black or white dog" and "red, green, or blue umbrellas" are one query each.

    >>> split_alternatives("a dog, a cat or the red car")
    ['a dog', 'a cat', 'the red car']
    """
    found = _OR.split(text.strip(" \t\n.?!"))
    pieces, commas = found[::2], found[1::2]
    determined = sum(map(_is_determined, pieces))
    if determined == len(pieces) > 1:
        listed = [one for piece in pieces for one in _COMMA.split(piece)]
        pieces = listed if all(map(_is_determined, listed)) else pieces
        is_clear = True
    else:
        counts = {len(piece.split()) for piece in pieces}
        if any("," in piece for piece in pieces):
            is_clear = False
        elif all(commas):
            is_clear = not determined or min(counts) > _FEW_WORDS
        else:
            is_clear = not determined and (counts == {1} or min(counts) >= _FEW_WORDS)
    return pieces if is_clear and 1 < len(pieces) <= MOST and _are_alike(pieces) else []


def _is_determined(piece: str) -> bool:
    return _DETERMINER.match(piece) is not None


def _are_alike(pieces: list[str]) -> bool:
    """Return whether the longest has at most twice the words of the shortest, which has some."""
    counts = [len(piece.split()) for piece in pieces]
    return 0 < max(counts) <= 2 * min(counts)
