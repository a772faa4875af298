"""Parse conditions such as ``price<20`` into a :class:`Filter`, and find the items that meet them.

A condition is ``FIELD OPERATOR VALUE``, for example ``price<20``, ``brand=acme``,
``colour in red,blue`` or ``title~umbrella``. Fields are the keys of the JSON object that came with
an item, inner keys after a dot (``size.width``), and the item's columns ``id``, ``modality``,
``text`` and ``image``. A quoted name is always a key of the JSON object.

The steps from a condition to items::

    "price in 5..20, 30"                                 typed by a user
    "price", "in", "5..20, 30"                           _CONDITION
    [5..20], [30]                                        _parse_values; TypedValue
    Condition(("price",), "in", (5..20, 30))             _build_condition
    value IN (30), value BETWEEN 5 AND 20                Condition.to_sql
    [True, False, True]                                  matching_items: a mask of a store's rows
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final, Literal, NamedTuple, TypeAlias, TypeGuard, cast, get_args

import numpy as np
from jaxtyping import Bool, Int64

from genius_search.border import as_id, is_missing
from genius_search.data.values import (
    FALSE,
    TRUE,
    YEAR_DIGITS,
    Span,
    Value,
    number_of,
    times_of,
    to_json_value,
)
from genius_search.errors import UsageError
from genius_search.index.items import ItemStore, spell_path
from genius_search.index.match import parse_match
from genius_search.records import Modality, check_unicode, composed
from genius_search.text import clean

Operator: TypeAlias = Literal["=", "!=", "<", "<=", ">", ">=", "~", "!~", "in"]
Mask: TypeAlias = Bool[np.ndarray, " items"]
Column: TypeAlias = Literal["item_id", "modality", "text", "image"]

COLUMN_OF_FIELD: Final[Mapping[str, Column]] = {
    "id": "item_id",
    "modality": "modality",
    "text": "text",
    "image": "image",
}
"""Columns of the table of items, by their names in conditions."""
CONDITION_GRAMMAR: Final = (
    "a condition is FIELD OPERATOR VALUE with one of = != < <= > >= ~ (contains) "
    "!~ (does not contain) in, "
    "for example: price<20, price=5..20, taken>=2024-05, brand=acme, 'colour in red,blue', "
    "title~umbrella, 'price is missing', "
    'size.width>=30, \'"unit price"="a, b"\'; several conditions are joined by "and", or given '
    "one by one (--where for each, or a list)"
)
"""The grammar as error messages state it."""
MAX_CONDITION_CHARACTERS: Final = 1_000_000
"""Maximum length of all conditions together."""
MAX_CONDITIONS: Final = 200
MAX_VALUES: Final = 10_000
"""Maximum number of values in all conditions; more values would take longer than a second."""
MAX_LISTED_FIELDS: Final = 30
"""Maximum number of fields that an error message lists."""
MAX_SHOWN_CONDITION_CHARACTERS: Final = 200
"""Maximum number of characters of a condition that an error message shows."""
SCANNED_ITEMS_PER_LOOK_UP: Final = 5
"""A scan reads the modality of this many items in the time that looking up one item takes."""
FIRST_TEXT: Final = ""
AFTER_TEXTS: Final = b""
"""SQLite orders values as numbers < texts < blobs, so texts begin at "" and end before b""."""
MISSING: Final = Span(None, None)
"""The value of a field that is missing or null."""

_OPERATORS: Final[Sequence[Operator]] = get_args(Operator)
_ORDERS: Final = ("<", "<=", ">", ">=")
_CONTAINS: Final = ("~", "!~")
_NEGATIONS: Final = ("!=", "!~")

# The grammar of a typed condition, in EBNF, with an example of each rule:
#
#   conditions = condition {"and" condition}   price<20 and brand=acme
#   condition = field operator value           price<20
#             | field "in" list                colour in red, "light blue"
#             | field "is" ["not"] missing     price is not missing
#   field     = part {"." part}                size.width    "unit price".net
#   part      = quoted | bare                  "unit price"  size
#   operator  = "=" | "==" | "!=" | "<" | "<=" | ">" | ">=" | "~" | "!~"
#   value     = quoted | range | unquoted      "120"  5..20  acme
#   range     = unquoted ".." unquoted         2024-05..2024-08
#   list      = ["("] element {"," element} [")"], or with "[" and "]"
#   element   = quoted | range | unquoted without a comma
#   missing   = "missing" | "null"
#   quoted    = '"' {any character but '"'} '"' | "'" {any character but "'"} "'"
#   bare      = one or more characters, but no white space and none of . = ! < > ~ " ' ,
#   unquoted  = one or more characters, the first of which is no quote
#
# White space between the parts means nothing. "in", "is" and "missing" may be in upper case.
# Possessive quantifiers (*+, ++) never backtrack, so that parsing takes linear time.
_QUOTED: Final = r"\"[^\"]*+\"|'[^']*+'"
_BARE: Final = r"[^\s.=!<>~\"',]++"
_PART: Final = rf"(?:{_QUOTED}|{_BARE})"
_FIELD: Final = re.compile(rf"{_PART}(?:\.{_PART})*+")
_CONDITION: Final = re.compile(
    rf"\s*+({_FIELD.pattern})\s*+"
    r"(!=|!~|<=|>=|==?|<|>|~|(?:[iI][nN]|[iI][sS])(?=[\s\"']))\s*+(.*+)",
    re.DOTALL,
)
# Both patterns have three groups: a quoted value, an unquoted value, and the separator after it.
_VALUE: Final = re.compile(rf"(?:({_QUOTED})\s*+|([^\"'].*+))($)", re.DOTALL)
_ELEMENT: Final = re.compile(rf"\s*+(?:({_QUOTED})\s*+|([^\"',][^,]*+))(,|$)", re.DOTALL)
_AND: Final = re.compile(
    rf"{_QUOTED}|(?<=\s)and\s++"
    rf"(?={_FIELD.pattern}\s*+(?:[=<>~]|!=|!~|(?:in|is)(?=[\s\"'])))",
    re.IGNORECASE,
)
"""A quoted text, or the "and" before another condition, which no value contains unquoted."""
_BRACKETS: Final = re.compile(r"^[(\[](.*)[)\]]$", re.DOTALL)
_SHORT_NUMBER: Final = re.compile(r"-?\.[0-9]+")
"""A number without a digit before its point, such as .5."""
_JOINED: Final = re.compile(r"[=<>~]|&&|\|\||\b(?:and|or) \S++ (?:is|in)\b", re.IGNORECASE)
"""A sign that an unquoted value contains another condition, as in ``price<20 or year=2020``."""
_SEPARATED: Final = re.compile(r"[-+]?[0-9][0-9.]*+[,'][0-9][0-9.,']*+")
"""A number with thousands separators or a decimal comma, such as 1,234 or 2,5."""


class UnknownField(UsageError, LookupError):
    """A condition names a field that no item has."""


class TypedValue(NamedTuple):
    """A value of a condition, as a user types it."""

    text: str
    """The value without quotes."""
    spans: list[Span]
    """Its possible meanings: 2024 is a number and a year."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparison of a field with a value, or with several values of which one must match (``in``).

    ``!=`` is the negation of ``=``, and ``!~`` that of ``~``. A missing, null or object field
    satisfies these negations, and a missing or null field also ``= null``. A list satisfies the
    other operators if one of its values does, or, for an inner field, the field of one of its
    objects. Numbers are compared with numbers and with texts that are numbers (in a CSV file
    everything is text), times with texts that are times, Booleans with Booleans and the texts true
    and false, and texts with texts in the order of their characters. ``~`` searches for a
    substring, ignoring case.
    """

    path: tuple[str, ...]
    """Path of the field in the item's JSON object, or the name of a column."""
    operator: Operator
    values: tuple[Span, ...]
    """Meanings of one value, or of all values of ``in``; :data:`MISSING` for a missing value."""
    column: Column | None = None
    """Set for the item's id, modality, text or image, whose values are always texts."""

    def to_sql(self, column: str) -> Iterator[tuple[str, list[Value]]]:
        """Yield comparisons in SQL, one of which must hold, with the values to bind.

        For a negation, yield the comparisons that it negates. A value of another type satisfies
        none of them: an order also limits the column to numbers, texts or times::

            price in 5..20,30   value IN (30)
                                value BETWEEN 5 AND 20
            price<=20           value <= 20 AND value >= -inf
            title~kite          value >= '' AND value < x'' AND contains(value, 'kite')
        """
        if self.operator in _CONTAINS:
            is_text = f"{column} >= ? AND {column} < ?"
            part = self.values[0].low
            yield f"{is_text} AND contains({column}, ?)", [FIRST_TEXT, AFTER_TEXTS, part]
        elif self.operator in _ORDERS:
            # taken <= 2024 means <= the last second of 2024, and taken < 2024 its first second.
            for low, high in self.values:
                type_start, type_end = _type_bounds(low)
                is_upper_limit = "<" in self.operator
                type_operator = ">=" if is_upper_limit else "<"
                type_limit = type_start if is_upper_limit else type_end
                limit = low if self.operator in ("<", ">=") else high
                yield (
                    f"{column} {self.operator} ? AND {column} {type_operator} ?",
                    [limit, type_limit],
                )
        else:
            single_values: list[Value] = [
                low for low, high in self.values if low is not None and low == high
            ]
            if single_values:
                yield f"{column} IN ({', '.join('?' * len(single_values))})", single_values
            for low, high in self.values:
                if low != high:
                    yield f"{column} BETWEEN ? AND ?", [low, high]


