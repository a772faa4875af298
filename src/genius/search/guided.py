"""A generator that starts from geometry, laid out for search: two decoders in step.

What the generator's decoder says and how near the code vectors are (``search/geometry.py``) become one, as
in training (``models/guide.py``). Either decoder may be any that beam search takes.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from genius.errors import UsageError
from genius.models.guide import Guide
from genius.search.decoding import Decoding, DecodingState
from genius.search.geometry import GeometricDecoder


class GuidedState(NamedTuple):
    """Half-written IDs, as both see them."""

    written: DecodingState
    located: DecodingState

    @property
    def level(self) -> int:
        """Tokens read: the start, then codes."""
        return self.written.level

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> GuidedState:
        """The state of these queries (None: of all), and for each of them of these of its rows."""
        return GuidedState(self.written.select(queries, rows), self.located.select(queries, rows))


class GuidedStep(NamedTuple):
    """What follows each code that was read, and the state after the last."""

    hidden: Float[Tensor, "rows tokens width"]
    """What the decoder says, then what is left of the query's embedding."""
    state: GuidedState


class GuidedDecoder:
    """A decoder and its guide.

    It copies the guide's numbers: make it anew after training further.

    Parameters
    ----------
    decoder
        the generator's, without its guide: PyTorch's or ONNX Runtime's.
    """

    @torch.no_grad()
    def __init__(self, decoder: Decoding, guide: Guide) -> None:
        self._decoder = decoder
        self._geometry = GeometricDecoder(guide.tables())
        self.sizes: tuple[int, ...] = decoder.sizes
        self._dim = guide.vectors.shape[1]
        self._scales = guide.log_scale.exp().tolist()
        self._gates = guide.gate.tolist()
        self._biases = guide.bias.detach().clone().split(guide.sizes)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._decoder.device

    def start(self, queries: Float[Tensor, "queries dim"]) -> GuidedState:
        """The state before any code."""
        return GuidedState(self._decoder.start(queries), self._geometry.start(queries))

    def advance(self, state: Any, codes: Int64[Tensor, "rows tokens"]) -> GuidedStep:
        """Read codes; on a fresh state the start token comes before them."""
        written = self._decoder.advance(state.written, codes)
        located = self._geometry.advance(state.located, codes)
        hidden = torch.cat([written.hidden, located.hidden], dim=-1)
        return GuidedStep(hidden, GuidedState(written.state, located.state))

    def logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Of one level's codes."""
        said, left = hidden.split([hidden.shape[1] - self._dim, self._dim], dim=1)
        near = self._geometry.logits(left, level).mul_(self._scales[level]).add_(self._biases[level])
        return near.add_(self._decoder.logits(said, level), alpha=self._gates[level])

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Of one level's codes, normalised over the level.

        Raises
        ------
        UsageError
            it is asked to normalise over the whole vocabulary, where distances at different levels would
            be compared.
        """
        if scores == "vocabulary":
            raise UsageError(
                "this model's generator is guided by geometry, level by level; its scores cannot be "
                "normalised over the whole vocabulary. Use --scores level (or children)"
            )
        return torch.log_softmax(self.logits(hidden, level), dim=-1)
