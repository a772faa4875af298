"""Two numbers of an ID that make ranking by it better: its vector's length, and how crowded its place is.

**Half norm.** An ID stands for v, the sum of its code vectors, and v is no unit vector: what the codes failed
to explain is missing from it. Ranking by the inner product q·v favours the long ones; q·v − |v|²/2 ranks by
the distance between q and v, by which the quantizer chose the codes.

**Density.** Some items are near to nearly every query (hubs; Radovanović et al., "Hubs in space", 2010) and
push better ones down. Cross-domain similarity local scaling takes an item's mean similarity to its nearest
queries from its score (Conneau et al., "Word translation without parallel data", 2018), and nearest-neighbour
normalisation does so for retrieval with a bank of queries (Chowdhury et al., 2024). Here no queries are
needed: the mean of the few largest cosines between v and a sample of the pool's IDs says how crowded it is
around an item. A model that was not refitted to a pool has no such sample; then the vectors of the first
semantic codes stand for it, since they lie where items do.

An item whose embedding is stored is ranked by that, and then the density around the embedding itself is what
counts, which the one around its ID tells less well: :meth:`Marker.crowding`, a byte an item, kept beside the
embeddings.

The marks of an ID follow from the codes and the model alone. So they are computed once, when an item is
encoded, and are kept in a byte each beside its codes, where they never tell two equal IDs apart. Without
keeping them, the second would cost every search thousands of inner products for each ID it looks at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int, Int16, Int64, Integer, UInt8
from torch import Tensor
from torch.nn import functional as F

NUM_MARKS: Final = 2
"""Columns that follow an ID's codes: half norm, density."""
NEIGHBOURS: Final = 4
"""Of what an ID is compared with, the nearest, whose cosines make a density."""
LARGEST: Final = 255
"""A mark fills a byte."""
HALF_NORM_STEPS: Final = 160
"""Steps from 0 to 1: half norms up to 1.59, which is |v|² = 3.19, with an error of at most 1/320."""
DENSITY_STEPS: Final = LARGEST
"""The same for densities: up to 1, with an error of at most 1/510. Below 0, far from every first code, it is
as good as empty; where IDs begin with a modality code, densities differ by hundredths, so steps are short."""
KEY_BASE: Final = 0x9E3779B97F4A7C15
"""Odd and without a pattern in its bits, as multiplicative hashing wants it."""
SCORES_AT_ONCE: Final = 1 << 22
"""Cosines in memory at once: 32 MiB."""


class Measured(NamedTuple):
    """The two numbers of some IDs, as they are."""

    half_norms: Float64[Tensor, " ids"]
    densities: Float64[Tensor, " ids"]


class _Around(NamedTuple):
    """What IDs are compared with."""

    directions: Float64[Tensor, "others dim"]
    keys: Int64[Tensor, " others"] | None
    """Of the IDs whose directions they are, so that none is a neighbour of its own; None where they are of
    no IDs."""


