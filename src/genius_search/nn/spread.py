"""Spread of products, which scales a query before costs are subtracted from its scores.

A score is the inner product of a query with an item, minus costs: half the norm of an ID's vector,
and its density (:mod:`genius_search.nn.density`). Exact search keeps its order if a query gets
longer, or if a vector is added to it that has the same product with every item. Costs in absolute
units break this. It matters most where words look for pictures: texts and pictures occupy two
narrow cones, so most of a query's length is the same for every item, and costs would drown the
rest.

So a query is scaled such that its products spread as an item's products would, if the item were the
query:

    s(q) = σ / √(Σ_c u_c (q·e_c − m)²)    with m = Σ_c u_c q·e_c

- e_c are the code vectors of the first semantic level. Beam search needs their products anyway.
- u_c is the share of the items that have code c (:attr:`TargetSpread.usage`).
- σ is the mean of the same root for items in place of the query (:attr:`TargetSpread.deviation`).

The final score is divided by s(q), so that it is in the units of the query. A density costs its
weight in units of the scaled products, which are cosines where the query resembles the items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Integer, UInt8

from genius_search.config import decades_above_small

RESIDUAL_BIT_WIDTHS: Final = (1, 2, 4, 8)
"""Bits per number in which residuals may be stored."""
MAX_CONSTANT_DIRECTIONS: Final = 8
"""Maximum number of constant directions, dimensions not counted."""
NUM_MODALITY_STATISTICS: Final = 3
"""Numbers stored for each modality: the spread, and the mean and reliability of densities."""
NUM_EXTRA_COLUMNS: Final = 2
"""Columns stored after an ID's codes: half norm and density, a byte each."""
MAX_BYTE: Final = 255
"""Largest value of a stored half norm or density."""
HALF_NORM_STEPS: Final = 160
"""Steps from 0 to 1: half norms up to 1.59 (|v|² = 3.19) with an error of at most 1/320."""
DENSITY_STEPS: Final = 800
"""Steps from 0 to 1, with an error of at most 1/1600, since densities differ by hundredths."""
ZERO_DENSITY: Final = 128
"""The byte of a density of 0. Densities beyond ±.16, of single items far from all others, are
clipped."""
# In a small pool, densities are within ±.1 and fade early. Otherwise items in sparse regions, such
# as single vectors far from all others, displace nearer items. The larger the pool, the more hubs
# are near every query, and the nearer are its nearest items: with each decade above 100,000 items
# (MAX_EXHAUSTIVE_POOL) the limit and the weight (genius_search.config.default_search) grow, and
# densities fade nearer to 1.
MAX_FADE: Final = 0.25
"""Fade width of small pools: densities count less for products above 1 − 0.25, and not at all at 1.
Without fading, items are not the first hit of their vectors."""
FADE_PER_DECADE: Final = 0.1
"""Decrease of the fade width when a pool is ten times as large."""
MIN_FADE: Final = 0.1
"""Fade width of the largest pools."""
MIN_LIMIT: Final = 0.1
"""Limit of the densities of items in small pools."""
LIMIT_PER_DECADE: Final = 0.06
"""Increase of the limit when a pool is ten times as large."""


def decode_half_norms(stored: Integer[np.ndarray, " ids"]) -> Float32[np.ndarray, " ids"]:
    """Decode half norms from the bytes stored in an index."""
    return np.asarray(stored / np.float32(HALF_NORM_STEPS), dtype=np.float32)


def decode_densities(stored: Integer[np.ndarray, " ids"]) -> Float32[np.ndarray, " ids"]:
    """Decode densities of IDs or items from the bytes stored in an index: (byte − 128) / 800."""
    return np.asarray(
        (stored.astype(np.int16) - ZERO_DENSITY) / np.float32(DENSITY_STEPS), dtype=np.float32
    )


def encode_densities(densities: Float32[np.ndarray, " items"]) -> UInt8[np.ndarray, " items"]:
    """Encode densities as bytes: 800 · density + 128, clipped to 0 to 255."""
    steps = np.rint(densities * DENSITY_STEPS) + ZERO_DENSITY
    return np.asarray(steps.clip(0, MAX_BYTE), dtype=np.uint8)


def fade_width(items: int) -> float:
    """Return the width of the last part of the cosine in which densities fade, for a pool's size.

    It is .25 in pools up to 100,000 items, and .15 in a million.
    """
    return max(MIN_FADE, MAX_FADE - FADE_PER_DECADE * decades_above_small(items))


def limit_densities(stored: UInt8[np.ndarray, " items"], items: int) -> UInt8[np.ndarray, " items"]:
    """Return the densities of items, stored as bytes, within the limit for a pool's size.

    The limit is ±.1 in pools up to 100,000 items; in a million it is ±.16, as for all bytes.
    """
    limit = MIN_LIMIT + LIMIT_PER_DECADE * decades_above_small(items)
    steps = round(limit * DENSITY_STEPS)
    if steps >= ZERO_DENSITY:
        return stored
    return stored.clip(ZERO_DENSITY - steps, ZERO_DENSITY + steps)