def _type_bounds(value: Value) -> tuple[Value, Value]:
    """Return the first value of a value's type in SQLite's order, and the first one after the type.

    Numbers come before texts, and texts before blobs: Booleans, then times, which begin with T.
    """
    match value:
        case str():
            return FIRST_TEXT, AFTER_TEXTS
        case bytes():
            return b"T", b"U"  # a time; Booleans have no order
        case _:
            return -math.inf, FIRST_TEXT


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions that an item must all meet. Hashable, so that results can be cached.

    >>> Filter.parse(["price<20", "size in 1,2"], match='"leather strap" b*')  # doctest: +SKIP
    >>> Filter.parse({"price": {"<": 20}, "colour": ["red", "blue"]})  # doctest: +SKIP
    """

    conditions: tuple[Condition, ...] = ()
    match: str | None = None
    """Words that the text must contain in any order; also ``"a phrase"`` and ``prefix*``.

    A ``-`` or NOT before a word, a phrase or a prefix excludes items that contain it, and OR
    stands between two of which one must occur. Case and accents are ignored. All characters but
    letters and digits separate words."""
    modality: Modality | None = None
    ignores_unknown_fields: bool = False
    """Whether a field that no item has is no error, since items of other shards may have it."""

    def __post_init__(self) -> None:
        if len(self.conditions) > MAX_CONDITIONS:
            raise UsageError(
                f"{len(self.conditions):,} conditions were given; give at most {MAX_CONDITIONS}, "
                "and several values of one field with in"
            )
        num_values = sum(len(condition.values) for condition in self.conditions)
        if num_values > MAX_VALUES:
            raise UsageError(
                f"{num_values:,} values were given; give at most {MAX_VALUES:,} in all conditions"
            )
        if self.match is not None:
            parse_match(self.match)

    @staticmethod
    def parse(
        where: Iterable[object] | Mapping[str, object] = (),
        match: str | None = None,
    ) -> Filter:
        """Parse conditions given as strings or as a mapping.

        A mapping contains for each field a value, a list of values of which one must match, or a
        mapping from operators to values. Values keep their types; None means that the field is
        missing. A string may join conditions, as in ``price<20 and brand=acme``. In strings,
        unquoted values that look like numbers, true, false or null are parsed as such. Texts that
        are dates or times in ISO 8601 are compared as times. A time without a zone counts as UTC,
        and a year, month or day as the whole period.

        Raises
        ------
        UsageError
            A condition cannot be parsed. The message contains the grammar.
        """
        conditions: list[Condition] = []
        if isinstance(where, Mapping):
            for name, comparisons in where.items():
                field = as_id(name, "the name of a field")
                conditions += _parse_comparisons(field, comparisons)
        else:
            for text in _require_texts(where):
                conditions += map(_parse_condition, _split_at_and(text))
        return Filter(tuple(conditions), match)


def _require_texts(where: Iterable[object]) -> list[str]:
    """Return conditions as a list of texts; raise :class:`UsageError` for other types."""
    is_single = isinstance(where, str) or not isinstance(where, Iterable)
    conditions = [where] if is_single else [*where]
    texts = [condition for condition in conditions if isinstance(condition, str)]
    if len(texts) < len(conditions):
        raise UsageError(
            f"conditions {conditions}: expected texts, or one mapping of all; {CONDITION_GRAMMAR}"
        )
    if (length := sum(map(len, texts))) > MAX_CONDITION_CHARACTERS:
        raise UsageError(
            f"the conditions have {length:,} characters; give at most {MAX_CONDITION_CHARACTERS:,}"
        )
    return texts


def _split_at_and(text: str) -> list[str]:
    """Return the conditions of a text.

    >>> _split_at_and("title~salt and pepper and price<20")
    ['title~salt and pepper ', 'price<20']
    """
    conditions, start = [], 0
    for match in _AND.finditer(text):
        if match[0][0] not in "\"'":
            conditions.append(text[start : match.start()])
            start = match.end()
    return [*conditions, text[start:]]


def _parse_condition(text: str) -> Condition:
    """Parse a typed condition."""
    shown = _shorten(text)
    condition = _CONDITION.fullmatch(check_unicode(text).rstrip())
    if condition is None:
        raise UsageError(
            f"condition {shown!r}: expected a field and an operator; {CONDITION_GRAMMAR}"
        )
    field, operator, operand = condition.groups()
    if operator.lower() == "is":
        return _parse_missing(shown, field, operand)
    operator = cast("Operator", "=" if operator == "==" else operator.lower())
    values = _parse_values(shown, field, operator, operand)
    return _build_condition(shown, field, operator, values)


def _shorten(text: str) -> str:
    """Return the beginning of a text for an error message."""
    is_short = len(text) <= MAX_SHOWN_CONDITION_CHARACTERS
    return text if is_short else f"{text[:MAX_SHOWN_CONDITION_CHARACTERS]}…"


def _parse_missing(shown: str, field: str, operand: str) -> Condition:
    """Parse the operand of ``is``: missing, null, or not before one of them."""
    before, negation, state = operand.lower().rpartition("not ")
    if state.strip() not in ("missing", "null") or before.strip():
        raise UsageError(
            f"condition {shown!r}: expected 'is missing' or 'is not missing'; {CONDITION_GRAMMAR}"
        )
    values = [TypedValue("null", [MISSING])]
    return _build_condition(shown, field, "!=" if negation else "=", values)


def _parse_values(shown: str, field: str, operator: Operator, operand: str) -> list[TypedValue]:
    """Parse the operand of a condition: one value, or the elements of a list for ``in``."""
    pattern, quoting_rule = _VALUE, "begins with a quote"
    if operator == "in":
        pattern, quoting_rule = _ELEMENT, "has a quote or a comma"
        operand = _BRACKETS.sub(r"\1", operand)
    values: list[TypedValue] = []
    position, separator = 0, ","
    while separator:  # a comma before each value, nothing after the last
        value = pattern.match(operand, position)
        if value is None or (value[2] and not value[2].strip()):
            raise UsageError(
                f"condition {shown!r}: expected a value (in quotes if it {quoting_rule}); "
                f"{CONDITION_GRAMMAR}"
            )
        quoted, unquoted, separator = value.groups()
        if quoted:
            text = quoted[1:-1]
            values.append(TypedValue(text, _spans_of_quoted(text, operator)))
        else:
            values.append(_parse_unquoted(shown, field, operator, unquoted.rstrip()))
        position = value.end()
    return values


def _parse_unquoted(shown: str, field: str, operator: Operator, text: str) -> TypedValue:
    """Parse an unquoted value; refuse joined conditions and numbers in other notations."""
    if _JOINED.search(text):
        raise UsageError(
            f"condition {shown!r}: {_shorten(text)!r} is not one value; join conditions by and, "
            "'price<20 and year=2020', or give each by itself, --where 'price<20' --where "
            "year=2020; put a value that has = < > ~ in quotes"
        )
    spans = _spans_of_unquoted(shown, text)
    is_text = isinstance(spans[0].low, str)
    needs_number = operator in _ORDERS or _SEPARATED.fullmatch(text)
    if needs_number and is_text and field not in COLUMN_OF_FIELD:
        raise UsageError(
            f"condition {shown!r}: {_shorten(text)!r} is neither a number (1234.5) "
            f"nor a date (2024-05-01); put a text in quotes; {CONDITION_GRAMMAR}"
        )
    return TypedValue(text, spans)


def _spans_of_unquoted(shown: str, text: str) -> list[Span]:
    """Return the possible meanings of an unquoted value: 2024 is a number and a year."""
    match text.lower():
        case "true":
            return [Span(TRUE, TRUE)]
        case "false":
            return [Span(FALSE, FALSE)]
        case "null":
            return [MISSING]
    low, dots, high = text.partition("..")
    if dots:
        return _spans_of_range(shown, text, low.strip(), high.strip())
    return _spans_of_number_or_time(text) or [Span(text, text)]


def _spans_of_range(shown: str, text: str, low: str, high: str) -> list[Span]:
    """Return the meanings of LOW..HIGH: of numbers, of times, or of a text with two dots in it."""
    low_spans = _spans_of_number_or_time(low)
    high_spans = _spans_of_number_or_time(high)
    spans = []
    for first, last in product(low_spans, high_spans):
        if isinstance(first.low, bytes) is not isinstance(last.high, bytes):
            continue  # a number and a time
        if first.low > last.high:  # type: ignore[operator]
            raise UsageError(f"condition {shown!r}: {text} ends before it begins; give LOW..HIGH")
        spans.append(Span(first.low, last.high))
    if not spans and (low_spans or high_spans):
        raise UsageError(
            f"condition {shown!r}: {text} is no range; give LOW..HIGH, or a condition with >= or <="
        )
    return spans or [Span(text, text)]


def _spans_of_number_or_time(text: str) -> list[Span]:
    """Return a text's meanings as a number and as a time; none if it is neither."""
    spans = []
    number = number_of(text.replace(".", "0.") if _SHORT_NUMBER.fullmatch(text) else text)
    if number is not None:
        spans.append(Span(number, number))
    period = times_of(text)
    if period is not None:
        spans.append(period)
    return spans


