"""Fine codes: 4-bit codes for the part of an embedding that the ID does not explain.

An index without a generator needs no long IDs. Its IDs have one or two semantic codes, and the
items of an ID are a *cell*. The residual of an item, its embedding minus the vector of its ID, is
stored in fine codes, as in a product quantizer (Jégou et al., "Product quantization for nearest
neighbor search", TPAMI 2011): each code stands for one of 16 vectors of a few dimensions. With
three dimensions for each code::

    residual     .1 −.2  0 | .3  0 −.1 | ...
    fine code        7     |     2     | ...

A query has 16 products with the vectors of each code. As bytes, they fit into a register of the
processor, and one instruction looks up the codes of 16 or more items (André et al., "Cache locality
is not enough", VLDB 2015).

The last code of an item stands for its half norm, relative to the half norm of its cell.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int32, Integer, UInt8

from genius_search.native.build import open_library
from genius_search.nn.kmeans import assign, draw_centroids, move_centroids

FINE_VALUES: Final = 16
"""Number of vectors that a fine code distinguishes."""
FINE_ITERATIONS: Final = 8
"""Maximum number of k-means iterations for the vectors of a fine code."""
CODES_PER_GROUP: Final = 8
"""The number of an item's fine codes is a multiple of this, since the search adds their bytes in
groups: 8 bytes up to 31 have a sum that fits into a byte."""
MAX_FINE_CODES: Final = 64
"""Maximum number of an item's fine codes (native/cells.c)."""
ITEMS_PER_BLOCK: Final = 1024
"""Number of items per block whose vectors stay in a core's cache while they are encoded."""
NORM_TAIL: Final = 1.0
"""Per cent of the items whose half norms are below, or above, the values that a code stands for."""

# Names of the arrays among the weights of a quantizer.
FINE_VECTORS: Final = "fine.vectors"
FINE_ENDS: Final = "fine.ends"
FINE_NORMS: Final = "fine.norms"


