"""Weights of networks as safetensors files, and encoding in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from genius_search.artifact import mismatch_error

Network = TypeVar("Network", bound=nn.Module)
Input = TypeVar("Input")


class _Uninitialized(TorchFunctionMode):
    """Skips random initialisation, for which PyTorch would load its compiler on the meta device."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: Any,
        args: Sequence[Any] = (),
        options: Any = None,
    ) -> Any:
        if getattr(function, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else options["tensor"]
        return function(*args, **(options or {}))


def load_weights(file: Path, make: Callable[[], Network]) -> Network:
    """Construct a network with the weights of a file, which must hold all its tensors.

    Parameters
    ----------
    make
        constructs the network. It is called on the meta device, which allocates no memory, since
        settings may describe a network of any size.

    Raises
    ------
    ArtifactMismatch
        The file is damaged, or its names and shapes differ from the network's.
    """
    try:
        tensors = load_file(file)
        with torch.device("meta"), _Uninitialized():
            network = make()
        network.load_state_dict(tensors, assign=True)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        ArithmeticError,
        LookupError,
        SafetensorError,
    ) as error:
        raise mismatch_error(file, error) from None
    return network


def in_batches(
    encode: Callable[[Sequence[Input]], Tensor], items: Sequence[Input], *, size: int, dim: int
) -> Float[Tensor, "items dim"]:
    """Encode items in batches of ``size``, and return the features on the CPU."""
    parts = [encode(items[start : start + size]).cpu() for start in range(0, len(items), size)]
    return torch.cat([torch.zeros(0, dim), *parts])


def write_weights(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None
) -> None:
    """Write named tensors into a safetensors file; tensors may share memory."""
    copies = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    path.write_bytes(save(copies, metadata=metadata))
