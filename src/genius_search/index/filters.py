"""Filters: conditions on the fields of items, words of their texts, ids.

A condition is ``FIELD OPERATOR VALUE``, for example ``price<20``, ``brand=acme``, ``colour in red,blue`` or
``title~umbrella``. Fields are the keys of the JSON that came with an item, inner ones after a dot
(``size.width``), and the item's own ``id``, ``modality``, ``text`` and ``image``. A name in quotes is always
one of the JSON.
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
from typing import Final, Literal, TypeAlias, TypeGuard, cast, get_args

import numpy as np
from jaxtyping import Bool

from genius_search.border import as_id, is_missing
from genius_search.data.values import (
    FALSE,
    TRUE,
    YEAR_DIGITS,
    Span,
    Value,
    number_of,
    plain,
    times_of,
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
"""Names of the item's columns in conditions."""
CONDITION_GRAMMAR: Final = (
    "a condition is FIELD OPERATOR VALUE with one of = != < <= > >= ~ (contains) !~ (does not) in, "
    "for example: price<20, price=5..20, taken>=2024-05, brand=acme, 'colour in red,blue', "
    "title~umbrella, 'price is missing', "
    'size.width>=30, \'"unit price"="a, b"\'; several conditions are given one by one (--where for each, or '
    "a list)"
)
MAX_CONDITION_CHARACTERS: Final = 1_000_000
"""Maximum length of all conditions together."""
MAX_CONDITIONS: Final = 200
MAX_VALUES: Final = 10_000
"""Maximum number of values in all conditions; more would take longer than a second."""
FIRST_TEXT: Final = ""
AFTER_TEXTS: Final = b""
"""Where texts begin and end in SQLite's order of values."""
MISSING: Final = Span(None, None)

SCANNED_IN_THE_TIME_OF_ONE: Final = 5
"""Items whose modality is read in a scan of all while that of one is looked up."""
MAX_NAMES: Final = 30
"""Number of fields that an error lists."""
MAX_SHOWN_CHARACTERS: Final = 200
"""Characters of a condition that an error shows."""
_OPERATORS: Final[Sequence[Operator]] = get_args(Operator)
_ORDERS: Final = ("<", "<=", ">", ">=")
_CONTAINS: Final = ("~", "!~")
_NEGATIONS: Final = ("!=", "!~")
# Possessive quantifiers (*+, ++) never backtrack, so that reading a condition takes linear time.
_QUOTED: Final = r"\"[^\"]*+\"|'[^']*+'"
_BARE: Final = r"[^\s.=!<>~\"',]++"
_PART: Final = rf"(?:{_QUOTED}|{_BARE})"
_FIELD_NAME: Final = re.compile(rf"{_PART}(?:\.{_PART})*+")
_CONDITION: Final = re.compile(
    rf"\s*+({_FIELD_NAME.pattern})\s*+(!=|!~|<=|>=|==?|<|>|~|(?:[iI][nN]|[iI][sS])(?=[\s\"']))\s*+(.*+)",
    re.DOTALL,
)
_VALUE: Final = re.compile(rf"(?:({_QUOTED})\s*+|([^\"'].*+))($)", re.DOTALL)
_LISTED: Final = re.compile(rf"\s*+(?:({_QUOTED})\s*+|([^\"',][^,]*+))(,|$)", re.DOTALL)
_BRACKETS: Final = re.compile(r"^[(\[](.*)[)\]]$", re.DOTALL)
_SHORT_NUMBER: Final = re.compile(r"-?\.[0-9]+")
_JOINED: Final = re.compile(r"[=<>~]|&&|\|\||\b(?:and|or) \S++ (?:is|in)\b", re.IGNORECASE)
"""What shows that a value without quotes is meant as more than a value."""
_SEPARATED: Final = re.compile(r"[-+]?[0-9][0-9.]*+[,'][0-9][0-9.,']*+")
"""A number as no JSON has it."""


