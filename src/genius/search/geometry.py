"""Decode by geometry alone: no generator, only the distance between a query and the vectors of prefixes.

The rival that a generator has to beat, level by level and inside the same beam search: it knows the code
vectors and the query, and has learned nothing about which items answer which queries.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from genius.errors import UsageError


class GeometricState(NamedTuple):
    """Half-written IDs: what of the query no code read so far explains."""

    level: int
    """Tokens read: the start, then codes."""
    residuals: Float[Tensor, "rows dim"]
    """Each query's embedding less the vectors of its codes; before the first token a row for each query."""

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> GeometricState:
        """The state of these queries (None: of all), and for each of them of these of its rows."""
        if self.level:
            return self._replace(residuals=self.residuals[rows.flatten()])
        return self if queries is None else self._replace(residuals=self.residuals[queries])


class GeometricStep(NamedTuple):
    """What follows each code that was read, and the state after the last."""

    hidden: Float[Tensor, "rows tokens dim"]
    """The residual that the next code's vector should be near to."""
    state: GeometricState


class GeometricDecoder:
    """Writes the IDs whose vectors, the sums of their codes' vectors, are nearest to the query.

    With the residual r and a code vector e, the code gains r·e − |e|²/2. Over the levels that adds up to
    (|q|² − |q − v|²) / 2, where v is the prefix's vector: the order by distance, as the quantizer chose the
    codes. Gains stand where beam search expects log-probabilities, without being normalised.

    It copies the vectors: make it anew after training further.

    Parameters
    ----------
    tables
        the code vectors of each level.
    """

    def __init__(self, tables: list[Float[Tensor, "_ dim"]]) -> None:
        self.sizes: tuple[int, ...] = tuple(len(table) for table in tables)
        self._vectors = torch.cat([table.detach().float() for table in tables])
        self._offsets = torch.tensor([0, *accumulate(self.sizes)][:-1], device=self.device)
        levels = self._vectors.split(self.sizes)
        self._columns = tuple(level.t().contiguous() for level in levels)
        self._costs = tuple(level.square().sum(dim=1) / -2 for level in levels)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._vectors.device

    def start(self, queries: Float[Tensor, "queries dim"]) -> GeometricState:
        """The state before any code."""
        return GeometricState(level=0, residuals=queries.detach().float())

    def advance(self, state: GeometricState, codes: Int64[Tensor, "rows tokens"]) -> GeometricStep:
        """Read codes; on a fresh state the start token comes before them.

        A fresh state may be continued by several rows of each query, equally many; those of a query are
        neighbours.
        """
        rows, count = codes.shape
        is_fresh = state.level == 0
        level = state.level + count + is_fresh
        if level == state.level or level > len(self.sizes):
            raise UsageError(
                f"{count} codes after {state.level} tokens of an ID of {len(self.sizes)} levels; the start "
                "and the code of each level but the last are read, at least one at a time"
            )
        first = max(state.level - 1, 0)
        vectors = F.embedding(codes + self._offsets[first : first + count], self._vectors)
        before = state.residuals.repeat_interleave(rows // max(len(state.residuals), 1), dim=0)
        residuals = torch.cat([before[:, None], -vectors], dim=1).cumsum(dim=1)
        hidden = residuals if is_fresh else residuals[:, 1:]
        return GeometricStep(hidden, GeometricState(level, hidden[:, -1]))

    def logits(self, hidden: Float[Tensor, "rows dim"], level: int) -> Float[Tensor, "rows codes"]:
        """What each code of a level gains."""
        return torch.addmm(self._costs[level], hidden, self._columns[level])

    def log_probabilities(
        self,
        hidden: Float[Tensor, "rows dim"],
        level: int,
        scores: Literal["level", "vocabulary"],  # noqa: ARG002  nothing is normalised
    ) -> Float[Tensor, "rows codes"]:
        """The same, however they are asked for."""
        return self.logits(hidden, level)
