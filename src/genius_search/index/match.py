"""Words that texts must contain or must not contain: ``beach OR sea -people "a red kite" umbr*``.

SQLite's full-text search gets two queries, one for required and one for excluded words, in which
each word is quoted, so that it has no operators but ours::

    beach OR sea -people "a red kite" umbr*
    required    ("beach" OR "sea") AND ("a red kite") AND ("umbr"*)
    excluded    "people"
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Final, NamedTuple

from genius_search.border import as_text
from genius_search.errors import UsageError

MATCH_GRAMMAR: Final = (
    "give words that the text must have, for example: leather strap*, or for a phrase "
    """'"leather strap"'; a - before a word, a phrase or a prefix* excludes it, OR stands """
    "between two words of which one must occur, and AND, OR and NOT as words are put in quotes"
)
"""The grammar as error messages state it."""

# The grammar of a match, in EBNF, with an example of each rule:
#
#   match    = term {[operator] term}       beach OR sea -people
#   operator = ("AND" | "&&" | "OR" | "|" | "||") ["NOT"] | "NOT"
#   term     = [sign] (phrase | word)       -people
#   phrase   = '"' words '"' ["*"]          "a red kite"
#   word     = characters ["*"]             umbr*
#   sign     = minus | "!"
#
# OR binds more closely than AND, which stands between all other terms: a b OR c is a AND (b OR c).
# There are no brackets.
_MINUS: Final = r"-\u2010-\u2013\u2212\ufe63\uff0d"
"""A hyphen, its typographic forms up to the en dash, a minus, and hyphens of East Asian keyboards.
Programs for texts put them in the place of a typed hyphen."""
_SIGN: Final = rf"[{_MINUS}!]"
_TERM: Final = re.compile(rf'({_SIGN}?)(?:"([^"]*)"(\*?)|(?!{_SIGN}")([^\s"]+))|{_SIGN}?"')
"""A sign with a phrase or a word; or a quote that is not closed, with no group."""
_EXCLUDED: Final = re.compile(
    rf'(?<!\S)[{_MINUS}](?=[^\W\d_]|"[^"]*[^\W\d_])'  # a sign before a letter: -5 is a number
    r'("[^"]*(?:"\*?|$)|[^\s"]+)'
)
"""A term of a query that is excluded."""
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
    """A match as two queries in SQLite's full-text syntax."""

    required: str | None
    """Finds the items with all required words; None if none is required."""
    excluded: str | None
    """Finds the items to exclude."""


class _Term(NamedTuple):
    """A word or phrase of a match."""

    quoted: str
    """The term in SQLite's syntax."""
    is_excluded: bool
    follows_or: bool


def parse_match(match: str) -> FullTextQueries:
    """Translate a match to SQLite's full-text syntax, in which every word is quoted.

    Raises
    ------
    UsageError
        The match contains no words, or an operator in a place where it has no meaning.
    """
    alternatives: list[dict[str, None]] = []  # ordered sets of terms joined by OR
    excluded: dict[str, None] = {}
    cleaned = as_text(match, "match").replace("\0", " ").translate(_STRAIGHT_QUOTES)
    for term in _parse_terms(cleaned):
        if term.is_excluded:
            excluded[term.quoted] = None
        elif term.follows_or:
            alternatives[-1][term.quoted] = None
        else:
            alternatives.append({term.quoted: None})
    _refuse_brackets(cleaned)
    if not alternatives and not excluded:
        raise UsageError(f"match {match!r} has no word in it; {MATCH_GRAMMAR}")
    groups = dict.fromkeys(f"({' OR '.join(terms)})" for terms in alternatives)
    return FullTextQueries(" AND ".join(groups) or None, " OR ".join(excluded) or None)


def _parse_terms(match: str) -> Iterator[_Term]:
    """Yield the terms of a match; raise :class:`UsageError` for operators without terms."""
    operator = negation = ""  # AND or OR, and NOT, since the previous term
    previous: _Term | None = None
    for token in _TERM.finditer(match):
        sign, phrase, phrase_star, word = token.groups(default="")
        new_operator = "" if sign else _OPERATOR_WORDS.get(word, "")
        if new_operator:
            is_misplaced = new_operator != "NOT" and (operator or previous is None)
            if negation or is_misplaced:
                raise UsageError(f"match {match!r}: {word} has no word before it; {MATCH_GRAMMAR}")
            if new_operator == "NOT":
                negation = word
            else:
                operator = new_operator
            continue
        words = phrase or word.rstrip("*")
        if not _has_words(words):
            if token[0] != '"' and token[0].endswith('"') and not phrase:
                raise UsageError(f"match {match!r}: {token[0]} begins no phrase; {MATCH_GRAMMAR}")
            continue  # punctuation
        if sign and negation:
            raise UsageError(
                f"match {match!r}: {negation} {token[0]} negates twice; {MATCH_GRAMMAR}"
            )
        star = phrase_star or ("*" if word.endswith("*") else "")
        term = _Term(f'"{words}"{star}', bool(sign or negation), follows_or=operator == "OR")
        _require_alternatives(match, previous, term)
        yield term
        operator = negation = ""
        previous = term
    if operator or negation:
        raise UsageError(
            f"match {match!r}: {negation or operator} has no word after it; {MATCH_GRAMMAR}"
        )


def _require_alternatives(match: str, previous: _Term | None, term: _Term) -> None:
    """Raise :class:`UsageError` if OR stands before or after an excluded term."""
    if term.follows_or and (term.is_excluded or (previous and previous.is_excluded)):
        raise UsageError(
            f"match {match!r}: OR cannot combine a word with an excluded word; {MATCH_GRAMMAR}"
        )


def _refuse_brackets(match: str) -> None:
    """Raise :class:`UsageError` if a match has operators and a word that begins with a bracket."""
    has_operators = False
    words_with_bracket = []
    for token in _TERM.finditer(match):
        sign, phrase, _, word = token.groups(default="")
        if _has_words(phrase or word):
            has_operators |= bool(sign)
            if word.startswith("("):
                words_with_bracket.append(word)
        has_operators |= not sign and word in _OPERATOR_WORDS
    if has_operators and words_with_bracket:
        raise UsageError(
            f"match {match!r}: the bracket of {words_with_bracket[0]!r} groups nothing; "
            f"{MATCH_GRAMMAR}"
        )


def _has_words(text: str) -> bool:
    """Return whether a text has a letter or a digit, which are the characters of SQLite's words."""
    categories = map(unicodedata.category, text)
    return any(category[0] in "LN" or category == "Co" for category in categories)


def split_excluded(text: str) -> tuple[str, str]:
    """Split a query into its text without excluded words, and the excluded words as a match.

    >>> split_excluded('a beach -people -"beach chair*" 5 -3, well-known')
    ('a beach 5 -3, well-known', '-people -"beach chair*"')
    """
    excluded: list[str] = []
    # Repeat, since in '-"x"-y' the word -y is only preceded by a blank once -"x" is removed.
    while terms := _EXCLUDED.findall(text):
        for term in terms:
            is_open = term.count('"') == 1
            excluded.append(f'-{term}"' if is_open else f"-{term}")
        text = " ".join(_EXCLUDED.sub(" ", text).split())
    return text, " ".join(excluded)
