"""Weights as safetensors files, and the sizes of networks that are read from folders."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from genius_search.artifact import Manifest, translate_full_disk
from genius_search.config import from_json
from genius_search.errors import ArtifactMismatch, UsageError

__all__ = ["check_size", "dim_of", "load_weights", "settings_of", "sizes_of", "write_weights"]

Network = TypeVar("Network", bound=nn.Module)
Settings = TypeVar("Settings")

_MAX_DIM: Final = 1 << 16
_MAX_CODES: Final = 32_767
_MAX_LEVELS: Final = 1024
_SLACK: Final = 1 << 20
"""Numbers that a network may have beyond its file, such as tables of positions."""


def settings_of(kind: type[Settings], manifest: Manifest) -> Settings:
    """Return the settings in a manifest; raise :class:`ArtifactMismatch` where one is out of range."""
    try:
        return from_json(kind, manifest.config)
    except UsageError as error:
        raise ArtifactMismatch(f"{manifest.folder} cannot be used: {error}") from None


def dim_of(manifest: Manifest) -> int:
    """Return the width of features that a manifest states; raise :class:`ArtifactMismatch` above 65,536."""
    return _number(manifest, "dim", manifest.facts.get("dim"), _MAX_DIM)


def sizes_of(manifest: Manifest) -> tuple[int, ...]:
    """Return the codes of each level that a manifest states; raise :class:`ArtifactMismatch` above 32,767."""
    sizes = manifest.facts.get("sizes")
    if not isinstance(sizes, list) or not 1 <= len(sizes) <= _MAX_LEVELS:
        raise ArtifactMismatch(f"{manifest.folder} states no sizes of 1 to {_MAX_LEVELS:,} levels")
    return tuple(_number(manifest, "sizes", size, _MAX_CODES) for size in sizes)


def _number(manifest: Manifest, name: str, value: object, most: int) -> int:
    if not (isinstance(value, int) and 1 <= value <= most):
        raise ArtifactMismatch(
            f"{manifest.folder} states {name} {str(value)[:80]}, expected a number from 1 to {most:,}"
        )
    return value


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
        with torch.device("meta"):
            network = make()
        held = 0
        for file in files:
            with safe_open(file, "pt") as opened:
                held += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, SafetensorError) as error:
        raise _unfit(files[0], error) from None
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
        raise _unfit(file, error) from None
    return network


def _unfit(file: Path, error: Exception) -> ArtifactMismatch:
    reason = " ".join(str(error).split())[:200]
    return ArtifactMismatch(
        f"{file} does not hold what the settings beside it say ({reason}); make its folder again"
    )


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
