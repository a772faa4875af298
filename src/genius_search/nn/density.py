"""Half norm and density of an ID: two corrections to scores by codes.

**Half norm.** The vector v of an ID is the sum of its code vectors. Since v is not a unit vector, ranking by
the inner product q·v favours long vectors; q·v − |v|²/2 ranks by the distance between q and v, which is also
what the quantizer minimises. An item that its codes explain badly has a short vector, though, and distance
favours it: what is missing of it is no more than partly like the query. Without training, half of the
correction (``norm_weight``) agrees better with exact search (``python -m research.bench``).

**Density.** Some items are near almost every query (hubs; Radovanović et al., "Hubs in space", 2010) and
displace better ones. Cross-domain similarity local scaling subtracts an item's mean similarity to its nearest
queries from its score (Conneau et al., "Word translation without parallel data", 2018), and nearest-neighbour
normalisation does so for retrieval with a bank of queries (Chowdhury et al., 2024). The variant used here
needs no queries: the density of an ID is the mean of the largest cosines between v and a sample of the pool's
IDs. A trained model has no such sample; the vectors of the first semantic codes
replace it, since they are spread like the items. If items are ranked by their stored embeddings, the density
around the embedding itself is used (:meth:`NormAndDensity.item_density`).

Both numbers depend only on the codes and the model. They are computed when an item is encoded, and stored
after its codes in one byte each; computing densities during search would cost thousands of inner products
per ID.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Float64, Int, Int16, Int64, UInt8
from torch import Tensor
from torch.nn import functional as F

from genius_search.nn.spread import DENSITY_STEPS, HALF_NORM_STEPS, LARGEST

NEIGHBOURS: Final = 4
"""Number of nearest vectors whose mean cosine is the density."""
SPARE: Final = 4
"""Vectors beyond the nearest whose cosines are computed, in case single precision confuses near ones."""
HASH_BASE: Final = 0x9E3779B97F4A7C15
"""Odd and with irregular bits, as multiplicative hashing requires."""
SCORES_AT_ONCE: Final = 1 << 22
"""Cosines in memory at once: 32 MiB."""


class Measured(NamedTuple):
    """Half norms and densities of IDs, before rounding to bytes."""

    half_norms: Float64[Tensor, " ids"]
    densities: Float64[Tensor, " ids"]


class _Reference(NamedTuple):
    """Unit vectors that IDs are compared with."""

    directions: Float64[Tensor, "others dim"]
    hashes: Int64[Tensor, " others"] | None
    """Hashes of the vectors' IDs, so that no ID is its own neighbour; None if they have no IDs."""


