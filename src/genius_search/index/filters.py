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
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import numpy as np
from jaxtyping import Bool

from genius_search.errors import UsageError
from genius_search.index.items import ItemStore, spell_path
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
SCANNED_IN_THE_TIME_OF_ONE: Final = 5
"""Items whose modality is read in a scan of all while that of one is looked up."""
MAX_NAMES: Final = 30
"""Number of fields that an error lists."""
_OPERATORS: Final[Sequence[Operator]] = get_args(Operator)
_QUOTED: Final = r"\"[^\"]*\"|'[^']*'"
_PART: Final = rf"(?:{_QUOTED}|[^\s.=!<>~\"',]++)"
_NAME: Final = re.compile(rf"{_PART}(?:\.{_PART})*+")
_CONDITION: Final = re.compile(rf"\s*({_NAME.pattern})\s*(!=|<=|>=|=|<|>|~|in(?=[\s\"']))\s*(.*)", re.DOTALL)
_VALUE: Final = re.compile(rf"({_QUOTED}|[^\"'=<>~!\s].*)\s*($)", re.DOTALL)
_LISTED: Final = re.compile(rf"\s*({_QUOTED}|[^\"',\s][^,]*)\s*(,|$)", re.DOTALL)
_SHORT_NUMBER: Final = re.compile(r"-?\.[0-9]+")
_WORDS: Final = re.compile(r'"([^"]*)"(\*?)|([^\s"]+)|"')


class UnknownField(UsageError, LookupError):
    """A condition is about a field that no item has."""


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
            A condition cannot be parsed. The message contains the grammar.
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


def _parse_text(text: str) -> Condition:
    """Parse a typed condition."""
    check_unicode(text)
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise UsageError(f"condition {text!r}: expected a field and an operator; {GRAMMAR}")
    name, operator, rest = found.groups()
    pattern, quoted = _VALUE, "begins with one of \" ' = < > ~ !"
    if operator == "in":
        pattern, quoted = _LISTED, "has a quote or a comma"
    given: list[tuple[str, Value]] = []
    place, more = 0, ","
    while more:
        value = pattern.match(rest, place)
        if value is None:
            raise UsageError(f"condition {text!r}: expected a value (in quotes if it {quoted}); {GRAMMAR}")
        written = value[1].rstrip()
        if written[0] in "\"'":
            given.append((written[1:-1], written[1:-1]))
        else:
            given.append((written, _typed(written)))
        place, more = value.end(), value[2]
    return _condition(text, name, cast("Operator", operator), given)


def _typed(text: str) -> Value:
    """Parse a value without quotes."""
    if text.lower() in ("true", "false"):
        return stored_truth(text.lower() == "true")
    number = number_of(text.replace(".", "0.") if _SHORT_NUMBER.fullmatch(text) else text)
    return text if number is None else number


def _parse_mapping(name: str, wanted: object) -> list[Condition]:
    """Parse the conditions on one field of a mapping."""
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
        values = [value]
        if how == "in" and isinstance(value, list | tuple | set | frozenset):
            values = list(value)
        given = [_given(shown, one) for one in values]
        conditions.append(_condition(shown, name, cast("Operator", how), given))
    return conditions


def _given(shown: str, value: Any) -> tuple[str, Value]:
    """Return a value of a mapping as it would be typed, and as items are stored."""
    match value:
        case bool():
            return str(value).lower(), stored_truth(value)
        case int():
            return str(value), number_of(str(value)) or 0
        case float() if math.isfinite(value):
            return repr(value), value
        case str():
            check_unicode(value)
            return value, value
        case _:
            raise UsageError(
                f"condition {shown}: {value!r} cannot be compared with; give a text, a finite number, true "
                "or false, or a list of them with in"
            )


def _condition(shown: str, name: str, how: Operator, given: Sequence[tuple[str, Value]]) -> Condition:
    """Return a condition on a field; each value is given as it is typed, and as fields are stored."""
    if not given:
        raise UsageError(f"condition {shown!r} has no values; give at least one")
    parts = name.split(".")
    if re.search(r"[\"']", name):
        if _NAME.fullmatch(name) is None:
            raise UsageError(f"condition {shown!r}: {name!r} is not the name of a field; {GRAMMAR}")
        parts = re.findall(_PART, name)
    path = tuple(part[1:-1] if part[:1] in ("'", '"') else part for part in parts)
    column = COLUMNS.get(name)
    values: list[Value] = [typed if column or how == "~" else stored for typed, stored in given]
    if column == "modality":
        if how not in ("=", "!=", "in"):
            raise UsageError(f"condition {shown!r}: a modality can be compared with = != in only")
        values = [Modality.parse(typed).mbeir for typed, _ in given]
    if how in ("<", "<=", ">", ">=") and isinstance(values[0], bytes):
        raise UsageError(f"condition {shown!r}: true and false can be compared with = != in only")
    return Condition(path, how, tuple(values), column)


def matching(store: ItemStore, wanted: Filter, *, deadline: float = math.inf) -> Bool[np.ndarray, " items"]:
    """Return which items of a store satisfy a filter.

    Raises
    ------
    DeadlinePassed
        It took until the deadline, on the clock of :func:`time.monotonic`.
    UsageError
        The filter has ``match``, and this SQLite or the one that wrote the store lacks full-text search.
    """
    mask = np.ones(store.num_rows, dtype=bool)
    look_up = partial(store.mask, deadline=deadline)
    if wanted.match is not None:
        if not store.has_full_text:
            raise UsageError(
                "this index has no full-text search: this Python's SQLite, or the one that wrote the index, "
                "lacks FTS5; give a condition such as text~leather instead, or use a Python whose SQLite has "
                "FTS5"
            )
        mask &= look_up("words WHERE words MATCH ?", [wanted.full_text_query()], row="rowid")
    for condition in wanted.conditions:
        if not mask.any():
            break
        compared, values = condition.to_sql(condition.column or "value")
        if condition.column is not None:
            holds = look_up(f"items WHERE {condition.column} IS NOT NULL AND {compared}", values)
        else:
            name = store.field_names.get(spell_path(condition.path))
            holds = look_up(f"fields WHERE name = ? AND {compared}", [name, *values])
        mask &= ~holds if condition.operator == "!=" else holds
    if wanted.modality is None or store.count_by_modality().get(wanted.modality) == store.num_rows:
        return mask
    source, values = "items WHERE modality = ?", [wanted.modality.mbeir]
    rows = np.flatnonzero(mask)
    if len(rows) <= store.num_rows // SCANNED_IN_THE_TIME_OF_ONE:
        source = f"json_each(?) CROSS JOIN {source} AND row = value"
        values = [json.dumps(rows.tolist()), *values]
    mask &= look_up(source, values)
    return mask


def matching_all(
    stores: Sequence[ItemStore], wanted: Filter, *, deadline: float
) -> list[Bool[np.ndarray, " items"]]:
    """Return which items of each store of an index satisfy a filter; raises like :func:`matching`.

    Raises
    ------
    UnknownField
        A condition is about a field that no item has.
    """
    names = set[str]().union(*(store.field_names for store in stores))
    for condition in wanted.conditions:
        if condition.column is None and spell_path(condition.path) not in names:
            shown = sorted(".".join(json.loads(name)) for name in names)
            known = ", ".join(shown[:MAX_NAMES]) + (", …" if len(shown) > MAX_NAMES else "")
            raise UnknownField(
                f"no item of this index has a field {'.'.join(condition.path)!r}; "
                + (f"the fields are {known}" if shown else "none has any field")
            )
    return [matching(store, wanted, deadline=deadline) for store in stores]