class FineCodes(NamedTuple):
    """The vectors of fine codes."""

    vectors: Float32[np.ndarray, "dim 16"]
    """Column c of the dimensions of a code is the vector that its value c stands for."""
    ends: Int32[np.ndarray, " codes"]
    """End of the dimensions of each code but the last; a code that begins at its end has none."""
    half_norms: Float32[np.ndarray, " 16"]
    """Weighted half norms, relative to the item's cell, that the last code stands for."""

    @property
    def num_codes(self) -> int:
        """Number of fine codes of an item, including that of its half norm."""
        return len(self.ends) + 1

    def is_consistent(self) -> bool:
        """Return whether the codes divide the dimensions, and searches support their number."""
        ends = self.ends
        has_number = self.num_codes in range(CODES_PER_GROUP, MAX_FINE_CODES + 1, CODES_PER_GROUP)
        is_ascending = bool((np.diff(ends, prepend=0) >= 0).all())
        is_whole = ends.dtype == np.int32 and int(ends[-1]) == self.dim
        return has_number and is_ascending and is_whole

    @property
    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.vectors)

    def encode(
        self,
        embeddings: Float32[np.ndarray, "items dim"],
        cells: Float32[np.ndarray, "items dim"],
        norm_weight: float,
    ) -> UInt8[np.ndarray, "items codes"]:
        """Return the fine codes of items.

        Parameters
        ----------
        cells
            the vectors of the items' IDs.
        norm_weight
            factor of half norms.
        """
        codes = np.zeros((len(cells), self.num_codes), np.uint8)
        middles = (self.half_norms[1:] + self.half_norms[:-1]) / 2
        for start in range(0, len(cells), ITEMS_PER_BLOCK):
            rows = slice(start, start + ITEMS_PER_BLOCK)
            codes[rows] = self.encode_residuals(embeddings[rows] - cells[rows])
            half_norms = relative_half_norms(cells[rows], self.sum(codes[rows]), norm_weight)
            codes[rows, -1] = np.searchsorted(middles, half_norms)
        return codes

    def encode_residuals(
        self, residuals: Float32[np.ndarray, "items dim"]
    ) -> UInt8[np.ndarray, "items codes"]:
        """Return the codes of the nearest vectors; the last code, of half norms, is 0."""
        codes = np.zeros((len(residuals), self.num_codes), np.uint8)
        library = open_library()
        if library is None:
            for number, (low, high) in enumerate(self.parts()):
                table = np.ascontiguousarray(self.vectors[low:high].T)
                codes[:, number] = assign(residuals[:, low:high], table)
            return codes
        halves = np.zeros((len(self.ends), FINE_VALUES), np.float32)
        for number, (low, high) in enumerate(self.parts()):
            halves[number] = np.square(self.vectors[low:high]).sum(axis=0) / 2
        arrays = [np.ascontiguousarray(array) for array in (residuals, self.vectors)]
        library.nearest_fine_codes(
            *(array.ctypes.data for array in (*arrays, halves, self.ends, codes)),
            *residuals.shape,
            *(len(self.ends), self.num_codes),
        )
        return codes

    def sum(self, codes: UInt8[np.ndarray, "items codes"]) -> Float32[np.ndarray, "items dim"]:
        """Return the vectors that fine codes stand for, without their cells."""
        sums = np.zeros((len(codes), self.dim), np.float32)
        library = open_library()
        if library is None:
            for number, (low, high) in enumerate(self.parts()):
                sums[:, low:high] = self.vectors[low:high].T[codes[:, number]]
            return sums
        arrays = [np.ascontiguousarray(array) for array in (codes, self.vectors)]
        library.sum_fine_codes(
            *(array.ctypes.data for array in (*arrays, self.ends, sums)),
            *sums.shape,
            *(len(self.ends), codes.shape[1]),
        )
        return sums

    def products(self, query: Float32[np.ndarray, " dim"]) -> list[Float32[np.ndarray, " 16"]]:
        """Return the products of a query with the vectors of each code that has dimensions."""
        weighted = self.vectors * query[:, None]
        return [weighted[low:high].sum(axis=0) for low, high in self.parts()]

    def parts(self) -> list[tuple[int, int]]:
        """Return the first dimension of each code that has any, and the end."""
        ends = self.ends.tolist()
        return [(low, high) for low, high in zip([0, *ends[:-1]], ends, strict=True) if low < high]


def fit_fine_codes(
    embeddings: Float32[np.ndarray, "items dim"],
    cells: Float32[np.ndarray, "items dim"],
    num_codes: int,
    norm_weight: float,
) -> FineCodes:
    """Fit the vectors of ``num_codes`` fine codes to items.

    Parameters
    ----------
    cells
        the vectors of the items' IDs.
    num_codes
        a multiple of :data:`CODES_PER_GROUP`.
    norm_weight
        factor of half norms.
    """
    residuals = embeddings - cells
    ends = divide_dimensions(np.square(residuals, dtype=np.float64).mean(axis=0), num_codes - 1)
    no_norms = np.zeros(FINE_VALUES, np.float32)
    fine = FineCodes(np.zeros((residuals.shape[1], FINE_VALUES), np.float32), ends, no_norms)
    samples = [np.ascontiguousarray(residuals[:, low:high]) for low, high in fine.parts()]
    for part, (low, high) in zip(samples, fine.parts(), strict=True):
        random = np.random.default_rng(low)
        fine.vectors[low:high] = draw_centroids(part, FINE_VALUES, random).T
    codes = fine.encode_residuals(residuals)
    for _ in range(FINE_ITERATIONS):  # k-means of all parts at once
        for number, (low, high) in enumerate(fine.parts()):
            centroids = np.ascontiguousarray(fine.vectors[low:high].T)
            moved = move_centroids(centroids, samples[number], codes[:, number])
            fine.vectors[low:high] = moved.T
        previous_codes = codes
        codes = fine.encode_residuals(residuals)
        if np.array_equal(previous_codes, codes):
            break
    half_norms = relative_half_norms(cells, fine.sum(codes), norm_weight)
    low, high = np.percentile(half_norms, [NORM_TAIL, 100 - NORM_TAIL])
    return fine._replace(half_norms=np.linspace(low, high, FINE_VALUES, dtype=np.float32))


