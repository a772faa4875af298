"""Memory-mapped arrays, and stored embeddings with 16, 8, 4, 2 or 1 bits per number.

With 16 bits, an embedding is stored in half precision, and has length 1 again when it is read. With
fewer bits, its residual is stored: the part r of the embedding that the code vectors of its ID do
not explain. Each number of the residual becomes an odd integer, and the whole residual has one
scale::

    r ≈ scale · n,   n = odd integers such as −3, −1, 1, 3 (2 bits),   scale = |r|² / (r · n)

Since the ID is stored anyway, a bit spent on the residual is worth more than a bit spent on the
embedding. This scale makes the product of the stored residual with the true one exact, |r|², as in
RaBitQ (Gao and Long, SIGMOD 2024). The scale of the nearest vector would make stored residuals too
short, and their products with queries too small.
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
from genius_search.nn.codebooks import normalize
from genius_search.nn.fine import FineCodes, unpack_fine_codes

if TYPE_CHECKING:
    from genius_search.nn.spread import Residuals
    from genius_search.search.rank import CodeRanker
    from genius_search.search.table import IdTable

EmbeddingBits: TypeAlias = Literal[1, 2, 4, 8, 16]
"""Bits per number of a stored embedding."""

RESIDUAL_BITS: Final[tuple[EmbeddingBits, ...]] = (1, 2, 4, 8)
"""Bits per number of a stored residual, as :data:`genius_search.nn.spread.RESIDUAL_BIT_WIDTHS`."""
QUANTIZATION_STEPS: Final = {1: 2.0, 2: 0.9957, 4: 0.3352}
"""Distance between neighbouring values, in standard deviations, by bits per number.

The best steps for a normal distribution (Max, "Quantizing for minimum distortion", 1960). With one
bit only the sign counts. With 8 bits the step follows from the largest number of each residual."""
INFINITE_EXPONENT: Final = 0x7C00
"""Exponent bits of a number in half precision; all are set if it is infinite or NaN."""


class Quantized(NamedTuple):
    """Vectors as they are stored: a vector is its integers times its scale."""

    values: Shaped[np.ndarray, "rows width"]
    """Half precision, or packed integers."""
    scales: Float16[np.ndarray, " rows"] | None
    """None in half precision."""


class Expected(NamedTuple):
    """Type, shape and range of numbers that an array on disk must have."""

    types: str
    """Names of the allowed types, such as ``"u1 i2"``."""
    shape: tuple[int | None, ...]
    """None allows any length."""
    least: int | None = None
    """Smallest allowed number; floats must be finite. None allows any number."""
    most: int = 32_767
    """Largest allowed number."""
    step: int | None = None
    """Minimum difference between a number and its predecessor; None if there is no order."""

    def admits(self, array: Shaped[np.ndarray, ...]) -> bool:
        """Return whether the numbers of an array, which has this type and shape, are in range."""
        if self.least is None or not array.size:
            return True
        if array.dtype.kind == "f":  # half precision
            exponents = array.view(np.uint16) & INFINITE_EXPONENT
            return bool(exponents.max() < INFINITE_EXPONENT)
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
        The file is truncated, is not an array, or does not have the expected type and numbers.
    """
    try:
        with path.open("rb") as file:  # np.load takes twice as long
            np.lib.format.read_magic(file)
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            array = np.frombuffer(mapped, dtype, offset=file.tell()).reshape(shape)
    except FileNotFoundError:
        raise ArtifactMissing(
            f"{path} is missing; restore it from a backup, or create its folder again"
        ) from None
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  numpy evaluates the header as Python
        raise ArtifactMismatch(
            f"{path} is damaged ({error}); restore it from a backup, or create it again"
        ) from None
    allowed_types = [np.dtype(name) for name in expected.types.split()]
    has_type = array.dtype in allowed_types and not is_fortran
    if not (has_type and shape_matches(array.shape, expected.shape) and expected.admits(array)):
        limits = ""
        if expected.least is not None:
            limits = f" from {expected.least} to {expected.most}, in order"
        raise ArtifactMismatch(
            f"{path} is damaged or belongs to another artifact: it has {array.dtype.name} of shape "
            f"{array.shape}, expected {expected.types} of {expected.shape}{limits}; restore it "
            "from a backup, or create it again"
        )
    return array


