"""K-means as the codebooks need it: random samples as seeds, empty clusters keep their mean."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 16_384
"""Items compared with all centroids at a time, which bounds memory."""


class Clusters(NamedTuple):
    """Centroids and how many samples each stands for."""

    centroids: Float[Tensor, "codes dim"]
    counts: Float[Tensor, " codes"]


def assign(
    samples: Float[Tensor, "items dim"], centroids: Float[Tensor, "codes dim"]
) -> Int[Tensor, " items"]:
    """Index of the nearest centroid (squared Euclidean); the lowest index wins a tie.

    In full precision even while training in bfloat16, which cannot tell near neighbours apart.
    """
    bias = centroids.square().sum(dim=1) / 2
    with torch.autocast(samples.device.type, enabled=False):
        parts = [
            torch.addmm(bias, chunk, centroids.T, alpha=-1).argmin(dim=1) for chunk in samples.split(CHUNK)
        ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=samples.device)


def kmeans(
    samples: Float[Tensor, "items dim"], size: int, *, iterations: int, generator: torch.Generator
) -> Clusters:
    """Lloyd's algorithm until nothing moves or ``iterations`` are done.

    With fewer samples than clusters, samples are drawn with replacement as seeds.
    """
    order = torch.randperm(len(samples), generator=generator)
    if len(samples) < size:
        order = torch.randint(len(samples), (size,), generator=generator)
    centroids = samples[order[:size].to(samples.device)].clone()
    chosen = assign(samples, centroids)
    counts = torch.bincount(chosen, minlength=size)
    for _ in range(iterations):
        sums = torch.zeros_like(centroids).index_add_(0, chosen, samples)
        means = sums / counts.clamp(min=1)[:, None]
        centroids = torch.where((counts > 0)[:, None], means, centroids)
        moved = assign(samples, centroids)
        if torch.equal(moved, chosen):
            break
        chosen = moved
        counts = torch.bincount(chosen, minlength=size)
    return Clusters(centroids=centroids, counts=counts.to(samples.dtype))
