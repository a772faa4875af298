"""Filters: conditions on the fields of items, words of their texts, ids.

A condition is ``FIELD OPERATOR VALUE``, for example ``price<20``, ``brand=acme``, ``colour in red,blue`` or
``title~umbrella``. Fields are the keys of the JSON that came with an item, inner ones after a dot
(``size.width``), and the item's own ``id``, ``modality``, ``text`` and ``image``. A name in quotes is always
one of the JSON. :class:`Condition` defines what conditions mean.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias, cast, get_args

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

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts among its values."""
        return tuple(value.text for value in self.values if value.kind == "text")

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """The numbers among its values."""
        numbers = (number_of(value.text) for value in self.values if value.kind == "number")
        return tuple(number for number in numbers if number is not None)

    @property
    def truths(self) -> tuple[bool, ...]:
        """The truth values among its values."""
        return tuple(value.text == "true" for value in self.values if value.kind == "truth")


def number_of(text: str) -> int | float | None:
    """Parse a text as a JSON number; return None if it is not one, such as ``007``.

    Integers beyond 64 bits become floats.
    """
    if NUMBER.fullmatch(text) is None:
        return None
    if INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63:
        return int(text)
    return float(text)


GRAMMAR: Final = (
    "a condition is FIELD OPERATOR VALUE with one of = != < <= > >= ~ (contains) in, for example: price<20, "
    "brand=acme, 'colour in red,blue', title~umbrella, size.width>=30, '\"unit price\"=\"a, b\"'"
)
MAX_VALUES: Final = 1_000
"""Values after ``in``."""
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
_OPERATORS: Final[Sequence[Operator]] = get_args(Operator)
_QUOTED: Final = r"\"[^\"]*\"|'[^']*'"
_NAME: Final = re.compile(rf"\s*({_QUOTED}|[^\s.=!<>~\"',]+)")
_OPERATOR: Final = re.compile(r"\s*(!=|<=|>=|=|<|>|~|in(?=[\s\"']))\s*")
_VALUE: Final = re.compile(rf"\s*(?:({_QUOTED})|([^\"'=<>~!\s].*?))\s*$", re.DOTALL)
_LISTED: Final = re.compile(rf"\s*(?:({_QUOTED})|([^\"',\s][^,]*?))\s*(,|$)", re.DOTALL)
_SHORT_NUMBER: Final = re.compile(r"-?\.[0-9]+")
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
        if isinstance(where, Mapping):
            conditions = [one for name, wanted in where.items() for one in _parse_mapping(name, wanted)]
        else:
            conditions = [_parse_text(one) for one in ([where] if isinstance(where, str) else where)]
        names = None if item_ids is None else frozenset(item_ids)
        return Filter(tuple(conditions), match, modality, names)


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
    _check_unicode(match, match)
    return " ".join(found)


def _is_word_character(character: str) -> bool:
    kind = unicodedata.category(character)
    return kind[0] in "LN" or kind == "Co"


def _parse_text(text: str) -> Condition:
    """Parse a typed condition."""
    _check_unicode(text, text)
    path, own, place = _name(text)
    found = _OPERATOR.match(text, place)
    if found is None:
        raise _syntax_error(text, place, "an operator")
    how = cast("Operator", found[1])
    place = found.end()
    if how != "in":
        value = _VALUE.match(text, place)
        if value is None:
            raise _syntax_error(text, place, "a value (in quotes if it begins with one of \" ' = < > ~ !)")
        return _condition(text, path, how, [_typed(value[1], value[2])], own=own)
    values = []
    more = ","
    while more:
        value = _LISTED.match(text, place)
        if value is None:
            raise _syntax_error(text, place, "a value (in quotes if it has a quote or a comma)")
        values.append(_typed(value[1], value[2]))
        place, more = value.end(), value[3]
    return _condition(text, path, how, values, own=own)