class NormAndDensity:
    """Computes half norms and densities of one quantizer's IDs; its code vectors must not change.

    Parameters
    ----------
    tables
        the code vectors of each level.
    has_modality_level
        whether IDs begin with a modality code. If so, IDs are compared only with those of their own modality,
        and the modality's vector is added to those of the first semantic codes.
    norm_weight
        factor of the half norms that are stored.
    sample
        distinct IDs of a pool. If absent, or if too few have an ID's modality, the vectors of the first
        semantic codes are used instead.
    """

    def __init__(
        self,
        tables: Sequence[Float[Tensor, "_ dim"]],
        *,
        has_modality_level: bool,
        norm_weight: float = 1.0,
        sample: Int[Tensor, "sampled levels"] | None = None,
    ) -> None:
        # In double precision, since single-precision matrix products depend on the batch, so equal IDs could
        # get different numbers in different batches. MPS has no doubles.
        self._device = torch.device("cpu") if tables[0].device.type == "mps" else tables[0].device
        self._tables = [table.to(self._device) for table in tables]
        self._has_modality_level = has_modality_level
        self._norm_weight = norm_weight
        empty = torch.empty(0, len(tables), dtype=torch.int64)
        self._sample = (empty if sample is None else sample).to(self._device).long()
        self._references: dict[int, _Reference] = {}
        """By modality code; cached, since summing the sample takes longer than measuring a few new IDs."""

    @torch.no_grad()
    def measure(self, codes: Int[Tensor, "ids levels"]) -> Measured:
        """Return half the squared norm of each ID's vector and the density around it."""
        codes = codes.to(self._device)
        vectors = self._vectors(codes)
        return Measured(vectors.square().sum(dim=1) / 2, self._densities(vectors, codes))

    def columns(self, codes: Int[Tensor, "ids levels"]) -> Int16[Tensor, "ids columns"]:
        """Return weighted half norm and density as an index stores them, 0 to 255; more is clipped."""
        half_norms, densities = self.measure(codes)
        costs = self._norm_weight * half_norms
        steps = torch.stack([costs * HALF_NORM_STEPS, densities * DENSITY_STEPS], dim=1)
        return steps.round().clamp(0, LARGEST).short()

    @torch.no_grad()
    def item_density(
        self, embeddings: Float[Tensor, "items dim"], codes: Int[Tensor, "items levels"]
    ) -> UInt8[Tensor, " items"]:
        """Return the densities of items' embeddings as stored in an index, 0 to 255.

        An embedding is compared with the same vectors as its ID.
        """
        densities = self._densities(embeddings.to(self._device).double(), codes.to(self._device))
        return (densities * DENSITY_STEPS).round().clamp(0, LARGEST).to("cpu", torch.uint8)

    def _densities(
        self, vectors: Float64[Tensor, "items dim"], codes: Int[Tensor, "items levels"]
    ) -> Float64[Tensor, " items"]:
        """Return the density around each vector; ``codes`` are those of its ID."""
        densities = torch.zeros(len(codes), dtype=torch.float64, device=self._device)
        groups = codes[:, 0] if self._has_modality_level else torch.zeros_like(codes[:, 0])
        for code in groups.unique().tolist():
            reference = self._reference(code)
            size = max(1, SCORES_AT_ONCE // len(reference.directions))
            for rows in (groups == code).nonzero()[:, 0].split(size):
                densities[rows] = _density(vectors[rows], codes[rows], reference)
        return densities

    def _reference(self, code: int) -> _Reference:
        if code not in self._references:
            sample = self._sample
            if self._has_modality_level:
                sample = sample[sample[:, 0] == code]
            if len(sample) > NEIGHBOURS:
                vectors, hashes = self._vectors(sample), _hashes(sample)
            elif self._has_modality_level:
                vectors, hashes = self._tables[0][code].double() + self._tables[1].double(), None
            else:
                vectors, hashes = self._tables[0].double(), None
            self._references[code] = _Reference(F.normalize(vectors, dim=1), hashes)
        return self._references[code]

    def _vectors(self, codes: Int[Tensor, "ids levels"]) -> Float64[Tensor, "ids dim"]:
        """Sum the code vectors of each ID."""
        levels = zip(self._tables, codes.T, strict=True)
        nothing = torch.zeros(len(codes), self._tables[0].shape[1], dtype=torch.float64, device=self._device)
        return sum((table[own].double() for table, own in levels), nothing)


def _density(
    vectors: Float64[Tensor, "items dim"], codes: Int[Tensor, "items levels"], reference: _Reference
) -> Float64[Tensor, " items"]:
    """Return the mean cosine to the nearest reference vectors, excluding an item's own ID.

    Single precision tells which vectors are nearest, up to a few; their cosines are then computed in double.
    """
    units = F.normalize(vectors, dim=1)
    rough = units.float() @ reference.directions.float().T
    if reference.hashes is not None:
        rough = rough.masked_fill_(_hashes(codes)[:, None] == reference.hashes, -torch.inf)
    near = rough.topk(min(NEIGHBOURS + SPARE, rough.shape[1]), dim=1)
    cosines = (reference.directions[near.indices] * units[:, None]).sum(dim=2)
    cosines = cosines.where(near.values > -torch.inf, -1.0)
    return cosines.topk(min(NEIGHBOURS, cosines.shape[1]), dim=1).values.mean(dim=1)


def _hashes(codes: Int[Tensor, "ids levels"]) -> Int64[Tensor, " ids"]:
    """Return a 64-bit hash of each ID."""
    powers = [pow(HASH_BASE, level, 1 << 63) for level in range(1, codes.shape[1] + 1)]
    return (codes.long() * torch.tensor(powers, device=codes.device)).sum(dim=1)
