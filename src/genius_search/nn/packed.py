"""A generator packed for the compiled library: fewer and larger matrices, built without PyTorch.

T5's norm of a vector x, with learned gains g (:data:`EPSILON` is ε), is

    norm(x) = g ⊙ x / √(mean(x²) + ε) = √width · g ⊙ unit(x)
    unit(x) = x / √(Σ x² + width · ε)

The library computes unit(x) alone. The factor √width · g is folded into the columns of the matrix
that reads the norm: W norm(x) = (W · diag(√width · g)) unit(x). A comment in each function gives
the equation that it folds.
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
"""Rows of the vocabulary before the codes, as in T5: padding (also the start token), end,
unknown."""
NUM_BUCKETS: Final = 32
"""Number of distance buckets of T5's relative-position bias."""
MAX_DISTANCE: Final = 128
"""Distance from which on all tokens share the last bucket."""
EPSILON: Final = 1e-6
"""Added to the mean square in T5's norm."""


class PackedGenerator(NamedTuple):
    """Sizes and weights of a generator, by their names in ``native/structures.h``."""

    sizes: dict[str, int]
    arrays: dict[str, Float32[np.ndarray, ...]]
    guide: Float32[np.ndarray, "codes dim"] | None
    """Code vectors of the guide, level after level; None without a guide."""


