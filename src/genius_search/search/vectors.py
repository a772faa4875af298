"""Arrays on disk, memory-mapped, and what an index stores of embeddings: 16, 8, 4, 2 or 1 bits a number.

With 16 bits a number is in half precision. With fewer, what is stored is the residual of an embedding, the
part that the code vectors of its ID do not explain: odd integers of so many bits times a scale. Since the ID
is stored anyway, a bit of the residual tells more than one of the embedding. The scale makes a residual's
product with itself exact, as in RaBitQ (Gao and Long, SIGMOD 2024); the nearest vector would be too short,
and products with queries too small.
"""

from __future__ import annotations

import mmap
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float, Float16, Float32, Int16, Int64, Shaped, UInt8

from genius_search.artifact import shape_matches
from genius_search.errors import ArtifactMismatch, ArtifactMissing

if TYPE_CHECKING:
    from genius_search.search.rank import CodeRanker
    from genius_search.search.table import IdTable

EmbeddingBits: TypeAlias = Literal[1, 2, 4, 8, 16]
"""Bits of a number of a stored embedding."""

RESIDUAL_BITS: Final[tuple[EmbeddingBits, ...]] = (1, 2, 4, 8)
"""Those of residuals, as :data:`genius_search.nn.spread.BITS`."""
STEPS: Final = {1: 2.0, 2: 0.9957, 4: 0.3352}
"""Distance between neighbouring values, in standard deviations: the best for a normal distribution (Max,
"Quantizing for minimum distortion", 1960). With one bit only the sign counts; with 8 bits the largest number
decides, which no step is too coarse for."""


class Quantized(NamedTuple):
    """Vectors as they are stored: a vector is its integers times its scale."""

    values: Shaped[np.ndarray, "rows width"]
    """Half precision, or packed integers."""
    scales: Float16[np.ndarray, " rows"] | None
    """None in half precision."""


class Expected(NamedTuple):
    """What an array on disk must be."""

    types: str
    """Names of the types that it may have, such as ``"u1 i2"``."""
    shape: tuple[int | None, ...]
    """None for any length."""
    least: int | None = None
    """No number is less, nor infinite or NaN; None for any number."""
    most: int = 32_767
    step: int | None = None
    """Each number is at least so much more than the one before."""

    def admits(self, array: Shaped[np.ndarray, ...]) -> bool:
        """Return whether the numbers of an array of this type and shape are as they must be."""
        if self.least is None or not array.size:
            return True
        if array.dtype.kind == "f":  # half precision; this is the exponent of infinity and NaN
            return bool((array.view(np.uint16) & 0x7C00).max() < 0x7C00)
        if array.min() < self.least or array.max() > self.most:
            return False
        return self.step is None or bool((array[1:] - array[:-1] >= self.step).all())


def open_array(path: Path, expected: Expected) -> Shaped[np.ndarray, "rows ..."]:
    """Memory-map an ``.npy`` file, read-only, and check its header and its numbers.

    Raises
    ------
    ArtifactMissing
        The file does not exist.
    ArtifactMismatch
        The file is truncated, is no array, or not what is expected.
    """
    try:
        with path.open("rb") as file:  # np.load takes twice as long
            np.lib.format.read_magic(file)
            shape, is_turned, dtype = np.lib.format.read_array_header_1_0(file)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            array = np.frombuffer(mapped, dtype, offset=file.tell()).reshape(shape)
    except FileNotFoundError:
        raise ArtifactMissing(f"{path} is missing; restore it, or make its folder again") from None
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  numpy evaluates the header as Python
        raise ArtifactMismatch(
            f"{path} is damaged ({error}); restore it, or make it again"
        ) from None
    types, wanted, least, most, _ = expected
    is_known = array.dtype in [np.dtype(name) for name in types.split()] and not is_turned
    if not (is_known and shape_matches(array.shape, wanted) and expected.admits(array)):
        raise ArtifactMismatch(
            f"{path} is damaged or belongs to something else: it has {array.dtype.name} of shape "
            f"{array.shape}, expected {types} of {wanted}"
            f"{'' if least is None else f' from {least} to {most}, in order'}; restore it, or make it again"
        )
    return array