def _spans_of_quoted(text: str, operator: str) -> list[Span]:
    """Return the meaning of a quoted text: a date if it is one, otherwise a text.

    A quoted year such as "2024" is a text, except after an operator of order.
    """
    may_be_time = len(text) > YEAR_DIGITS or operator in _ORDERS
    period = times_of(text) if may_be_time else None
    return [Span(text, text) if period is None else period]


def _parse_comparisons(field: str, comparisons: object) -> list[Condition]:
    """Parse the conditions on a field: a value, a list, or a mapping from operators to values."""
    if not isinstance(comparisons, Mapping):
        comparisons = {"in" if _is_list(comparisons) else "=": comparisons}
    if not comparisons:
        raise UsageError(f"condition on {field}: {{}} has no operator; give one, as in {{'<': 20}}")
    conditions = []
    for operator, value in comparisons.items():
        shown = f"{field} {operator} {_shorten(str(value))}"
        if operator not in _OPERATORS:
            raise UsageError(
                f"condition {shown}: {operator!r} is no operator; give one of "
                f"{' '.join(_OPERATORS)}, and an inner field by its name with dots, "
                f"{field}.{operator}"
            )
        values = [*value] if operator == "in" and _is_list(value) else [value]
        if field == "id":  # ids are stored as texts: 5.0 is "5"
            values = [value if is_missing(value) else as_id(value) for value in values]
        typed_values = [_type_value(shown, operator, value) for value in values]
        operator = cast("Operator", operator)
        conditions.append(_build_condition(shown, field, operator, typed_values))
    return conditions


