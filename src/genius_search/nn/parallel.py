"""Distributed training over several ranks, and device checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from genius_search.errors import UsageError

Rows = TypeVar("Rows", Tensor, np.ndarray)


def num_ranks() -> int:
    """Return the number of training processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if num_ranks() > 1 else 0


def own_rows(batch: Rows) -> Rows:
    """Return this rank's share of a batch that is identical on all ranks and divides evenly."""
    size = len(batch) // num_ranks()
    return batch[rank() * size : (rank() + 1) * size]


class _Gather(torch.autograd.Function):
    """All-gather whose backward pass sums the gradients of all ranks.

    Deviation 10: in the released code the weight of L_cl shrinks with the number of ranks.
    """

    @staticmethod
    def forward(_: torch.autograd.function.FunctionCtx, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(num_ranks())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(_: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return own_rows(total)


def gather(rows: Tensor) -> Tensor:
    """Gather the rows of all ranks, in rank order; differentiable."""
    if num_ranks() == 1:
        return rows
    gathered: Tensor = _Gather.apply(rows)  # type: ignore[no-untyped-call]
    return gathered


def gather_pairs(rows: Tensor) -> Tensor:
    """Gather rows that consist of queries, then candidates; the result has the same order."""
    if num_ranks() == 1:
        return rows
    parts: Tensor = gather(rows).unflatten(0, (num_ranks(), 2, len(rows) // 2))
    return parts.transpose(0, 1).flatten(0, 2)


def sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all ranks."""
    if num_ranks() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its mean over all ranks."""
    if num_ranks() == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= num_ranks()


def usable(device: str) -> str:
    """Check that a device can be used, and return its name.

    Raises
    ------
    UsageError
        PyTorch does not know the name, or the machine has no such device.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {device!r} cannot be used here ({reason}); try --device cpu") from None
    return device
