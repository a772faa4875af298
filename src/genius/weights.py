"""Weights as safetensors files: what every stage of ours writes and anybody's tools read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

__all__ = ["write_weights"]


def write_weights(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write weights by name; tensors that share memory or lie scattered in it are written as they read.

    The file may be read by whoever may read other new files; the library alone would let only its owner.
    """
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode & 0o777
    save_file(_apart(tensors), path, metadata=None if metadata is None else dict(metadata))
    path.chmod(mode)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor in one piece and in memory of its own; only those that are not are copied."""
    pieces = {name: tensor.contiguous() for name, tensor in tensors.items()}
    end = 0
    for name, tensor in sorted(pieces.items(), key=lambda piece: piece[1].data_ptr()):
        if tensor.data_ptr() < end:
            pieces[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return pieces
