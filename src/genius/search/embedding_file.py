"""Embeddings on disk: 16-bit floats, or 8-bit integers with a scale for each vector.

They are written and copied block by block, so that no more than a block is ever in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float16, Int8, Shaped

from genius.search.arrays import GrowingArray

EmbeddingType: TypeAlias = Literal["float16", "int8"]
"""How stored embeddings are kept."""
BLOCK_BYTES: Final = 16 << 20
LARGEST: Final = 127


class Quantized(NamedTuple):
    """Vectors as integers: a vector is ``values`` times its ``scales``."""

    values: Int8[np.ndarray, "rows dim"]
    scales: Float16[np.ndarray, " rows"]


def quantize(embeddings: Float16[np.ndarray, "rows dim"]) -> Quantized:
    """Round vectors to integers, the largest component of each to ±127."""
    vectors = embeddings.astype(np.float32)
    largest = np.abs(vectors).max(axis=1, initial=0)
    scales = (largest / LARGEST).astype(np.float16)
    divisor = np.where(scales > 0, scales, 1).astype(np.float32)
    values = np.rint(vectors / divisor[:, None]).clip(-LARGEST, LARGEST)
    return Quantized(values.astype(np.int8), scales)


class EmbeddingWriter:
    """Writes embeddings, block by block.

    >>> with closing(EmbeddingWriter(file, scales, dim=768, kind="int8")) as out:  # doctest: +SKIP
    ...     out.append(embeddings)
    """

    def __init__(self, path: Path, scales: Path, *, dim: int, kind: EmbeddingType) -> None:
        self._rows = GrowingArray(path, np.dtype(kind), dim)
        self._scales = GrowingArray(scales, np.float16) if kind == "int8" else None

    def append(self, embeddings: Float16[np.ndarray, "rows dim"]) -> None:
        """Add embeddings as they are; they are rounded if they are to be integers."""
        rows_at_once = max(1, BLOCK_BYTES // (4 * max(1, embeddings.shape[1])))
        for start in range(0, len(embeddings), rows_at_once):
            block = embeddings[start : start + rows_at_once]
            self.append_stored(*((block, None) if self._scales is None else quantize(block)))

    def append_stored(
        self, values: Shaped[np.ndarray, "rows dim"], scales: Float16[np.ndarray, " rows"] | None
    ) -> None:
        """Add embeddings as another file keeps them."""
        self._rows.append(values)
        if self._scales is not None and scales is not None:
            self._scales.append(scales)

    def close(self) -> None:
        """Finish the files."""
        self._rows.close()
        if self._scales is not None:
            self._scales.close()


def read_blocks(path: Path) -> Iterator[Shaped[np.ndarray, "rows dim"]]:
    """The rows of an ``.npy`` file in order, a block at a time; nothing is mapped into memory."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        (rows, dim), _, dtype = np.lib.format.read_array_header_1_0(file)
        rows_at_once = max(1, BLOCK_BYTES // (dtype.itemsize * max(1, dim)))
        for start in range(0, rows, rows_at_once):
            count = min(rows_at_once, rows - start)
            yield np.fromfile(file, dtype, count * dim).reshape(count, dim)