def is_residual(bits: EmbeddingBits) -> bool:
    """Return whether residuals are stored, rather than whole embeddings."""
    return bits < 16


def quantize(vectors: Float[np.ndarray, "rows dim"], bits: EmbeddingBits) -> Quantized:
    """Quantize embeddings, or with fewer than 16 bits residuals."""
    if bits == 16:
        return Quantized(vectors.astype(np.float16), None)
    vectors = vectors.astype(np.float32)
    half = 1 << (bits - 1)
    if bits == 8:
        steps = np.abs(vectors).max(axis=1, initial=0) / np.float32(half)
    else:
        deviations = np.sqrt(np.square(vectors).mean(axis=1))
        steps = deviations * np.float32(QUANTIZATION_STEPS[bits])
    # Levels 0, 1, 2, 3 of two bits are the intervals of the odd integers −3, −1, 1, 3.
    levels = np.floor(vectors / np.where(steps > 0, steps, 1)[:, None]).clip(-half, half - 1) + half
    products = np.vecdot(2 * levels + (1 - 2 * half), vectors)
    # scale = |r|² / (r · n)
    scales = np.square(vectors).sum(axis=1) / np.where(products > 0, products, 1)
    return Quantized(_pack(levels.astype(np.uint8), bits), scales.astype(np.float16))


PLANE_SHARE: Final = 1e-4
"""Squared sine of the smallest angle between v and n with which both get factors."""
PARALLEL_COSINE: Final = 0.05
"""Smallest cosine of x and n with which rounding of the factor of v is corrected."""
FINE_ROWS: Final = 16
"""Number of items whose fine codes are adjacent: a block of search.c's cells.c."""
MIN_LENGTH: Final = 0.5
"""Smallest factor of the vector that codes stand for."""
ROWS_PER_BLOCK: Final = 1024
"""Number of residuals per block that stay in a core's cache while they are rounded."""
LENGTH_STEPS: Final = 200
"""Steps of the factors from 0 to 1; a byte holds factors up to 1.775."""


def decode_lengths(stored: UInt8[np.ndarray, " items"]) -> Float32[np.ndarray, " items"]:
    """Decode factors of the vectors that codes stand for: .5 + byte / 200."""
    return np.asarray(stored / np.float32(LENGTH_STEPS) + np.float32(MIN_LENGTH), dtype=np.float32)


def fit_scales(
    vectors: Float32[np.ndarray, "items dim"],
    coded: Float32[np.ndarray, "items dim"],
    rounded: Float32[np.ndarray, "items dim"],
) -> tuple[UInt8[np.ndarray, " items"], Float16[np.ndarray, " items"]]:
    """Return the factors a, as bytes, and s of the stored vectors a v + s n.

    They are those of the nearest such vector to x, times a factor that makes its product with x
    equal |x|²: an item's own vector then finds it with a cosine of 1, and products with other
    queries are as long as the true ones on average.

    Parameters
    ----------
    vectors
        the vectors x.
    coded
        v: the vectors that codes and fine codes stand for.
    rounded
        n: the integers of the residuals x − v, with the weights of their dimensions.
    """
    coded_squares = np.vecdot(coded, coded)
    rounded_squares = np.vecdot(rounded, rounded)
    crossed = np.vecdot(coded, rounded)
    with_coded = np.vecdot(vectors, coded)
    with_rounded = np.vecdot(vectors, rounded)
    squares = np.vecdot(vectors, vectors)
    determinants = coded_squares * rounded_squares - crossed * crossed
    # Where residuals are parallel to v, or nothing, v alone is stored.
    is_plane = determinants > PLANE_SHARE * coded_squares * rounded_squares
    divisors = np.where(is_plane, determinants, 1)
    lengths = (with_coded * rounded_squares - with_rounded * crossed) / divisors
    scales = (with_rounded * coded_squares - with_coded * crossed) / divisors
    products = lengths * with_coded + scales * with_rounded
    factors = np.where(products > 0, squares, 1) / np.where(products > 0, products, 1)
    stored = np.rint((np.where(is_plane, lengths * factors, 1) - MIN_LENGTH) * LENGTH_STEPS)
    stored = stored.clip(0, 255).astype(np.uint8)
    scales *= factors
    # The scale makes up for the rounding of the factor, if residuals point to where x does.
    missing = squares - decode_lengths(stored) * with_coded
    can_correct = is_plane & (with_rounded > np.sqrt(squares * rounded_squares) * PARALLEL_COSINE)
    corrected = missing / np.where(can_correct, with_rounded, 1)
    scales = np.where(can_correct, corrected, np.where(is_plane, scales, 0))
    return stored, scales.astype(np.float16)