class UnknownField(UsageError, LookupError):
    """A condition is about a field that no item has."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparison of a field with a value, or with several values of which one must match (``in``).

    ``!=`` is the negation of ``=``, and ``!~`` that of ``~``. A missing, null or object field
    satisfies only these. A list satisfies the other operators if one of its values does, or one of
    its objects' for an inner field. Numbers are compared with numbers and with texts that are
    numbers (in a CSV file everything is text), times with texts that are times, Booleans with
    Booleans and the texts true and false, and texts with texts in the order of their characters.
    ``~`` searches for a substring, ignoring case.
    """

    path: tuple[str, ...]
    """Path of the field in the item's JSON, or the name of a column."""
    operator: Operator
    values: tuple[Span, ...]
    """What one value means, or any number of values for ``in``; :data:`MISSING` for one that is missing."""
    column: Column | None = None
    """Set for the item's id, modality, text or image, whose values are always texts."""

    def to_sql(self, column: str) -> Iterator[tuple[str, list[Value]]]:
        """Yield comparisons in SQL, of which one must hold, and the values to bind.

        Of a negation they are the comparisons that it negates.

        Values of other kinds do not satisfy them.
        """
        if self.operator in _CONTAINS:
            texts = f"{column} >= ? AND {column} < ?"
            yield (
                f"{texts} AND contains({column}, ?)",
                [FIRST_TEXT, AFTER_TEXTS, self.values[0].low],
            )
        elif self.operator in _ORDERS:
            for low, high in self.values:
                least, above = _bounds(low)
                other, bound = (">=", least) if "<" in self.operator else ("<", above)
                edge = low if self.operator in ("<", ">=") else high
                yield f"{column} {self.operator} ? AND {column} {other} ?", [edge, bound]
        else:
            single: list[Value] = [
                low for low, high in self.values if low is not None and low == high
            ]
            if single:
                yield f"{column} IN ({', '.join('?' * len(single))})", single
            for low, high in self.values:
                if low != high:
                    yield f"{column} BETWEEN ? AND ?", [low, high]


