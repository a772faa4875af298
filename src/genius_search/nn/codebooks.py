"""A finished quantizer in NumPy: it fuses features and holds the code vectors for searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from jaxtyping import Float, Float32, Int64, Integer, Shaped

from genius_search.artifact import open_artifact, read_arrays
from genius_search.config import CodebookConfig, settings_of
from genius_search.errors import ArtifactMismatch
from genius_search.nn.fine import FINE_ENDS, FINE_NORMS, FINE_VALUES, FINE_VECTORS, FineCodes
from genius_search.nn.spread import (
    MAX_CONSTANT_DIRECTIONS,
    NUM_MODALITY_STATISTICS,
    RESIDUAL_BIT_WIDTHS,
    Residuals,
    Spread,
)
from genius_search.records import NUM_MODALITIES

if TYPE_CHECKING:
    from torch import Tensor

    AnyArray: TypeAlias = Shaped[np.ndarray, "..."] | Shaped[Tensor, "..."]
else:
    AnyArray = Any
"""An array, or a tensor on any device."""

QUANTIZER_KIND: Final = "quantizer"
QUANTIZER_FILE: Final = "quantizer.safetensors"
METRIC: Final = "metric"
"""Name of the quantizer's metric among its weights and among the inputs of its manifest: a
symmetric matrix A. Codes minimise |A r|, with r the residual that they leave of an item; without a
metric, |r|. With :func:`genius_search.training.codebooks.query_metric`, |A r| is the error of
queries' products."""
POOL_SAMPLE: Final = "pool_sample"
"""Name of a sample of a pool's distinct IDs, with which densities are measured; only codebooks that
were fitted to a pool have it. With fine codes, they follow the codes of an ID."""
FUSION: Final = "fusion."
"""Prefix of the names of the fusion's weights."""
IDS_PER_BLOCK: Final = 128
"""Number of IDs per block whose vectors stay in a core's cache while they are summed."""
MIN_BATCH_FOR_MATMUL: Final = 8
"""Smaller batches are fused one by one: the waiting of a matrix product's threads would cost
more."""


def as_array(values: AnyArray) -> Shaped[np.ndarray, ...]:
    """Return an array unchanged, or a tensor as an array on the CPU, if possible without a copy."""
    if isinstance(values, np.ndarray):
        return values
    detached = values.detach().cpu()
    if not detached.is_floating_point():
        return detached.numpy()
    # NumPy has no bfloat16.
    return (detached.float() if detached.dtype.itemsize == 2 else detached).numpy()


def as_floats(values: AnyArray) -> Float32[np.ndarray, ...]:
    """Return an array or a tensor as an array of 32-bit floats."""
    return as_array(values).astype(np.float32, copy=False)


def normalize(vectors: Float[np.ndarray, "*rows dim"]) -> Float[np.ndarray, "*rows dim"]:
    """Scale vectors to unit length; as in PyTorch, lengths below 1e-12 count as 1e-12."""
    lengths = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
    return np.asarray(vectors / np.maximum(lengths, np.float32(1e-12)))


def sum_codes(
    tables: Sequence[Float[np.ndarray, "_ dim"]],
    ids: Integer[np.ndarray, "items columns"],
    fine: FineCodes | None = None,
) -> Float[np.ndarray, "items dim"]:
    """Return the vectors of IDs: the sums of their code vectors, in the precision of the tables.

    With ``fine``, the columns after the codes are fine codes, whose vectors are added.
    """
    vectors = np.zeros((len(ids), tables[0].shape[1]), dtype=tables[0].dtype)
    for start in range(0, len(ids), IDS_PER_BLOCK):
        rows = slice(start, start + IDS_PER_BLOCK)
        for level, table in enumerate(tables):
            vectors[rows] += table[ids[rows, level]]
    if fine is not None:
        vectors += fine.sum(ids[:, len(tables) :].astype(np.uint8))
    return vectors


