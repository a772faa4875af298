"""The border: what ids, texts, vectors and paths become that come from outside.

Every public entry passes them through here, so that an item has one id whatever table, file or
library names it, and nothing that is no id, text or number becomes one in silence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Shaped

from genius_search.errors import BadData, UsageError
from genius_search.records import check_unicode, composed
from genius_search.text import clean

SHORTEST_VECTOR: Final = 1e-12
"""A vector that is not longer has no direction."""
ROWS_AT_ONCE: Final = 4096
"""Vectors that are checked together, and so read from a memory-mapped file."""
SHOWN: Final = 60
"""Characters of a value that an error shows."""
NUMBERS: Final = "fiu"
"""Kinds of NumPy's types whose values are real numbers: floats and integers."""


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home folder in place of a leading ``~`` or ``~user``, as shells do.

    As there, ``~`` before anything that names no user stays as it is.
    """
    try:
        return Path(os.path.expanduser(path))  # noqa: PTH111  a Path of ./~ would become it, too
    except ValueError:  # a character that no user's name has
        return Path(path)


def as_text(text: object, name: str) -> str:
    """Return a text in Unicode's composed form (NFC), cleaned; ``name`` is what an error calls it.

    Raises
    ------
    UsageError
        It is not a text, or not valid Unicode.
    """
    if not isinstance(text, str):
        raise UsageError(f"{name} is {_show(text)}, expected a text")
    return clean(
        check_unicode(str.__str__(text))
    )  # those of NumPy and of enumerations become plain ones


def is_missing(value: object) -> bool:
    """Return whether a value is None, NaN, pandas' NA or NaT, or masked."""
    if isinstance(value, float | np.floating | Decimal):
        return math.isnan(value)
    return value is None or value is np.ma.masked or type(value).__name__ in ("NAType", "NaTType")


def as_id(value: Any, name: str = "the id") -> str:
    """Return an id as a text: a text in composed form (NFC), or a whole number in digits.

    Floats that are whole count as whole numbers: a table turns a column of integers into floats
    as soon as it has a gap.

    >>> as_id("7"), as_id(7), as_id(np.float64(7))
    ('7', '7', '7')

    Raises
    ------
    UsageError
        It is anything else: a missing value, a fraction, bytes, a truth value or a tuple.
    """
    if type(value) is str:  # as most are
        return composed(value)
    if type(value) is int:
        return str(value)
    if not isinstance(value, str | np.generic) and getattr(value, "shape", None) == ():
        value = value.tolist()  # an array or a tensor without dimensions; None if it is masked
    if isinstance(value, str):
        return composed(str.__str__(value))
    number = _whole_number(value)
    if number is not None:
        return str(number)
    remedy = "make a text of it, as in str(value)"
    if is_missing(value):
        remedy = "leave out what has no id, or give it one"
    elif isinstance(value, bytes):
        remedy = "decode it, as in value.decode()"
    elif isinstance(value, float | np.floating) and value.is_integer():
        remedy = "such a large float may stand for another number, so give integers or texts"
    raise UsageError(f"{name} is {_show(value)}, expected a text or a whole number; {remedy}")


def _whole_number(value: Any) -> int | None:
    """Return a whole number as an integer; None for others, and for floats that may be rounded."""
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, int | np.integer):
        return int(value)
    if not isinstance(value, float | np.floating | Decimal) or not math.isfinite(value):
        return None
    if not isinstance(value, Decimal):
        digits = 53 if isinstance(value, float) else np.finfo(type(value)).nmant + 1
        if abs(float(value)) >= 2.0**digits:
            return None
    return int(value) if value == int(value) else None


def as_ids(values: object, name: str = "ids") -> list[str]:
    """Return a column of ids as texts (:func:`as_id`).

    Raises
    ------
    UsageError
        It is not a column.
    BadData
        A value is not an id. The message names its row.
    """
    ids = []
    for row, value in enumerate(as_column(values, name)):
        try:
            ids.append(as_id(value))
        except UsageError as error:
            raise BadData(f"row {row}: {error}") from None
    return ids


def as_id_list(given: object) -> list[str]:
    """Return one id, or each of several, as texts; raises like :func:`as_ids`."""
    is_several = isinstance(given, Iterable) and getattr(given, "shape", None) != ()
    return as_ids(given) if is_several and not isinstance(given, str | bytes) else [as_id(given)]


def as_column(values: Any, name: str) -> list[Any]:
    """Return the values of a list, an array, a tensor, a column of a table or any other iterable.

    Raises
    ------
    UsageError
        It is one text, a mapping, a whole table or nothing to iterate over.
    """
    is_single = isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable)
    if is_single or len(getattr(values, "shape", (0,))) != 1:
        kind = f"{type(values).__module__}.{type(values).__qualname__}".removeprefix("builtins.")
        raise UsageError(f"{name} are given as a {kind}; expected a list, or one column of a table")
    if hasattr(values, "detach"):
        values = _read_tensor(values, name)
    if type(values) is np.ndarray and (values.dtype.kind in "iuU" or values.dtype == np.float64):
        values = values.tolist()  # the same values, and quicker to read
    if hasattr(values, "to_pylist"):  # of Arrow
        values = values.to_pylist()
    return list(values)


