"""Weights of a generator, rearranged for searching: fewer and larger matrices, as arrays.

The gains of norms are folded into the matrices that follow them, and the projections of cross-attention into
the prefixes of a query.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from genius_search.artifact import Manifest
from genius_search.config import GeneratorConfig
from genius_search.nn.stored import dim_of, read_arrays, settings_of, sizes_of

if TYPE_CHECKING:
    from genius_search.nn.generator import Generator

KIND: Final = "generator"
WEIGHTS: Final = "generator.safetensors"
NUM_SPECIAL: Final = 3
"""Rows before the codes: padding (also the decoder's start), end, unknown; T5's convention."""
NUM_BUCKETS: Final = 32
MAX_DISTANCE: Final = 128
EPSILON: Final = 1e-6
"""Added to the mean square in T5's norm."""


class BlockWeights(NamedTuple):
    """The weights of a block but for its cross-attention."""

    token: Float32[np.ndarray, "width three_inner"]
    """Queries, keys and values of self-attention."""
    token_out: Float32[np.ndarray, "inner width"]
    up: Float32[np.ndarray, "width feedforward"]
    down: Float32[np.ndarray, "feedforward width"]


class FoldedWeights(NamedTuple):
    """The weights of a generator. The gains of norms are in the matrices after them."""

    heads: int
    prefixes: int
    prefix_weights: Float32[np.ndarray, "dim prefixes_width"]
    prefix_biases: Float32[np.ndarray, " prefixes_width"]
    prefix_keys_values: Float32[np.ndarray, "width blocks_two_inner"]
    prefix_sides: Float32[np.ndarray, "blocks_two_heads head_width width"]
    """Projections of the keys of each head, then of the values, into the space of the tokens, by block."""
    embeddings: Float32[np.ndarray, "tokens width"]
    """Of the start token, then of all codes, level after level."""
    distances: Float32[np.ndarray, "heads levels"]
    """Bias of self-attention by the distance between tokens, the same in all blocks."""
    blocks: list[BlockWeights]
    codes: list[Float32[np.ndarray, "width codes"]]
    """From a hidden state to the logits of each level's codes."""
    specials: Float32[np.ndarray, "width specials"]
    """From a hidden state to the logits of the special tokens."""


class Combination(NamedTuple):
    """How nearness to code vectors and logits are combined."""

    tables: list[Float32[np.ndarray, "_ dim"]]
    """Code vectors of each level."""
    scales: Sequence[float]
    """Weight of nearness at each level."""
    gates: Sequence[float]
    """Weight of the logits at each level."""
    biases: Sequence[Float32[np.ndarray, " codes"]]


def offsets_of(sizes: Sequence[int], *, shares_codes: bool) -> tuple[int, ...]:
    """Return the row of the vocabulary at which each level's codes begin."""
    return tuple(NUM_SPECIAL + (0 if shares_codes else sum(sizes[:level])) for level in range(len(sizes)))


def bucket(distance: Int64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
    """Return T5's distance buckets: one per distance up to 15, then logarithmic up to 128."""
    exact = NUM_BUCKETS // 2
    ratio = np.log(np.maximum(distance, 1) / exact) / math.log(MAX_DISTANCE / exact)
    far = np.minimum(exact + (ratio * (NUM_BUCKETS - exact)).astype(np.int64), NUM_BUCKETS - 1)
    return np.where(distance < exact, distance, far)


def fold_norm(
    gain: Float32[np.ndarray, " width"], *layers: Float32[np.ndarray, "_ width"]
) -> Float32[np.ndarray, "width out"]:
    """Return the joint matrix of layers that follow a norm, with the norm's gain folded in."""
    scaled = gain * np.float32(len(gain) ** 0.5)
    return np.ascontiguousarray((np.concatenate(layers) * scaled).T)


def fold_cross(
    gain: Float32[np.ndarray, " width"],
    query: Float32[np.ndarray, "inner width"],
    out: Float32[np.ndarray, "width inner"],
    heads: int,
) -> Float32[np.ndarray, "two_heads head_width width"]:
    """Return the matrices that project the keys and values of prefixes into the space of the tokens.

    Applied once per query, they save the projections of every token in cross-attention.
    """
    scaled = query * (gain * np.float32(len(gain) ** 0.5))
    return np.concatenate([matrix.reshape(heads, -1, matrix.shape[1]) for matrix in (scaled, out.T)])


def fold_weights(
    config: GeneratorConfig,
    sizes: Sequence[int],
    weights: Mapping[str, Float32[np.ndarray, ...]],
    *,
    shares_codes: bool,
) -> FoldedWeights:
    """Return the weights of a generator (:class:`genius_search.nn.generator.Generator`), rearranged."""

    def of(block: int, name: str) -> Float32[np.ndarray, ...]:
        return weights[f"blocks.{block}.{name}.weight"]

    blocks = range(config.layers)
    rows = weights["embedding.weight"]
    is_tied = config.head == "tied"
    head = rows if is_tied else weights["head.weight"]
    gain = weights["final_norm.weight"] * np.float32(1.0 if is_tied else config.width**0.5)
    starts = offsets_of(sizes, shares_codes=shares_codes)
    levels = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    distances = bucket(np.arange(len(sizes)))
    return FoldedWeights(
        heads=config.heads,
        prefixes=config.prefixes,
        prefix_weights=np.ascontiguousarray(weights["prefix_projection.weight"].T),
        prefix_biases=weights["prefix_projection.bias"],
        prefix_keys_values=fold_norm(
            weights["prefix_norm.weight"],
            *(of(block, f"cross_attention.{x}") for block in blocks for x in "kv"),
        ),
        prefix_sides=np.concatenate(
            [
                fold_cross(
                    of(block, "cross_norm"),
                    of(block, "cross_attention.q"),
                    of(block, "cross_attention.o"),
                    config.heads,
                )
                for block in blocks
            ]
        ),
        embeddings=np.concatenate([rows[:1], *(rows[level] for level in levels)]),
        distances=np.ascontiguousarray(weights["position_bias.weight"][distances].T),
        blocks=[
            BlockWeights(
                token=fold_norm(of(block, "self_norm"), *(of(block, f"self_attention.{x}") for x in "qkv")),
                token_out=np.ascontiguousarray(of(block, "self_attention.o").T),
                up=fold_norm(of(block, "feedforward_norm"), of(block, "wi")),
                down=np.ascontiguousarray(of(block, "wo").T),
            )
            for block in blocks
        ],
        codes=[np.ascontiguousarray((head[level] * gain).T) for level in levels],
        specials=np.ascontiguousarray((head[:NUM_SPECIAL] * gain).T),
    )


def shapes_of_weights(
    dim: int, sizes: Sequence[int], config: GeneratorConfig, *, shares_codes: bool
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights of a generator."""
    width, inner = config.width, config.heads * config.head_width
    starts = offsets_of(sizes, shares_codes=shares_codes)
    vocabulary = max(start + size for start, size in zip(starts, sizes, strict=True))
    shapes: dict[str, tuple[int, ...]] = {
        "prefix_projection.weight": (config.prefixes * width, dim),
        "prefix_projection.bias": (config.prefixes * width,),
        "prefix_norm.weight": (width,),
        "embedding.weight": (vocabulary, width),
        "position_bias.weight": (NUM_BUCKETS, config.heads),
        "final_norm.weight": (width,),
    }
    block: dict[str, tuple[int, ...]] = {
        "wi": (config.feedforward, width),
        "wo": (width, config.feedforward),
        **dict.fromkeys(("self_norm", "cross_norm", "feedforward_norm"), (width,)),
    }
    for attention in ("self_attention", "cross_attention"):
        block |= {f"{attention}.{name}": (inner, width) for name in "qkv"}
        block[f"{attention}.o"] = (width, inner)
    for number in range(config.layers):
        shapes |= {f"blocks.{number}.{name}.weight": shape for name, shape in block.items()}
    if config.head != "tied":
        shapes["head.weight"] = (vocabulary, width)
    if config.guide == "geometry":
        for name in ("log_scale", "gate"):
            shapes[f"guide.{name}"] = (len(sizes),)
        shapes |= {"guide.vectors": (sum(sizes), dim), "guide.bias": (sum(sizes),)}
    return shapes


class FoldedGenerator:
    """A generator in NumPy: its weights, folded.

    Parameters
    ----------
    weights
        those of :class:`genius_search.nn.generator.Generator` by name.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        sizes: Sequence[int],
        weights: Mapping[str, Float32[np.ndarray, ...]],
        *,
        shares_codes: bool,
    ) -> None:
        self.weights = fold_weights(config, sizes, weights, shares_codes=shares_codes)
        self._guide = {name: weight for name, weight in weights.items() if name.startswith("guide.")}

    def combination(self, tables: Sequence[Float32[np.ndarray, "_ dim"]]) -> Combination:
        """Return how its logits are combined with nearness; without a guide, they stand alone.

        Parameters
        ----------
        tables
            code vectors of each level; those of a guide are its own.
        """
        bounds = np.cumsum([0, *map(len, tables)])
        levels = [slice(low, high) for low, high in pairwise(bounds.tolist())]
        guide = self._guide
        if not guide:
            biases = [np.zeros(len(table), dtype=np.float32) for table in tables]
            return Combination(list(tables), [0.0] * len(tables), [1.0] * len(tables), biases)
        return Combination(
            [guide["guide.vectors"][level] for level in levels],
            np.exp(guide["guide.log_scale"]).tolist(),
            guide["guide.gate"].tolist(),
            [guide["guide.bias"][level] for level in levels],
        )


class StoredGenerator:
    """A generator in a folder, read for searching; PyTorch reads it again to train it."""

    def __init__(self, manifest: Manifest, *, device: str = "cpu") -> None:
        self.manifest = manifest
        self._device = device
        sizes, config = sizes_of(manifest), settings_of(GeneratorConfig, manifest)
        shares_codes = bool(manifest.facts.get("shares_codes"))
        shapes = shapes_of_weights(dim_of(manifest), sizes, config, shares_codes=shares_codes)
        weights = read_arrays(manifest.folder / WEIGHTS, shapes)
        self.folded = FoldedGenerator(config, sizes, weights, shares_codes=shares_codes)

    @cached_property
    def generator(self) -> Generator:
        """The generator in PyTorch."""
        from genius_search.nn.generator import load_generator  # noqa: PLC0415  searching does not need it

        return load_generator(self.manifest.folder, device=self._device).generator
