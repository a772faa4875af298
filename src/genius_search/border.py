"""Convert and check ids, texts, vectors and paths that come from outside the package.

Every public function passes its arguments through this module. An item therefore has the same id
whichever table, file or library names it, and a value that is no id, text or number is an error
rather than being converted silently.
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
"""A vector that is not longer than this has no usable direction."""
ROWS_PER_CHECK: Final = 4096
"""Number of vectors to check, and to read from a memory-mapped file, at a time."""
MAX_SHOWN_CHARACTERS: Final = 60
"""Maximum number of characters of a value that an error message shows."""
REAL_DTYPES: Final = "fiu"
"""``dtype.kind`` of NumPy's real numbers: floats, signed and unsigned integers."""
MAX_INTEGER_BITS: Final = 14_000
"""Maximum size of a whole number in an id or a field. Python writes no more than 4,300 digits."""
MAX_DECIMAL_DIGITS: Final = 4_000
"""Maximum number of digits of a decimal that is an id."""
MAX_HITS: Final = 10**9
"""Maximum of ``k``, ``offset`` and ``beam`` in a request."""


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a path, with a leading ``~`` or ``~user`` expanded to a home folder as in a shell.

    A ``~`` that is not followed by the name of a user is kept, as in a shell.
    """
    try:
        return Path(os.path.expanduser(path))  # noqa: PTH111  Path.expanduser expands ./~, too
    except ValueError:  # a character that no user name contains, such as NUL
        return Path(path)


def as_text(text: object, name: str) -> str:
    """Return a cleaned text in Unicode's composed form (NFC).

    Parameters
    ----------
    name
        the name of the text in error messages.

    Raises
    ------
    UsageError
        The value is not a text, or not valid Unicode.
    """
    if not isinstance(text, str):
        raise UsageError(f"{name} is {_show(text)}, expected a text")
    # str.__str__ turns subclasses, such as np.str_ and members of enumerations, into plain strings.
    return clean(check_unicode(str.__str__(text)))


def is_missing(value: object) -> bool:
    """Return whether a value is None, NaN, pandas' NA or NaT, or masked."""
    if isinstance(value, Decimal):
        return value.is_nan()  # math.isnan raises for a signalling NaN
    if isinstance(value, float | np.floating):
        return math.isnan(value)
    return value is None or value is np.ma.masked or type(value).__name__ in ("NAType", "NaTType")


def as_id(value: Any, name: str = "the id") -> str:
    """Return an id as a text. Texts are composed (NFC), and whole numbers are written in digits.

    Whole floats count as whole numbers, because a table turns a column of integers into floats as
    soon as a value is missing.

    >>> as_id("7"), as_id(7), as_id(np.float64(7))
    ('7', '7', '7')

    Raises
    ------
    UsageError
        The value is neither: it is missing, a fraction, bytes, a truth value or a tuple.
    """
    if type(value) is str:  # the most frequent case first
        return composed(value)
    if type(value) is int and value.bit_length() <= MAX_INTEGER_BITS:
        return str(value)
    if not isinstance(value, str | np.generic) and getattr(value, "shape", None) == ():
        # An array or a tensor without dimensions becomes a number; NumPy's masked value, None.
        value = value.tolist()
    if isinstance(value, str):
        return composed(str.__str__(value))
    number = _whole_number(value)
    if number is not None:
        return str(number)
    remedy = "convert it to a text, as in str(value)"
    if is_missing(value):
        remedy = "leave out items without an id, or give them one"
    elif isinstance(value, bytes):
        remedy = "decode it, as in value.decode()"
    elif isinstance(value, float | np.floating) and value.is_integer():
        remedy = "a float this large may have been rounded, so give integers or texts"
    raise UsageError(f"{name} is {_show(value)}, expected a text or a whole number; {remedy}")


