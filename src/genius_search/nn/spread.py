"""The spread of products, by which queries are scaled before costs are subtracted from their scores.

A score is the inner product of a query with an item, minus costs: half the norm of an ID's vector, and its
density (:mod:`genius_search.nn.density`). Exact search does not change its order if a query gets longer, or
if something is added to it that has the same product with every item. With costs in absolute units the order
would change. That matters most where words look for pictures: texts and pictures lie in two narrow cones, so
most of a query's length is the same for every item, and costs would drown the rest.

So a query is scaled such that its products spread as those of an item would, if it were the query. The
products are those with the code vectors of the first semantic level, weighted by the number of items that
have each code; beam search needs them anyway. The score is divided by the same factor in the end, so that it
is in the units of the query.

Densities cost their weight in units of these scaled products, which are cosines where the query is like the
items (:mod:`genius_search.nn.density`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Integer, UInt8

RESIDUAL_BIT_WIDTHS: Final = (1, 2, 4, 8)
"""Bits of a number of a stored residual."""
MAX_CONSTANT_DIRECTIONS: Final = 8
"""Most directions that are found to be constant, besides dimensions."""
NUM_MODALITY_STATISTICS: Final = 3
"""Numbers stored for each modality: the spread, and mean and reliability of densities."""
NUM_EXTRA_COLUMNS: Final = 2
"""Columns stored after an ID's codes: half norm, density; a byte each."""
MAX_BYTE: Final = 255
"""Largest stored value of them."""
HALF_NORM_STEPS: Final = 160
"""Steps from 0 to 1: half norms up to 1.59 (|v|² = 3.19) with an error of at most 1/320."""
DENSITY_STEPS: Final = 800
"""Steps from 0 to 1, with an error of at most 1/1600, since densities differ by hundredths."""
ZERO_DENSITY: Final = 128
"""The byte of a density of 0. Those beyond ±.16 are clipped, for single items far from all others."""
MAX_FADE: Final = 0.25
"""Densities count less for products above 1 - MAX_FADE, and not at all at 1. Without it, items are not the first
hit of their own vectors."""
FADE_PER_DECADE: Final = 0.05
MIN_FADE: Final = 0.1
MAX_FULL_FADE_POOL: Final = 8192


def decode_half_norms(stored: Integer[np.ndarray, " ids"]) -> Float32[np.ndarray, " ids"]:
    """Decode half norms from the bytes stored in an index."""
    return np.asarray(stored / np.float32(HALF_NORM_STEPS), dtype=np.float32)


def decode_densities(stored: Integer[np.ndarray, " ids"]) -> Float32[np.ndarray, " ids"]:
    """Decode densities, of IDs or items, from the bytes stored in an index."""
    return np.asarray(
        (stored.astype(np.int16) - ZERO_DENSITY) / np.float32(DENSITY_STEPS), dtype=np.float32
    )


def encode_densities(densities: Float32[np.ndarray, " items"]) -> UInt8[np.ndarray, " items"]:
    """Return densities as bytes."""
    steps = np.rint(densities * DENSITY_STEPS) + ZERO_DENSITY
    return np.asarray(steps.clip(0, MAX_BYTE), dtype=np.uint8)


def fade_width(items: int) -> float:
    """Return over which last part of the cosine densities fade in a pool of so many items.

    In larger pools the nearest items are nearer: a quarter in small ones, .14 in a million.
    """
    decades = max(0.0, math.log10(max(items, 1) / MAX_FULL_FADE_POOL))
    return max(MIN_FADE, MAX_FADE - FADE_PER_DECADE * decades)


def fade(
    products: Float32[np.ndarray, "*shape"], width: float = MAX_FADE
) -> Float32[np.ndarray, "*shape"]:
    """Return the share of a density that counts, from the product of query and item, both of unit length."""
    return np.asarray(((1 - products) / np.float32(width)).clip(0, 1) ** 3, dtype=np.float32)


