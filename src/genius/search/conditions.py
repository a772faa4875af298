"""What a condition on an item's fields means: as SQL for most items, in Python for those SQL misreads.

SQLite compares names of fields as they are spelt in the JSON, so items whose JSON holds an escape or is no
strict JSON (``NaN``), and those with a list where the condition looks, are judged by
:meth:`Condition.holds`. Both say the same. What a person typed reaches SQL as bound parameters only.
"""

from __future__ import annotations

import json
import operator
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

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