def relative_half_norms(
    cells: Float32[np.ndarray, "items dim"],
    fine: Float32[np.ndarray, "items dim"],
    norm_weight: float,
) -> Float32[np.ndarray, " items"]:
    """Return the weighted half norms of items minus those of their cells.

    With c the vector of a cell and f that of fine codes, |c + f|² − |c|² = f·(2 c + f).
    """
    return np.asarray(np.vecdot(fine, 2 * cells + fine) * np.float32(norm_weight / 2))


def divide_dimensions(
    variances: Float[np.ndarray, " dim"], num_parts: int
) -> Int32[np.ndarray, " parts"]:
    """Divide dimensions into parts of about equal standard deviations; return the parts' ends.

    Each part has at least one dimension, while there are any.

    >>> divide_dimensions(np.array([4.0, 4.0, 1.0, 1.0, 1.0, 1.0]), 4)
    array([1, 2, 4, 6], dtype=int32)
    """
    dim = len(variances)
    deviations = np.sqrt(variances) + 1e-6 * np.sqrt(variances.max(initial=0)) + 1e-30
    totals = deviations.cumsum()
    targets = totals[-1] * np.arange(1, num_parts + 1) / num_parts
    ends = np.searchsorted(totals - deviations / 2, targets)  # rounded to the nearest dimension
    # Part i ends after dimension i at the earliest, and leaves a dimension for each later part.
    earliest = np.arange(1, num_parts + 1).clip(max=dim)
    latest = (dim - num_parts + np.arange(1, num_parts + 1)).clip(min=earliest, max=dim)
    for number in range(1, num_parts):
        ends[number] = max(ends[number], ends[number - 1] + 1)
    return np.asarray(ends.clip(earliest, latest), dtype=np.int32)


def round_to_bytes(table: Float32[np.ndarray, "codes dim"]) -> Float32[np.ndarray, "codes dim"]:
    """Round each code vector to integers from −127 to 127 times a step.

    The search multiplies these integers. Since items are encoded with the rounded vectors, that
    loses nothing.
    """
    steps = np.abs(table).max(axis=1, keepdims=True) / np.float32(127)
    return np.asarray(np.rint(table / np.where(steps > 0, steps, 1)) * steps, dtype=np.float32)


def pack_fine_codes(codes: UInt8[np.ndarray, "items codes"]) -> UInt8[np.ndarray, "items bytes"]:
    """Pack two codes into each byte: code 2i into the lower, code 2i + 1 into the upper bits."""
    return np.asarray(codes[:, 0::2] | codes[:, 1::2] << 4)


def unpack_fine_codes(packed: UInt8[np.ndarray, "items bytes"]) -> UInt8[np.ndarray, "items codes"]:
    """Unpack the codes that :func:`pack_fine_codes` packed."""
    codes = np.empty((len(packed), 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2] = packed & 15
    codes[:, 1::2] = packed >> 4
    return codes


def to_blocks(
    packed: UInt8[np.ndarray, "items bytes"], items: Integer[np.ndarray, " items"], rows: int
) -> UInt8[np.ndarray, "blocks bytes rows"]:
    """Arrange packed codes by blocks of ``rows`` items, in the order that ``items`` lists them.

    Within a block, the first bytes of all items come first, then their second bytes, and so on. The
    last block is padded with zeros.
    """
    num_blocks = -(-len(items) // rows)
    blocks = np.zeros((num_blocks * rows, packed.shape[1]), np.uint8)
    blocks[: len(items)] = packed[items]
    shaped = blocks.reshape(num_blocks, rows, packed.shape[1])
    return np.ascontiguousarray(shaped.transpose(0, 2, 1))