class TargetSpread(NamedTuple):
    """What is known of the items that a query may find."""

    usage: Float32[np.ndarray, " codes"]
    """Share of the items with each code of the first semantic level."""
    deviation: float
    """Standard deviation of the products of an item with the code vectors of that level, by usage."""

    def scale(
        self, products: Float[np.ndarray, "queries codes"]
    ) -> Float32[np.ndarray, " queries"]:
        """Return the factor of each query, from its products with the code vectors of the first level."""
        centred = products - (products @ self.usage)[:, None]
        variances = np.square(centred) @ self.usage
        known = (variances > 0) & (self.deviation > 0)
        return np.asarray(
            np.where(known, self.deviation / np.sqrt(np.where(known, variances, 1)), 1), np.float32
        )


class Residuals(NamedTuple):
    """Weights of the dimensions of stored residuals, which are rounded to few bits.

    Rounding to one bit gives every number of a residual the same size. Where a dimension differs little
    between items, most of what is stored of it is error, and a query may have much of it. The weights are
    those of a linear regression from rounded to true residuals, relative to their mean. Directions in which
    items do not differ at all are left out.
    """

    weights: Float32[np.ndarray, "bits dim"]
    """Weight of each dimension with 1, 2, 4 and 8 bits."""
    constant: Float32[np.ndarray, "directions dim"]
    """Orthogonal unit vectors that have the same product with every item."""

    def apply(
        self, residuals: Float32[np.ndarray, "rows dim"], bits: int
    ) -> Float32[np.ndarray, "rows dim"]:
        """Return the residuals, weighted, without constant directions."""
        weighted = residuals * self.weights[RESIDUAL_BIT_WIDTHS.index(bits)]
        return np.asarray(weighted - (weighted @ self.constant.T) @ self.constant, np.float32)

    @staticmethod
    def unweighted(dim: int) -> Residuals:
        """Return weights of 1."""
        return Residuals(
            np.ones((len(RESIDUAL_BIT_WIDTHS), dim), np.float32), np.zeros((0, dim), np.float32)
        )


class Spread:
    """The spreads of the items of each modality.

    Parameters
    ----------
    usage
        number of items, by the first code of their ID and by that of the first semantic level.
    spreads
        by the first code of their ID, the standard deviation of :class:`TargetSpread`, and mean and reliability
        of the items' densities, which are stored relative to these.
    residuals
        None if they were not measured.
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
        self._known: dict[frozenset[int], TargetSpread] = {}

    def target_spread(self, level0: frozenset[int] = frozenset()) -> TargetSpread:
        """Return the spreads of the items with these first codes; none means any."""
        if level0 not in self._known:
            chosen = (
                [code for code in sorted(level0) if code < len(self._usage)] if self.level else []
            )
            rows = np.array(chosen) if chosen else np.arange(len(self._usage))
            usage, spreads = self._usage[rows], self._spreads[rows]
            counts = usage.sum(axis=1)
            if not counts.any():
                usage, counts = np.ones_like(usage), np.ones_like(counts)
            # Of several modalities, the mean variance within each.
            first = math.sqrt(np.square(spreads[:, 0]) @ counts / counts.sum())
            shares = (usage.sum(axis=0) / counts.sum()).astype(np.float32)
            self._known[level0] = TargetSpread(shares, first)
        return self._known[level0]

    def scales(
        self, products: Float[np.ndarray, "queries codes"], level0: Sequence[frozenset[int]]
    ) -> Float32[np.ndarray, " queries"]:
        """Return the factors of queries that look for items with these first codes; none means any."""
        scales = np.ones(len(products), dtype=np.float32)
        for allowed in set(level0):
            own = [number for number, one in enumerate(level0) if one == allowed]
            scales[own] = self.target_spread(allowed).scale(products[own])
        return scales

    @staticmethod
    def neutral(codes: int) -> Spread:
        """Return spreads by which no query is scaled, for ``codes`` codes at the first level."""
        return Spread(np.ones((1, codes)), np.zeros((1, NUM_MODALITY_STATISTICS)))
