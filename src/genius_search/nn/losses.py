"""Losses: contrast, alignment (paper, equations 2 and 8), words, phrases, and prefixes of IDs."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
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
    """Compute the contrastive loss L_cl between queries and the candidates of the batch (InfoNCE).

    With τ the temperature, it is the mean over queries i of

        −log( exp(q_i·c_i / τ) / Σ_j exp(q_i·c_j / τ) )

    and with ``direction="both"``, half the sum of this and of the same for candidates against
    queries.

    Deviation 1: candidates that are also relevant to the query are left out of the denominator.

    Parameters
    ----------
    queries, candidates
        unit vectors; query i matches candidate i.
    false_negatives
        true at [i, j] if candidate j is relevant to query i although it is not its match; false on
        the diagonal.
    """
    # In bfloat16, a low temperature would magnify the rounding.
    with torch.autocast(queries.device.type, enabled=False):
        logits = queries @ candidates.T / temperature
    logits = logits.masked_fill(false_negatives, float("-inf"))
    target = torch.arange(len(logits), device=logits.device)
    forward = F.cross_entropy(logits, target)
    if direction == "query":
        return forward
    return (forward + F.cross_entropy(logits.T, target)) / 2


def word_loss(
    images: Float[Tensor, "images dim"],
    words: Float[Tensor, "words dim"],
    present: Bool[Tensor, "images words"],
    *,
    temperature: float,
) -> Float[Tensor, ""]:
    """Compute the cross-entropy of predicting the words that go with each image.

    See Joulin et al., "Learning visual features from large weakly supervised data", 2016. With n_w
    the number of images that word w goes with, the logit of word w for image i is

        i·w / τ + log n_w

    so that a frequent word is expected of every image, and its vector needs to encode only how much
    more (or less) likely an image makes it. An image's target gives each of its words a share
    proportional to 1 / √n_w.

    Parameters
    ----------
    images, words
        unit vectors.
    present
        true at [i, w] if word w is in a text that goes with image i. Images without words do not
        count; every word must go with an image.
    """
    counts = present.sum(dim=0)
    shares = F.normalize(present / counts.sqrt(), p=1, dim=1)
    with torch.autocast(images.device.type, enabled=False):
        logits = images @ words.T / temperature + counts.log()
    return -(shares * logits.log_softmax(dim=1)).sum() / present.any(dim=1).sum().clamp(min=1)


def phrase_loss(
    phrases: Float[Tensor, "phrases dim"],
    images: Float[Tensor, "images dim"],
    relevant: Bool[Tensor, "phrases images"],
    *,
    temperature: float,
) -> Float[Tensor, ""]:
    """Compute the cross-entropy of finding the images that a phrase fits, all with the same share.

    Parameters
    ----------
    phrases, images
        unit vectors.
    relevant
        true at [p, i] if phrase p fits image i; every phrase must fit an image.
    """
    with torch.autocast(images.device.type, enabled=False):
        logits = phrases @ images.T / temperature
    shares = F.normalize(relevant.float(), p=1, dim=1)
    return -(shares * logits.log_softmax(dim=1)).sum() / max(1, len(phrases))


def prefix_loss(
    scores: Float[Tensor, "queries ids levels"],
    codes: Int[Tensor, "queries ids levels"],
    excluded: Bool[Tensor, "queries ids"],
) -> Float[Tensor, " levels"]:
    """Compute the cross-entropy of choosing the target's prefix of each length among those of IDs.

    A prefix scores the sum of its codes' scores, S_l = s_1 + … + s_l, which no level normalises. So
    the loss compares the same sums as a beam search. Among IDs with the same prefix, only the first
    counts.

    Parameters
    ----------
    scores
        score of each code of each ID, given the codes before it. The query's target is ID 0.
    excluded
        true for IDs that also answer the query; false for its target.
    """
    # same[q, i, j, l]: the IDs i and j of query q have the same first l + 1 codes.
    same = (codes[:, :, None] == codes[:, None]).int().cumprod(dim=3).bool()
    # earlier[i, j]: j < i
    earlier = torch.ones(same.shape[1:3], dtype=torch.bool, device=codes.device).tril(-1)
    is_repeated = (same & earlier[..., None]).any(dim=2)
    totals = scores.cumsum(dim=2).masked_fill(is_repeated | excluded[..., None], float("-inf"))
    target = torch.zeros(len(totals), totals.shape[2], dtype=torch.long, device=codes.device)
    return F.cross_entropy(totals, target, reduction="none").mean(dim=0)


def alignment_loss(
    queries: Float[Tensor, "batch dim"], candidates: Float[Tensor, "batch dim"]
) -> Float[Tensor, ""]:
    """Compute the mean squared error L_mse between normalised quantized queries and candidates.

    Deviation 2: it is a mean over elements, as in the released code; the paper's norm is ``dim``
    times as large.
    """
    return F.mse_loss(F.normalize(queries, dim=-1), F.normalize(candidates, dim=-1))
