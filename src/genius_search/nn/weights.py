"""Weights of networks as safetensors files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from genius_search.errors import ArtifactMismatch
from genius_search.nn.stored import unfit
from genius_search.writing import translate_full_disk

Network = TypeVar("Network", bound=nn.Module)

_SLACK: Final = 1 << 20
"""Numbers that a network may have beyond its file, such as tables of positions."""


class _Uninitialized(TorchFunctionMode):
    """Draws no random numbers; without memory for them, PyTorch would load its compiler to do so."""

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, args: Sequence[Any] = (), options: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else options["tensor"]
        return function(*args, **(options or {}))


def check_size(make: Callable[[], nn.Module], *files: Path) -> None:
    """Compare a network's size with that of its weights, before any memory is taken for it.

    Settings of a folder may describe a network of any size; its files are as large as they are.

    Parameters
    ----------
    make
        constructs the network; called without memory for tensors.

    Raises
    ------
    ArtifactMismatch
        The network would have more than twice as many numbers as the files, or cannot be constructed.
    """
    try:
        with torch.device("meta"), _Uninitialized():
            network = make()
        held = 0
        for file in files:
            with safe_open(file, "pt") as opened:
                held += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, SafetensorError) as error:
        raise unfit(files[0], error) from None
    wanted = sum({id(one): one.numel() for one in chain(network.parameters(), network.buffers())}.values())
    if wanted > 2 * held + _SLACK:
        raise ArtifactMismatch(
            f"{files[0]} holds {held:,} numbers, and the settings beside it describe a network of "
            f"{wanted:,}; do not use it, or make its folder again"
        )


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
    check_size(make, file)
    network = make()
    try:
        network.load_state_dict(change(network, load_file(file)))
    except (RuntimeError, LookupError, SafetensorError) as error:
        raise unfit(file, error) from None
    return network


def write_weights(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors, copying those that share memory or are not contiguous.

    The file gets the permissions of the umask; safetensors alone would restrict it to its owner.
    """
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
