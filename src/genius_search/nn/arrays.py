"""NumPy in place of PyTorch: what a search computes without importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxtyping import Float, Float32, Shaped

if TYPE_CHECKING:
    from torch import Tensor

    AnyArray: TypeAlias = Shaped[np.ndarray, "..."] | Shaped[Tensor, "..."]
else:
    AnyArray = Any
"""An array, or a tensor on any device."""


def as_array(values: AnyArray) -> Shaped[np.ndarray, ...]:
    """Return an array as it is, and a tensor as an array on the CPU, without a copy if it is there."""
    if isinstance(values, np.ndarray):
        return values
    detached = values.detach().cpu()
    if not detached.is_floating_point():
        return detached.numpy()
    return (detached.float() if detached.dtype.itemsize == 2 else detached).numpy()


def as_floats(values: AnyArray) -> Float32[np.ndarray, ...]:
    """Return an array or a tensor as an array of 32-bit floats."""
    return as_array(values).astype(np.float32, copy=False)


def normalize(vectors: Float[np.ndarray, "*rows dim"]) -> Float[np.ndarray, "*rows dim"]:
    """Scale vectors to unit length, as PyTorch's ``normalize`` does: shorter ones than 1e-12 stay short."""
    lengths = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
    return np.asarray(vectors / np.maximum(lengths, np.float32(1e-12)))
