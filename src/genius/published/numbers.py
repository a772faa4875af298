"""Are a published file's numbers fit to be weights? Floating, finite, and given in single precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from genius.errors import ArtifactMismatch


def sound(tensor: Tensor, *, name: str, what: str) -> Tensor:
    """One tensor in single precision; the file's own memory where it is in single precision already.

    Parameters
    ----------
    what
        what the tensor belongs to and where it was read, for the message.

    Raises
    ------
    ArtifactMismatch
        it holds whole or complex numbers, NaN or infinity, or nothing.
    """
    kind = str(tensor.dtype).removeprefix("torch.")
    if not tensor.is_floating_point():
        raise ArtifactMismatch(
            f"{what}: {name} holds {kind} numbers, expected floating-point weights; this is another model, "
            "or the file is damaged"
        )
    single = tensor.float()
    if tensor.numel() == 0 or not all(bound.isfinite() for bound in single.aminmax()):
        found = "NaN or infinity" if tensor.numel() else "no numbers"
        raise ArtifactMismatch(f"{what}: {name} holds {found}; the file is damaged")
    return single


def all_sound(tensors: Mapping[str, Tensor], names: Iterable[str], *, what: str) -> dict[str, Tensor]:
    """These tensors as :func:`sound` gives them, by name."""
    return {name: sound(tensors[name], name=name, what=what) for name in names}