def _whole_number(value: Any) -> int | None:
    """Return a whole number as an integer, or None for other values.

    None is returned for floats that may have been rounded, too: a float64 has a mantissa of 53
    bits, so 2**53 + 1 would be stored as 2**53.
    """
    if isinstance(value, bool | np.bool_ | np.timedelta64):  # NumPy's durations are integers, too
        return None
    if isinstance(value, int | np.integer):
        return int(value) if int(value).bit_length() <= MAX_INTEGER_BITS else None
    if isinstance(value, Decimal):
        is_readable = value.is_finite() and value.adjusted() < MAX_DECIMAL_DIGITS
    elif isinstance(value, float | np.floating):
        digits = 53 if isinstance(value, float) else np.finfo(type(value)).nmant + 1
        is_readable = math.isfinite(value) and abs(float(value)) < 2.0**digits
    else:
        return None
    return int(value) if is_readable and value == int(value) else None


def as_ids(values: object, name: str = "ids") -> list[str]:
    """Return a column of ids as texts (:func:`as_id`).

    Raises
    ------
    UsageError
        The values are not a column (:func:`as_column`).
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


def as_id_list(ids: object) -> list[str]:
    """Return a single id, or a column of ids, as a list of texts; raise like :func:`as_ids`."""
    if isinstance(ids, set | frozenset):
        ids = [*ids]
    is_iterable = isinstance(ids, Iterable) and getattr(ids, "shape", None) != ()
    return as_ids(ids) if is_iterable and not isinstance(ids, str | bytes) else [as_id(ids)]


def as_column(values: Any, name: str) -> list[Any]:
    """Return the values of a list, an array, a tensor, a column of a table or any other iterable.

    Raises
    ------
    UsageError
        The argument is a single text, a mapping, a set, a whole table or not iterable.
    """
    if isinstance(values, set | frozenset):
        raise UsageError(f"{name} are given as a set, which has no order; give a list")
    is_single = isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable)
    if is_single or len(getattr(values, "shape", (0,))) != 1:
        type_name = f"{type(values).__module__}.{type(values).__qualname__}"
        raise UsageError(
            f"{name} are given as a {type_name.removeprefix('builtins.')}; "
            "expected a list, or one column of a table"
        )
    if hasattr(values, "detach"):
        values = _read_tensor(values, name)
    if type(values) is np.ndarray and (values.dtype.kind in "iuU" or values.dtype == np.float64):
        values = values.tolist()  # Python's numbers: equal values that are faster to read
    if hasattr(values, "to_pylist"):  # an array of Arrow
        values = values.to_pylist()
    return list(values)


def as_numbers(values: Any, name: str) -> Shaped[np.ndarray, ...]:
    """Return real numbers in an array, a tensor, a table or nested lists as a NumPy array.

    Tensors are detached and copied to the CPU; bfloat16 and smaller types become float32. An array
    that is already in this form is returned unchanged, so a memory-mapped array is not read.

    Raises
    ------
    BadData
        A number is masked; the message names its row.
    UsageError
        There are other things than real numbers, or rows of different lengths.
    """
    if type(values) is np.ndarray and values.dtype.kind in REAL_DTYPES:
        return values
    if isinstance(values, np.ma.MaskedArray):
        is_masked = np.atleast_1d(np.ma.getmaskarray(values))
        if is_masked.any():
            row = is_masked.reshape(len(is_masked), -1).any(axis=1).argmax()
            part = "row" if values.ndim > 1 else "number"
            raise BadData(f"{part} {row} of {name} is masked; leave it out, or fill in a value")
        values = values.data
    if hasattr(values, "detach"):
        array = _read_tensor(values, name)
    elif isinstance(values, list | tuple):
        array = _stack_rows(values, name)
    else:
        try:
            array = np.asarray(values)
        except Exception as error:  # noqa: BLE001  other libraries raise any class
            raise UsageError(f"{name} cannot be read as an array: {error}") from None
    if array.dtype.kind == "O" and array.ndim:  # rows are lists or arrays, as in a pandas column
        array = _stack_rows(array.tolist(), name)
    if array.dtype.kind == "V" and not issubclass(array.dtype.type, np.void):
        # bfloat16 of ml_dtypes and jax
        array = array.astype(np.float32)
    if array.dtype.kind not in REAL_DTYPES:
        raise UsageError(
            f"{name} are {_type_name(array, values)} of shape {array.shape}; expected real "
            "numbers, such as those of array.astype('float32')"
        )
    return array


def _type_name(array: np.ndarray, values: Any) -> str:
    if not array.ndim:
        return type(values).__qualname__
    if str(array.dtype) == "|V2":
        return "|V2 (bytes, as NumPy saves bfloat16)"
    return str(array.dtype)


def check_range(name: str, number: Any, minimum: int, maximum: int = MAX_HITS) -> None:
    """Raise :class:`UsageError` unless a number is whole, and between its minimum and maximum."""
    if isinstance(number, bool) or not hasattr(type(number), "__index__"):
        raise UsageError(f"{name} is {_show(number)}, expected a whole number")
    if not minimum <= number <= maximum:
        raise UsageError(
            f"{name} is {number}, it must be at least {minimum} and at most {maximum:,}"
        )


def as_matrix(values: Any, name: str) -> Shaped[np.ndarray, "rows dim"]:
    """Return vectors as a matrix with one row each (:func:`as_numbers`), each with a direction.

    Raises
    ------
    BadData
        A vector contains only zeros, or a number that is masked, not finite or too large. The
        message names its row.
    UsageError
        The argument is not a matrix of real numbers.
    """
    array = as_numbers(values, name)
    if array.ndim != 2 or not array.size:
        raise UsageError(
            f"{name} are {array.dtype} of shape {array.shape}; expected numbers of shape "
            "(rows, dim), with one row for each vector"
        )
    for start in range(0, len(array), ROWS_PER_CHECK):
        with np.errstate(over="ignore"):  # an overflowing length becomes infinite, and is reported
            rows = np.asarray(array[start : start + ROWS_PER_CHECK], dtype=np.float64)
            lengths = np.linalg.norm(rows, axis=1)
        invalid = np.flatnonzero(~(np.isfinite(lengths) & (lengths > SHORTEST_VECTOR)))
        if len(invalid):
            end = start + len(rows) - 1
            raise BadData(
                f"row {start + invalid[0]} of {name} has {_vector_problem(rows[invalid[0]])}; "
                f"leave such rows out ({len(invalid)} of rows {start} to {end})"
            )
    return array


def _vector_problem(vector: np.ndarray) -> str:
    """Describe why a vector has no direction."""
    if not vector.any():
        return "only zeros"
    if not np.isfinite(vector).all():
        return "a number that is not finite"
    return "numbers too small or too large to have a direction"


def _stack_rows(rows: Sequence[Any], name: str) -> Shaped[np.ndarray, ...]:
    """Return an array with the given rows: arrays, lists or numbers."""
    rows = [
        as_numbers(row, f"row {number} of {name}") if hasattr(row, "__array__") else row
        for number, row in enumerate(rows)
    ]
    array = _array_or_none(rows)
    if array.dtype.kind in REAL_DTYPES:
        return array
    # Find the row to blame.
    for number, row in enumerate(rows):
        row_array = _array_or_none(row)
        if row_array.dtype.kind not in REAL_DTYPES:
            raise UsageError(f"row {number} of {name} is {_show(row)}, expected real numbers")
        if row_array.shape != np.shape(rows[0]):
            raise UsageError(
                f"row {number} of {name} has the shape {row_array.shape}, but row 0 has "
                f"{np.shape(rows[0])}; all rows must have the same length"
            )
    return array


def _array_or_none(values: object) -> Shaped[np.ndarray, ...]:
    """Return numbers or lists as an array, or an array of None if NumPy cannot convert them."""
    try:
        return np.asarray(values)
    except (ValueError, OverflowError):  # different lengths, or a whole number beyond 64 bits
        return np.asarray(None)


def _read_tensor(tensor: Any, name: str) -> Shaped[np.ndarray, ...]:
    """Return a PyTorch tensor as a NumPy array."""
    try:
        if tensor.is_floating_point() and tensor.dtype.itemsize <= 2:  # NumPy has no bfloat16
            tensor = tensor.float()
        array: np.ndarray = tensor.numpy(force=True)  # detach, and copy to the CPU
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{name} cannot be read as an array: {error}") from None
    return array


def _show(value: object) -> str:
    """Return a value with its type for an error message, cut if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or a list that contains itself
        text = "a value that cannot be shown"
    if len(text) > MAX_SHOWN_CHARACTERS:
        text = f"{text[:MAX_SHOWN_CHARACTERS]}…"
    return f"{text} ({type(value).__qualname__})"
