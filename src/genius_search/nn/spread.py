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

The weight of the density is in units of these spreads, too: a weight of 0.1 costs an item whose density is
one standard deviation higher a tenth of the standard deviation of the products of an item with all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Integer

BITS: Final = (1, 2, 4, 8)
"""Bits of a number of a stored residual."""
MOST_CONSTANT: Final = 8
"""Most directions that are found to be constant, besides dimensions."""
COLUMNS: Final = 3
"""Numbers stored for each modality: :class:`SpreadOf`, without the usage."""
NUM_EXTRA_COLUMNS: Final = 2
"""Columns stored after an ID's codes: half norm, density; a byte each."""
LARGEST: Final = 255
"""Largest stored value of them."""
HALF_NORM_STEPS: Final = 160
"""Steps from 0 to 1: half norms up to 1.59 (|v|² = 3.19) with an error of at most 1/320."""
DENSITY_STEPS: Final = LARGEST
"""Steps from 0 to 1, with an error of at most 1/510; negative densities are stored as 0. Where IDs begin with
a modality code, densities differ by hundredths only, hence the short steps."""


def decode_half_norms(stored: Integer[np.ndarray, " ids"]) -> Float32[np.ndarray, " ids"]:
    """Decode half norms from the bytes stored in an index."""
    return np.asarray(stored / np.float32(HALF_NORM_STEPS), dtype=np.float32)


def decode_densities(stored: Integer[np.ndarray, " ids"]) -> Float32[np.ndarray, " ids"]:
    """Decode densities, of IDs or items, from the bytes stored in an index."""
    return np.asarray(stored / np.float32(DENSITY_STEPS), dtype=np.float32)


class SpreadOf(NamedTuple):
    """What is known of the items that a query may find."""

    usage: Float32[np.ndarray, " codes"]
    """Share of the items with each code of the first semantic level."""
    first: float
    """Standard deviation of the products of an item with the code vectors of that level, by usage."""
    items: float
    """Standard deviation of the products of an item with other items."""
    densities: float
    """Standard deviation of the items' densities."""

    @property
    def density_unit(self) -> float:
        """Cost of a density of 1 where the weight is 1; 0 if densities do not differ, or are not known."""
        return self.items / self.densities if self.densities > 0 else 0.0

    def scale(self, products: Float[np.ndarray, "queries codes"]) -> Float32[np.ndarray, " queries"]:
        """Return the factor of each query, from its products with the code vectors of the first level."""
        centred = products - (products @ self.usage)[:, None]
        variances = np.square(centred) @ self.usage
        known = (variances > 0) & (self.first > 0)
        return np.asarray(np.where(known, self.first / np.sqrt(np.where(known, variances, 1)), 1), np.float32)


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

    def apply(self, residuals: Float32[np.ndarray, "rows dim"], bits: int) -> Float32[np.ndarray, "rows dim"]:
        """Return the residuals, weighted, without constant directions."""
        weighted = residuals * self.weights[BITS.index(bits)]
        return np.asarray(weighted - (weighted @ self.constant.T) @ self.constant, np.float32)

    @staticmethod
    def plain(dim: int) -> Residuals:
        """Return weights of 1."""
        return Residuals(np.ones((len(BITS), dim), np.float32), np.zeros((0, dim), np.float32))


class Spread:
    """The spreads of the items of each modality.

    Parameters
    ----------
    usage
        number of items, by the first code of their ID and by that of the first semantic level.
    spreads
        the numbers of :class:`SpreadOf`, by the first code of their ID.
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
        self._known: dict[frozenset[int], SpreadOf] = {}

    def among(self, level0: frozenset[int] = frozenset()) -> SpreadOf:
        """Return the spreads of the items with these first codes; none means any."""
        if level0 not in self._known:
            chosen = [code for code in sorted(level0) if code < len(self._usage)] if self.level else []
            rows = np.array(chosen) if chosen else np.arange(len(self._usage))
            usage, spreads = self._usage[rows], self._spreads[rows]
            counts = usage.sum(axis=1)
            if not counts.any():
                usage, counts = np.ones_like(usage), np.ones_like(counts)
            # Of several modalities, the mean variance within each.
            pooled = np.sqrt(np.square(spreads).T @ counts / counts.sum())
            shares = (usage.sum(axis=0) / counts.sum()).astype(np.float32)
            self._known[level0] = SpreadOf(shares, *pooled.tolist())
        return self._known[level0]

    def scales(
        self, products: Float[np.ndarray, "queries codes"], level0: Sequence[frozenset[int]]
    ) -> Float32[np.ndarray, " queries"]:
        """Return the factors of queries that look for items with these first codes; none means any."""
        scales = np.ones(len(products), dtype=np.float32)
        for allowed in set(level0):
            own = [number for number, one in enumerate(level0) if one == allowed]
            scales[own] = self.among(allowed).scale(products[own])
        return scales

    @staticmethod
    def none(codes: int) -> Spread:
        """Return spreads by which no query is scaled, for ``codes`` codes at the first level.

        Densities then cost their weight in absolute units.
        """
        return Spread(np.ones((1, codes)), np.array([[0.0, 1.0, 1.0]]))