def bucket(distance: Int64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
    """Return T5's distance buckets: one per distance up to 15, then logarithmic up to 128."""
    exact = NUM_BUCKETS // 2
    # bucket = 16 + ⌊16 · log(distance / 16) / log(128 / 16)⌋, at most 31
    ratio = np.log(np.maximum(distance, 1) / exact) / math.log(MAX_DISTANCE / exact)
    far = np.minimum(exact + (ratio * (NUM_BUCKETS - exact)).astype(np.int64), NUM_BUCKETS - 1)
    return np.where(distance < exact, distance, far)


def read_packed(manifest: Manifest) -> PackedGenerator | None:
    """Read a generator from its folder; return None if a level has too many codes for the library.

    Raises
    ------
    ArtifactMismatch
        The weights do not fit the settings in the manifest.
    """
    path = manifest.folder / GENERATOR_FILE
    config = settings_of(DecoderConfig, manifest)
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
    """Arrange the weights of a generator for the compiled library.

    Parameters
    ----------
    dim
        width of the query embeddings.
    sizes
        number of codes at each level.
    weights
        of a :class:`genius_search.nn.generator.Generator`, by their names there.

    Raises
    ------
    ValueError
        A weight has another shape than the settings describe.
    """
    reader = _WeightReader(weights, config.width)
    arrays = {
        **_pack_prefixes(reader, config, dim),
        **_pack_blocks(reader, config, sizes),
        **_pack_codes(reader, config, sizes),
        **_pack_guide(reader, config, sizes),
    }
    has_guide = config.guide == "geometry"
    return PackedGenerator(
        sizes={
            "width": config.width,
            "feedforward": config.feedforward,
            "heads": config.heads,
            "head_width": config.head_width,
            "prefixes": config.prefixes,
            "blocks": config.layers,
        },
        arrays={
            name: np.ascontiguousarray(array, dtype=np.float32) for name, array in arrays.items()
        },
        guide=reader.read("guide.vectors", sum(sizes), dim) if has_guide else None,
    )


class _WeightReader:
    """Reads weights by name, and checks their shapes."""

    def __init__(self, weights: Mapping[str, Float32[np.ndarray, ...]], width: int) -> None:
        self._weights = weights
        self._width = width

    def read(self, name: str, *shape: int) -> Float32[np.ndarray, ...]:
        """Return a weight; raise ValueError if it has another shape."""
        weight = self._weights[name]
        if weight.shape != shape:
            raise ValueError(f"{name} has the shape {weight.shape}, not {shape}")
        return weight

    def gain(self, norm: str) -> Float32[np.ndarray, " width"]:
        """Return √width · g of a norm, the factor between norm(x) and unit(x)."""
        return self.read(f"{norm}.weight", self._width) * np.float32(self._width**0.5)

    def embeddings(self, vocabulary: int) -> Float32[np.ndarray, "vocabulary width"]:
        """Return the input embeddings of the whole vocabulary."""
        return self.read("embedding.weight", vocabulary, self._width)


def _pack_prefixes(
    reader: _WeightReader, config: DecoderConfig, dim: int
) -> dict[str, Float32[np.ndarray, ...]]:
    """Pack the matrices that turn a query into keys and values of cross-attention."""
    # They are applied once per query.
    # The score of token x for prefix p at one head is (Q norm(x)) · (K norm(p)), which is
    #     unit(x) · k'    with k' = (Q diag(gain of cross_norm))ᵀ k
    #                     and  k = K diag(gain of prefix_norm) unit(p)
    # and the prefix adds to the output, times its share of attention,
    #     v' = O v        with v = V diag(gain of prefix_norm) unit(p)
    # k' and v' depend on the query alone, so tokens are multiplied neither by Q nor by O. A product
    # with the K and V of all blocks gives k and v ("prefix_keys_values"); products with a head's
    # rows of Q and columns of O, the two sides of attention, turn them into k' and v'
    # ("prefix_sides").
    heads, width = config.heads, config.width
    inner = heads * config.head_width
    keys_values, sides = [], []
    for number in range(config.layers):
        attention = f"blocks.{number}.cross_attention"
        key_value = [reader.read(f"{attention}.{name}.weight", inner, width) for name in "kv"]
        keys_values.append(np.concatenate(key_value) * reader.gain("prefix_norm"))
        query_side = reader.read(f"{attention}.q.weight", inner, width)
        query_side = query_side * reader.gain(f"blocks.{number}.cross_norm")
        output_side = reader.read(f"{attention}.o.weight", width, inner).T
        sides += [*np.split(query_side, heads), *np.split(output_side, heads)]
    prefixes = config.prefixes * width
    return {
        "prefix_weights": _to_blocks([reader.read("prefix_projection.weight", prefixes, dim).T]),
        "prefix_biases": reader.read("prefix_projection.bias", prefixes),
        "prefix_keys_values": _to_blocks([np.concatenate(keys_values).T]),
        "prefix_sides": _to_blocks(sides),
    }


def _pack_blocks(
    reader: _WeightReader, config: DecoderConfig, sizes: Sequence[int]
) -> dict[str, Float32[np.ndarray, ...]]:
    """Pack self-attention and feed-forward, and what the first block reads of each code."""
    # Self-attention reads q, k, v = [Q; K; V] norm(x) = ([Q; K; V] diag(gain of self_norm))
    # unit(x), and feed-forward wi norm(x) = (wi diag(gain of feedforward_norm)) unit(x).
    width, feedforward = config.width, config.feedforward
    inner = config.heads * config.head_width
    queries_keys_values: list[np.ndarray] = []
    outputs: list[np.ndarray] = []
    up: list[np.ndarray] = []
    down: list[np.ndarray] = []
    for number in range(config.layers):
        block = f"blocks.{number}"
        attention = f"{block}.self_attention"
        read = np.concatenate(
            [reader.read(f"{attention}.{name}.weight", inner, width) for name in "qkv"]
        )
        queries_keys_values.append((read * reader.gain(f"{block}.self_norm")).T)
        outputs.append(reader.read(f"{attention}.o.weight", width, inner).T)
        wi = reader.read(f"{block}.wi.weight", feedforward, width)
        up.append((wi * reader.gain(f"{block}.feedforward_norm")).T)
        down.append(reader.read(f"{block}.wo.weight", width, feedforward).T)
    # Row 0 is the start token, row 1 + c the code c, counted through all levels.
    embeddings = reader.embeddings(NUM_SPECIAL + sum(sizes))
    tokens = np.concatenate([embeddings[:1], embeddings[NUM_SPECIAL:]])
    lengths = np.sqrt(np.square(tokens).sum(axis=1, keepdims=True) + np.float32(width * EPSILON))
    # The position bias of attention depends on the distance alone: a row for each head.
    biases = reader.read("position_bias.weight", NUM_BUCKETS, config.heads)
    return {
        # The first block reads embeddings alone, so the q, k and v of its tokens never change.
        "tokens": tokens / lengths @ queries_keys_values[0],
        "embeddings": tokens,
        "distances": biases[bucket(np.arange(len(sizes)))].T,
        "token": _to_blocks(queries_keys_values),
        "token_out": _to_blocks(outputs),
        "up": _to_blocks(up),
        "down": _to_blocks(down),
    }


def _pack_codes(
    reader: _WeightReader, config: DecoderConfig, sizes: Sequence[int]
) -> dict[str, Float32[np.ndarray, ...]]:
    """Pack the output weights of each level's codes."""
    # The logits are H norm(x) = (H diag(√width · g)) unit(x) with a head H. A tied one is E /
    # √width, as T5 scales it, so that √width cancels: (E diag(g)) unit(x).
    vocabulary = NUM_SPECIAL + sum(sizes)
    if config.head == "tied":
        head = reader.embeddings(vocabulary)
        gain = reader.read("final_norm.weight", config.width)
    else:
        head = reader.read("head.weight", vocabulary, config.width)
        gain = reader.gain("final_norm")
    levels = np.split(head[NUM_SPECIAL:], _starts(sizes))
    return {"codes": _to_blocks((codes * gain).T for codes in levels)}


def _pack_guide(
    reader: _WeightReader, config: DecoderConfig, sizes: Sequence[int]
) -> dict[str, Float32[np.ndarray, ...]]:
    """Pack the factors of the guide: scale · nearness + gate · logit + bias, at each level."""
    # Without a guide they are 0 · nearness + 1 · logit + 0.
    biases = np.zeros((len(sizes), CODES), dtype=np.float32)
    if config.guide != "geometry":
        return {
            "scales": np.zeros(len(sizes), np.float32),
            "gates": np.ones(len(sizes), np.float32),
            "biases": biases,
        }
    scales = np.exp(reader.read("guide.log_scale", len(sizes)))
    gates = reader.read("guide.gate", len(sizes))
    by_level = np.split(reader.read("guide.bias", sum(sizes)), _starts(sizes))
    for level, bias in enumerate(by_level):
        biases[level, : len(bias)] = bias
    return {"scales": scales, "gates": gates, "biases": biases}


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return where the codes of the second and later levels start: 3, 4, 2 codes give 3, 7."""
    return [*accumulate(sizes)][:-1]


def _to_blocks(
    matrices: Iterable[Float32[np.ndarray, "inputs outputs"]],
) -> Float32[np.ndarray, " weights"]:
    """Arrange matrices for the library's products, in blocks of 64 outputs, and join them."""
    # A matrix of 8 inputs and 100 outputs is padded to 128 outputs and becomes two blocks of 8 ×
    # 64, so that the library reads the weights of 64 sums side by side.
    packed = []
    for matrix in matrices:
        padded = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % BLOCK)))
        packed.append(padded.reshape(len(matrix), -1, BLOCK).transpose(1, 0, 2).ravel())
    return np.concatenate(packed)