def sum_features(
    image: Float32[np.ndarray, "items dim"], text: Float32[np.ndarray, "items dim"]
) -> Float32[np.ndarray, "items dim"]:
    """Fuse features without training: return the normalised sum of the normalised features."""
    return np.asarray(normalize(normalize(image) + normalize(text)), dtype=np.float32)


class Codebooks:
    """Fusion, code vectors, modalities and spread of a quantizer; immutable.

    Parameters
    ----------
    weights
        the weights of :class:`genius_search.nn.quantizer.Quantizer` and the statistics of items, by
        name: at least the names of :func:`weight_shapes`.
    """

    def __init__(self, dim: int, config: CodebookConfig, weights: Mapping[str, np.ndarray]) -> None:
        self.dim = dim
        self.config = config
        self.weights = weights
        self._tables = [weights[f"codebooks.{level}.embed"] for level in range(_num_levels(config))]
        self.sizes = tuple(len(table) for table in self._tables)
        """Number of codes at each level."""
        self.has_modality_level = config.level0 != "none"
        """Whether the first code of an ID encodes the modality."""
        self.level0_modality: Int64[np.ndarray, " 3"] = weights["level0_modality"]
        """Number of the modality that each level-0 code stands for; −1 if unknown."""
        self.metric: Float32[np.ndarray, "dim dim"] | None = weights.get(METRIC)

    def tables(self) -> list[Float32[np.ndarray, "_ dim"]]:
        """Return the code vectors of each level."""
        return self._tables

    @cached_property
    def fine(self) -> FineCodes | None:
        """The fine codes that follow an ID; None if IDs are whole."""
        if FINE_VECTORS not in self.weights:
            return None
        return FineCodes(*(self.weights[name] for name in (FINE_VECTORS, FINE_ENDS, FINE_NORMS)))

    def vectors(
        self, codes: Integer[np.ndarray, "items columns"]
    ) -> Float32[np.ndarray, "items dim"]:
        """Return the vectors of IDs, and of the fine codes that follow them."""
        has_fine_codes = codes.shape[1] > len(self._tables)
        return sum_codes(self._tables, codes, self.fine if has_fine_codes else None)

    @cached_property
    def spread(self) -> Spread:
        """Spread of products and densities; if it was not measured, queries are not scaled."""
        if not self.weights["usage"].any():
            return Spread.neutral(self.sizes[0])
        constant = self.weights["constant"]
        residuals = Residuals(self.weights["residual_weights"], constant[constant.any(axis=1)])
        return Spread(self.weights["usage"], self.weights["spreads"], residuals)

    def fuse_text(self, text: Float32[np.ndarray, " dim"]) -> Float32[np.ndarray, " dim"]:
        """Return the unit embedding of the unit feature of a text."""
        if self.config.fusion.kind == "sum":
            return text
        [fused] = self.fuse(np.zeros_like(text)[None], text[None])
        return np.asarray(fused)

    def fuse(
        self, image: Float32[np.ndarray, "items dim"], text: Float32[np.ndarray, "items dim"]
    ) -> Float32[np.ndarray, "items dim"]:
        """Return unit embeddings of features; those of an absent modality are zeros.

        The network is :class:`genius_search.nn.quantizer.Fusion` without dropout.
        """
        if self.config.fusion.kind == "sum":
            return sum_features(image, text)

        def layer(name: str, inputs: np.ndarray) -> np.ndarray:
            weight = self.weights[f"{FUSION}{name}.weight"]
            bias = self.weights[f"{FUSION}{name}.bias"]
            if len(inputs) < MIN_BATCH_FOR_MATMUL:
                return np.asarray(np.vecdot(inputs[:, None], weight) + bias)
            return np.asarray(inputs @ weight.T + bias)

        # h(x, y) = λ·text + (1 − λ)·image + MLP([text; image]), with λ the sigmoid of another MLP.
        projected = layer("text_projection_layer", text), layer("image_projection_layer", image)
        joint = np.maximum(np.concatenate(projected, axis=1), 0)
        mixed = layer("output_layer", np.maximum(layer("combiner_layer", joint), 0))
        logits = layer("dynamic_scalar.3", np.maximum(layer("dynamic_scalar.0", joint), 0))
        text_share = 1 / (1 + np.exp(-logits.clip(-80, 80)))  # clipped, or exp would overflow
        fused = mixed + text_share * text + (1 - text_share) * image
        return np.asarray(normalize(fused), dtype=np.float32)