def quantize_with_lengths(
    vectors: Float32[np.ndarray, "items dim"],
    coded: Float32[np.ndarray, "items dim"],
    bits: EmbeddingBits,
    residuals: Residuals | None,
) -> tuple[Quantized, UInt8[np.ndarray, " items"]]:
    """Quantize the residuals of vectors; return them with the factors of the coded vectors.

    With 8 bits, residuals are as precise as a factor, which is then 1.

    Parameters
    ----------
    coded
        the vectors that codes and fine codes stand for.
    residuals
        weights of the dimensions of residuals, if they were measured.
    """
    blocks = [
        _quantize_block(
            vectors[start : start + ROWS_PER_BLOCK],
            coded[start : start + ROWS_PER_BLOCK],
            bits,
            residuals,
        )
        for start in range(0, max(1, len(vectors)), ROWS_PER_BLOCK)
    ]
    values, scales, lengths = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return Quantized(values, scales), lengths


def _quantize_block(
    vectors: Float32[np.ndarray, "items dim"],
    coded: Float32[np.ndarray, "items dim"],
    bits: EmbeddingBits,
    residuals: Residuals | None,
) -> tuple[
    UInt8[np.ndarray, "items width"], Float16[np.ndarray, " items"], UInt8[np.ndarray, " items"]
]:
    """Return the rounded residuals of a few vectors, and both factors."""
    values, scales = quantize(vectors - coded, bits)
    if bits == 8:
        ones = np.full(len(vectors), round((1 - MIN_LENGTH) * LENGTH_STEPS), np.uint8)
        return values, scales, ones  # type: ignore[return-value]
    rounded = dequantize(Quantized(values, None), bits, vectors.shape[1])
    if residuals is not None:
        rounded = residuals.apply(rounded, bits)
    lengths, scales = fit_scales(vectors, coded, rounded)
    return values, scales, lengths


def restore_lengths(values: Float16[np.ndarray, "rows dim"]) -> Float32[np.ndarray, "rows dim"]:
    """Return unit vectors that were stored in half precision.

    Rounding changes lengths by up to 5e-4, which is more than the products of near items differ.
    """
    return normalize(values.astype(np.float32))


