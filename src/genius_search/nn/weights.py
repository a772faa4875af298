"""Weights of networks as safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from genius_search.nn.stored import unfit

Network = TypeVar("Network", bound=nn.Module)


class _Uninitialized(TorchFunctionMode):
    """Draws no random numbers; without memory for them, PyTorch would load its compiler to do so."""

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, args: Sequence[Any] = (), options: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else options["tensor"]
        return function(*args, **(options or {}))


def load_weights(
    file: Path,
    make: Callable[[], Network],
    *,
    change: Callable[[Network, dict[str, Tensor]], Mapping[str, Tensor]] = lambda _, tensors: tensors,
) -> Network:
    """Construct a network and give it the weights of a file.

    Parameters
    ----------
    make
        constructs the network; called twice, the first time without memory for tensors.
    change
        returns the tensors under the names that the network gives them.

    Raises
    ------
    ArtifactMismatch
        The file is damaged, or holds other names and shapes than the network has.
    """
    try:
        tensors = load_file(file)
        with torch.device("meta"), _Uninitialized():
            sketch = (
                make()
            )  # settings may describe a network of any size: names and shapes are compared first
        sketch.load_state_dict(change(sketch, dict(tensors)), assign=True)
        network = make()
        network.load_state_dict(change(network, tensors))
    except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, SafetensorError) as error:
        raise unfit(file, error) from None
    return network


def write_weights(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors, copying those that share memory or are not contiguous.

    The file gets the permissions of the umask; safetensors alone would restrict it to its owner.
    """
    from genius_search.writing import translate_full_disk  # noqa: PLC0415  reading needs none of it

    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode & 0o777
    pieces = {name: tensor.contiguous() for name, tensor in tensors.items()}
    end = 0
    for name, tensor in sorted(pieces.items(), key=lambda piece: piece[1].data_ptr()):
        if tensor.data_ptr() < end:
            pieces[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    with translate_full_disk(path.parent):
        save_file(pieces, path, metadata=None if metadata is None else dict(metadata))
    path.chmod(mode)
