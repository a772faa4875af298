"""Which items a person wants to search among: conditions on fields, words of the text, names.

A condition is ``FIELD OPERATOR VALUE``, for example ``price<20``, ``brand=acme``, ``colour in red,blue`` or
``title~umbrella``. Fields are the keys of the JSON that came with an item, inner ones after a dot
(``size.width``), and the item's own ``id``, ``modality``, ``text`` and ``image``. A name in quotes is always
one of the JSON. What conditions mean: :class:`genius_search.index.filters.Condition`.
"""

from __future__ import annotations

import json
import math
import operator
import re
import sqlite3
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast, get_args

from genius_search.errors import UsageError
from genius_search.records import Modality

Operator: TypeAlias = Literal["=", "!=", "<", "<=", ">", ">=", "~", "in"]
Column: TypeAlias = Literal["item_id", "modality", "text", "image"]
Bound: TypeAlias = dict[str, str]
"""What the parameters of a query stand for."""

_EQUALITIES: Final = ("=", "in")
_FEW: Final = 8
"""Values that are looked for in JSON before it is read."""
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WHOLE: Final = re.compile(r"-?[0-9]{1,19}")
_COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "~": lambda have, want: want.casefold() in have.casefold(),
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Value(NamedTuple):
    """What a field is compared with. Kept as it is spelt, so that 1 and true are two values."""

    kind: Literal["text", "number", "truth"]
    text: str
    """Of a truth value ``true`` or ``false``."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One field compared with a value, or with several of which one has to fit (``in``).

    A field that an item does not have, or that is null or an object, satisfies ``!=`` and nothing else:
    ``!=`` holds exactly where ``=`` does not. A list satisfies the other operators if one of its values does.
    Numbers are compared with numbers and with texts that spell one (in a CSV file everything is text); truth
    values with truth values and the texts true and false; texts with texts, in the order of their characters.
    ``~`` looks for a part of a text, upper and lower case alike.
    """

    path: tuple[str, ...]
    """Where the field lies in the JSON that came with the item; or the name of a column."""
    operator: Operator
    values: tuple[Value, ...]
    """One; any number for ``in``."""
    column: Column | None = None
    """Set if it is not in the JSON but the item's own; all values are texts then."""

    def holds(self, source: str | None) -> bool:
        """Whether what came with an item satisfies it."""
        have = _resolve(source, self.path)
        found = any(_fits(one, self) for one in (have if isinstance(have, list) else [have]))
        return found != (self.operator == "!=")

    def clause(self, bound: Bound) -> str:
        """The same as SQL over the table ``items``: 0 or 1, never NULL. Adds its parameters to ``bound``."""
        if self.operator == "!=":
            return f"NOT ({replace(self, operator='=').clause(bound)})"
        if self.column is None:
            return self._clause_of_source(bound)
        found = _compare_texts(self.column, self, bound)
        if self.column in ("item_id", "modality"):
            return found
        return f"CASE WHEN {self.column} IS NULL THEN 0 ELSE {found} END"

    def _clause_of_source(self, bound: Bound) -> str:
        judged = f"genius_holds(source, {_bind(bound, _spell(self))})"
        escaped = rf"CASE WHEN source IS NULL THEN 0 WHEN instr(source, '\') THEN {judged} "
        if any(json.dumps(part, ensure_ascii=False) != f'"{part}"' for part in self.path):
            return f"{escaped} ELSE 0 END"  # JSON cannot hold such a name without an escape
        path = _bind(bound, "$" + "".join(f'."{part}"' for part in self.path))
        absent = " AND ".join(f"NOT instr(source, {_bind(bound, part)})" for part in self._indispensable())
        if self.operator == "~":  # in ASCII it is seen without reading the JSON, too
            part = _bind(bound, self.values[0].text.casefold())
            absent += f" OR ({_is_ascii('source')} AND NOT instr(lower(source), {part}))"
        cases = self._cases(f"json_extract(source, {path})", bound)
        return (
            f"{escaped} WHEN {absent} THEN 0 WHEN NOT json_valid(source) THEN {judged} ELSE "
            f"CASE json_type(source, {path}) {cases} WHEN 'array' THEN {judged} ELSE 0 END END"
        )

    def _indispensable(self) -> list[str]:
        """JSON without escapes that has none of these cannot satisfy it; seen without reading the JSON."""
        if (
            self.operator in _EQUALITIES
            and len(self.values) <= _FEW
            and {v.kind for v in self.values} == {"text"}
        ):
            return [json.dumps(value.text, ensure_ascii=False) for value in self.values]
        return [f'"{self.path[-1]}"']

    def _cases(self, field: str, bound: Bound) -> str:
        """What to do with a text, a number and a truth value."""
        numbers = [_number_in_sql(bound, value) for value in self.values if value.kind == "number"]
        truths = [value.text for value in self.values if value.kind == "truth"]
        of_text = [_compare_texts(field, self, bound)] if any(v.kind == "text" for v in self.values) else []
        if truths:
            of_text.append(f"lower({field}) IN ({_bind_all(bound, truths)})")
        of_number = "0"
        if numbers:
            how = (
                f"IN ({', '.join(numbers)})"
                if self.operator in _EQUALITIES
                else f"{self.operator} {numbers[0]}"
            )
            of_number = f"{field} {how}"
            of_text.append(
                f"CASE WHEN {field} GLOB '[-0-9]*' AND {field} GLOB '*[0-9]' AND json_valid({field}) "
                f"THEN CAST({field} AS NUMERIC) {how} ELSE 0 END"
            )
        return (
            f"WHEN 'text' THEN {' OR '.join(of_text) or '0'} "
            f"WHEN 'integer' THEN {of_number} WHEN 'real' THEN {of_number} "
            f"WHEN 'true' THEN {int('true' in truths)} WHEN 'false' THEN {int('false' in truths)}"
        )


