"""IDs by beam search: the nearest sum of code vectors that a few partial IDs side by side can find.

Greedy residual quantization takes the nearest code vector at every level (paper, equation 4). Keeping several
partial IDs and choosing at the end gives a nearer sum (Babenko and Lempitsky, "Additive quantization", 2014;
Liu, Shao and Lu, "Improved residual vector quantization", 2015): the same codebooks, the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

DISTANCES_AT_ONCE: Final = 1 << 24
"""Distances in memory at once: 64 MiB."""


def nearest_sums(
    residuals: Float[Tensor, "items dim"], tables: Sequence[Float[Tensor, "_ dim"]], *, beam: int
) -> Int[Tensor, "items levels"]:
    """Codes whose vectors add up to something near each residual, keeping ``beam`` partial IDs a level.

    With a beam of one these are the greedy choices.
    """
    largest = max(len(table) for table in tables)
    at_once = max(1, DISTANCES_AT_ONCE // (beam * largest))
    parts = [_nearest(chunk, tables, beam) for chunk in residuals.split(at_once)]
    return torch.cat(parts)


def _nearest(
    residuals: Float[Tensor, "items dim"], tables: Sequence[Float[Tensor, "_ dim"]], beam: int
) -> Int[Tensor, "items levels"]:
    items, dim = residuals.shape
    left = residuals[:, None]  # of each partial ID
    halves = residuals.square().sum(dim=1, keepdim=True) / 2  # of the squared length of what is left
    codes = torch.zeros(items, 1, 0, dtype=torch.int64, device=residuals.device)
    for table in tables:
        width = left.shape[1]
        nearer = torch.addmm(table.square().sum(dim=1) / 2, left.flatten(0, 1), table.T, alpha=-1)
        grown = nearer.view(items, width, len(table)).add_(halves[..., None])
        kept = min(beam, width * len(table))
        halves, best = grown.flatten(1).topk(kept, dim=1, largest=False)
        came_from, chosen = best // len(table), best % len(table)
        left = left.gather(1, came_from[..., None].expand(-1, -1, dim)) - table[chosen]
        codes = codes.gather(1, came_from[..., None].expand(-1, -1, codes.shape[2]))
        codes = torch.cat([codes, chosen[..., None]], dim=2)
    return codes[:, 0]
