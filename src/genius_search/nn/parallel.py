"""Training over several processes (ranks), and a check of devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from genius_search.errors import UsageError

Rows = TypeVar("Rows", Tensor, np.ndarray)
Value = TypeVar("Value")

MAX_STEP_TIME: Final = timedelta(minutes=10)
"""Timeout of a collective operation, after which a lost rank is noticed."""
MAX_WAIT_TIME: Final = timedelta(days=7)
"""Timeout of :func:`wait_for_ranks`: the other ranks wait while the first one embeds and writes."""
_waiting_group: dist.ProcessGroup | None = None
"""A group of all ranks with the timeout :data:`MAX_WAIT_TIME`."""


@contextmanager
def join_ranks() -> Iterator[None]:
    """Join the processes that ``torchrun`` started, if it started this one.

    Local rank n of a machine then uses its GPU n under the name ``cuda``.
    """
    if not dist.is_torchelastic_launched():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    global _waiting_group  # noqa: PLW0603  like PyTorch's own default group
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        # When torchrun restarts the processes, it keeps its store with the addresses of the lost
        # ones, so every attempt gets a prefix. Several machines count their attempts separately;
        # there, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun create a new store.
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=MAX_STEP_TIME)
    _waiting_group = dist.new_group(backend="gloo", timeout=MAX_WAIT_TIME)
    try:
        yield
    finally:
        _waiting_group = None
        dist.destroy_process_group()


def num_ranks() -> int:
    """Return the number of training processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if num_ranks() > 1 else 0


def broadcast(value: Value) -> Value:
    """Return the first rank's value on all ranks."""
    if num_ranks() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def wait_for_ranks() -> None:
    """Wait until every rank calls this function."""
    if num_ranks() > 1:
        dist.barrier(_waiting_group)


def run_in_rank_order(work: Callable[[], Value]) -> Value:
    """Run a function on one rank after the other: the first writes a folder, the others open it."""
    # Rank r passes r barriers, works, and passes the remaining ones: n in all, as on every rank.
    for _ in range(rank()):
        wait_for_ranks()
    value = work()
    for _ in range(rank(), num_ranks()):
        wait_for_ranks()
    return value


def copy_from_first_rank(module: nn.Module) -> None:
    """Replace a module's parameters and buffers by those of the first rank."""
    if num_ranks() > 1:
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, 0)


def rows_of_rank(batch: Rows) -> Rows:
    """Return this rank's part of a batch, which is identical on all ranks and divides evenly."""
    size = len(batch) // num_ranks()
    return batch[rank() * size : (rank() + 1) * size]


class _Gather(torch.autograd.Function):
    """All-gather whose backward pass sums the gradients of all ranks.

    Each rank computes the loss of the whole batch; its rows influence the losses of all ranks.

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
        return rows_of_rank(total)


def gather(rows: Tensor) -> Tensor:
    """Concatenate the rows of all ranks, in rank order; differentiable."""
    if num_ranks() == 1:
        return rows
    gathered: Tensor = _Gather.apply(rows)  # type: ignore[no-untyped-call]
    return gathered


def sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all ranks."""
    if num_ranks() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its mean over all ranks."""
    if num_ranks() == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(total)
    nn.utils.vector_to_parameters(total / num_ranks(), gradients)


def average_measures(measures: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return measures as numbers: tensors are averaged over all ranks, numbers are unchanged."""
    tensors = {name: value for name, value in measures.items() if isinstance(value, Tensor)}
    means = torch.stack([value.detach().float() for value in tensors.values()])
    sum_over_ranks([means])
    numbers = dict(zip(tensors, (means / num_ranks()).tolist(), strict=True))
    return {name: float(value) for name, value in {**measures, **numbers}.items()}


def check_device(device: str) -> str:
    """Check that PyTorch can use a device, and return its name.

    Raises
    ------
    UsageError
        PyTorch does not know the name, or the machine has no such device.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"device {device!r} cannot be used here ({reason}); try `device='cpu'`"
        ) from None
    return device
