"""Folders of trained parts: their settings, and weights as arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from genius_search.artifact import Manifest
from genius_search.config import from_json
from genius_search.errors import ArtifactMismatch, UsageError

Settings = TypeVar("Settings")


def settings_of(kind: type[Settings], manifest: Manifest) -> Settings:
    """Return the settings in a manifest; raise :class:`ArtifactMismatch` where one is out of range."""
    try:
        return from_json(kind, manifest.config)
    except UsageError as error:
        raise ArtifactMismatch(f"{manifest.folder} cannot be used: {error}") from None


def read_arrays(
    file: Path,
    shapes: Mapping[str, tuple[int | None, ...]] | None = None,
    *,
    optional: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Read weights from a file, floating point as 32 bits.

    Parameters
    ----------
    shapes
        names and shapes of the weights that are read, None for any length; by default all are read.
    optional
        those that may be absent.

    Raises
    ------
    ArtifactMismatch
        The file is damaged, or lacks weights of these names and shapes.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        with safe_open(file, "np") as opened:
            there = opened.keys()
            for name in there if shapes is None else shapes:
                if name in optional and name not in there:
                    continue
                array = opened.get_tensor(name)
                wanted = array.shape if shapes is None else shapes[name]
                if not fits(array.shape, wanted):
                    raise ValueError(f"{name} has the shape {array.shape}, not {wanted}")  # noqa: TRY301
                is_float = np.issubdtype(array.dtype, np.floating)
                arrays[name] = array = array.astype(np.float32, copy=False) if is_float else array
                if is_float and not np.isfinite(np.vdot(array, array)):
                    raise ValueError(f"{name} has numbers that are infinite, or NaN")  # noqa: TRY301
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise unfit(file, error) from None
    return arrays


def fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    """Return whether a shape is the wanted one, in which None stands for any length."""
    return len(shape) == len(wanted) and all(map(lambda one, other: other in (None, one), shape, wanted))


def unfit(file: Path, error: Exception) -> ArtifactMismatch:
    """Return the error for a file that is damaged or does not fit the settings beside it."""
    reason = " ".join(str(error).split())[:200]
    return ArtifactMismatch(
        f"{file} does not hold what the settings beside it say ({reason}); make its folder again"
    )
