"""Batches of encoders that run a network in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

Input = TypeVar("Input")


def in_batches(
    encode: Callable[[Sequence[Input]], Tensor], items: Sequence[Input], *, size: int, dim: int
) -> Float[Tensor, "items dim"]:
    """Encode ``size`` items at a time, and return the features on the CPU."""
    parts = [encode(items[start : start + size]).cpu() for start in range(0, len(items), size)]
    return torch.cat([torch.zeros(0, dim), *parts])