def _is_list(value: object) -> TypeGuard[Iterable[object]]:
    is_iterable = isinstance(value, Iterable) and getattr(value, "shape", None) != ()
    return is_iterable and not isinstance(value, str | bytes)


def _type_value(shown: str, operator: str, value: object) -> TypedValue:
    """Return a Python value as a user would type it in a condition."""
    try:
        value = check_unicode(value) if isinstance(value, str) else to_json_value(value)
    except UsageError:
        raise
    except (TypeError, ValueError):
        value = []  # refused below
    match value:
        case str():
            return TypedValue(value, _spans_of_quoted(value, operator))
        case None | bool() | int() | float():
            text = json.dumps(value)
            return TypedValue(text, _spans_of_unquoted(shown, text))
        case _:
            raise UsageError(
                f"condition {shown}: expected a text, a number, a date, true or false, None for a "
                "missing value, or a list with in"
            )


def _build_condition(
    shown: str, field: str, operator: Operator, values: Sequence[TypedValue]
) -> Condition:
    """Build the condition that a field has one of several values, and check that it has a meaning.

    ``shown`` is the condition as error messages show it.
    """
    if not values:
        raise UsageError(f"condition {shown!r} has no values; give at least one")
    path = _parse_path(shown, field)
    column = COLUMN_OF_FIELD.get(field)
    spans = [span for value in values for span in value.spans]
    if operator in _ORDERS and any(span.low in (None, TRUE, FALSE) for span in spans):
        raise UsageError(
            f"condition {shown!r}: true, false and null can be compared with = != in only"
        )
    if column == "modality" and MISSING not in spans:
        if operator not in ("=", "!=", "in"):
            raise UsageError(f"condition {shown!r}: a modality can be compared with = != in only")
        modalities = [Modality.parse(value.text).mbeir for value in values]
        spans = [Span(modality, modality) for modality in modalities]
    elif operator in _CONTAINS:
        part = clean(composed(values[0].text)).casefold()
        spans = [Span(part, part)]
    elif column:
        spans = [_span_in_column(column, value) for value in values]
    return Condition(path, operator, tuple(spans), column)


