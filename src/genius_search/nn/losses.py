"""Losses of stages 0 and 1 (paper, equations 2 and 8), two that teach an encoder words, one of whole IDs."""

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


def word_loss(
    images: Float[Tensor, "images dim"],
    words: Float[Tensor, "words dim"],
    present: Bool[Tensor, "images words"],
    *,
    temperature: float,
) -> Float[Tensor, ""]:
    """Compute the cross-entropy of predicting the words that go with each image (Joulin et al., 2016).

    A word of many images is expected of every image, so its vector needs to say only how much more (or less)
    likely an image makes it; and it counts less, by the square root of the number of its images.

    Parameters
    ----------
    images, words
        unit vectors.
    present
        true if a word is in a text that goes with the image. Images without words do not count; every word
        must go with an image.
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
    """Compute the cross-entropy of finding the images that a phrase fits, each of them equally.

    Parameters
    ----------
    phrases, images
        unit vectors.
    relevant
        true if the phrase fits the image; every phrase must fit one.
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
    """Compute the cross-entropy of choosing a query's own prefix among those of other IDs, for each length.

    A prefix is scored by the sum of its codes' scores, which no level normalises by itself. So the loss is of
    what a beam search compares. Equal prefixes count once.

    Parameters
    ----------
    scores
        of each code, given the codes before it. A query's own ID comes first.
    excluded
        true for IDs that also answer the query; never for its own.
    """
    same = (codes[:, :, None] == codes[:, None]).int().cumprod(dim=3).bool()
    earlier = torch.ones(same.shape[1:3], dtype=torch.bool, device=codes.device).tril(-1)
    left_out = (same & earlier[..., None]).any(dim=2) | excluded[..., None]
    totals = scores.cumsum(dim=2).masked_fill(left_out, float("-inf"))
    own = torch.zeros(len(totals), totals.shape[2], dtype=torch.long, device=codes.device)
    return F.cross_entropy(totals, own, reduction="none").mean(dim=0)


def alignment_loss(
    queries: Float[Tensor, "batch dim"], candidates: Float[Tensor, "batch dim"]
) -> Float[Tensor, ""]:
    """Compute the mean squared error L_mse between normalised quantized queries and candidates.

    Deviation 2: a mean over elements, as in the released code; the paper's norm is ``dim`` times as large.
    """
    return F.mse_loss(F.normalize(queries, dim=-1), F.normalize(candidates, dim=-1))
