"""The values of a field in a segment as arrays, for sorting, counting and grouping items.

A segment never changes, so that its columns are read once and kept. The column of ``brand`` in a
segment whose rows 0 and 3 are of acme, and row 1 of bata::

    values   "acme"  "bata"
    codes    0  0    1        one entry for each value of an item
    rows     0  3    1

The table of fields has several forms of a value, such as the text "2024-05-01" and a time. Of each
value, one form is shown and one decides the order::

    stored           shown        sorted as
    12, "12"         12           12
    "true", true     True         True
    "2024-05-01"     "2024-05-01" the time
    "acme"           "acme"       "acme"
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Int32, Int64

from genius_search.data.values import FALSE, TRUE, YEAR_DIGITS, Value, number_of, times_of
from genius_search.errors import UsageError
from genius_search.index.filters import Condition, Filter, check_fields, parse_field
from genius_search.index.items import ItemStore, spell_path
from genius_search.index.snapshot import Snapshot
from genius_search.records import Modality

CONTENT: Final = "content"
"""Groups items by their content hash; a quoted name is a field."""
MAX_CACHED_COLUMNS: Final = 8
"""Maximum number of columns of a segment that are kept."""
MAX_COMPARED_CHARACTERS: Final = 200
"""Texts that are equal up to here count as one value, and are not sorted further."""
SortKey: TypeAlias = tuple[int, float | str | bytes]
ShownValue: TypeAlias = str | int | float | bool
_CUT_VALUE: Final = (
    f"CASE typeof(value) WHEN 'text' THEN substr(value, 1, {MAX_COMPARED_CHARACTERS}) "
    "ELSE value END"
)


class ItemField(NamedTuple):
    """A field, or a column, that items are sorted, counted or grouped by."""

    name: str
    """As the user gave it."""
    path: tuple[str, ...]
    column: str | None = None
    """A column of the table of items, instead of a field."""


def find_field(snapshot: Snapshot, name: str, *, option: str) -> ItemField:
    """Return a field, the id, the modality or, for groups, the content hash by its name.

    Raises
    ------
    UnknownField
        No item has this field.
    UsageError
        Items cannot be sorted or counted by it.
    """
    if name == CONTENT and option == "group_by":
        return ItemField(name, (), "content")
    path, column = parse_field(name, option)
    if column is None:
        condition = Condition(path, "=", ())
        names = set[str]().union(*(segment.items.field_names for segment in snapshot.segments))
        check_fields(Filter((condition,)), names)
    elif column not in ("item_id", "modality"):
        raise UsageError(f"{option}: {name!r} is not a field; give a field, id or modality")
    return ItemField(name, path, column)


class FieldColumn:
    """The values of a field in a segment: ``values[codes[i]]`` is a value of row ``rows[i]``.

    Values ascend in SQLite's order: numbers, texts, Booleans, times.
    """

    def __init__(self, entries: Sequence[tuple[Value, str]], num_rows: int) -> None:
        self.values: list[Value] = [value for value, _ in entries]
        self._num_rows = num_rows
        counts = np.array([joined.count(",") + 1 for _, joined in entries], dtype=np.int64)
        joined_rows = ",".join(joined for _, joined in entries)
        self.rows: Int32[np.ndarray, " entries"] = np.fromstring(
            joined_rows, dtype=np.int32, sep=","
        )
        self.codes: Int32[np.ndarray, " entries"] = np.repeat(
            np.arange(len(entries), dtype=np.int32), counts
        )

    @cached_property
    def is_shown(self) -> Bool[np.ndarray, " values"]:
        """Whether each value is shown, rather than another form of it."""
        shown = [_is_shown(value) for value in self.values]
        return np.array(shown, dtype=bool)

    @cached_property
    def _is_sorted(self) -> Bool[np.ndarray, " values"]:
        """Whether each value decides the order, rather than another form of it."""
        has_other_forms = any(not isinstance(value, str) for value in self.values)
        decides = [not (has_other_forms and _has_other_form(value)) for value in self.values]
        return np.array(decides, dtype=bool)

    def shown_codes(self) -> Int32[np.ndarray, " items"]:
        """Return for each row the code of its first shown value; -1 without one."""
        return self._codes_by_row(self.is_shown, descending=False)

    def sorted_codes(self, *, descending: bool) -> Int32[np.ndarray, " items"]:
        """Return for each row the code of its least or, descending, greatest value, or -1."""
        return self._codes_by_row(self._is_sorted, descending=descending)

    def count(self, mask: Bool[np.ndarray, " items"]) -> Int64[np.ndarray, " values"]:
        """Return how many items of a mask have each value; 0 for values that are not shown."""
        counts = np.bincount(self.codes[mask[self.rows]], minlength=len(self.values))
        return np.where(self.is_shown, counts, 0)

    def find(self, value: Value) -> int | None:
        """Return the code of a value, or None if no item of the segment has it."""
        code = bisect.bisect_left(self.values, sort_key(value), key=sort_key)
        return code if code < len(self.values) and self.values[code] == value else None

    def _codes_by_row(
        self, is_used: Bool[np.ndarray, " values"], *, descending: bool
    ) -> Int32[np.ndarray, " items"]:
        codes_by_row = np.full(self._num_rows, -1, dtype=np.int32)
        if len(self.codes):
            used = is_used[self.codes]
            # Of several values of a row, the last that is assigned stays.
            step = 1 if descending else -1
            codes_by_row[self.rows[used][::step]] = self.codes[used][::step]
        return codes_by_row


def read_column(store: ItemStore, field: ItemField, *, deadline: float = math.inf) -> FieldColumn:
    """Return the column of a field in a segment; the last ones are cached.

    Raises
    ------
    DeadlinePassed
        It took until the deadline, on the clock of :func:`time.monotonic`.
    """
    key = field.column or spell_path(field.path)
    column = store.columns.get(key)
    if not isinstance(column, FieldColumn):
        if field.column is None:
            number = store.field_names.get(key)
            source, value = "fields WHERE name = ? GROUP BY value", _CUT_VALUE
            entries = store.rows_by_value(source, value, "value", [number], deadline)
        else:
            value = f"CAST({field.column} AS TEXT)"
            source = f"items WHERE {field.column} IS NOT NULL GROUP BY {field.column}"
            entries = store.rows_by_value(source, value, field.column, [], deadline)
        column = FieldColumn(entries, store.num_rows)
        while len(store.columns) >= MAX_CACHED_COLUMNS:
            store.columns.pop(next(iter(store.columns)), None)
        store.columns[key] = column
    return column


def sort_key(value: Value) -> SortKey:
    """Return a key that sorts values as SQLite does: numbers < texts < Booleans < times."""
    match value:
        case str():
            return 1, value
        case bytes():
            return 2, value
        case None:
            return 3, b""
        case _:
            return 0, value


def as_shown(field: ItemField, value: Value) -> ShownValue:
    """Return a value of the table of fields as the user gave it."""
    match value:
        case bytes() | None:
            return value == TRUE
        case str() if field.column == "modality":
            return Modality.parse(value).value
        case _:
            return value


def _is_shown(value: Value) -> bool:
    if isinstance(value, bytes):
        return value in (TRUE, FALSE)
    return not (isinstance(value, str) and _has_plain_form(value))


def _has_plain_form(text: str) -> bool:
    """Return whether a text is also stored as a number or a Boolean."""
    return text.lower() in ("true", "false") or number_of(text) is not None


def _has_other_form(value: Value) -> bool:
    """Return whether a value is a text that is also stored as a number, a Boolean or a time."""
    if not isinstance(value, str):
        return False
    is_time = len(value) > YEAR_DIGITS and times_of(value) is not None
    return is_time or _has_plain_form(value)