def _span_in_column(column: Column, value: TypedValue) -> Span:
    """Return the meaning of a value in a column, where numbers and times are texts, too."""
    if MISSING in value.spans:
        return MISSING
    text = clean(value.text) if column == "text" else value.text
    return Span(text, text)


def _parse_path(shown: str, field: str) -> tuple[str, ...]:
    """Split the name of a field at its dots, except at dots within quotes."""
    parts = field.split(".")
    if re.search(r"[\"']", field):
        if _FIELD.fullmatch(field) is None:
            raise UsageError(
                f"condition {shown!r}: {field!r} is not the name of a field; {CONDITION_GRAMMAR}"
            )
        parts = re.findall(_PART, field)
    return tuple(composed(part[1:-1] if part[:1] in ("'", '"') else part) for part in parts)


def parse_field(name: str, option: str) -> tuple[tuple[str, ...], Column | None]:
    """Return the path of a field, and its column if it is one; ``option`` is for messages."""
    if not isinstance(name, str) or _FIELD.fullmatch(name) is None:
        raise UsageError(
            f"{option}: {name!r} is not the name of a field; inner fields have a dot, size.width, "
            "and unusual names are in quotes"
        )
    return _parse_path(f"{option} {name}", name), COLUMN_OF_FIELD.get(name)


