"""Words that texts must contain, or must not: ``beach OR sea -people "a red kite" umbr*``."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Final, NamedTuple

from genius_search.border import as_text
from genius_search.errors import UsageError

MATCH_GRAMMAR: Final = (
    "give words that the text must have, for example: leather strap*, or for a phrase "
    """'"leather strap"'; a - before a word, a phrase or a prefix* leaves out, OR stands between """
    "two words of which one must occur, and AND, OR and NOT as words are put in quotes"
)
_MINUS: Final = r"-\u2212\uff0d"
"""A hyphen, a minus, and the hyphen of East Asian keyboards."""
_SIGN: Final = rf"[{_MINUS}!]"
_TERM: Final = re.compile(rf'({_SIGN}?)(?:"([^"]*)"(\*?)|(?!{_SIGN}")([^\s"]+))|{_SIGN}?"')
"""A phrase or a word with the sign that leaves it out, or a quote that is not closed."""
_LEFT_OUT: Final = re.compile(
    rf'(?<!\S)[{_MINUS}](?=[^\W\d_]|"[^"]*[^\W\d_])'  # not before a number
    r'("[^"]*(?:"\*?|$)|[^\s"]+)'
)
_OPERATOR_WORDS: Final = {
    "AND": "AND",
    "&&": "AND",
    "OR": "OR",
    "|": "OR",
    "||": "OR",
    "NOT": "NOT",
}
_STRAIGHT_QUOTES: Final = str.maketrans("“”„«»", '"""""')


class FullTextQueries(NamedTuple):
    """A match in SQLite's full-text syntax."""

    required: str | None
    left_out: str | None
    """What finds the items to leave out."""


class _Term(NamedTuple):
    """A word or phrase of a match."""

    quoted: str
    """Itself in SQLite's syntax."""
    is_left_out: bool
    follows_or: bool


def parse_match(match: str) -> FullTextQueries:
    """Translate words to SQLite's full-text syntax, which sees nothing of them but quoted.

    Raises
    ------
    UsageError
        The text contains no words, or an operator that means nothing where it is.
    """
    required: list[dict[str, None]] = []  # sets of alternatives; a word is looked up once
    left_out: dict[str, None] = {}
    cleaned = as_text(match, "match").replace("\0", " ").translate(_STRAIGHT_QUOTES)
    for term in _read_terms(cleaned):
        if term.is_left_out:
            left_out[term.quoted] = None
        elif term.follows_or:
            required[-1][term.quoted] = None
        else:
            required.append({term.quoted: None})
    if not required and not left_out:
        raise UsageError(f"match {match!r} has no word in it; {MATCH_GRAMMAR}")
    groups = dict.fromkeys(f"({' OR '.join(group)})" for group in required)
    return FullTextQueries(" AND ".join(groups) or None, " OR ".join(left_out) or None)


def _read_terms(match: str) -> Iterator[_Term]:
    operator = negation = bracket = ""
    before: _Term | None = None
    has_operators = False
    for found in _TERM.finditer(match):
        sign, phrase, phrase_star, word = found.groups(default="")
        means = "" if sign else _OPERATOR_WORDS.get(word, "")
        if means:
            if negation or (means != "NOT" and (operator or before is None)):
                raise UsageError(f"match {match!r}: {word} has no word before it; {MATCH_GRAMMAR}")
            operator, negation = (operator, word) if means == "NOT" else (means, "")
            has_operators = True
            continue
        words = phrase or word.rstrip("*")
        if not _has_words(words):
            if found[0] != '"' and found[0].endswith('"') and not phrase:
                raise UsageError(f"match {match!r}: {found[0]} begins no phrase; {MATCH_GRAMMAR}")
            continue
        star = phrase_star or ("*" if word.endswith("*") else "")
        term = _Term(f'"{words}"{star}', bool(sign or negation), follows_or=operator == "OR")
        if sign and negation:
            raise UsageError(
                f"match {match!r}: {negation} {found[0]} negates twice; {MATCH_GRAMMAR}"
            )
        if term.follows_or and (term.is_left_out or (before and before.is_left_out)):
            raise UsageError(
                f"match {match!r}: OR has a word to leave out beside it; {MATCH_GRAMMAR}"
            )
        yield term
        has_operators |= bool(sign)
        bracket = bracket or (word if word.startswith("(") else "")
        operator, negation, before = "", "", term
    if operator or negation:
        raise UsageError(
            f"match {match!r}: {negation or operator} has no word after it; {MATCH_GRAMMAR}"
        )
    if has_operators and bracket:
        raise UsageError(
            f"match {match!r}: the bracket of {bracket!r} groups nothing; {MATCH_GRAMMAR}"
        )


def _has_words(text: str) -> bool:
    """Return whether a text has a letter or a digit, of which SQLite's words are made."""
    return any(kind[0] in "LN" or kind == "Co" for kind in map(unicodedata.category, text))


def split_left_out(text: str) -> tuple[str, str]:
    """Return a query's text without the words that it leaves out, and these as a match.

    >>> split_left_out('a beach -people -"beach chair*" 5 -3, well-known')
    ('a beach 5 -3, well-known', '-people -"beach chair*"')
    """
    left_out: list[str] = []
    while found := _LEFT_OUT.findall(text):
        left_out += (f'-{term}"' if term.count('"') == 1 else f"-{term}" for term in found)
        text = " ".join(_LEFT_OUT.sub(" ", text).split())
    return text, " ".join(left_out)
