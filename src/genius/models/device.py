"""Where tensors live."""

from __future__ import annotations

import torch

from genius.errors import UsageError


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
