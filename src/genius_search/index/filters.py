"""Filters: conditions on the fields of items, words of their texts, ids.

:class:`Condition` defines what conditions mean, :mod:`genius_search.index.conditions` how they are written.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from genius_search.errors import UsageError
from genius_search.records import Modality

Operator: TypeAlias = Literal["=", "!=", "<", "<=", ">", ">=", "~", "in"]
Column: TypeAlias = Literal["item_id", "modality", "text", "image"]
NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
INTEGER: Final = re.compile(r"-?[0-9]{1,19}")


class Value(NamedTuple):
    """A value to compare with, as written, so that 1 and true are distinct."""

    kind: Literal["text", "number", "truth"]
    text: str
    """``true`` or ``false`` for a Boolean."""

    @property
    def given(self) -> str | int | float | bool:
        """The value as a text, a number or a Boolean."""
        if self.kind == "truth":
            return self.text == "true"
        number = number_of(self.text) if self.kind == "number" else None
        return self.text if number is None else number


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparison of a field with a value, or with several values of which one must match (``in``).

    ``!=`` is the negation of ``=``. A missing, null or object field satisfies ``!=`` only. A list satisfies
    the other operators if one of its values does. Numbers are compared with numbers and with texts that are
    numbers (in a CSV file everything is text), Booleans with Booleans and the texts true and false, and texts
    with texts in the order of their characters. ``~`` searches for a substring, ignoring case.
    """

    path: tuple[str, ...]
    """Path of the field in the item's JSON, or the name of a column."""
    operator: Operator
    values: tuple[Value, ...]
    """One value, or any number for ``in``."""
    column: Column | None = None
    """Set for the item's id, modality, text or image, whose values are always texts."""


def number_of(text: str) -> int | float | None:
    """Parse a text as a JSON number; return None if it is not one, such as ``007``.

    Integers beyond 64 bits become floats.
    """
    if NUMBER.fullmatch(text) is None:
        return None
    if INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63:
        return int(text)
    return float(text)


MAX_CONDITIONS: Final = 200
MAX_TOTAL_VALUES: Final = 10_000
"""Maximum number of values in all conditions; more would take longer than a second."""

COLUMNS: Final[Mapping[str, Column]] = {
    "id": "item_id",
    "modality": "modality",
    "text": "text",
    "image": "image",
}
"""Names of the item's columns in conditions."""
_WORDS: Final = re.compile(r'"([^"]*)"(\*?)|([^\s"]+)|"')


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions that an item must meet, all of them. Hashable, so that results can be cached.

    >>> Filter.parse(["price<20", "colour in red,blue"], match='"leather strap" bag*')  # doctest: +SKIP
    >>> Filter.parse({"price": {"<": 20}, "colour": ["red", "blue"]})  # doctest: +SKIP
    """

    conditions: tuple[Condition, ...] = ()
    match: str | None = None
    """Words that the text must contain in any order; also ``"a phrase"`` and ``prefix*``. Case and accents
    are ignored. All characters but letters and digits separate words."""
    modality: Modality | None = None
    item_ids: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if len(self.conditions) > MAX_CONDITIONS:
            raise UsageError(
                f"{len(self.conditions):,} conditions were given; give at most {MAX_CONDITIONS}, values of "
                "one field with in, and long lists of items by item_ids"
            )
        total = sum(len(condition.values) for condition in self.conditions)
        if total > MAX_TOTAL_VALUES:
            raise UsageError(
                f"{total:,} values were given; give at most {MAX_TOTAL_VALUES:,} in all conditions"
            )
        if self.match is not None:
            full_text_query(self.match)

    @staticmethod
    def parse(
        where: Sequence[str] | Mapping[str, object] = (),
        match: str | None = None,
        *,
        modality: Modality | None = None,
        item_ids: Iterable[str] | None = None,
    ) -> Filter:
        """Parse conditions given as strings or as a mapping.

        A mapping contains for each field a value, a list of values of which one must match, or a mapping from
        operators to values, whose types are kept. In strings, unquoted values that look like numbers, true or
        false are parsed as such.

        Raises
        ------
        UsageError
            A condition cannot be parsed. The message contains the position and the grammar.
        """
        conditions: tuple[Condition, ...] = ()
        if where:
            from genius_search.index.conditions import parse_conditions  # noqa: PLC0415  most have none

            conditions = parse_conditions(where)
        names = None if item_ids is None else frozenset(item_ids)
        return Filter(conditions, match, modality, names)


def full_text_query(match: str) -> str:
    """Translate words, phrases and prefixes to SQLite's full-text syntax, quoting everything else.

    Raises
    ------
    UsageError
        The text contains no words.
    """
    found = []
    for phrase, phrase_star, word in _WORDS.findall(match.replace("\0", " ")):
        words = phrase or word.rstrip("*")
        star = phrase_star or ("*" if word.endswith("*") else "")
        if any(_is_word_character(character) for character in words):
            found.append(f'"{words}"{star}')
    if not found:
        raise UsageError(
            f"match {match!r} has no word in it; give words that the text must have, for example "
            '"leather strap*" or, for a phrase, \'"leather strap"\''
        )
    check_unicode(match, match)
    return " ".join(found)


def _is_word_character(character: str) -> bool:
    kind = unicodedata.category(character)
    return kind[0] in "LN" or kind == "Co"


def check_unicode(shown: str, text: str) -> None:
    """Raise UsageError if a text has a lone surrogate, which UTF-8 cannot write."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{shown!r} is not valid Unicode; type it in UTF-8") from None