class Marker:
    """Measures the IDs of one quantizer, whose code vectors must not change meanwhile.

    Parameters
    ----------
    tables
        the code vectors of each level.
    has_modality_level
        whether IDs begin with a modality code. Then they are compared with those of their own modality only,
        and its vector is added to those of first codes.
    sample
        different IDs of a pool. Without them, and where hardly one has an ID's modality, the vectors of the
        first semantic codes take their place.
    """

    def __init__(
        self,
        tables: Sequence[Float[Tensor, "_ dim"]],
        *,
        has_modality_level: bool,
        sample: Int[Tensor, "sampled levels"] | None = None,
    ) -> None:
        # In double precision: a product in single precision depends on what is multiplied along with it, so
        # equal IDs could get different marks in different batches. Apple's devices have no doubles.
        self._place = torch.device("cpu") if tables[0].device.type == "mps" else tables[0].device
        self._tables = [table.to(self._place) for table in tables]
        self._has_modality_level = has_modality_level
        nothing = torch.empty(0, len(tables), dtype=torch.int64)
        self._sample = (nothing if sample is None else sample).to(self._place).long()
        self._around: dict[int, _Around] = {}
        """By modality code; kept, for thousands of sampled IDs take longer than a few new ones."""

    @torch.no_grad()
    def measure(self, codes: Int[Tensor, "ids levels"]) -> Measured:
        """Half the squared norm of each ID's vector, and how near a pool's other IDs are to it."""
        codes = codes.to(self._place)
        half_norms = torch.zeros(len(codes), dtype=torch.float64, device=self._place)
        densities = torch.zeros_like(half_norms)
        for around, members in self._groups(codes):
            for rows in members.split(max(1, SCORES_AT_ONCE // len(around.directions))):
                vectors = self._vectors(codes[rows])
                densities[rows] = _density(vectors, codes[rows], around)
                half_norms[rows] = vectors.square().sum(dim=1) / 2
        return Measured(half_norms, densities)

    @torch.no_grad()
    def crowding(
        self, embeddings: Float[Tensor, "items dim"], codes: Int[Tensor, "items levels"]
    ) -> UInt8[Tensor, " items"]:
        """The density around items themselves, as an index keeps it: 0 … 255.

        They are compared with what their IDs would be compared with.
        """
        codes, vectors = codes.to(self._place), embeddings.to(self._place).double()
        densities = torch.zeros(len(codes), dtype=torch.float64, device=self._place)
        for around, members in self._groups(codes):
            for rows in members.split(max(1, SCORES_AT_ONCE // len(around.directions))):
                densities[rows] = _density(vectors[rows], codes[rows], around)
        return (densities * DENSITY_STEPS).round().clamp(0, LARGEST).to("cpu", torch.uint8)

    def marks(self, codes: Int[Tensor, "ids levels"]) -> Int16[Tensor, "ids marks"]:
        """The two numbers as an index keeps them, 0 … 255: what goes beyond is cut off."""
        found = self.measure(codes)
        steps = torch.stack([found.half_norms * HALF_NORM_STEPS, found.densities * DENSITY_STEPS], dim=1)
        return steps.round().clamp(0, LARGEST).short()

    def _groups(self, codes: Int[Tensor, "ids levels"]) -> Iterator[tuple[_Around, Int[Tensor, " members"]]]:
        """The IDs by modality: what they are compared with, and their rows."""
        if not self._has_modality_level:
            yield self._compared(0, self._sample), torch.arange(len(codes), device=self._place)
            return
        first = codes[:, 0]
        for code in map(int, first.unique()):
            own = self._sample[self._sample[:, 0] == code]
            yield self._compared(code, own), (first == code).nonzero()[:, 0]

    def _compared(self, code: int, sample: Int[Tensor, "sampled levels"]) -> _Around:
        if code not in self._around:
            are_ids = len(sample) > NEIGHBOURS
            vectors = self._vectors(sample) if are_ids else self._prefixes(code)
            self._around[code] = _Around(F.normalize(vectors, dim=1), _keys(sample) if are_ids else None)
        return self._around[code]

    def _prefixes(self, code: int) -> Float64[Tensor, "codes dim"]:
        """What the first semantic codes stand for, in this modality."""
        if not self._has_modality_level:
            return self._tables[0].double()
        return self._tables[0][code].double() + self._tables[1].double()

    def _vectors(self, codes: Int[Tensor, "ids levels"]) -> Float64[Tensor, "ids dim"]:
        """What IDs stand for: the sums of their code vectors."""
        vectors = torch.zeros(len(codes), self._tables[0].shape[1], dtype=torch.float64, device=self._place)
        for level, table in enumerate(self._tables):
            vectors += table[codes[:, level]].double()
        return vectors


def _density(
    vectors: Float64[Tensor, "items dim"], codes: Int[Tensor, "items levels"], around: _Around
) -> Float64[Tensor, " items"]:
    """Mean cosine to the nearest of what is around, less the item's own ID."""
    cosines = F.normalize(vectors, dim=1) @ around.directions.T
    if around.keys is not None:
        cosines = cosines.masked_fill(_keys(codes)[:, None] == around.keys, -1.0)
    return cosines.topk(min(NEIGHBOURS, cosines.shape[1]), dim=1).values.mean(dim=1)


def _keys(codes: Int[Tensor, "ids levels"]) -> Int64[Tensor, " ids"]:
    """A number for each ID, by which it is known again: equal for equal IDs, and else all but never."""
    powers = [pow(KEY_BASE, level, 1 << 63) for level in range(1, codes.shape[1] + 1)]
    return (codes.long() * torch.tensor(powers, device=codes.device)).sum(dim=1)


def half_norms(marks: Integer[np.ndarray, "ids marks"]) -> Float32[np.ndarray, " ids"]:
    """Half norms, from what is kept."""
    return np.asarray(marks[:, 0] / np.float32(HALF_NORM_STEPS), dtype=np.float32)


def densities(marks: Integer[np.ndarray, "ids marks"]) -> Float32[np.ndarray, " ids"]:
    """Densities around IDs, from what is kept."""
    return measured(marks[:, 1])


def measured(kept: Integer[np.ndarray, " items"]) -> Float32[np.ndarray, " items"]:
    """Densities around items, from what is kept."""
    return np.asarray(kept / np.float32(DENSITY_STEPS), dtype=np.float32)
