"""Training on several ranks, and the device that a model is on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from genius_search.errors import UsageError


def num_ranks() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the place of this process among them."""
    return dist.get_rank() if num_ranks() > 1 else 0


def own_rows(batch: Tensor) -> Tensor:
    """Return this rank's share of a batch that every rank drew alike; the batch divides evenly."""
    size = len(batch) // num_ranks()
    return batch[rank() * size : (rank() + 1) * size]


class _Gather(torch.autograd.Function):
    """Gathers the rows of all ranks; a rank's gradient is the sum of all ranks' gradients of its rows.

    Deviation 10: in the released code L_cl weighs less the more ranks there are.
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
    """Return the rows of all ranks, in rank order, with gradient."""
    if num_ranks() == 1:
        return rows
    gathered: Tensor = _Gather.apply(rows)  # type: ignore[no-untyped-call]
    return gathered


def gather_pairs(rows: Tensor) -> Tensor:
    """Gather rows that hold queries, then candidates, such that all queries come first again."""
    if num_ranks() == 1:
        return rows
    parts: Tensor = gather(rows).unflatten(0, (num_ranks(), 2, len(rows) // 2))
    return parts.transpose(0, 1).flatten(0, 2)


def sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over ranks."""
    if num_ranks() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its mean over ranks."""
    if num_ranks() == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= num_ranks()


def usable(device: str) -> str:
    """Return the device as given if this machine has it.

    Raises
    ------
    UsageError
        PyTorch does not know the name, or there is no such device.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {device!r} cannot be used here ({reason}); try --device cpu") from None
    return device
