"""Folders of trained parts: what their manifests state, and weights as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from genius_search.artifact import Manifest
from genius_search.config import from_json
from genius_search.errors import ArtifactMismatch, UsageError

Settings = TypeVar("Settings")

_MAX_DIM: Final = 1 << 16
_MAX_CODES: Final = 32_767
_MAX_LEVELS: Final = 1024


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


def read_arrays(
    file: Path, shapes: Mapping[str, tuple[int, ...]] | None = None, *, optional: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Read weights from a file, floating point as 32 bits.

    Parameters
    ----------
    shapes
        names and shapes of the weights that are read; None reads all.
    optional
        further weights that are read if they are there.

    Raises
    ------
    ArtifactMismatch
        The file is damaged, or lacks weights of these names and shapes.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        with safe_open(file, "np") as opened:
            there = opened.keys()
            for name in [*shapes, *(name for name in optional if name in there)] if shapes else there:
                array = opened.get_tensor(name)
                if shapes and array.shape != shapes.get(name, array.shape):
                    raise ValueError(f"{name} has the shape {array.shape}, not {shapes[name]}")  # noqa: TRY301
                is_float = np.issubdtype(array.dtype, np.floating)
                arrays[name] = array.astype(np.float32, copy=False) if is_float else array
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise unfit(file, error) from None
    return arrays


def unfit(file: Path, error: Exception) -> ArtifactMismatch:
    """Return the error for a file that is damaged or does not fit the settings beside it."""
    reason = " ".join(str(error).split())[:200]
    return ArtifactMismatch(
        f"{file} does not hold what the settings beside it say ({reason}); make its folder again"
    )