def as_numbers(values: Any, name: str) -> Shaped[np.ndarray, ...]:
    """Return an array, a tensor, a table or nested lists of real numbers as an array of NumPy.

    Tensors are detached and copied from other devices; bfloat16 and smaller types become float32.
    A memory-mapped array is not read.

    Raises
    ------
    BadData
        A number is masked; the message names its row.
    UsageError
        There are other things than real numbers, or rows of different lengths.
    """
    if type(values) is np.ndarray and values.dtype.kind in NUMBERS:
        return values
    if isinstance(values, np.ma.MaskedArray):
        is_masked = np.atleast_1d(np.ma.getmaskarray(values))
        if is_masked.any():
            row = is_masked.reshape(len(is_masked), -1).any(axis=1).argmax()
            part = "row" if values.ndim > 1 else "number"
            raise BadData(f"{part} {row} of {name} is masked; leave it out, or fill it")
        values = values.data
    if hasattr(values, "detach"):
        array = _read_tensor(values, name)
    elif isinstance(values, list | tuple):
        array = _join(values, name)
    else:
        try:
            array = np.asarray(values)
        except Exception as error:  # noqa: BLE001  whatever another library raises
            raise UsageError(f"{name} cannot be read as an array: {error}") from None
    if array.dtype.kind == "O" and array.ndim:  # rows are lists or arrays, as in a column of pandas
        array = _join(array.tolist(), name)
    if array.dtype.kind == "V" and array.dtype.type is not np.void:  # bfloat16, as of jax
        array = array.astype(np.float32)
    if array.dtype.kind not in NUMBERS:
        kind = str(array.dtype) if array.ndim else type(values).__qualname__
        kind += " (bytes, as NumPy saves bfloat16)" if kind == "|V2" else ""
        raise UsageError(
            f"{name} are {kind} of shape {array.shape}; expected real numbers, such as those of "
            "array.astype('float32')"
        )
    return array


def as_matrix(values: Any, name: str) -> Shaped[np.ndarray, "rows dim"]:
    """Return vectors as a matrix with a row for each (:func:`as_numbers`); each has a direction.

    Raises
    ------
    BadData
        A vector has only zeros, or a number that is masked, not finite or too large; the message
        names its row.
    UsageError
        It is not a matrix of real numbers.
    """
    array = as_numbers(values, name)
    if array.ndim != 2 or not array.size:
        raise UsageError(
            f"{name} are {array.dtype} of shape {array.shape}; expected numbers of shape "
            "(rows, dim), a row for each vector"
        )
    for start in range(0, len(array), ROWS_AT_ONCE):
        with np.errstate(over="ignore"):  # such a length is not finite
            rows = np.asarray(array[start : start + ROWS_AT_ONCE], dtype=np.float64)
            lengths = np.linalg.norm(rows, axis=1)
        bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > SHORTEST_VECTOR)))
        if len(bad):
            first, end = rows[bad[0]], start + len(rows) - 1
            problem = "numbers too small or too large to have a direction"
            if not first.any():
                problem = "only zeros"
            elif not np.isfinite(first).all():
                problem = "a number that is not finite"
            raise BadData(
                f"row {start + bad[0]} of {name} has {problem}; leave such rows out "
                f"({len(bad)} of rows {start} to {end})"
            )
    return array


def _join(rows: Sequence[Any], name: str) -> Shaped[np.ndarray, ...]:
    """Return the array whose rows are these: arrays, lists or numbers."""
    rows = [
        as_numbers(row, f"row {number} of {name}") if hasattr(row, "__array__") else row
        for number, row in enumerate(rows)
    ]
    array = _plain_array(rows)
    if array.dtype.kind in NUMBERS:
        return array
    for number, row in enumerate(rows):
        one = _plain_array(row)
        if one.dtype.kind not in NUMBERS:
            raise UsageError(f"row {number} of {name} is {_show(row)}, expected real numbers")
        if one.shape != np.shape(rows[0]):
            raise UsageError(
                f"row {number} of {name} has the shape {one.shape}, and row 0 has "
                f"{np.shape(rows[0])}; give rows of one length"
            )
    return array


def _plain_array(values: object) -> Shaped[np.ndarray, ...]:
    """Return numbers or lists as an array; of objects if they have none."""
    try:
        return np.asarray(values)
    except (ValueError, OverflowError):  # different lengths, or a whole number beyond 64 bits
        return np.asarray(None)


def _read_tensor(tensor: Any, name: str) -> Shaped[np.ndarray, ...]:
    """Return a tensor of PyTorch as an array."""
    try:
        if tensor.is_floating_point() and tensor.dtype.itemsize <= 2:  # NumPy has no bfloat16
            tensor = tensor.float()
        array: np.ndarray = tensor.numpy(force=True)  # without its gradient, on the CPU
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{name} cannot be read as an array: {error}") from None
    return array


def _show(value: object) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
    return f"{shown} ({type(value).__qualname__})"
