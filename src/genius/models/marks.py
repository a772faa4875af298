"""Two numbers of an ID that make ranking by it better: its vector's length, and how crowded its place is.

**Half norm.** An ID stands for v, the sum of its code vectors, and v is no unit vector: what the codes failed
to explain is missing from it. Ranking by the inner product q·v favours the long ones; q·v − |v|²/2 ranks by
the distance between q and v, by which the quantizer chose the codes.

**Density.** Some items are near to nearly every query (hubs; Radovanović et al., "Hubs in space", 2010) and
push better ones down. Cross-domain similarity local scaling takes an item's mean similarity to its nearest
queries from its score (Conneau et al., "Word translation without parallel data", 2018), and nearest-neighbour
normalisation does so for retrieval with a bank of queries (Chowdhury et al., 2024). Here no queries are
needed: the vectors of the first semantic codes lie where a pool's items do, so the mean of the few largest
cosines between v and these says how crowded it is around an item.

Both follow from the codes alone. So they are computed once, when an item is encoded, and are kept in a byte
each beside its codes, where they never tell two equal IDs apart. Without keeping them, the second would cost
every search as many inner products as the first level has codes, for each ID it looks at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int, Int16, Integer
from torch import Tensor
from torch.nn import functional as F

NUM_MARKS: Final = 2
"""Columns that follow an ID's codes: half norm, density."""
NEIGHBOURS: Final = 4
"""First codes whose cosines make a density."""
LARGEST: Final = 255
"""A mark fills a byte."""
HALF_NORM_STEPS: Final = 160
"""Steps from 0 to 1: half norms up to 1.59, which is |v|² = 3.19, with an error of at most 1/320."""
DENSITY_STEPS: Final = LARGEST
"""The same for densities: up to 1, with an error of at most 1/510. Below 0, far from every first code, it is
as good as empty; where IDs begin with a modality code, densities differ by hundredths, so steps are short."""
SCORES_AT_ONCE: Final = 1 << 22
"""Cosines in memory at once: 32 MiB."""


class Measured(NamedTuple):
    """The two numbers of some IDs, as they are."""

    half_norms: Float64[Tensor, " ids"]
    densities: Float64[Tensor, " ids"]


@torch.no_grad()
def measured(
    tables: Sequence[Float[Tensor, "_ dim"]], codes: Int[Tensor, "ids levels"], *, has_modality_level: bool
) -> Measured:
    """Half the squared norm of each ID's vector, and how near the first semantic codes' vectors are to it.

    Where IDs begin with a modality code, its vector is added to each of these: they are compared as prefixes
    of the ID's own modality.

    Parameters
    ----------
    tables
        the code vectors of each level.
    """
    # In double precision: a product in single precision depends on what is multiplied along with it, so
    # equal IDs could get different marks in different batches. Apple's devices have no doubles.
    place = torch.device("cpu") if tables[0].device.type == "mps" else tables[0].device
    levels = [table.to(place) for table in tables]
    codes = codes.to(place)
    half_norms = torch.zeros(len(codes), dtype=torch.float64, device=place)
    densities = torch.zeros_like(half_norms)
    for prefixes, members in _groups(levels, codes, has_modality_level=has_modality_level):
        for rows in members.split(max(1, SCORES_AT_ONCE // len(prefixes))):
            vectors = torch.zeros(len(rows), prefixes.shape[1], dtype=torch.float64, device=place)
            for level, table in enumerate(levels):
                vectors += table[codes[rows, level]].double()
            cosines = F.normalize(vectors, dim=1) @ prefixes.T
            nearest = cosines.topk(min(NEIGHBOURS, len(prefixes)), dim=1).values
            densities[rows] = nearest.mean(dim=1)
            half_norms[rows] = vectors.square().sum(dim=1) / 2
    return Measured(half_norms, densities)


def marks_of(
    tables: Sequence[Float[Tensor, "_ dim"]], codes: Int[Tensor, "ids levels"], *, has_modality_level: bool
) -> Int16[Tensor, "ids marks"]:
    """The two numbers as an index keeps them, 0 … 255: what goes beyond is cut off."""
    found = measured(tables, codes, has_modality_level=has_modality_level)
    steps = torch.stack([found.half_norms * HALF_NORM_STEPS, found.densities * DENSITY_STEPS], dim=1)
    return steps.round().clamp(0, LARGEST).short()


def half_norms(marks: Integer[np.ndarray, "ids marks"]) -> Float32[np.ndarray, " ids"]:
    """Half norms, from what is kept."""
    return np.asarray(marks[:, 0] / np.float32(HALF_NORM_STEPS), dtype=np.float32)


def densities(marks: Integer[np.ndarray, "ids marks"]) -> Float32[np.ndarray, " ids"]:
    """Densities, from what is kept."""
    return np.asarray(marks[:, 1] / np.float32(DENSITY_STEPS), dtype=np.float32)


def _groups(
    levels: Sequence[Float[Tensor, "_ dim"]], codes: Int[Tensor, "ids levels"], *, has_modality_level: bool
) -> Iterator[tuple[Float64[Tensor, "codes dim"], Int[Tensor, " members"]]]:
    """The directions that IDs are compared with, and the rows of the IDs that are compared with them."""
    if not has_modality_level:
        yield F.normalize(levels[0].double(), dim=1), torch.arange(len(codes), device=codes.device)
        return
    first = codes[:, 0]
    for code in first.unique():
        prefixes = levels[0][code].double() + levels[1].double()
        yield F.normalize(prefixes, dim=1), (first == code).nonzero()[:, 0]
