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


def load_weights(file: Path, make: Callable[[], Network]) -> Network:
    """Construct a network with the weights of a file; all its tensors must be there.

    Parameters
    ----------
    make
        constructs the network, without memory for tensors: settings may describe one of any size.

    Raises
    ------
    ArtifactMismatch
        The file is damaged, or holds other names and shapes than the network has.
    """
    try:
        tensors = load_file(file)
        with torch.device("meta"), _Uninitialized():
            network = make()
        network.load_state_dict(tensors, assign=True)
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
