r"""Cleaning of texts. Items and queries are cleaned alike, so that words match in any spelling.

>>> clean("an o\N{LATIN SMALL LIGATURE FFI}ce in the har\N{SOFT HYPHEN}bour")
'an office in the harbour'
>>> join_divided_words("a light-\nhouse")
'a lighthouse'
"""

from __future__ import annotations

import re
from typing import Final
from unicodedata import normalize

# Characters without a shape:
# - soft hyphens, with the line break that follows where they divide a word ("har\u00ad\nbour"),
# - word joiners and byte order marks,
# - zero-width spaces, except after Thai, Lao, Burmese and Khmer letters, where they separate words.
_INVISIBLE: Final = re.compile(
    r"\u00ad(?:[ \t]*\r?\n[ \t]*)?|[\u2060\ufeff]"
    r"|(?<![\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff])\u200b"
)
# Presentation forms, which no keyboard types: Latin ligatures (U+FB00 to U+FB06), Hebrew and Arabic
# presentation forms, and Kangxi radicals. Only these are normalised to NFKC: applied to the whole
# text, NFKC would turn the square in "5 m²" into a plain 2. U+FDFA and U+FDFB stand for sentences
# of up to 18 characters, and stay.
_SHAPES: Final = re.compile(r"[\u2f00-\u2fdf\ufb00-\ufdf9\ufdfc-\ufdff\ufe70-\ufefc]")
# A hyphen at the end of a line, up to the letter (group 1) that starts the next line. The line may
# be followed by one empty line, as between the columns of a PDF file.
_DIVIDED: Final = re.compile(r"[-\u2010][ \t]*\n{1,2}[ \t]*(?=([^\W\d_]))")
# A mark of time in the text of subtitles, such as "[0:01:30] ".
_MARK: Final = re.compile(r"\[(\d{1,4}):(\d\d):(\d\d)\] ")


def clean(text: str) -> str:
    """Remove invisible characters, and replace ligatures and similar forms by letters."""
    if text.isascii():
        return text
    return _SHAPES.sub(lambda shape: normalize("NFKC", shape[0]), _INVISIBLE.sub("", text))


def join_divided_words(text: str) -> str:
    """Join words that a hyphen at a line end divides between two lower-case letters."""

    def join(line_end: re.Match[str]) -> str:
        before = text[max(0, line_end.start() - 1) : line_end.start()]
        return "" if before.islower() and line_end[1].islower() else line_end[0]

    return _DIVIDED.sub(join, text)


def second_at(text: str, position: int) -> int | None:
    """Return the second at a position of a text with marks of time; None without marks."""
    second = None
    for mark in _MARK.finditer(text):
        if mark.start() > position and second is not None:
            break
        hours, minutes, seconds = map(int, mark.groups())
        second = 3600 * hours + 60 * minutes + seconds
        if mark.start() >= position:
            break
    return second


def format_seconds(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds: ``0:01:30``."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