def stored_width(dim: int, bits: EmbeddingBits) -> int:
    """Return the length of the stored row of a vector with ``dim`` numbers."""
    return -(-dim * bits // 8) if is_residual(bits) else dim


def _pack(
    levels: UInt8[np.ndarray, "rows dim"], bits: EmbeddingBits
) -> UInt8[np.ndarray, "rows width"]:
    """Pack numbers into bytes.

    The first ``width`` numbers occupy the lowest bits of the bytes, the next ``width`` numbers the
    bits above. With 2 bits and dim = 8, width is 2: byte 0 holds the numbers 6 4 2 0, highest bits
    first, and byte 1 the numbers 7 5 3 1.
    """
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
    parts = packed[:, None] >> shifts & largest
    levels = parts.reshape(len(packed), packed.shape[1] * 8 // bits)[:, :dim]
    return np.asarray(2 * levels.astype(np.int16) - largest)


def dequantize(stored: Quantized, bits: EmbeddingBits, dim: int) -> Float32[np.ndarray, "rows dim"]:
    """Restore residuals of fewer than 16 bits, up to rounding."""
    scales: np.ndarray = np.ones(len(stored.values)) if stored.scales is None else stored.scales
    return np.asarray(unpack(stored.values, bits, dim) * scales[:, None].astype(np.float32))


class StoredFineCodes:
    """The fine codes of a segment, and the factors of the vectors that they and the IDs stand for.

    Parameters
    ----------
    blocks
        packed codes in the order of the table's items (:func:`genius_search.nn.fine.to_blocks`).
    lengths
        factors as bytes; None if embeddings have 16 bits.
    """

    def __init__(
        self,
        blocks: UInt8[np.ndarray, "blocks bytes 16"],
        lengths: UInt8[np.ndarray, " items"] | None,
        table: IdTable,
    ) -> None:
        self.blocks = blocks
        self.lengths = lengths
        self._table = table

    def packed_codes(self, rows: Int64[np.ndarray, " rows"]) -> UInt8[np.ndarray, "rows bytes"]:
        """Return the packed fine codes of item rows."""
        positions = self._table.positions_of_items[rows]
        return np.asarray(self.blocks[positions // FINE_ROWS, :, positions % FINE_ROWS])

    def vectors(
        self, fine: FineCodes, rows: Int64[np.ndarray, " rows"]
    ) -> Float32[np.ndarray, "rows dim"]:
        """Return the vectors that the fine codes of item rows stand for, without their cells."""
        return fine.sum(unpack_fine_codes(self.packed_codes(rows)))

    def lengths_of(self, rows: Int64[np.ndarray, " rows"]) -> UInt8[np.ndarray, " rows"] | None:
        """Return the factors of item rows as bytes; None if embeddings have 16 bits."""
        return None if self.lengths is None else self.lengths[rows]


class StoredVectors:
    """The stored embeddings of a segment, decoded when they are read.

    Parameters
    ----------
    ranker, table
        the code vectors and IDs that residuals are added to.
    fine
        the fine codes that follow the IDs, if there are any.
    """

    def __init__(
        self,
        stored: Quantized,
        bits: EmbeddingBits,
        ranker: CodeRanker,
        table: IdTable,
        fine: StoredFineCodes | None = None,
    ) -> None:
        self._values, self._scales = stored
        self.bits = bits
        self._ranker = ranker
        self._table = table
        self._fine = fine

    def __call__(self, rows: Int64[np.ndarray, " rows"]) -> Float32[np.ndarray, "rows dim"]:
        """Return the vectors of item rows; those of residuals are only approximately 1 long."""
        values = self._values[rows]
        if self._scales is None:
            return restore_lengths(values)
        vectors = self._coded_vectors(rows)
        residuals = dequantize(Quantized(values, self._scales[rows]), self.bits, vectors.shape[1])
        weights = self._ranker.spread.residuals
        vectors += residuals if weights is None else weights.apply(residuals, self.bits)
        return vectors

    def _coded_vectors(self, rows: Int64[np.ndarray, " rows"]) -> Float32[np.ndarray, "rows dim"]:
        """Return the vectors that the codes of item rows stand for."""
        vectors = self._ranker.vectors(self._table.ids[self._table.rows_of_items[rows]])
        if self._fine is not None and self._ranker.fine is not None:
            vectors += self._fine.vectors(self._ranker.fine, rows)
            lengths = self._fine.lengths_of(rows)
            if lengths is not None:
                vectors *= decode_lengths(lengths)[:, None]
        return vectors

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Address of the values, address of the scales (0 without scales), bytes of the values."""
        scales = 0 if self._scales is None else self._scales.ctypes.data
        return self._values.ctypes.data, scales, self._values.nbytes


def value_type(bits: EmbeddingBits) -> np.dtype[Any]:
    """Return the NumPy type of the stored values."""
    return np.dtype(np.float16 if bits == 16 else np.uint8)
