"""Losses of stages 0 and 1 (paper, equations 2 and 8)."""

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
    """Compute the contrastive loss L_cl between queries and the candidates of the batch.

    Deviation 1: ``false_negatives[q, c]`` is true if candidate c is also relevant to query q; such pairs are
    excluded from the denominator.

    Parameters
    ----------
    queries, candidates
        unit vectors; row i of one matches row i of the other.
    false_negatives
        must be false on the diagonal.
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
    """Compute the mean squared error L_mse between normalised quantized queries and candidates.

    Deviation 2: a mean over elements, as in the released code; the paper's norm is ``dim`` times as large.
    """
    return F.mse_loss(F.normalize(queries, dim=-1), F.normalize(candidates, dim=-1))
