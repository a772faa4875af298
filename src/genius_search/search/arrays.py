"""Arrays on disk: ``.npy`` files that are written in pieces and memory-mapped."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from genius_search.errors import ArtifactMismatch, ArtifactMissing


class GrowingArray:
    """An ``.npy`` file that rows can be appended to; closing it writes the final header.

    Parameters
    ----------
    columns
        length of a row; None for a one-dimensional array.

    >>> with contextlib.closing(GrowingArray(Path("items.npy"), np.int32)) as items:  # doctest: +SKIP
    ...     items.append(np.arange(3))
    """

    def __init__(self, path: Path, dtype: np.typing.DTypeLike, columns: int | None = None) -> None:
        self.dtype = np.dtype(dtype)
        self.columns = columns
        self.num_rows = 0
        self._file = path.open("wb")
        self._write_header()

    def append(self, rows: Shaped[np.ndarray, "rows ..."]) -> None:
        """Append rows to the file."""
        if len(rows):
            # Not ndarray.tofile, whose error does not say that the disk is full.
            self._file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
            self.num_rows += len(rows)

    def close(self) -> None:
        """Write the header with the final number of rows."""
        if not self._file.closed:
            with self._file:  # closed also when the disk is full
                self._file.seek(0)
                self._write_header()

    def _write_header(self) -> None:
        shape = (self.num_rows,) if self.columns is None else (self.num_rows, self.columns)
        np.lib.format.write_array_header_1_0(  # it reserves space for any number of rows
            self._file, {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        )


def save_array(path: Path, array: Shaped[np.ndarray, "rows ..."]) -> None:
    """Write an ``.npy`` file; unlike ``np.save``, the error of a full disk says so."""
    with contextlib.closing(GrowingArray(path, array.dtype, *array.shape[1:])) as file:
        file.append(array)


def open_array(
    path: Path, *dtypes: np.typing.DTypeLike, dimensions: int = 1
) -> Shaped[np.ndarray, "rows ..."]:
    """Memory-map an ``.npy`` file, read-only. Only its header is read.

    Raises
    ------
    ArtifactMissing
        The file does not exist.
    ArtifactMismatch
        The file is truncated, has an unexpected type or shape, or is not an array.
    """
    expected = f"{' or '.join(np.dtype(dtype).name for dtype in dtypes)} of {dimensions} dimensions"
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        size = array.offset + array.nbytes
    except FileNotFoundError:
        raise ArtifactMissing(f"{path} is missing; restore it, or make its folder again") from None
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  numpy evaluates the header as Python
        raise ArtifactMismatch(
            f"{path} is damaged or no array of {expected} ({error}); restore it, or make it again"
        ) from None
    if (
        array.ndim != dimensions
        or array.dtype not in [np.dtype(dtype) for dtype in dtypes]
        or not array.flags.c_contiguous
    ):
        raise ArtifactMismatch(
            f"{path} holds {array.dtype.str} of shape {array.shape}, expected {expected}; it belongs to "
            "something else, make it again"
        )
    if size != path.stat().st_size:
        raise ArtifactMismatch(
            f"{path} is damaged: it has {path.stat().st_size} bytes, its header promises {size}"
        )
    return np.asarray(array)
