"""Weights as safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

__all__ = ["write_weights"]


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
    save_file(pieces, path, metadata=None if metadata is None else dict(metadata))
    path.chmod(mode)