def matching_items_of_stores(
    stores: Sequence[ItemStore], item_filter: Filter, *, deadline: float
) -> list[Bool[np.ndarray, " items"]]:
    """Return a mask of the items that satisfy a filter, for each store of an index.

    Raises
    ------
    UnknownField
        A condition names a field that no item has.
    DeadlinePassed
        See :func:`matching_items`.
    """
    if not item_filter.ignores_unknown_fields:
        check_fields(item_filter, set[str]().union(*(store.field_names for store in stores)))
    return [matching_items(store, item_filter, deadline=deadline) for store in stores]


def matching_items(
    store: ItemStore, item_filter: Filter, *, deadline: float = math.inf
) -> Bool[np.ndarray, " items"]:
    """Return a mask of the items of a store that satisfy a filter.

    Raises
    ------
    DeadlinePassed
        It took until the deadline, on the clock of :func:`time.monotonic`.
    """
    mask = np.ones(store.num_rows, dtype=bool)
    look_up = partial(store.mask, deadline=deadline)
    if item_filter.match is not None:
        required, excluded = parse_match(item_filter.match)
        if required is not None:
            mask &= look_up("words WHERE words MATCH ?", [required], row="rowid")
        if excluded is not None:
            mask &= ~look_up("words WHERE words MATCH ?", [excluded], row="rowid")
    for condition in item_filter.conditions:
        if not mask.any():
            break
        has_value = _items_with_value(store, condition, look_up)
        mask &= ~has_value if condition.operator in _NEGATIONS else has_value
    modality = item_filter.modality
    if modality is None or store.count_by_modality().get(modality) == store.num_rows:
        return mask
    mask &= _items_of_modality(store, modality, np.flatnonzero(mask), look_up)
    return mask


