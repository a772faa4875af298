"""Contrast with a slow copy of the network and what it gave for the last batches (BLIP; MoCo before it).

The copy follows the network by a moving average. Its vectors of the current batch and, from a queue, of
earlier ones are what the network's are compared with, and its similarities are a part of the targets: a
candidate that it finds near is not pushed away as a stranger (specification of M-BEIR, section 3.5).
"""

from __future__ import annotations

import copy
from typing import Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

Network = TypeVar("Network", bound=nn.Module)

NOBODY = -1
"""Stands in the queue for the candidate of a random vector, before there are others."""


class Views(NamedTuple):
    """Unit vectors of the pairs of a batch; row i of one belongs to row i of the other."""

    queries: Float[Tensor, "batch dim"]
    candidates: Float[Tensor, "batch dim"]


class MomentumPair(nn.Module, Generic[Network]):
    """A network, its slow copy and their queue; all of it is in a checkpoint.

    Parameters
    ----------
    dim
        width of its vectors.
    queue
        pairs that are remembered.
    decay
        share of itself that the copy keeps at a step.
    """

    queued_queries: Tensor
    queued_candidates: Tensor
    queued_numbers: Tensor

    def __init__(
        self, network: Network, *, dim: int, queue: int, decay: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.network = network
        self.slow: Network = copy.deepcopy(network).requires_grad_(requires_grad=False)
        self.decay = decay
        for name in ("queued_queries", "queued_candidates"):
            vectors = F.normalize(torch.randn(queue, dim, generator=generator), dim=-1)
            self.register_buffer(name, vectors)
        self.register_buffer("queued_numbers", torch.full((queue,), NOBODY))

    @torch.no_grad()
    def follow(self) -> None:
        """Move the copy towards the network."""
        for slow, fast in zip(self.slow.parameters(), self.network.parameters(), strict=True):
            slow.lerp_(fast, 1 - self.decay)

    @torch.no_grad()
    def remember(self, slow: Views, numbers: Int64[Tensor, " batch"]) -> None:
        """Put a batch in front of the queue; the oldest pairs are forgotten."""
        for name, new in (
            ("queued_queries", slow.queries),
            ("queued_candidates", slow.candidates),
            ("queued_numbers", numbers),
        ):
            queue = getattr(self, name)
            queue.copy_(torch.cat([new, queue])[: len(queue)])

    def loss(
        self,
        fast: Views,
        slow: Views,
        numbers: Int64[Tensor, " batch"],
        false_negatives: Bool[Tensor, "batch batch"],
        *,
        temperature: float,
        softness: float,
    ) -> Float[Tensor, ""]:
        """Cross-entropy in both directions against targets that are partly the copy's own similarities.

        Parameters
        ----------
        numbers
            of the candidates; pairs of the same candidate share the hard target.
        false_negatives
            marks candidates of the batch that answer another query too; they share its hard target.
        softness
            of the targets: the share that is the copy's (BLIP's alpha).
        """
        same = numbers[:, None] == torch.cat([numbers, self.queued_numbers])[None]
        batch = len(numbers)
        forth, back = same.clone(), same.clone()
        forth[:, :batch] |= false_negatives
        back[:, :batch] |= false_negatives.T
        candidates = torch.cat([slow.candidates, self.queued_candidates])
        queries = torch.cat([slow.queries, self.queued_queries])
        with torch.autocast(numbers.device.type, enabled=False):  # a low temperature magnifies rounding
            return (
                _soft(fast.queries, slow.queries, candidates, forth, temperature, softness)
                + _soft(fast.candidates, slow.candidates, queries, back, temperature, softness)
            ) / 2


def _soft(
    fast: Float[Tensor, "batch dim"],
    slow: Float[Tensor, "batch dim"],
    others: Float[Tensor, "others dim"],
    right: Bool[Tensor, "batch others"],
    temperature: float,
    softness: float,
) -> Float[Tensor, ""]:
    hard = F.normalize(right.float(), p=1, dim=1)
    with torch.no_grad():
        guessed = (slow @ others.T / temperature).softmax(dim=1)
    return F.cross_entropy(fast @ others.T / temperature, softness * guessed + (1 - softness) * hard)
