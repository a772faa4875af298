"""Values of fields: what is given becomes JSON, and JSON becomes what conditions are compared with."""

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

from genius_search.border import as_id, is_missing
from genius_search.records import composed

Value: TypeAlias = str | int | float | bytes | None
"""A value as the table of fields stores it: Booleans and times are bytes. None stands for a missing one."""

TRUE: Final = b"\1"
FALSE: Final = b"\0"
NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?")
INTEGER: Final = re.compile(r"-?[0-9]{1,19}")
TIME: Final = re.compile(
    r"\d{4}(-\d\d(-\d\d([Tt ]\d\d(:\d\d(:\d\d(\.\d{1,9})?)?)?(?:[Zz]| ?[+-]\d\d(?::?\d\d)?)?)?)?)?",
    re.ASCII,
)
"""A year, month, day or time in ISO 8601, also with a blank instead of T."""
EXIF_DAY: Final = re.compile(r"(\d{4}):(\d\d):(\d\d)(?![^T ])", re.ASCII)
"""A day as EXIF, and so exiftool, writes it."""
YEAR_DIGITS: Final = 4


class Span(NamedTuple):
    """All values of one kind from ``low`` to ``high``, which may be the same."""

    low: Value
    high: Value


def fields_to_json(fields: Mapping[Any, object] | None) -> tuple[str | None, list[str]]:
    """Return fields as an item stores them, and what is wrong with those that are left out."""
    kept, problems = {}, []
    for name, value in (fields or {}).items():
        try:
            kept.update(plain({name: value}))
        except (TypeError, ValueError, RecursionError) as error:
            problems.append(f"its field {str(name)[:80]!r} is left out: {error}")
    return (json.dumps(kept, ensure_ascii=False) if kept else None), problems


def plain(value: Any) -> Any:  # noqa: C901, PLR0911  a kind of value each
    """Return a value as JSON has it, or None if it is missing: NaN, an infinity, NaT or pandas' NA.

    NumPy's values become Python's, dates and times texts in ISO 8601, and texts are composed (NFC).

    Raises
    ------
    TypeError, ValueError
        JSON has no such value.
    """
    match value:
        case str():
            value.encode()
            return composed(value)
        case bool() | int():
            return value
        case float() | Decimal() | np.floating():
            return float(value) if math.isfinite(value) else None
        case date() | time():
            return None if value != value else value.isoformat()  # noqa: PLR0124  pandas' NaT is a date
        case np.generic() | np.ndarray():
            if value.dtype.name == "datetime64[ns]":
                value = value.astype("datetime64[us]")  # nanoseconds would become numbers
            if isinstance(inner := value.tolist(), np.generic):
                raise TypeError(f"{value!r} is no number, text or date")
            return plain(inner)
        case Mapping():
            return {as_id(name, "a name"): plain(inner) for name, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(inner) for inner in value]
        case PurePath():
            return plain(str(value))
    if is_missing(value):
        return None
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(
        f"a {kind} is no number, text, date, true or false, nor a list or mapping of them"
    )


def table_values(fields: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Value]]:
    """Yield path and value of each value of an item's fields; every path also with None.

    Values in a list, and those of objects in a list, have the path of the list. A text that reads as a number
    or a date is also one.
    """
    waiting: list[tuple[tuple[str, ...], Any]] = [((), fields)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*path, composed(name)), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(path, inner) for inner in value]
        for one in _stored(value):
            yield path, one


def _stored(value: object) -> Iterator[Value]:
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
    """Return the first and the last microsecond of a year, month, day or time in ISO 8601, else None.

    A day may be spelled as in EXIF. They are stored as bytes in the order of time. A time without a zone
    counts as UTC.

    >>> times_of("2024-02")
    Span(low=b'T2024-02-01T00:00:00.000000', high=b'T2024-02-29T23:59:59.999999')
    """
    if exif := EXIF_DAY.match(text):
        text = "-".join(exif.groups()) + text[exif.end() :]
    found = TIME.fullmatch(text)
    if found is None:
        return None
    text = re.sub(r" (?=[+-])", "", text.upper())
    month, day, hour, minute, second, fraction = found.groups()
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
    except (
        ValueError,
        OverflowError,
    ):  # there is no such day, or its year is beyond those of Python
        return None


def _time_key(moment: datetime) -> bytes:
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC).replace(tzinfo=None)
    return b"T" + moment.isoformat(timespec="microseconds").encode()