def is_residual(bits: EmbeddingBits) -> bool:
    """Return whether what is stored is the residual of an embedding."""
    return bits < 16


def quantize(vectors: Float[np.ndarray, "rows dim"], bits: EmbeddingBits) -> Quantized:
    """Quantize embeddings, or residuals if there are fewer than 16 bits."""
    if bits == 16:
        return Quantized(vectors.astype(np.float16), None)
    vectors = vectors.astype(np.float32)
    half = 1 << (bits - 1)
    if bits == 8:
        steps = np.abs(vectors).max(axis=1, initial=0) / np.float32(half)
    else:
        steps = np.sqrt(np.square(vectors).mean(axis=1)) * np.float32(STEPS[bits])
    levels = np.floor(vectors / np.where(steps > 0, steps, 1)[:, None]).clip(-half, half - 1) + half
    products = np.vecdot(2 * levels + (1 - 2 * half), vectors)
    scales = np.square(vectors).sum(axis=1) / np.where(products > 0, products, 1)
    return Quantized(_pack(levels.astype(np.uint8), bits), scales.astype(np.float16))


def stored_width(dim: int, bits: EmbeddingBits) -> int:
    """Return the length of the stored row of a vector of ``dim`` numbers."""
    return -(-dim * bits // 8) if is_residual(bits) else dim


def _pack(
    levels: UInt8[np.ndarray, "rows dim"], bits: EmbeddingBits
) -> UInt8[np.ndarray, "rows width"]:
    """Pack numbers: the first ``width`` lie in the lowest bits of the bytes, the next ones above them."""
    rows, dim = levels.shape
    width, parts = stored_width(dim, bits), 8 // bits
    padded = np.pad(levels, ((0, 0), (0, width * parts - dim))).reshape(rows, parts, width)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.asarray(np.bitwise_or.reduce(padded << shifts, axis=1))


def unpack(
    packed: UInt8[np.ndarray, "rows width"], bits: EmbeddingBits, dim: int
) -> Int16[np.ndarray, "rows dim"]:
    """Return packed numbers as odd integers, such as −3, −1, 1 and 3 for two bits."""
    largest = (1 << bits) - 1
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    levels = (packed[:, None] >> shifts & largest).reshape(
        len(packed), packed.shape[1] * 8 // bits
    )[:, :dim]
    return np.asarray(2 * levels.astype(np.int16) - largest)


def dequantize(stored: Quantized, bits: EmbeddingBits, dim: int) -> Float32[np.ndarray, "rows dim"]:
    """Return residuals of fewer than 16 bits as they were before, up to rounding."""
    scales: np.ndarray = np.ones(len(stored.values)) if stored.scales is None else stored.scales
    return np.asarray(unpack(stored.values, bits, dim) * scales[:, None].astype(np.float32))


class StoredVectors:
    """The stored embeddings of a segment.

    Parameters
    ----------
    ranker, table
        the code vectors and the IDs that residuals belong to.
    """

    def __init__(
        self, stored: Quantized, bits: EmbeddingBits, ranker: CodeRanker, table: IdTable
    ) -> None:
        self._values, self._scales = stored
        self.bits = bits
        self._ranker = ranker
        self._table = table

    def __call__(self, rows: Int64[np.ndarray, " rows"]) -> Float32[np.ndarray, "rows dim"]:
        """Return the vectors of items; they are not exactly of unit length."""
        values = self._values[rows]
        if self._scales is None:
            return np.asarray(values, dtype=np.float32)
        vectors = self._ranker.vectors(self._table.ids[self._table.rows_of_items[rows]])
        residuals = dequantize(Quantized(values, self._scales[rows]), self.bits, vectors.shape[1])
        measured = self._ranker.spread.residuals
        vectors += residuals if measured is None else measured.apply(residuals, self.bits)
        return vectors

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Where values and scales are, 0 if there are no scales, and how many bytes the values have."""
        scales = 0 if self._scales is None else self._scales.ctypes.data
        return self._values.ctypes.data, scales, self._values.nbytes


def value_type(bits: EmbeddingBits) -> np.dtype[Any]:
    """Return the type of the stored numbers."""
    return np.dtype(np.float16 if bits == 16 else np.uint8)
