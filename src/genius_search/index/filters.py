"""Filters: conditions on the fields of items, words of their texts, ids.

A condition is ``FIELD OPERATOR VALUE``, for example ``price<20``, ``brand=acme``, ``colour in red,blue`` or
``title~umbrella``. Fields are the keys of the JSON that came with an item, inner ones after a dot
(``size.width``), and the item's own ``id``, ``modality``, ``text`` and ``image``. A name in quotes is always
one of the JSON.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast, get_args

from genius_search.errors import UsageError
from genius_search.records import Modality, check_unicode

Operator: TypeAlias = Literal["=", "!=", "<", "<=", ">", ">=", "~", "in"]
Column: TypeAlias = Literal["item_id", "modality", "text", "image"]
Value: TypeAlias = str | int | float | bytes
"""A value as items are stored: Booleans are bytes (:func:`stored_truth`)."""

COLUMNS: Final[Mapping[str, Column]] = {
    "id": "item_id",
    "modality": "modality",
    "text": "text",
    "image": "image",
}
"""Names of the item's columns in conditions."""
GRAMMAR: Final = (
    "a condition is FIELD OPERATOR VALUE with one of = != < <= > >= ~ (contains) in, for example: price<20, "
    "brand=acme, 'colour in red,blue', title~umbrella, size.width>=30, '\"unit price\"=\"a, b\"'"
)
MAX_CONDITIONS: Final = 200
MAX_VALUES: Final = 10_000
"""Maximum number of values in all conditions; more would take longer than a second."""
FIRST_TEXT: Final = ""
AFTER_TEXTS: Final = b""
"""Where texts begin and end in SQLite's order of values."""

NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
INTEGER: Final = re.compile(r"-?[0-9]{1,19}")
_OPERATORS: Final[Sequence[Operator]] = get_args(Operator)
_QUOTED: Final = r"\"[^\"]*\"|'[^']*'"
_NAME: Final = re.compile(rf"\s*({_QUOTED}|[^\s.=!<>~\"',]+)")
_OPERATOR: Final = re.compile(r"\s*(!=|<=|>=|=|<|>|~|in(?=[\s\"']))\s*")
_VALUE: Final = re.compile(rf"\s*(?:({_QUOTED})|([^\"'=<>~!\s].*?))\s*($)", re.DOTALL)
_LISTED: Final = re.compile(rf"\s*(?:({_QUOTED})|([^\"',\s][^,]*?))\s*(,|$)", re.DOTALL)
_SHORT_NUMBER: Final = re.compile(r"-?\.[0-9]+")
_WORDS: Final = re.compile(r'"([^"]*)"(\*?)|([^\s"]+)|"')


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

    def to_sql(self, column: str) -> tuple[str, list[Value]]:
        """Return the comparison in SQL, that of ``=`` for ``!=``, and the values to bind.

        Values of other kinds do not satisfy it.
        """
        first = self.values[0]
        match self.operator:
            case "=" | "!=" | "in":
                return f"{column} IN ({', '.join('?' * len(self.values))})", list(self.values)
            case "~":
                texts = f"{column} >= ? AND {column} < ?"
                return f"{texts} AND contains({column}, ?)", [FIRST_TEXT, AFTER_TEXTS, str(first).casefold()]
            case how:
                low, high = (FIRST_TEXT, AFTER_TEXTS) if isinstance(first, str) else (-math.inf, FIRST_TEXT)
                other, bound = (">=", low) if "<" in how else ("<", high)  # of the same kind
                return f"{column} {how} ? AND {column} {other} ?", [first, bound]


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

    def __post_init__(self) -> None:
        if len(self.conditions) > MAX_CONDITIONS:
            raise UsageError(
                f"{len(self.conditions):,} conditions were given; give at most {MAX_CONDITIONS}, and several "
                "values of one field with in"
            )
        total = sum(len(condition.values) for condition in self.conditions)
        if total > MAX_VALUES:
            raise UsageError(f"{total:,} values were given; give at most {MAX_VALUES:,} in all conditions")
        if self.match is not None:
            self.full_text_query()

    @staticmethod
    def parse(
        where: Sequence[str] | Mapping[str, object] = (),
        match: str | None = None,
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
            conditions = [_parse_text(text) for text in ([where] if isinstance(where, str) else where)]
        return Filter(tuple(conditions), match)

    def full_text_query(self) -> str:
        """Translate :attr:`match` to SQLite's full-text syntax; quotes all but words and their signs.

        Raises
        ------
        UsageError
            The text contains no words.
        """
        match = self.match or ""
        check_unicode(match)
        found = []
        for phrase, phrase_star, word in _WORDS.findall(match.replace("\0", " ")):
            words = phrase or word.rstrip("*")
            star = phrase_star or ("*" if word.endswith("*") else "")
            kinds = map(unicodedata.category, words)
            if any(kind[0] in "LN" or kind == "Co" for kind in kinds):
                found.append(f'"{words}"{star}')
        if not found:
            raise UsageError(
                f"match {match!r} has no word in it; give words that the text must have, for example "
                '"leather strap*" or, for a phrase, \'"leather strap"\''
            )
        return " ".join(found)


def number_of(text: str) -> int | float | None:
    """Parse a text as a JSON number; return None if it is not one, such as ``007``.

    Integers beyond 64 bits become floats.
    """
    if NUMBER.fullmatch(text) is None:
        return None
    if INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63:
        return int(text)
    return float(text)


def stored_truth(value: bool) -> bytes:  # noqa: FBT001  its only argument
    """Return a Boolean as the table of fields stores it, so that it equals no number and no text."""
    return b"\1" if value else b"\0"


class _Given(NamedTuple):
    """A value of a condition."""

    text: str
    """As it is written, for fields whose values are texts."""
    value: Value


def _parse_text(text: str) -> Condition:
    """Parse a typed condition."""
    check_unicode(text)
    path, is_own, place = _parse_name(text)
    found = _OPERATOR.match(text, place)
    if found is None:
        raise _syntax_error(text, place, "an operator")
    pattern, quoted = _VALUE, "begins with one of \" ' = < > ~ !"
    if found[1] == "in":
        pattern, quoted = _LISTED, "has a quote or a comma"
    values = []
    place, more = found.end(), ","
    while more:
        value = pattern.match(text, place)
        if value is None:
            raise _syntax_error(text, place, f"a value (in quotes if it {quoted})")
        written = value[2] if value[1] is None else value[1][1:-1]
        values.append(_Given(written, written if value[1] is not None else _typed(written)))
        place, more = value.end(), value[3]
    return _condition(text, path, cast("Operator", found[1]), values, is_own=is_own)


def _parse_name(text: str) -> tuple[tuple[str, ...], bool, int]:
    """Parse a field's name; return its parts, whether it may be a column, and its end position."""
    parts: list[str] = []
    place = 0
    is_own = True
    while True:
        found = _NAME.match(text, place)
        if found is None:
            raise _syntax_error(text, place, "the name of a field")
        is_quoted = found[1][0] in "\"'"
        parts.append(found[1][1:-1] if is_quoted else found[1])
        is_own = is_own and not is_quoted
        place = found.end()
        if not text.startswith(".", place):
            return tuple(parts), is_own and len(parts) == 1, place
        place += 1


def _typed(text: str) -> Value:
    """Parse a value without quotes."""
    if text.lower() in ("true", "false"):
        return stored_truth(text.lower() == "true")
    number = number_of(text.replace(".", "0.") if _SHORT_NUMBER.fullmatch(text) else text)
    return text if number is None else number


def _parse_mapping(name: str, wanted: object) -> list[Condition]:
    """Parse the conditions on one field of a mapping."""
    path, is_own, end = tuple(name.split(".")), "." not in name, len(name)
    if re.search(r"[\"']", name):
        path, is_own, end = _parse_name(name)
    if end != len(name):
        raise _syntax_error(name, end, "the end of the name")
    if not isinstance(wanted, Mapping):
        wanted = {"in" if isinstance(wanted, list | tuple | set | frozenset) else "=": wanted}
    if not wanted:
        raise UsageError(f"condition on {name}: {{}} has no operator; give one, as in {{'<': 20}}")
    conditions = []
    for how, value in wanted.items():
        shown = f"{name} {how} {value!r}"
        if how not in _OPERATORS:
            raise UsageError(
                f"condition {shown}: {how!r} is no operator; give one of {' '.join(_OPERATORS)}, and "
                f"an inner field by its name with dots, {name}.{how}"
            )
        several = (
            list(value) if how == "in" and isinstance(value, list | tuple | set | frozenset) else [value]
        )
        values = [_given(shown, one) for one in several]
        conditions.append(_condition(shown, path, cast("Operator", how), values, is_own=is_own))
    return conditions


def _given(shown: str, value: Any) -> _Given:
    """Convert a value of a mapping."""
    match value:
        case bool():
            return _Given(str(value).lower(), stored_truth(value))
        case int():
            return _Given(str(value), number_of(str(value)) or 0)
        case float() if math.isfinite(value):
            return _Given(repr(value), value)
        case str():
            check_unicode(value)
            return _Given(value, value)
        case _:
            raise UsageError(
                f"condition {shown}: {value!r} cannot be compared with; give a text, a finite number, true "
                "or false, or a list of them with in"
            )


def _condition(
    shown: str, path: tuple[str, ...], how: Operator, given: Sequence[_Given], *, is_own: bool
) -> Condition:
    """Build a condition after checking that operator and values are compatible."""
    if not given:
        raise UsageError(f"condition {shown!r} has no values; give at least one")
    column = COLUMNS.get(path[0]) if is_own else None
    values: list[Value] = [one.value if column is None and how != "~" else one.text for one in given]
    if column == "modality":
        if how not in ("=", "!=", "in"):
            raise UsageError(f"condition {shown!r}: a modality can be compared with = != in only")
        values = [Modality.parse(one.text).mbeir for one in given]
    if how in ("<", "<=", ">", ">=") and isinstance(values[0], bytes):
        raise UsageError(f"condition {shown!r}: true and false can be compared with = != in only")
    return Condition(path, how, tuple(values), column)


def _syntax_error(text: str, place: int, expected: str) -> UsageError:
    rest = text[place:].strip()
    where = f"before {rest!r}" if rest else "at its end"
    return UsageError(f"condition {text!r}: expected {expected} {where} (character {place + 1}); {GRAMMAR}")
