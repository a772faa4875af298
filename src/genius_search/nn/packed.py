"""A generator as the compiled library reads it: fewer and larger matrices, made without PyTorch.

The gains of norms are in the matrices behind them, and the projections of cross-attention are applied to the
prefixes of a query, once, instead of to every token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from genius_search.artifact import Manifest, mismatch_error, read_arrays
from genius_search.config import DecoderConfig, settings_of
from genius_search.native.build import BLOCK, CODES

GENERATOR_KIND: Final = "generator"
GENERATOR_FILE: Final = "generator.safetensors"
NUM_SPECIAL: Final = 3
"""Rows before the codes: padding (also the decoder's start), end, unknown; T5's convention."""
NUM_BUCKETS: Final = 32
MAX_DISTANCE: Final = 128
EPSILON: Final = 1e-6
"""Added to the mean square in T5's norm."""


class PackedGenerator(NamedTuple):
    """Sizes and weights of a generator, by their names in ``native/search.c``."""

    sizes: dict[str, int]
    arrays: dict[str, Float32[np.ndarray, ...]]
    guide: Float32[np.ndarray, "codes dim"] | None
    """Code vectors of the guide, level after level; None without a guide."""


def bucket(distance: Int64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
    """Return T5's distance buckets: one per distance up to 15, then logarithmic up to 128."""
    exact = NUM_BUCKETS // 2
    ratio = np.log(np.maximum(distance, 1) / exact) / math.log(MAX_DISTANCE / exact)
    far = np.minimum(exact + (ratio * (NUM_BUCKETS - exact)).astype(np.int64), NUM_BUCKETS - 1)
    return np.where(distance < exact, distance, far)


def read_packed(manifest: Manifest) -> PackedGenerator | None:
    """Read a generator from its folder; None if it has more codes at a level than the library knows.

    Raises
    ------
    ArtifactMismatch
        The weights do not fit the settings in the manifest.
    """
    path, config = manifest.folder / GENERATOR_FILE, settings_of(DecoderConfig, manifest)
    try:
        dim, sizes = manifest.facts["dim"], manifest.facts["sizes"]
        return None if max(sizes) > CODES else pack(config, dim, sizes, read_arrays(path))
    except (LookupError, TypeError, ValueError) as error:
        raise mismatch_error(path, error) from None


def pack(
    config: DecoderConfig,
    dim: int,
    sizes: Sequence[int],
    weights: Mapping[str, Float32[np.ndarray, ...]],
) -> PackedGenerator:
    """Arrange the weights of a :class:`genius_search.nn.generator.Generator`, given by their names there."""
    heads, width, inner = config.heads, config.width, config.heads * config.head_width
    vocabulary, starts = NUM_SPECIAL + sum(sizes), [0, *accumulate(sizes)]

    def get(name: str, *shape: int) -> Float32[np.ndarray, ...]:
        if weights[name].shape != shape:
            raise ValueError(f"{name} has the shape {weights[name].shape}, not {shape}")
        return weights[name]

    def gain(norm: str) -> Float32[np.ndarray, " width"]:
        return get(f"{norm}.weight", width) * np.float32(
            width**0.5
        )  # the library norms to unit length

    embedding = get("embedding.weight", vocabulary, width)
    head, last = embedding, get("final_norm.weight", width)
    if config.head != "tied":
        head, last = get("head.weight", vocabulary, width), gain("final_norm")
    cross, sides, token, token_out, up, down = [], [], [], [], [], []
    for block in (f"blocks.{number}" for number in range(config.layers)):
        own, other = f"{block}.self_attention", f"{block}.cross_attention"
        keys_values = [get(f"{other}.{name}.weight", inner, width) for name in "kv"]
        cross.append(np.concatenate(keys_values) * gain("prefix_norm"))
        into = get(f"{other}.q.weight", inner, width) * gain(f"{block}.cross_norm")
        sides += [
            *np.split(into, heads),
            *np.split(get(f"{other}.o.weight", width, inner).T, heads),
        ]
        read = np.concatenate([get(f"{own}.{name}.weight", inner, width) for name in "qkv"])
        token.append((read * gain(f"{block}.self_norm")).T)
        token_out.append(get(f"{own}.o.weight", width, inner).T)
        up.append(
            (
                get(f"{block}.wi.weight", config.feedforward, width)
                * gain(f"{block}.feedforward_norm")
            ).T
        )
        down.append(get(f"{block}.wo.weight", width, config.feedforward).T)
    tokens = np.concatenate([embedding[:1], embedding[NUM_SPECIAL:]])
    lengths = np.sqrt(np.square(tokens).sum(axis=1, keepdims=True) + np.float32(width * EPSILON))
    biases = np.zeros((len(sizes), CODES), dtype=np.float32)
    scales, gates, guide = np.zeros(len(sizes)), np.ones(len(sizes)), None
    if config.guide == "geometry":
        guide = get("guide.vectors", sum(sizes), dim)
        scales, gates = np.exp(get("guide.log_scale", len(sizes))), get("guide.gate", len(sizes))
        for level, bias in enumerate(np.split(get("guide.bias", sum(sizes)), starts[1:-1])):
            biases[level, : len(bias)] = bias
    prefixes = config.prefixes * width
    arrays = {
        "prefix_weights": _pack([get("prefix_projection.weight", prefixes, dim).T]),
        "prefix_biases": get("prefix_projection.bias", prefixes),
        "prefix_keys_values": _pack([np.concatenate(cross).T]),
        "prefix_sides": _pack(sides),
        "tokens": tokens / lengths @ token[0],  # those of the first block depend on nothing else
        "embeddings": tokens,
        "distances": get("position_bias.weight", NUM_BUCKETS, heads)[
            bucket(np.arange(len(sizes)))
        ].T,
        "token": _pack(token),
        "token_out": _pack(token_out),
        "up": _pack(up),
        "down": _pack(down),
        "codes": _pack((codes * last).T for codes in np.split(head[NUM_SPECIAL:], starts[1:-1])),
        "scales": scales,
        "gates": gates,
        "biases": biases,
    }
    return PackedGenerator(
        sizes={
            "width": width,
            "feedforward": config.feedforward,
            "heads": heads,
            "head_width": config.head_width,
            "prefixes": config.prefixes,
            "blocks": config.layers,
        },
        arrays={
            name: np.ascontiguousarray(array, dtype=np.float32) for name, array in arrays.items()
        },
        guide=guide,
    )


def _pack(
    matrices: Iterable[Float32[np.ndarray, "inputs outputs"]],
) -> Float32[np.ndarray, " weights"]:
    """Arrange matrices for the library's products: blocks of 64 outputs."""
    packed = []
    for matrix in matrices:
        padded = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % BLOCK)))
        packed.append(padded.reshape(len(matrix), -1, BLOCK).transpose(1, 0, 2).ravel())
    return np.concatenate(packed)
