"""The losses of stage 0 and stage 1 (paper, equations 2 and 8). All accept gathered batches."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F


def contrastive_loss(
    queries: Float[Tensor, "batch dim"],
    candidates: Float[Tensor, "batch dim"],
    false_negatives: Bool[Tensor, "batch batch"],
    *,
    temperature: float,
    direction: Literal["both", "query"],
) -> Float[Tensor, ""]:
    """Pull each query to its candidate, away from the batch's others (L_cl).

    Deviation 1: ``false_negatives[q, c]`` marks candidates that also answer query q; they are left out
    of the denominator instead of being pushed away.

    Parameters
    ----------
    queries, candidates
        unit vectors; row i of one belongs to row i of the other.
    false_negatives
        never true on the diagonal.
    """
    with torch.autocast(queries.device.type, enabled=False):  # a low temperature magnifies rounding
        logits = queries @ candidates.T / temperature
    logits = logits.masked_fill(false_negatives, float("-inf"))
    target = torch.arange(len(logits), device=logits.device)
    forward = F.cross_entropy(logits, target)
    if direction == "query":
        return forward
    return (forward + F.cross_entropy(logits.T, target)) / 2


def alignment_loss(
    queries: Float[Tensor, "batch dim"], candidates: Float[Tensor, "batch dim"]
) -> Float[Tensor, ""]:
    """Bring the quantized query to its quantized candidate (L_mse), both as unit vectors.

    Deviation 2: the mean over elements, as in the released code; the paper's norm is ``dim`` times it.
    """
    return F.mse_loss(F.normalize(queries, dim=-1), F.normalize(candidates, dim=-1))
