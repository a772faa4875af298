"""Values of fields, in three forms.

Python values, such as ``datetime.date(2024, 5, 1)``, become JSON (``"2024-05-01"``), which is
stored with the item. JSON values become table values, with which conditions are compared: that
text, and also the time ``b"T2024-05-01T00:00:00.000000"``.
"""

from __future__ import annotations

import json
import math
import re
from calendar import monthrange
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import PurePath
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from genius_search.border import MAX_INTEGER_BITS, as_id, is_missing
from genius_search.records import composed

Value: TypeAlias = str | int | float | bytes | None
"""A value in the table of fields. Booleans and times are bytes; None is a missing value."""

TRUE: Final = b"\1"
FALSE: Final = b"\0"
NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?")
INTEGER: Final = re.compile(r"-?[0-9]{1,19}")
TIME: Final = re.compile(
    r"\d{4}(-\d\d(-\d\d([Tt ]\d\d(:\d\d(:\d\d(\.\d{1,9})?)?)?(?:[Zz]| ?[+-]\d\d(?::?\d\d)?)?)?)?)?",
    re.ASCII,
)
"""A year, month, day or time in ISO 8601; a blank may replace the T."""
EXIF_DAY: Final = re.compile(r"(\d{4}):(\d\d):(\d\d)(?![^T ])", re.ASCII)
"""A day as EXIF and exiftool write it: ``2024:05:01``."""
YEAR_DIGITS: Final = 4
"""Length of a year. A text of this length is a number and not also a time."""


class Span(NamedTuple):
    """All values of one type from ``low`` to ``high``, both included."""

    low: Value
    high: Value


def fields_to_json(fields: Mapping[Any, object] | None) -> tuple[str | None, list[str]]:
    """Return fields as JSON (None without fields), and a message for each unusable field."""
    json_fields: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in (fields or {}).items():
        try:
            field = to_json_value({name: value})
        except (TypeError, ValueError, RecursionError) as error:
            problems.append(f"its field {str(name)[:80]!r} is left out: {error}")
            continue
        if field.keys() & json_fields.keys():
            problems.append(f"its field {str(name)[:80]!r} is left out: another one has this name")
        else:
            json_fields |= field
    return (json.dumps(json_fields, ensure_ascii=False) if json_fields else None), problems


def to_json_value(value: Any) -> Any:  # noqa: C901, PLR0911, PLR0912  one case for each type
    """Convert a value to a type of JSON.

    NumPy's values become Python's, dates and times become texts in ISO 8601, and texts are
    composed (NFC). Missing values become None: NaN, infinities, NaT, and pandas' NA.

    Raises
    ------
    TypeError, ValueError
        The value has no form in JSON.
    """
    match value:
        case str():
            value.encode()
            return composed(value)
        case bool():
            return value
        case int():
            if value.bit_length() > MAX_INTEGER_BITS:
                raise ValueError(f"its integer has more than {MAX_INTEGER_BITS:,} bits")
            return value
        case float() | Decimal() | np.floating():
            return float(value) if math.isfinite(value) else None
        case date() | time():
            is_nat = value != value  # noqa: PLR0124  pandas' NaT is a date
            return None if is_nat else value.isoformat()
        case np.generic() | np.ndarray():
            python_value = _as_python_times(value) if value.dtype.kind == "M" else value.tolist()
            if isinstance(python_value, np.generic) or value.dtype.kind == "m":
                raise TypeError(f"{value!r} is no number, text or date")
            return to_json_value(python_value)
        case Mapping():
            inner_values = [(as_id(key, "a name"), to_json_value(value[key])) for key in value]
            if len(named := dict(inner_values)) < len(inner_values):
                raise ValueError(f"two of its names are alike once they are texts: {[*value]}")
            return named
        case list() | tuple() | set() | frozenset():
            return [to_json_value(inner) for inner in value]
        case PurePath():
            return to_json_value(str(value))
    if is_missing(value):
        return None
    type_name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(
        f"a {type_name} is no number, text, date, true or false, nor a list or mapping of them"
    )


