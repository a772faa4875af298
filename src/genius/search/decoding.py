"""What beam search asks of a decoder, however it computes: PyTorch, or ONNX Runtime."""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@runtime_checkable
class DecodingState(Protocol):
    """A half-written batch of IDs; rows are places of beams, query after query."""

    @property
    def level(self) -> int:
        """Tokens read: the start, then codes; so the level that the last of them foretold, plus one."""

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> DecodingState:
        """The state of these queries (None: of all), and for each of them of these of its rows."""


@runtime_checkable
class DecodingStep(Protocol):
    """What a decoder says after reading codes."""

    @property
    def hidden(self) -> Float[Tensor, "rows tokens width"]:
        """Of each row and token: what follows it."""

    @property
    def state(self) -> DecodingState:
        """What later steps need."""


@runtime_checkable
class Decoding(Protocol):
    """A decoder of IDs."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Codes at each level."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def start(self, queries: Float[Tensor, "queries dim"]) -> DecodingState:
        """The state before any code."""

    def advance(self, state: Any, codes: Int64[Tensor, "rows tokens"]) -> DecodingStep:
        """Read codes; on a fresh state the start token comes before them.

        ``state`` is one of its own. A fresh one may be continued by several rows of each query, equally many.
        """

    def logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Of one level's codes."""

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Of one level's codes, normalised over the level or over the whole vocabulary."""
