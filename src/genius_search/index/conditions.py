"""Conditions on fields as users write them.

A condition is ``FIELD OPERATOR VALUE``, for example ``price<20``, ``brand=acme``, ``colour in red,blue`` or
``title~umbrella``. Fields are the keys of the JSON that came with an item, inner ones after a dot
(``size.width``), and the item's own ``id``, ``modality``, ``text`` and ``image``. A name in quotes is always
one of the JSON.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, cast, get_args

from genius_search.errors import UsageError
from genius_search.index.filters import (
    COLUMNS,
    Condition,
    Operator,
    Value,
    check_unicode,
    number_of,
)
from genius_search.records import Modality

GRAMMAR: Final = (
    "a condition is FIELD OPERATOR VALUE with one of = != < <= > >= ~ (contains) in, for example: price<20, "
    "brand=acme, 'colour in red,blue', title~umbrella, size.width>=30, '\"unit price\"=\"a, b\"'"
)
MAX_VALUES: Final = 1_000
"""Values after ``in``."""
_OPERATORS: Final[Sequence[Operator]] = get_args(Operator)
_QUOTED: Final = r"\"[^\"]*\"|'[^']*'"
_NAME: Final = re.compile(rf"\s*({_QUOTED}|[^\s.=!<>~\"',]+)")
_OPERATOR: Final = re.compile(r"\s*(!=|<=|>=|=|<|>|~|in(?=[\s\"']))\s*")
_VALUE: Final = re.compile(rf"\s*(?:({_QUOTED})|([^\"'=<>~!\s].*?))\s*$", re.DOTALL)
_LISTED: Final = re.compile(rf"\s*(?:({_QUOTED})|([^\"',\s][^,]*?))\s*(,|$)", re.DOTALL)
_SHORT_NUMBER: Final = re.compile(r"-?\.[0-9]+")


def parse_conditions(where: Sequence[str] | Mapping[str, object]) -> tuple[Condition, ...]:
    """Parse conditions given as strings or as a mapping, as :meth:`Filter.parse` describes.

    Raises
    ------
    UsageError
        A condition cannot be parsed. The message contains the position and the grammar.
    """
    if isinstance(where, Mapping):
        return tuple(one for name, wanted in where.items() for one in _parse_mapping(name, wanted))
    return tuple(_parse_text(one) for one in ([where] if isinstance(where, str) else where))


def _parse_text(text: str) -> Condition:
    """Parse a typed condition."""
    check_unicode(text, text)
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
            check_unicode(shown, value)
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


def _syntax_error(text: str, place: int, expected: str) -> UsageError:
    rest = text[place:].strip()
    where = f"before {rest!r}" if rest else "at its end"
    return UsageError(f"condition {text!r}: expected {expected} {where} (character {place + 1}); {GRAMMAR}")