def register_functions(database: sqlite3.Connection) -> None:
    """Teach a database the functions that clauses call."""
    database.create_function(
        "genius_holds", 2, lambda source, spelt: _read(spelt).holds(source), deterministic=True
    )
    database.create_function(
        "genius_contains", 2, lambda text, part: part in text.casefold(), deterministic=True
    )


def is_number(text: str) -> bool:
    """Whether a text spells a number, as JSON does; ``007`` does not, it is a name."""
    return _NUMBER.fullmatch(text) is not None


def _resolve(source: str | None, path: tuple[str, ...]) -> object:
    if source is None:
        return None
    try:
        have = json.loads(
            source, object_pairs_hook=lambda pairs: dict(reversed(pairs))
        )  # the first, as SQLite
    except (ValueError, RecursionError):
        return None
    for part in path:
        have = have.get(part) if isinstance(have, dict) else None
    return have


def _fits(have: object, condition: Condition) -> bool:
    return any(_compare(have, condition.operator, value) for value in condition.values)


def _compare(have: object, how: Operator, want: Value) -> bool:
    fits: Callable[[Any, Any], bool] = _COMPARISONS.get(how, operator.eq)
    match have, want.kind:
        case str(), "text":
            return fits(have, want.text)
        case str(), "number":
            return is_number(have) and fits(_number(have), _number(want.text))
        case (bool(), "truth") | (str(), "truth"):
            return str(have).lower() == want.text
        case (int() | float(), "number") if not isinstance(have, bool):
            return fits(_number(str(have)), _number(want.text))
        case _:
            return False


def _number(text: str) -> int | float:
    """As SQLite reads it: whole numbers beyond 64 bits are not exact."""
    whole = int(text) if _WHOLE.fullmatch(text) else None
    return whole if whole is not None and -(2**63) <= whole < 2**63 else float(text)


