"""Arrays in ``.npy`` files: grown row by row, and opened without reading them.

Opening compares the header with what genius writes, to the letter, and the file's length with what the
header promises, so a truncated or foreign file is refused by name before anything trusts it.
"""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Shaped

from genius.errors import ArtifactMismatch, ArtifactMissing

HEADER: Final = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)"
    rb"\{'descr': '(?P<type>[<|][biuf]\d)', 'fortran_order': False, "
    rb"'shape': \((?P<rows>\d{1,18}),(?: (?P<columns>\d{1,9}))?\), \} *\n",
    re.DOTALL,
)
"""What numpy writes before the rows of a small-endian array of one or two dimensions."""
HEADER_BYTES: Final = 1024
"""More than any such header has."""


class GrowingArray:
    """An ``.npy`` file that rows are appended to; its header is right once it is closed.

    Parameters
    ----------
    columns
        length of a row; None for plain numbers.

    >>> with contextlib.closing(GrowingArray(Path("items.npy"), np.int32)) as items:  # doctest: +SKIP
    ...     items.append(np.arange(3))
    """

    def __init__(self, path: Path, dtype: np.typing.DTypeLike, columns: int | None = None) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.columns = columns
        self.num_rows = 0
        self._file = path.open("wb")
        self._write_header()

    def append(self, rows: Shaped[np.ndarray, "rows ..."]) -> None:
        """Write rows at the end."""
        if len(rows):
            self._file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
            self.num_rows += len(rows)

    def close(self) -> None:
        """Write the header with the number of rows there are."""
        if not self._file.closed:
            with self._file:  # closed also when the disk is full
                self._file.seek(0)
                self._write_header()

    def _write_header(self) -> None:
        shape = (self.num_rows,) if self.columns is None else (self.num_rows, self.columns)
        np.lib.format.write_array_header_1_0(  # it leaves room for any number of rows
            self._file, {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        )


def save_array(path: Path, array: Shaped[np.ndarray, "rows ..."]) -> None:
    """Write an ``.npy`` file; unlike numpy's own saving it says why when it fails, as on a full disk."""
    columns = array.shape[1] if array.ndim == 2 else None
    with closing(GrowingArray(path, array.dtype, columns)) as file:
        file.append(array)


def open_array(
    path: Path, *dtypes: np.typing.DTypeLike, dimensions: int = 1
) -> Shaped[np.ndarray, "rows ..."]:
    """An array as it lies on disk, memory-mapped and read-only, of one of these types.

    Raises
    ------
    ArtifactMissing
        there is no such file.
    ArtifactMismatch
        it is truncated, of another type or shape, or no array at all.
    """
    wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
    try:
        with path.open("rb") as file:
            begin = file.read(HEADER_BYTES)
            size = file.seek(0, 2)
    except FileNotFoundError:
        raise ArtifactMissing(f"{path} is missing; restore it, or make its folder again") from None
    header = HEADER.match(begin)
    if header is None or header.end() != 10 + int.from_bytes(header["length"], "little"):
        raise ArtifactMismatch(f"{path} is damaged or no array of {wanted}; restore it, or make it again")
    shape = tuple(int(header[name]) for name in ("rows", "columns") if header[name] is not None)
    dtype = next((np.dtype(kind) for kind in dtypes if np.dtype(kind).str == header["type"].decode()), None)
    if dtype is None or len(shape) != dimensions:
        raise ArtifactMismatch(
            f"{path} holds {header['type'].decode()} of shape {shape}, expected {wanted} of {dimensions} "
            "dimensions; it belongs to something else, make it again"
        )
    expected = header.end() + dtype.itemsize * shape[0] * (shape[1] if dimensions == 2 else 1)
    if size != expected:
        raise ArtifactMismatch(f"{path} is damaged: it has {size} bytes, its header promises {expected}")
    if 0 in shape:
        return np.zeros(shape, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=header.end(), shape=shape))