def _items_of_modality(
    store: ItemStore,
    modality: Modality,
    rows: Int64[np.ndarray, " rows"],
    look_up: Callable[..., Mask],
) -> Mask:
    """Return a mask of the items of a modality, at least among the given rows."""
    source, values = "items WHERE modality = ?", [modality.mbeir]
    if len(rows) <= store.num_rows // SCANNED_ITEMS_PER_LOOK_UP:  # faster than a scan
        source = f"json_each(?) CROSS JOIN {source} AND row = value"
        values = [json.dumps(rows.tolist()), *values]
    mask: Mask = look_up(source, values)
    return mask


def _items_with_value(store: ItemStore, condition: Condition, look_up: Callable[..., Mask]) -> Mask:
    """Return a mask of the items that satisfy a condition, or the condition that it negates."""
    mask = np.zeros(store.num_rows, dtype=bool)
    column = condition.column
    source, bound = f"items WHERE {column} IS NOT NULL", list[Value]()
    if column is None:
        field = store.field_names.get(spell_path(condition.path))
        source, bound = "fields WHERE name = ?", [field]
    for comparison, values in condition.to_sql(column or "value"):
        mask |= look_up(f"{source} AND {comparison}", [*bound, *values])
    if MISSING in condition.values:
        if column is None:
            source = "fields WHERE name IN (SELECT value FROM json_each(?))"
            bound = [json.dumps(_field_and_inner_fields(store, condition.path))]
        mask |= ~look_up(source, bound)
    return mask


def _field_and_inner_fields(store: ItemStore, path: Sequence[str]) -> list[int]:
    """Return the numbers of a field and its inner fields: an object exists if one of them does.

    The path ``["size"]`` is a prefix of ``["size", "width"]`` without its bracket.
    """
    prefix = spell_path(path)[:-1]
    return [
        number
        for name, number in store.field_names.items()
        if name.startswith((f"{prefix}]", f"{prefix}, "))
    ]


def check_fields(item_filter: Filter, names: AbstractSet[str]) -> None:
    """Raise :class:`UnknownField` if a condition names a field that is not in ``names``."""
    for condition in item_filter.conditions:
        if condition.column is None and spell_path(condition.path) not in names:
            fields = spell_fields(names)
            listed = ", ".join(fields[:MAX_LISTED_FIELDS])
            if len(fields) > MAX_LISTED_FIELDS:
                listed += ", …"
            raise UnknownField(
                f"no item of this index has a field {'.'.join(condition.path)!r}; "
                + (f"the fields are {listed}" if fields else "none has any field")
            )


def spell_fields(keys: Iterable[str]) -> list[str]:
    """Return fields as conditions name them: inner fields after a dot, unusual names in quotes.

    Of a field with inner fields only the inner fields are returned.

    >>> spell_fields(['["size"]', '["size", "width"]', '["unit price"]'])
    ['size.width', '"unit price"']
    """
    paths = {tuple(json.loads(key)) for key in keys}
    objects = {path[:end] for path in paths for end in range(1, len(path))}
    names = []
    for first, *inner in sorted(paths - objects):
        if any('"' in name and "'" in name for name in (first, *inner)):
            continue  # a condition cannot name it
        is_column = first in COLUMN_OF_FIELD and not inner
        names.append(".".join([_quote(first, is_plain=not is_column), *map(_quote, inner)]))
    return names


def _quote(name: str, *, is_plain: bool = True) -> str:
    """Put the name of a field in quotes if a condition needs them."""
    if is_plain and re.fullmatch(_BARE, name):
        return name
    return f"'{name}'" if '"' in name else f'"{name}"'
