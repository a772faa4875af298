"""The weights of a generator of one block, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float32

EPSILON: Final = 1e-6
"""Added to the mean square in T5's norm."""


class OneBlock(NamedTuple):
    """The weights of a :class:`T5Decoder` of one block. The gains of norms are in the matrices after them."""

    heads: int
    prefixes: int
    prefix_weights: Float32[np.ndarray, "dim prefixes_width"]
    prefix_biases: Float32[np.ndarray, " prefixes_width"]
    prefix_keys_values: Float32[np.ndarray, "width two_inner"]
    prefix_sides: Float32[np.ndarray, "two_heads head_width width"]
    """Projections of the keys of each head, then of the values, into the space of the tokens."""
    embeddings: Float32[np.ndarray, "tokens width"]
    """Of the start token, then of all codes, level after level."""
    distances: Float32[np.ndarray, "heads levels"]
    """Bias of self-attention by the distance between tokens."""
    token: Float32[np.ndarray, "width three_inner"]
    token_out: Float32[np.ndarray, "inner width"]
    up: Float32[np.ndarray, "width feedforward"]
    down: Float32[np.ndarray, "feedforward width"]
    codes: list[Float32[np.ndarray, "width codes"]]
    """From a hidden state to the logits of each level's codes."""


class Combination(NamedTuple):
    """How a :class:`GuidedDecoder` combines nearness to code vectors with logits."""

    tables: list[Float32[np.ndarray, "_ dim"]]
    """Code vectors of each level."""
    scales: Sequence[float]
    """Weight of nearness at each level."""
    gates: Sequence[float]
    """Weight of the logits at each level."""
    biases: Sequence[Float32[np.ndarray, " codes"]]