def _num_levels(config: CodebookConfig) -> int:
    """Return the number of codes in an ID, including the modality's."""
    return config.levels + (config.level0 != "none")


def weight_shapes(dim: int, config: CodebookConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weights that :class:`Codebooks` needs."""
    shapes: dict[str, tuple[int, ...]] = {
        f"codebooks.{level}.embed": (config.codebook_size, dim)
        for level in range(_num_levels(config))
    }
    if config.level0 != "none":
        shapes["codebooks.0.embed"] = (NUM_MODALITIES, dim)
    if config.level0 == "classifier":
        shapes |= {"classifier.weight": (NUM_MODALITIES, dim), "classifier.bias": (NUM_MODALITIES,)}
    if config.fusion.kind != "sum":
        hidden = config.fusion.hidden
        joint = 2 * hidden
        for name, outputs, inputs in (
            ("text_projection_layer", hidden, dim),
            ("image_projection_layer", hidden, dim),
            ("combiner_layer", joint, joint),
            ("output_layer", dim, joint),
            ("dynamic_scalar.0", joint, joint),
            ("dynamic_scalar.3", 1, joint),
        ):
            shapes[f"{FUSION}{name}.weight"] = (outputs, inputs)
            shapes[f"{FUSION}{name}.bias"] = (outputs,)
    return {**shapes, "level0_modality": (NUM_MODALITIES,), **statistic_shapes(dim, config)}


def statistic_shapes(dim: int, config: CodebookConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the statistics of items, which are measured after training.

    ``usage`` counts items by their first code and their first semantic code, and ``spreads`` holds
    the statistics of products and densities (:class:`genius_search.nn.spread.Spread`).
    ``residual_weights`` and ``constant`` are for stored residuals
    (:class:`genius_search.nn.spread.Residuals`); unused constant directions are zeros.
    """
    modalities = 1 if config.level0 == "none" else NUM_MODALITIES
    return {
        "usage": (modalities, config.codebook_size),
        "spreads": (modalities, NUM_MODALITY_STATISTICS),
        "residual_weights": (len(RESIDUAL_BIT_WIDTHS), dim),
        "constant": (MAX_CONSTANT_DIRECTIONS, dim),
    }


class StoredQuantizer:
    """A quantizer in a folder: its manifest and its codebooks.

    Raises
    ------
    ArtifactMismatch
        The files of the folder do not fit each other.
    """

    def __init__(self, folder: Path) -> None:
        self.manifest = open_artifact(folder, kind=QUANTIZER_KIND)
        dim = self.manifest.facts.get("dim") or 0
        config = settings_of(CodebookConfig, self.manifest)
        optional = {
            METRIC: (dim, dim),
            POOL_SAMPLE: (None, None),
            FINE_VECTORS: (dim, FINE_VALUES),
            FINE_ENDS: (None,),
            FINE_NORMS: (FINE_VALUES,),
        }
        shapes = {**weight_shapes(dim, config), **optional}
        weights = read_arrays(folder / QUANTIZER_FILE, shapes, optional=optional)
        self.codebooks = Codebooks(dim, config, weights)
        if self.codebooks.fine is not None and not self.codebooks.fine.is_consistent():
            raise ArtifactMismatch(
                f"{folder / QUANTIZER_FILE} is damaged: its fine codes do not divide {dim} "
                "dimensions; restore it from a backup, or create it again"
            )
