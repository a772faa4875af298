"""A quantizer in NumPy, as far as searching needs it: code vectors, modalities and spread."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from jaxtyping import Float, Float32, Int64, Shaped

from genius_search.artifact import open_artifact
from genius_search.config import CodebookConfig
from genius_search.nn.spread import BITS, COLUMNS, MOST_CONSTANT, Residuals, Spread
from genius_search.nn.stored import dim_of, read_arrays, settings_of
from genius_search.records import NUM_MODALITIES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from genius_search.nn.quantizer import Quantizer

    AnyArray: TypeAlias = Shaped[np.ndarray, "..."] | Shaped[Tensor, "..."]
else:
    AnyArray = Any
"""An array, or a tensor on any device."""

KIND: Final = "quantizer"
WEIGHTS: Final = "quantizer.safetensors"
METRIC: Final = "metric"
"""Name of the quantizer's metric, among its weights and in the inputs of its manifest."""


def as_array(values: AnyArray) -> Shaped[np.ndarray, ...]:
    """Return an array as it is, and a tensor as an array on the CPU, without a copy if it is there."""
    if isinstance(values, np.ndarray):
        return values
    detached = values.detach().cpu()
    if not detached.is_floating_point():
        return detached.numpy()
    return (detached.float() if detached.dtype.itemsize == 2 else detached).numpy()


def as_floats(values: AnyArray) -> Float32[np.ndarray, ...]:
    """Return an array or a tensor as an array of 32-bit floats."""
    return as_array(values).astype(np.float32, copy=False)


def normalize(vectors: Float[np.ndarray, "*rows dim"]) -> Float[np.ndarray, "*rows dim"]:
    """Scale vectors to unit length, as PyTorch's ``normalize`` does: shorter ones than 1e-12 stay short."""
    lengths = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
    return np.asarray(vectors / np.maximum(lengths, np.float32(1e-12)))


class Codebooks:
    """Code vectors, modalities and spread of a quantizer of the kind ``residual``.

    Parameters
    ----------
    weights
        those of :class:`genius_search.nn.quantizer.Quantizer` by name, at least those of
        :func:`shapes_of_weights`.
    """

    def __init__(self, dim: int, config: CodebookConfig, weights: Mapping[str, np.ndarray]) -> None:
        self.dim = dim
        self.config = config
        self._weights = weights
        self._tables = [weights[f"codebooks.{level}.embed"] for level in range(_num_levels(config))]
        self.sizes = tuple(len(table) for table in self._tables)
        """Number of codes at each level."""
        self.has_modality_level = config.level0 != "none"
        """Whether the first code of an ID encodes the modality."""
        self.level0_modality: Int64[np.ndarray, " 3"] = weights["level0_modality"]
        """Number of the modality that each level-0 code stands for, −1 if it is not known."""

    def tables(self) -> list[Float32[np.ndarray, "_ dim"]]:
        """Return the code vectors of each level."""
        return self._tables

    @cached_property
    def spread(self) -> Spread:
        """By how much products and densities differ; if it was not measured, queries are not scaled."""
        if not self._weights["usage"].any():
            return Spread.none(self.sizes[0])
        constant = self._weights["constant"]
        residuals = Residuals(self._weights["residual_weights"], constant[constant.any(axis=1)])
        return Spread(self._weights["usage"], self._weights["spreads"], residuals)


def _num_levels(config: CodebookConfig) -> int:
    return config.levels + (config.level0 != "none")


def shapes_of_weights(dim: int, config: CodebookConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights that :class:`Codebooks` needs."""
    shapes: dict[str, tuple[int, ...]] = {
        f"codebooks.{level}.embed": (config.codebook_size, dim) for level in range(_num_levels(config))
    }
    modalities = 1
    if config.level0 != "none":
        modalities = NUM_MODALITIES
        shapes["codebooks.0.embed"] = (NUM_MODALITIES, dim)
    return {
        **shapes,
        "level0_modality": (NUM_MODALITIES,),
        "usage": (modalities, config.codebook_size),
        "spreads": (modalities, COLUMNS),
        "residual_weights": (len(BITS), dim),
        "constant": (MOST_CONSTANT, dim),
    }


class StoredQuantizer:
    """A quantizer in a folder, read for searching; PyTorch reads it again when items are to be encoded.

    Raises
    ------
    ArtifactMismatch
        The files of the folder do not fit each other.
    """

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        self.manifest = manifest = open_artifact(folder, kind=KIND)
        self._device = device
        dim, config = dim_of(manifest), settings_of(CodebookConfig, manifest)
        weights = read_arrays(folder / WEIGHTS, shapes_of_weights(dim, config))
        self.codebooks = Codebooks(dim, config, weights)

    @cached_property
    def fusion(self) -> nn.Module:
        """The fusion in PyTorch, which encodes queries."""
        if "quantizer" in vars(self):
            return self.quantizer.fusion
        from genius_search.nn.fusion import make_fusion  # noqa: PLC0415  a sum needs no PyTorch
        from genius_search.nn.weights import load_weights  # noqa: PLC0415

        fusion = load_weights(
            self.manifest.folder / WEIGHTS,
            lambda: make_fusion(self.codebooks.dim, self.codebooks.config.fusion),
            change=lambda _, tensors: {
                name.removeprefix("fusion."): tensor
                for name, tensor in tensors.items()
                if name.startswith("fusion.")
            },
        )
        return fusion.to(self._device).eval()

    @cached_property
    def quantizer(self) -> Quantizer:
        """The quantizer in PyTorch."""
        import torch  # noqa: PLC0415  searching does not need it

        from genius_search.nn.quantizer import load_quantizer  # noqa: PLC0415  as above

        with torch.random.fork_rng(devices=[]):  # reading it must not change what a training draws
            return load_quantizer(self.manifest.folder, device=self._device)
