"""What geometry says of the next code, for a generator to start from and to correct.

A query's embedding already points at what it asks for: the code whose vector is nearest to what the codes so
far leave unexplained is a good guess at every level. A decoder that has to learn this from pairs ends up
behind it; one that starts from it learns only where the right answer lies elsewhere.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

FIRST_SCALE: Final = 20.0
"""Turns distances into logits when training begins; a cosine of 0.05 is worth a factor of e."""
FIRST_GATE: Final = 0.1
"""Share of the decoder's own logits when training begins, when they say nothing yet."""


class Guide(nn.Module):
    """Logits of level l: scale_l · (r·e − |e|²/2) + bias + gate_l · (what the decoder says).

    r is the query's embedding less the code vectors before, e a code's vector; the bracket is, up to a
    constant of the query, minus half the squared distance to the vector of the longer prefix. Scales, gates
    and biases are learned with the decoder, the code vectors stay those of the quantizer.

    Parameters
    ----------
    sizes
        codes at each level.
    """

    vectors: Tensor

    def __init__(self, dim: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = sizes
        self.register_buffer("vectors", torch.zeros(sum(sizes), dim))
        self.log_scale = nn.Parameter(torch.full((len(sizes),), math.log(FIRST_SCALE)))
        self.gate = nn.Parameter(torch.full((len(sizes),), FIRST_GATE))
        self.bias = nn.Parameter(torch.zeros(sum(sizes)))

    def tables(self) -> list[Float[Tensor, "_ dim"]]:
        """The code vectors of each level."""
        return list(self.vectors.split(self.sizes))

    def residuals(
        self, queries: Float[Tensor, "batch dim"], codes: Int[Tensor, "batch levels"]
    ) -> Float[Tensor, "batch levels dim"]:
        """What the codes before each level leave unexplained."""
        offsets = torch.tensor([0, *accumulate(self.sizes)][:-1], device=codes.device)
        before = self.vectors[codes[:, :-1] + offsets[:-1]]
        return torch.cat([queries[:, None], -before], dim=1).cumsum(dim=1)

    def guided(
        self,
        said: Float[Tensor, "rows codes"],
        residuals: Float[Tensor, "rows dim"],
        level: int,
    ) -> Float[Tensor, "rows codes"]:
        """Logits of one level's codes, given what the decoder says of them."""
        start = sum(self.sizes[:level])
        here = slice(start, start + self.sizes[level])
        vectors = self.vectors[here]
        nearness = residuals @ vectors.T - vectors.square().sum(dim=1) / 2
        return self.log_scale[level].exp() * nearness + self.bias[here] + self.gate[level] * said