def _name(text: str) -> tuple[tuple[str, ...], bool, int]:
    """Parse a field's name; return its parts, whether it may be a column, and its end position."""
    parts: list[str] = []
    place = 0
    own = True
    while True:
        found = _NAME.match(text, place)
        if found is None:
            raise _syntax_error(text, place, "the name of a field")
        quoted = found[1][0] in "\"'"
        parts.append(found[1][1:-1] if quoted else found[1])
        own = own and not quoted
        place = found.end()
        if not text.startswith(".", place):
            return tuple(parts), own and len(parts) == 1, place
        place += 1


def _typed(quoted: str | None, bare: str | None) -> Value:
    """Parse a value in a string; quoted ones are texts."""
    if bare is None:
        return Value("text", (quoted or "")[1:-1])
    if bare.lower() in ("true", "false"):
        return Value("truth", bare)
    if _SHORT_NUMBER.fullmatch(bare):
        bare = bare.replace(".", "0.")
    return Value("text" if number_of(bare) is None else "number", bare)


def _parse_mapping(name: str, wanted: object) -> list[Condition]:
    """Parse the conditions on one field of a mapping."""
    if not isinstance(name, str):
        raise UsageError(f"condition on {name!r}: the name of a field is a text; {GRAMMAR}")
    path, own, place = (
        _name(name) if re.search(r"[\"']", name) else (tuple(name.split(".")), "." not in name, 0)
    )
    if place not in (0, len(name)):
        raise _syntax_error(name, place, "the end of the name")
    if not isinstance(wanted, Mapping):
        wanted = {"in" if isinstance(wanted, list | tuple | set | frozenset) else "=": wanted}
    if not wanted:
        raise UsageError(f"condition on {name}: {{}} has no operator; give one, as in {{'<': 20}}")
    conditions = []
    for given, value in wanted.items():
        how = next((one for one in _OPERATORS if one == given), None)
        shown = f"{name} {given} {value!r}"
        if how is None:
            raise UsageError(
                f"condition {shown}: {given!r} is no operator; give one of {' '.join(_OPERATORS)}, and "
                f"an inner field by its name with dots, {name}.{given}"
            )
        several = (
            list(value) if how == "in" and isinstance(value, list | tuple | set | frozenset) else [value]
        )
        conditions.append(_condition(shown, path, how, [_given(shown, one) for one in several], own=own))
    return conditions


def _given(shown: str, value: object) -> Value:
    """Convert a value of a mapping."""
    match value:
        case bool():
            return Value("truth", str(value).lower())
        case int():
            return Value("number", str(value))
        case float() if math.isfinite(value):
            return Value("number", repr(value))
        case str():
            _check_unicode(shown, value)
            return Value("text", value)
        case _:
            raise UsageError(
                f"condition {shown}: {value!r} cannot be compared with; give a text, a finite number, true "
                "or false, or a list of them with in"
            )


def _condition(
    shown: str, path: tuple[str, ...], how: Operator, values: list[Value], *, own: bool
) -> Condition:
    """Build a condition after checking that operator and values are compatible."""
    if not 1 <= len(values) <= MAX_VALUES:
        raise UsageError(
            f"condition {shown[:80]!r} has {len(values):,} values; give 1 to {MAX_VALUES:,}, and long lists "
            "of items by item_ids"
        )
    column = COLUMNS.get(path[0]) if own else None
    if how == "~" or column is not None:
        values = [Value("text", value.text) for value in values]
    if column == "modality":
        if how not in ("=", "!=", "in"):
            raise UsageError(f"condition {shown!r}: a modality can be compared with = != in only")
        values = [Value("text", Modality.parse(value.text).mbeir) for value in values]
    if how in ("<", "<=", ">", ">=") and values[0].kind == "truth":
        raise UsageError(f"condition {shown!r}: true and false can be compared with = != in only")
    spelt = (value._replace(text=value.text.lower()) if value.kind == "truth" else value for value in values)
    return Condition(path, how, tuple(spelt), column)


def _check_unicode(shown: str, text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{shown!r} is not valid Unicode; type it in UTF-8") from None


def _syntax_error(text: str, place: int, expected: str) -> UsageError:
    rest = text[place:].strip()
    where = f"before {rest!r}" if rest else "at its end"
    return UsageError(f"condition {text!r}: expected {expected} {where} (character {place + 1}); {GRAMMAR}")