def fade(
    products: Float32[np.ndarray, "*shape"], width: float = MAX_FADE
) -> Float32[np.ndarray, "*shape"]:
    """Return the share of a density that counts, from the product of a query and an item.

    Both are unit vectors. The share is ((1 − product) / width)³, clipped to 0 to 1.
    """
    return np.asarray(((1 - products) / np.float32(width)).clip(0, 1) ** 3, dtype=np.float32)


class TargetSpread(NamedTuple):
    """Statistics of the items that a query may find, for scaling the query."""

    usage: Float32[np.ndarray, " codes"]
    """Share of the items with each code of the first semantic level."""
    deviation: float
    """Standard deviation of an item's products with the code vectors of that level, weighted by
    usage."""

    def scale(
        self, products: Float[np.ndarray, "queries codes"]
    ) -> Float32[np.ndarray, " queries"]:
        """Return the factor s(q) of each query, or 1 where products do not differ.

        ``products`` are those of the queries with the code vectors of the first semantic level.
        """
        centred = products - (products @ self.usage)[:, None]
        variances = np.square(centred) @ self.usage
        differs = (variances > 0) & (self.deviation > 0)
        return np.asarray(
            np.where(differs, self.deviation / np.sqrt(np.where(differs, variances, 1)), 1),
            np.float32,
        )


class Residuals(NamedTuple):
    """Weights of the dimensions of stored residuals, which are rounded to few bits.

    Rounding to one bit gives every number of a residual the same size. In a dimension that differs
    little between items, most of the stored number is rounding error, and a query may have a large
    component there. The weights are those of a linear regression from rounded to true residuals,
    relative to their mean. Directions in which items do not differ at all are left out.
    """

    weights: Float32[np.ndarray, "bits dim"]
    """Weight of each dimension with 1, 2, 4 and 8 bits."""
    constant: Float32[np.ndarray, "directions dim"]
    """Orthogonal unit vectors that have the same product with every item."""

    def apply(
        self, residuals: Float32[np.ndarray, "rows dim"], bits: int
    ) -> Float32[np.ndarray, "rows dim"]:
        """Return weighted residuals w without their constant directions C: w − (w Cᵀ) C."""
        weighted = residuals * self.weights[RESIDUAL_BIT_WIDTHS.index(bits)]
        return np.asarray(weighted - (weighted @ self.constant.T) @ self.constant, np.float32)

    @staticmethod
    def unweighted(dim: int) -> Residuals:
        """Return weights of 1 and no constant direction."""
        return Residuals(
            np.ones((len(RESIDUAL_BIT_WIDTHS), dim), np.float32), np.zeros((0, dim), np.float32)
        )


class Spread:
    """The spreads of the items of each modality.

    Parameters
    ----------
    usage
        number of items by the first code of their ID (rows) and their first semantic code
        (columns). IDs without a modality level have a single row.
    spreads
        a row for each first code: the standard deviation of :class:`TargetSpread`, and mean and
        reliability of the items' densities, relative to which densities are stored.
    residuals
        weights of stored residuals; None if they were not measured.
    """

    def __init__(
        self,
        usage: Float[np.ndarray, "modalities codes"],
        spreads: Float[np.ndarray, "modalities 3"],
        residuals: Residuals | None = None,
    ) -> None:
        self.residuals = residuals
        self.level = int(len(usage) > 1)
        """The first semantic level."""
        self._usage = np.asarray(usage, dtype=np.float64)
        self._spreads = np.asarray(spreads, dtype=np.float64)
        self._target_spreads: dict[frozenset[int], TargetSpread] = {}

    def target_spread(self, level0: frozenset[int] = frozenset()) -> TargetSpread:
        """Return the statistics of the items with these first codes; empty means all items."""
        if level0 not in self._target_spreads:
            codes = (
                [code for code in sorted(level0) if code < len(self._usage)] if self.level else []
            )
            rows = np.array(codes) if codes else np.arange(len(self._usage))
            usage = self._usage[rows]
            spreads = self._spreads[rows]
            counts = usage.sum(axis=1)
            if not counts.any():
                usage = np.ones_like(usage)
                counts = np.ones_like(counts)
            # With several modalities, the variance is the mean of the variances within each.
            deviation = math.sqrt(np.square(spreads[:, 0]) @ counts / counts.sum())
            shares = (usage.sum(axis=0) / counts.sum()).astype(np.float32)
            self._target_spreads[level0] = TargetSpread(shares, deviation)
        return self._target_spreads[level0]

    def scales(
        self, products: Float[np.ndarray, "queries codes"], level0: Sequence[frozenset[int]]
    ) -> Float32[np.ndarray, " queries"]:
        """Return the factor s(q) of each query.

        ``level0`` holds for each query the first codes of the items that it may find; empty means
        all.
        """
        scales = np.ones(len(products), dtype=np.float32)
        for targets in set(level0):
            queries = [query for query, codes in enumerate(level0) if codes == targets]
            scales[queries] = self.target_spread(targets).scale(products[queries])
        return scales

    @staticmethod
    def neutral(codes: int) -> Spread:
        """Return spreads that scale no query, for ``codes`` codes at the first level."""
        return Spread(np.ones((1, codes)), np.zeros((1, NUM_MODALITY_STATISTICS)))