def _bounds(value: Value) -> tuple[Value, Value]:
    """Return where values of this kind begin in SQLite's order, and what comes after them."""
    match value:
        case str():
            return FIRST_TEXT, AFTER_TEXTS
        case bytes():
            return b"T", b"U"  # times
        case _:
            return -math.inf, FIRST_TEXT


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions that an item must meet, all of them. Hashable, so that results can be cached.

    >>> Filter.parse(["price<20", "colour in red,blue"], match='"leather strap" bag*')  # doctest: +SKIP
    >>> Filter.parse({"price": {"<": 20}, "colour": ["red", "blue"]})  # doctest: +SKIP
    """

    conditions: tuple[Condition, ...] = ()
    match: str | None = None
    """Words that the text must contain in any order; also ``"a phrase"`` and ``prefix*``. A ``-``
    before one of these, or NOT, leaves out items that have it, and OR stands between two of which
    one must occur. Case and accents are ignored. All characters but letters and digits separate words."""
    modality: Modality | None = None
    ignores_unknown_fields: bool = False
    """Whether a field that no item has is no error, since items of other shards may have it."""

    def __post_init__(self) -> None:
        if len(self.conditions) > MAX_CONDITIONS:
            raise UsageError(
                f"{len(self.conditions):,} conditions were given; give at most {MAX_CONDITIONS}, and several "
                "values of one field with in"
            )
        total = sum(len(condition.values) for condition in self.conditions)
        if total > MAX_VALUES:
            raise UsageError(
                f"{total:,} values were given; give at most {MAX_VALUES:,} in all conditions"
            )
        if self.match is not None:
            parse_match(self.match)

    @staticmethod
    def parse(
        where: Iterable[object] | Mapping[str, object] = (),
        match: str | None = None,
    ) -> Filter:
        """Parse conditions given as strings or as a mapping.

        A mapping contains for each field a value, a list of values of which one must match, or a mapping from
        operators to values, whose types are kept; None means that the field is missing. In strings, unquoted
        values that look like numbers, true, false or null are parsed as such. Texts that are dates or times
        in ISO 8601 are compared as times; one without a zone counts as UTC, and a year, month or day is all
        of it.

        Raises
        ------
        UsageError
            A condition cannot be parsed. The message contains the grammar.
        """
        if isinstance(where, Mapping):
            named = [(as_id(name, "the name of a field"), wanted) for name, wanted in where.items()]
            conditions = [one for name, wanted in named for one in _parse_mapping(name, wanted)]
        else:
            given = [where] if isinstance(where, str) else [*where]
            texts = [one for one in given if isinstance(one, str)]
            if len(texts) < len(given):
                raise UsageError(
                    f"conditions {given}: expected texts, or one mapping of all; {CONDITION_GRAMMAR}"
                )
            if (length := sum(map(len, texts))) > MAX_CONDITION_CHARACTERS:
                raise UsageError(
                    f"the conditions have {length:,} characters; at most {MAX_CONDITION_CHARACTERS:,}"
                )
            conditions = [_parse_text(text) for text in texts]
        return Filter(tuple(conditions), match)


def _parse_text(text: str) -> Condition:
    """Parse a typed condition."""
    shown = text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
    found = _CONDITION.fullmatch(check_unicode(text).rstrip())
    if found is None:
        raise UsageError(
            f"condition {shown!r}: expected a field and an operator; {CONDITION_GRAMMAR}"
        )
    name, operator, rest = found.groups()
    operator = "=" if operator == "==" else operator.lower()
    if operator == "is":
        negation, _, kind = rest.lower().rpartition("not ")
        if kind.strip() not in ("missing", "null") or (negation and negation.strip()):
            raise UsageError(
                f"condition {shown!r}: expected 'is missing' or 'is not missing'; {CONDITION_GRAMMAR}"
            )
        return _condition(shown, name, "!=" if kind != rest.lower() else "=", [("null", [MISSING])])
    pattern, quoted = _VALUE, "begins with a quote"
    if operator == "in":
        pattern, quoted, rest = _LISTED, "has a quote or a comma", _BRACKETS.sub(r"\1", rest)
    given: list[tuple[str, list[Span]]] = []
    place, more = 0, ","
    while more:
        value = pattern.match(rest, place)
        if value is None or (value[2] and not value[2].strip()):
            raise UsageError(
                f"condition {shown!r}: expected a value (in quotes if it {quoted}); {CONDITION_GRAMMAR}"
            )
        if value[1]:
            given.append((value[1][1:-1], _quoted_meanings(value[1][1:-1], operator)))
        else:
            written = value[2].rstrip()
            if _JOINED.search(written):
                raise UsageError(
                    f"condition {shown!r}: {written[:MAX_SHOWN_CHARACTERS]!r} is not one value; give each condition "
                    "by itself, --where 'price<20' --where year=2020 or ['price<20', 'year=2020'], and put a "
                    "value that has = < > ~ in quotes"
                )
            given.append((written, _meanings(shown, written)))
            is_number = operator in _ORDERS or _SEPARATED.fullmatch(written)
            if is_number and isinstance(given[0][1][0].low, str) and name not in COLUMN_OF_FIELD:
                raise UsageError(
                    f"condition {shown!r}: {written[:MAX_SHOWN_CHARACTERS]!r} is neither a number (1234.5) nor a date "
                    f"(2024-05-01); put a text in quotes; {CONDITION_GRAMMAR}"
                )
        place, more = value.end(), value[3]
    return _condition(shown, name, cast("Operator", operator), given)


def _meanings(shown: str, text: str) -> list[Span]:
    """Return what a value without quotes may mean: 2024 is a number and a year."""
    match text.lower():
        case "true" | "false" as truth:
            return [Span(TRUE, TRUE) if truth == "true" else Span(FALSE, FALSE)]
        case "null":
            return [MISSING]
    low, dots, high = text.partition("..")
    if not dots:
        return _orderly_meanings(text) or [Span(text, text)]
    found = []
    lows, highs = _orderly_meanings(low.strip()), _orderly_meanings(high.strip())
    for first, last in product(lows, highs):
        if isinstance(first.low, bytes) is isinstance(last.high, bytes):
            found.append(Span(first.low, last.high))
            if first.low > last.high:  # type: ignore[operator]
                raise UsageError(
                    f"condition {shown!r}: {text} ends before it begins; give LOW..HIGH"
                )
    if not found and (lows or highs):
        raise UsageError(
            f"condition {shown!r}: {text} is no range; give LOW..HIGH, or a condition with >= or <="
        )
    return found or [Span(text, text)]


def _orderly_meanings(text: str) -> list[Span]:
    number = number_of(text.replace(".", "0.") if _SHORT_NUMBER.fullmatch(text) else text)
    times = times_of(text)
    return [
        *([] if number is None else [Span(number, number)]),
        *([] if times is None else [times]),
    ]


def _quoted_meanings(text: str, operator: str) -> list[Span]:
    """Return what a text in quotes means: a date, if it is one, else a text."""
    times = times_of(text) if len(text) > YEAR_DIGITS or operator in _ORDERS else None
    return [Span(text, text) if times is None else times]


def _parse_mapping(name: str, wanted: object) -> list[Condition]:
    """Parse the conditions on one field of a mapping."""
    if not isinstance(wanted, Mapping):
        wanted = {"in" if _is_several(wanted) else "=": wanted}
    if not wanted:
        raise UsageError(f"condition on {name}: {{}} has no operator; give one, as in {{'<': 20}}")
    conditions = []
    for how, value in wanted.items():
        shown = f"{name} {how} {str(value)[:MAX_SHOWN_CHARACTERS]}"
        if how not in _OPERATORS:
            raise UsageError(
                f"condition {shown}: {how!r} is no operator; give one of {' '.join(_OPERATORS)}, and "
                f"an inner field by its name with dots, {name}.{how}"
            )
        values = [value]
        if how == "in" and _is_several(value):
            values = list(value)
        if name == "id":  # as ids are stored: 5.0 is 5
            values = [one if is_missing(one) else as_id(one) for one in values]
        given = [_given(shown, how, one) for one in values]
        conditions.append(_condition(shown, name, cast("Operator", how), given))
    return conditions


def _is_several(value: object) -> TypeGuard[Iterable[object]]:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _given(shown: str, how: str, value: object) -> tuple[str, list[Span]]:
    """Return a value of a mapping as it would be typed, and what it means."""
    try:
        value = check_unicode(value) if isinstance(value, str) else plain(value)
    except (TypeError, UnicodeEncodeError):
        value = []
    match value:
        case str():
            return value, _quoted_meanings(value, how)
        case None | bool() | int() | float():
            typed = json.dumps(value)
            return typed, _meanings(shown, typed)
        case _:
            raise UsageError(
                f"condition {shown}: expected a text, a number, a date, true or false, None for what is "
                "missing, or a list of them with in"
            )


def _condition(
    shown: str, name: str, how: Operator, given: Sequence[tuple[str, list[Span]]]
) -> Condition:
    """Return a condition on a field; each value is given as it is typed, and with what it means."""
    if not given:
        raise UsageError(f"condition {shown!r} has no values; give at least one")
    parts = name.split(".")
    if re.search(r"[\"']", name):
        if _FIELD_NAME.fullmatch(name) is None:
            raise UsageError(
                f"condition {shown!r}: {name!r} is not the name of a field; {CONDITION_GRAMMAR}"
            )
        parts = re.findall(_PART, name)
    path = tuple(composed(part[1:-1] if part[:1] in ("'", '"') else part) for part in parts)
    column = COLUMN_OF_FIELD.get(name)
    values = [one for _, meanings in given for one in meanings]
    if how in _ORDERS and any(one.low in (None, TRUE, FALSE) for one in values):
        raise UsageError(
            f"condition {shown!r}: true, false and null can be compared with = != in only"
        )
    if column == "modality" and MISSING not in values:
        if how not in ("=", "!=", "in"):
            raise UsageError(f"condition {shown!r}: a modality can be compared with = != in only")
        values = [Span(kind, kind) for kind in (Modality.parse(typed).mbeir for typed, _ in given)]
    elif how in _CONTAINS:
        folded = clean(composed(given[0][0])).casefold()
        values = [Span(folded, folded)]
    elif column:
        spelt = [clean(typed) if column == "text" else typed for typed, _ in given]
        pairs = zip(spelt, given, strict=True)
        values = [MISSING if MISSING in one[1] else Span(text, text) for text, one in pairs]
    return Condition(path, how, tuple(values), column)


def matching_items(
    store: ItemStore, wanted: Filter, *, deadline: float = math.inf
) -> Bool[np.ndarray, " items"]:
    """Return which items of a store satisfy a filter.

    Raises
    ------
    DeadlinePassed
        It took until the deadline, on the clock of :func:`time.monotonic`.
    """
    mask = np.ones(store.num_rows, dtype=bool)
    look_up = partial(store.mask, deadline=deadline)
    if wanted.match is not None:
        required, left_out = parse_match(wanted.match)
        if required is not None:
            mask &= look_up("words WHERE words MATCH ?", [required], row="rowid")
        if left_out is not None:
            mask &= ~look_up("words WHERE words MATCH ?", [left_out], row="rowid")
    for condition in wanted.conditions:
        if not mask.any():
            break
        holds = _holds(store, condition, look_up)
        mask &= ~holds if condition.operator in _NEGATIONS else holds
    if wanted.modality is None or store.count_by_modality().get(wanted.modality) == store.num_rows:
        return mask
    source, values = "items WHERE modality = ?", [wanted.modality.mbeir]
    rows = np.flatnonzero(mask)
    if len(rows) <= store.num_rows // SCANNED_IN_THE_TIME_OF_ONE:
        source = f"json_each(?) CROSS JOIN {source} AND row = value"
        values = [json.dumps(rows.tolist()), *values]
    mask &= look_up(source, values)
    return mask


def _holds(store: ItemStore, condition: Condition, look_up: Callable[..., Mask]) -> Mask:
    """Return which items satisfy a condition, or of a negation the condition that it negates."""
    holds = np.zeros(store.num_rows, dtype=bool)
    column, known = condition.column, store.field_names
    source, bound = f"items WHERE {column} IS NOT NULL", list[Value]()
    if column is None:
        source, bound = "fields WHERE name = ?", [known.get(spell_path(condition.path))]
    for compared, values in condition.to_sql(column or "value"):
        holds |= look_up(f"{source} AND {compared}", [*bound, *values])
    if MISSING in condition.values:
        if column is None:  # an object is there if a field of it is
            begin = spell_path(condition.path)[:-1]
            inside = [
                number
                for path, number in known.items()
                if path.startswith((f"{begin}]", f"{begin}, "))
            ]
            source, bound = (
                "fields WHERE name IN (SELECT value FROM json_each(?))",
                [json.dumps(inside)],
            )
        holds |= ~look_up(source, bound)
    return holds


def matching_items_of_stores(
    stores: Sequence[ItemStore], wanted: Filter, *, deadline: float
) -> list[Bool[np.ndarray, " items"]]:
    """Return which items of each store of an index satisfy a filter; raises like :func:`matching`.

    Raises
    ------
    UnknownField
        A condition is about a field that no item has.
    """
    if not wanted.ignores_unknown_fields:
        check_fields(wanted, set[str]().union(*(store.field_names for store in stores)))
    return [matching_items(store, wanted, deadline=deadline) for store in stores]


def check_fields(wanted: Filter, names: AbstractSet[str]) -> None:
    """Raise :class:`UnknownField` if a condition is about a field that is not one of these."""
    for condition in wanted.conditions:
        if condition.column is None and spell_path(condition.path) not in names:
            shown = spell_fields(names)
            known = ", ".join(shown[:MAX_NAMES]) + (", …" if len(shown) > MAX_NAMES else "")
            raise UnknownField(
                f"no item of this index has a field {'.'.join(condition.path)!r}; "
                + (f"the fields are {known}" if shown else "none has any field")
            )


def spell_fields(keys: Iterable[str]) -> list[str]:
    """Return fields as conditions name them: inner ones after a dot, unusual names in quotes.

    Of fields with inner ones only those are returned.
    """
    paths = {tuple(json.loads(key)) for key in keys}
    objects = {path[:end] for path in paths for end in range(1, len(path))}
    names = []
    for first, *inner in sorted(paths - objects):
        if any('"' in name and "'" in name for name in (first, *inner)):
            continue  # cannot be written in a condition
        is_column = first in COLUMN_OF_FIELD and not inner
        names.append(".".join([_quote(first, is_plain=not is_column), *map(_quote, inner)]))
    return names


def _quote(name: str, *, is_plain: bool = True) -> str:
    if is_plain and re.fullmatch(_BARE, name):
        return name
    return f"'{name}'" if '"' in name else f'"{name}"'
