"""Where tensors live."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from genius_search.errors import UsageError


def num_ranks() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The place of this process among them."""
    return dist.get_rank() if num_ranks() > 1 else 0


def own_rows(batch: Tensor) -> Tensor:
    """The share of this rank of a batch that every rank drew alike; the batch divides evenly."""
    size = len(batch) // num_ranks()
    return batch[rank() * size : (rank() + 1) * size]


class _Gather(torch.autograd.Function):
    """Rows of all ranks; each rank's gradient is the sum of what all ranks want of its rows.

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
    """The rows of all ranks, in rank order, with gradient."""
    if num_ranks() == 1:
        return rows
    gathered: Tensor = _Gather.apply(rows)  # type: ignore[no-untyped-call]
    return gathered


def gather_pairs(rows: Tensor) -> Tensor:
    """Like :func:`gather` for rows that hold queries, then their candidates: all queries come first again."""
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
    """The device as given, when this machine has it.

    Raises
    ------
    UsageError
        the name means nothing to PyTorch, or there is no such device here.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {device!r} cannot be used here ({reason}); try --device cpu") from None
    return device
