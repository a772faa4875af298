"""A quantizer in NumPy, as far as searching needs it: code vectors, modalities and the fusion of features."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
from jaxtyping import Float, Float32, Int64

from genius_search.artifact import Manifest
from genius_search.config import QuantizerConfig
from genius_search.nn.arrays import Linear, multiply, normalize
from genius_search.nn.spread import BITS, COLUMNS, MOST_CONSTANT, Residuals, Spread
from genius_search.nn.stored import dim_of, read_arrays, settings_of
from genius_search.records import NUM_MODALITIES

if TYPE_CHECKING:
    from genius_search.nn.quantizer import Quantizer

KIND: Final = "quantizer"
WEIGHTS: Final = "quantizer.safetensors"


class Codebooks:
    """Code vectors, modalities and fusion of a quantizer of the kind ``residual``.

    Parameters
    ----------
    weights
        those of :class:`genius_search.nn.quantizer.Quantizer` by name, at least those of
        :func:`shapes_of_weights`.
    """

    def __init__(self, dim: int, config: QuantizerConfig, weights: Mapping[str, np.ndarray]) -> None:
        self.dim = dim
        self.config = config
        self._weights = weights

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of codes at each level."""
        return tuple(len(table) for table in self.tables())

    @property
    def has_modality_level(self) -> bool:
        """Whether the first code of an ID encodes the modality."""
        return self.config.level0 != "none"

    def tables(self) -> list[Float32[np.ndarray, "_ dim"]]:
        """Return the code vectors of each level."""
        return list(self._tables)

    @cached_property
    def _tables(self) -> list[Float32[np.ndarray, "_ dim"]]:
        return [self._weights[name] for name in _names_of_tables(self.config)]

    @cached_property
    def spread(self) -> Spread:
        """By how much products and densities differ; estimated if it was not measured."""
        if not self._weights["usage"].any():
            return Spread.estimate(self._tables, has_modality_level=self.has_modality_level)
        constant = self._weights["constant"]
        residuals = Residuals(self._weights["residual_weights"], constant[constant.any(axis=1)])
        return Spread(self._weights["usage"], self._weights["spreads"], residuals)

    @property
    def level0_modality(self) -> Int64[np.ndarray, " 3"]:
        """Number of the modality that each level-0 code stands for, −1 if it is not known."""
        return np.asarray(self._weights["level0_modality"])

    def fuse(
        self, image: Float[np.ndarray, "items dim"], text: Float[np.ndarray, "items dim"]
    ) -> Float32[np.ndarray, "items dim"]:
        """Return fused unit embeddings (:mod:`genius_search.nn.fusion`); absent features are zero."""
        image, text = image.astype(np.float32, copy=False), text.astype(np.float32, copy=False)
        if self.config.fusion.kind == "sum":
            return normalize(normalize(image) + normalize(text))
        text_part, image_part = (
            self._joint(name, rows) if rows.any() else self._absent[name]
            for name, rows in (("text", text), ("image", image))
        )
        hidden = _relu(text_part + image_part + self._joint_layers[1])
        half = hidden.shape[1] // 2
        mixed = self._layer("output_layer").apply(hidden[:, :half])
        share = self._layer("dynamic_scalar.3").apply(hidden[:, half:])
        with np.errstate(over="ignore"):  # the share is 0 then
            share = 1 / (1 + np.exp(-share))
        return normalize(mixed + share * text + (1 - share) * image)

    @cached_property
    def _joint_layers(
        self,
    ) -> tuple[dict[str, Float32[np.ndarray, "outputs half"]], Float32[np.ndarray, " outputs"]]:
        """The two layers that read both modalities, as one: a matrix for each modality, and the biases."""
        layers = ("combiner_layer", "dynamic_scalar.0")
        both = np.concatenate([self._weights[f"fusion.{name}.weight"] for name in layers])
        halves = map(np.ascontiguousarray, np.split(both, 2, axis=1))
        biases = np.concatenate([self._weights[f"fusion.{name}.bias"] for name in layers])
        return dict(zip(("text", "image"), halves, strict=True)), biases

    @cached_property
    def _absent(self) -> dict[str, Float32[np.ndarray, "1 outputs"]]:
        """What a modality adds to the joint layers if no item has it."""
        nothing = np.zeros((1, self.dim), dtype=np.float32)
        return {modality: self._joint(modality, nothing) for modality in self._joint_layers[0]}

    def _joint(
        self, modality: str, rows: Float32[np.ndarray, "items dim"]
    ) -> Float32[np.ndarray, "items outputs"]:
        """Return what a modality adds to the joint layers."""
        projected = _relu(self._layer(f"{modality}_projection_layer").apply(rows))
        return multiply(projected, self._joint_layers[0][modality])

    def _layer(self, name: str) -> Linear:
        return Linear(*(self._weights[f"fusion.{name}.{part}"] for part in ("weight", "bias")))


def _relu(rows: Float32[np.ndarray, "items width"]) -> Float32[np.ndarray, "items width"]:
    return np.asarray(np.maximum(rows, 0))


def _names_of_tables(config: QuantizerConfig) -> list[str]:
    """Return the names of the weights that hold the code vectors of each level."""
    first = int(config.level0 != "none")
    semantic = [first if config.shared_codebook else first + level for level in range(config.levels)]
    return [f"codebooks.{book}.embed" for book in [*range(first), *semantic]]


def shapes_of_weights(dim: int, config: QuantizerConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights that :class:`Codebooks` needs."""
    tables = dict.fromkeys(_names_of_tables(config), (config.codebook_size, dim))
    if config.level0 != "none":
        tables["codebooks.0.embed"] = (NUM_MODALITIES, dim)
    modalities = 1 if config.level0 == "none" else NUM_MODALITIES
    shapes: dict[str, tuple[int, ...]] = {
        **tables,
        "level0_modality": (NUM_MODALITIES,),
        "usage": (modalities, config.codebook_size),
        "spreads": (modalities, COLUMNS),
        "residual_weights": (len(BITS), dim),
        "constant": (MOST_CONSTANT, dim),
    }
    if config.fusion.kind == "network":
        hidden = config.fusion.hidden
        for name, rows, columns in (
            ("text_projection_layer", hidden, dim),
            ("image_projection_layer", hidden, dim),
            ("combiner_layer", 2 * hidden, 2 * hidden),
            ("output_layer", dim, 2 * hidden),
            ("dynamic_scalar.0", 2 * hidden, 2 * hidden),
            ("dynamic_scalar.3", 1, 2 * hidden),
        ):
            shapes |= {f"fusion.{name}.weight": (rows, columns), f"fusion.{name}.bias": (rows,)}
    return shapes


class StoredQuantizer:
    """A quantizer in a folder, read for searching; PyTorch reads it again when items are to be encoded."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        dim, config = dim_of(manifest), settings_of(QuantizerConfig, manifest)
        self.codebooks = Codebooks(
            dim, config, read_arrays(manifest.folder / WEIGHTS, shapes_of_weights(dim, config))
        )

    @cached_property
    def quantizer(self) -> Quantizer:
        """The quantizer in PyTorch, on the CPU."""
        from genius_search.nn.quantizer import load_quantizer  # noqa: PLC0415  searching does not need it

        return load_quantizer(self.manifest.folder).quantizer