def _compare_texts(field: str, condition: Condition, bound: Bound) -> str:
    texts = [value.text for value in condition.values if value.kind == "text"]
    if condition.operator in _EQUALITIES:
        return f"{field} IN ({_bind_all(bound, texts)})"
    if condition.operator != "~":
        return f"{field} {condition.operator} {_bind(bound, texts[0])}"
    part = _bind(bound, texts[0].casefold())
    return (  # SQLite's lower knows ASCII only, where it is the same as casefold
        f"CASE WHEN {_is_ascii(field)} THEN instr(lower({field}), {part}) > 0 "
        f"ELSE genius_contains({field}, {part}) END"
    )


def _is_ascii(field: str) -> str:
    return f"length({field}) = length(CAST({field} AS BLOB))"


def _number_in_sql(bound: Bound, value: Value) -> str:
    """Read by SQLite, as those in the JSON are, so that the same spelling is the same number."""
    return f"CAST({_bind(bound, value.text)} AS NUMERIC)"


def _bind(bound: Bound, text: str) -> str:
    name = f"p{len(bound)}"
    bound[name] = text
    return f":{name}"


def _bind_all(bound: Bound, texts: list[str]) -> str:
    return ", ".join(_bind(bound, text) for text in texts)


def _spell(condition: Condition) -> str:
    """A condition as text, for a function that SQLite calls."""
    return json.dumps([condition.path, condition.operator, condition.values])


@lru_cache(maxsize=64)
def _read(spelt: str) -> Condition:
    path, how, values = json.loads(spelt)
    return Condition(tuple(path), how, tuple(Value(*value) for value in values))


GRAMMAR: Final = (
    "a condition is FIELD OPERATOR VALUE with one of = != < <= > >= ~ (contains) in, for example: price<20, "
    "brand=acme, 'colour in red,blue', title~umbrella, size.width>=30, '\"unit price\"=\"a, b\"'"
)
MOST_VALUES: Final = 1_000
"""Values after ``in``."""
MOST_CONDITIONS: Final = 200
"""SQLite takes no query that is nested deeper than a thousand."""

