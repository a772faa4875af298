r"""Cleaning of texts, of items and of queries alike, so that words are found in any spelling.

>>> clean("an o\N{LATIN SMALL LIGATURE FFI}ce in the har\N{SOFT HYPHEN}bour")
'an office in the harbour'
>>> join_divided_words("a light-\nhouse")
'a lighthouse'
"""

from __future__ import annotations

import re
from typing import Final
from unicodedata import normalize

# Soft hyphens, with the end of the line at which they divide a word; word joiners and byte order
# marks; and spaces of zero width, unless they separate words: in Thai, Lao, Burmese and Khmer.
_INVISIBLE: Final = re.compile(
    r"\u00ad(?:[ \t]*\r?\n[ \t]*)?|[\u2060\ufeff]"
    r"|(?<![\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff])\u200b"
)
# Shapes of letters, which no keyboard has: Latin ligatures (U+FB00 to U+FB06), Hebrew and Arabic
# presentation forms, and Kangxi radicals. NFKC of the whole text would change powers and fractions.
_SHAPES: Final = re.compile(r"[\u2f00-\u2fdf\ufb00-\ufdff\ufe70-\ufefc]")
_DIVIDED: Final = re.compile(r"[-\u2010][ \t]*\n{1,2}[ \t]*(?=([^\W\d_]))")


def clean(text: str) -> str:
    """Return a text without invisible characters, and with the letters of ligatures."""
    if text.isascii():
        return text
    return _SHAPES.sub(lambda shape: normalize("NFKC", shape[0]), _INVISIBLE.sub("", text))


def join_divided_words(text: str) -> str:
    """Join words that are divided between lower-case letters by a hyphen at a line end."""

    def join(line_end: re.Match[str]) -> str:
        before = text[max(0, line_end.start() - 1) : line_end.start()]
        return "" if before.islower() and line_end[1].islower() else line_end[0]

    return _DIVIDED.sub(join, text)