def _as_python_times(times: Any) -> Any:
    """Return NumPy's dates and times as Python's, with microseconds, and NaT as None.

    Raises
    ------
    TypeError
        A year is not between 1 and 9999. NumPy would return an integer.
    """
    if np.datetime_data(times.dtype)[0] in ("ns", "ps", "fs", "as"):  # finer than Python's times
        times = times.astype("datetime64[us]")
    python_times = times.tolist()
    if any(isinstance(moment, int) for moment in np.ravel(np.asarray(python_times, object))):
        raise TypeError(f"{times!r} is not in the years 1 to 9999")
    return python_times


def table_values(fields: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Value]]:
    """Yield the path and the table values of each value in an item's fields.

    Elements of a list have the path of the list. Every path also has the value None. ::

        {"price": 12, "size": {"width": [3, "4"]}}
            -> (), None;  ("price",), None;  ("price",), 12;  ("size",), None
               ("size", "width"), None, three times
               ("size", "width"), 3;  ("size", "width"), "4";  ("size", "width"), 4
    """
    unvisited: list[tuple[tuple[str, ...], Any]] = [((), fields)]
    while unvisited:
        path, value = unvisited.pop()
        if isinstance(value, dict):
            unvisited += [((*path, composed(name)), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            unvisited += [(path, inner) for inner in value]
        for table_value in _table_values_of(value):
            yield path, table_value


def _table_values_of(value: object) -> Iterator[Value]:
    """Yield None and the forms of a value: ``"2024-05"`` is a text and a time."""
    yield None
    match value:
        case bool():
            yield TRUE if value else FALSE
        case int():
            yield number_of(str(value))
        case float() if math.isfinite(value):
            yield value
        case str():
            yield composed(value.encode(errors="replace").decode())
            yield number_of(value)
            if value.lower() in ("true", "false"):
                yield TRUE if value.lower() == "true" else FALSE
            if len(value) > YEAR_DIGITS and (times := times_of(value)) is not None:
                yield times.low


def number_of(text: str) -> int | float | None:
    """Parse a text as a JSON number; return None if it is not one, such as ``007``.

    Integers beyond 64 bits become floats.
    """
    if NUMBER.fullmatch(text) is None:
        return None
    if INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63:
        return int(text)
    return float(text)


def times_of(text: str) -> Span | None:
    """Return the first and last microsecond of a year, month, day or time; None for other texts.

    The text is in ISO 8601, or has a day as in EXIF. Times without a zone are UTC. The results are
    bytes, which sort by time.

    >>> times_of("2024-02")
    Span(low=b'T2024-02-01T00:00:00.000000', high=b'T2024-02-29T23:59:59.999999')
    """
    if exif := EXIF_DAY.match(text):
        text = "-".join(exif.groups()) + text[exif.end() :]
    match = TIME.fullmatch(text)
    if match is None:
        return None
    text = re.sub(r" (?=[+-])", "", text.upper())
    # Each group holds the rest of the text, from "-05-01T12:30" to ".5"; None if it is absent.
    month, day, hour, minute, second, fraction = match.groups()
    try:
        low = datetime.fromisoformat(text if day else f"{text}-01" if month else f"{text}-01-01")
        high = low.replace(
            month=low.month if month else 12,
            hour=low.hour if hour else 23,
            minute=low.minute if minute else 59,
            second=low.second if second else 59,
            microsecond=low.microsecond if fraction else 999_999,
        )
        high = high if day else high.replace(day=monthrange(high.year, high.month)[1])
        return Span(_time_key(low), _time_key(high))
    except (ValueError, OverflowError):  # 30 February, or the year 0
        return None


def _time_key(moment: datetime) -> bytes:
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC).replace(tzinfo=None)
    return b"T" + moment.isoformat(timespec="microseconds").encode()