COLUMNS: Final[Mapping[str, Column]] = {
    "id": "item_id",
    "modality": "modality",
    "text": "text",
    "image": "image",
}
"""What an item has that is no field of its JSON."""
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
    """What an item has to satisfy, all of it. Two that ask the same are equal and may be kept in a cache.

    >>> Filter.parse(["price<20", "colour in red,blue"], match='"leather strap" bag*')  # doctest: +SKIP
    >>> Filter.parse({"price": {"<": 20}, "colour": ["red", "blue"]})  # doctest: +SKIP
    """

    conditions: tuple[Condition, ...] = ()
    match: str | None = None
    """Words that the text must have, all of them, in any order; ``"a phrase"``, ``begin*``. Accents and upper
    case are alike, and what is no letter or digit separates words, except inside quotes, where they stay
    together."""
    modality: Modality | None = None
    item_ids: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if len(self.conditions) > MOST_CONDITIONS:
            raise UsageError(
                f"{len(self.conditions):,} conditions were given; give at most {MOST_CONDITIONS}, values of "
                "one field with in, and long lists of items by item_ids"
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
        """Read conditions as a person types them, or as a mapping.

        In a mapping a field has a value, a list of which one has to fit, or operators with their values.
        Texts are texts there, whereas what is typed without quotes and spells a number or true or false is
        that.

        Raises
        ------
        UsageError
            a condition is none; says where, and how one is written.
        """
        if isinstance(where, Mapping):
            conditions = [one for name, wanted in where.items() for one in _of_mapping(name, wanted)]
        else:
            conditions = [_of_text(one) for one in ([where] if isinstance(where, str) else where)]
        names = None if item_ids is None else frozenset(item_ids)
        return Filter(tuple(conditions), match, modality, names)


def full_text_query(match: str) -> str:
    """Words, phrases and beginnings in the language of SQLite's full text; everything else is quoted away.

    Raises
    ------
    UsageError
        there is no word in it.
    """
    found = []
    for phrase, phrase_star, word in _WORDS.findall(match.replace("\0", " ")):
        words = phrase or word.rstrip("*")
        star = phrase_star or ("*" if word.endswith("*") else "")
        if any(_is_of_word(character) for character in words):
            found.append(f'"{words}"{star}')
    if not found:
        raise UsageError(
            f"match {match!r} has no word in it; give words that the text must have, for example "
            '"leather strap*" or, for a phrase, \'"leather strap"\''
        )
    _refuse_halves(match, match)
    return " ".join(found)


def _is_of_word(character: str) -> bool:
    kind = unicodedata.category(character)
    return kind[0] in "LN" or kind == "Co"


def _of_text(text: str) -> Condition:
    """One condition as it is typed."""
    _refuse_halves(text, text)
    path, own, place = _name(text)
    found = _OPERATOR.match(text, place)
    if found is None:
        raise _refused(text, place, "an operator")
    how = cast("Operator", found[1])
    place = found.end()
    if how != "in":
        value = _VALUE.match(text, place)
        if value is None:
            raise _refused(text, place, "a value (in quotes if it begins with one of \" ' = < > ~ !)")
        return _condition(text, path, how, [_typed(value[1], value[2])], own=own)
    values = []
    more = ","
    while more:
        value = _LISTED.match(text, place)
        if value is None:
            raise _refused(text, place, "a value (in quotes if it has a quote or a comma)")
        values.append(_typed(value[1], value[2]))
        place, more = value.end(), value[3]
    return _condition(text, path, how, values, own=own)


def _name(text: str) -> tuple[tuple[str, ...], bool, int]:
    """Parts of a field's name, whether it may be the item's own, and where the name ends."""
    parts: list[str] = []
    place = 0
    own = True
    while True:
        found = _NAME.match(text, place)
        if found is None:
            raise _refused(text, place, "the name of a field")
        quoted = found[1][0] in "\"'"
        parts.append(found[1][1:-1] if quoted else found[1])
        own = own and not quoted
        place = found.end()
        if not text.startswith(".", place):
            return tuple(parts), own and len(parts) == 1, place
        place += 1


def _typed(quoted: str | None, bare: str | None) -> Value:
    """A value as it is typed: quotes make it a text."""
    if bare is None:
        return Value("text", (quoted or "")[1:-1])
    if bare.lower() in ("true", "false"):
        return Value("truth", bare)
    return Value("number" if is_number(bare) or _SHORT_NUMBER.fullmatch(bare) else "text", bare)


def _of_mapping(name: str, wanted: object) -> list[Condition]:
    """The conditions on one field."""
    if not isinstance(name, str):
        raise UsageError(f"condition on {name!r}: the name of a field is a text; {GRAMMAR}")
    path, own, place = (
        _name(name) if re.search(r"[\"']", name) else (tuple(name.split(".")), "." not in name, 0)
    )
    if place not in (0, len(name)):
        raise _refused(name, place, "the end of the name")
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
    """A value of a mapping: its type says what it is."""
    match value:
        case bool():
            return Value("truth", json.dumps(value))
        case int():
            return Value("number", str(value))
        case float() if math.isfinite(value):
            return Value("number", repr(value))
        case str():
            _refuse_halves(shown, value)
            return Value("text", value)
        case _:
            raise UsageError(
                f"condition {shown}: {value!r} cannot be compared with; give a text, a finite number, true "
                "or false, or a list of them with in"
            )


def _condition(
    shown: str, path: tuple[str, ...], how: Operator, values: list[Value], *, own: bool
) -> Condition:
    """A condition, when its operator and values go together."""
    if not 1 <= len(values) <= MOST_VALUES:
        raise UsageError(
            f"condition {shown[:80]!r} has {len(values):,} values; give 1 to {MOST_VALUES:,}, and long lists "
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


def _refuse_halves(shown: str, text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{shown!r} is not valid Unicode; type it in UTF-8") from None


def _refused(text: str, place: int, expected: str) -> UsageError:
    rest = text[place:].strip()
    where = f"before {rest!r}" if rest else "at its end"
    return UsageError(f"condition {text!r}: expected {expected} {where} (character {place + 1}); {GRAMMAR}")
