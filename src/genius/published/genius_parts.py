"""The authors' GENIUS checkpoints as the weights of our quantizer and generator (specification, section 7).

Sizes are read off a few tensors; then every name and shape must follow from them. What the files hold twice
(level 0, tied embeddings, the quantizer inside the generator's file) must be equal both times.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from genius.config import FusionConfig, GeneratorConfig, QuantizerConfig, checked
from genius.errors import ArtifactMismatch, UsageError
from genius.presets import preset
from genius.published.container import Checkpoint
from genius.published.names import check_names, is_tolerated
from genius.published.numbers import sound

Config = TypeVar("Config", QuantizerConfig, GeneratorConfig)

QUANTIZER_FILE: Final = "rq_clip_large.pth"
GENERATOR_FILE: Final = "GENIUS_t5small.pth"
TOLERATED: Final = (re.compile(r"contra_projector\..*"), re.compile(r"(quantizer\.)?clip_model\..*"))
"""The encoder may come along, and a layer that the released code makes and never uses."""

NUM_MODALITIES: Final = 3
NUM_SPECIAL: Final = 3
NUM_BUCKETS: Final = 32
PUBLISHED_DIM: Final = 768
INSIDE: Final = "quantizer."
"""Before the names of the quantizer inside the generator's file."""
SHARED: Final = "id_generator.shared.weight"
TIED: Final = tuple(
    f"id_generator.{part}.weight" for part in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
)
FUSION_LAYERS: Final = (
    "text_projection_layer",
    "image_projection_layer",
    "combiner_layer",
    "output_layer",
    "dynamic_scalar.0",
    "dynamic_scalar.3",
)
BOOK: Final = ("initted", "cluster_size", "embed_avg", "embed")
BLOCK: Final = {
    "layer.0.SelfAttention": "self_attention",
    "layer.0.layer_norm": "self_norm",
    "layer.1.EncDecAttention": "cross_attention",
    "layer.1.layer_norm": "cross_norm",
    "layer.2.DenseReluDense.wi": "wi",
    "layer.2.DenseReluDense.wo": "wo",
    "layer.2.layer_norm": "feedforward_norm",
}
"""Parts of a decoder block: published name -> ours."""


class QuantizerParts(NamedTuple):
    """A published stage 1, under our names."""

    dim: int
    config: QuantizerConfig
    """The authors' settings, with the sizes found."""
    state: dict[str, Tensor]
    """Everything but what level 0's codes stand for, which no file says."""


class GeneratorParts(NamedTuple):
    """A published stage 2, under our names."""

    dim: int
    sizes: tuple[int, ...]
    config: GeneratorConfig
    state: dict[str, Tensor]


def quantizer_parts(checkpoint: Checkpoint) -> QuantizerParts:
    """Fusion and codebooks of a stage-1 file.

    Raises
    ------
    ArtifactMismatch
        names or shapes are not those of this model, copies differ, or the codebooks were never started.
    """
    what = f"{checkpoint.path} as a GENIUS quantizer ({QUANTIZER_FILE})"
    tensors = checkpoint.tensors
    dim, config = _quantizer_sizes(tensors)
    check_names(tensors, _quantizer_shapes(tensors, dim, config), tolerated=TOLERATED, what=what)
    config = _possible(config, what)
    _check_books(tensors, config.levels, what)
    state = {}
    for layer in FUSION_LAYERS:
        for kind in ("weight", "bias"):
            state[f"fusion.{layer}.{kind}"] = _sound(tensors, f"encoder.{layer}.{kind}", what)
    for level in range(1 + config.levels):
        for kind in ("embed", "cluster_size", "embed_avg"):
            state[f"codebooks.{level}.{kind}"] = _sound(tensors, _book(level, kind), what)[0]
    return QuantizerParts(dim, config, state)


def generator_parts(checkpoint: Checkpoint, quantizer: Checkpoint) -> GeneratorParts:
    """The decoder of a stage-2 file, whose own copy of the quantizer must be the one given.

    Raises
    ------
    ArtifactMismatch
        as for :func:`quantizer_parts`, or the two files do not belong together.
    """
    what = f"{checkpoint.path} as a GENIUS generator ({GENERATOR_FILE})"
    tensors = checkpoint.tensors
    copy = {name.removeprefix(INSIDE): tensors[name] for name in tensors if name.startswith(INSIDE)}
    dim, inner = _quantizer_sizes(copy)
    sizes = (NUM_MODALITIES, *[inner.codebook_size] * inner.levels)
    config = _generator_sizes(tensors)
    expected = {INSIDE + name: shape for name, shape in _quantizer_shapes(copy, dim, inner).items()}
    expected |= _generator_shapes(config, dim, NUM_SPECIAL + sum(sizes))
    check_names(tensors, expected, tolerated=TOLERATED, what=what)
    config = _possible(config, what)
    _check_same_quantizer(copy, checkpoint, quantizer)
    for name in TIED:
        if not _equal(tensors[name], tensors[SHARED]):
            raise ArtifactMismatch(f"{what}: {name} differs from {SHARED}, and they are one in this model")
    ours = _generator_names(config.layers)
    state = {ours[name]: _sound(tensors, name, what) for name in ours}
    return GeneratorParts(dim, sizes, config, state)


def _quantizer_sizes(tensors: Mapping[str, Tensor]) -> tuple[int, QuantizerConfig]:
    """Sizes by the shapes found; the published ones where a tensor is missing, which is then reported."""
    reference = preset("reference").quantizer
    projection = "encoder.text_projection_layer.weight"
    levels = [int(found[1]) for name in tensors if (found := _LEVEL.match(name))]
    return _size(tensors, projection, 1, PUBLISHED_DIM), dataclasses.replace(
        reference,
        levels=max(levels, default=reference.levels) or reference.levels,
        codebook_size=_size(tensors, _book(1, "embed"), 1, reference.codebook_size),
        fusion=FusionConfig(hidden=_size(tensors, projection, 0, reference.fusion.hidden)),
    )


def _generator_sizes(tensors: Mapping[str, Tensor]) -> GeneratorConfig:
    reference = preset("reference").generator
    blocks = [int(found[1]) for name in tensors if (found := _BLOCK.match(name))]
    first = "id_generator.decoder.block.0.layer."
    width = _size(tensors, SHARED, 1, reference.width)
    heads = _size(tensors, f"{first}0.SelfAttention.relative_attention_bias.weight", 1, reference.heads)
    inside = _size(tensors, f"{first}0.SelfAttention.q.weight", 0, heads * reference.head_width)
    prefixed = _size(tensors, "embed_projector.0.weight", 0, reference.prefixes * width)
    return dataclasses.replace(
        reference,
        layers=max(blocks, default=reference.layers - 1) + 1,
        width=width,
        feedforward=_size(tensors, f"{first}2.DenseReluDense.wi.weight", 0, reference.feedforward),
        heads=heads,
        head_width=max(1, inside // heads),
        prefixes=max(1, prefixed // width),
    )


def _quantizer_shapes(
    tensors: Mapping[str, Tensor], dim: int, config: QuantizerConfig
) -> dict[str, tuple[int, ...]]:
    hidden, joint = config.fusion.hidden, 2 * config.fusion.hidden
    layers = dict(
        zip(
            FUSION_LAYERS,
            ((hidden, dim), (hidden, dim), (joint, joint), (dim, joint), (joint, joint), (1, joint)),
            strict=True,
        )
    )
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (wide, narrow) in layers.items():
        shapes[f"encoder.{layer}.weight"] = (wide, narrow)
        shapes[f"encoder.{layer}.bias"] = (wide,)
    for level in (None, *range(1 + config.levels)):
        size = config.codebook_size if level else NUM_MODALITIES
        for kind, shape in zip(BOOK, ((1,), (1, size), (1, size, dim), (1, size, dim)), strict=True):
            shapes[_book(level, kind)] = shape
        started = _book(level, "initted")
        if started in tensors and tensors[started].shape == ():  # older and newer versions of a library
            shapes[started] = ()
    return shapes


def _generator_shapes(config: GeneratorConfig, dim: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    width, inside = config.width, config.heads * config.head_width
    kinds = {
        "q": (inside, width),
        "k": (inside, width),
        "v": (inside, width),
        "o": (width, inside),
        "relative_attention_bias": (NUM_BUCKETS, config.heads),
        "wi": (config.feedforward, width),
        "wo": (width, config.feedforward),
        "layer_norm": (width,),
        "final_layer_norm": (width,),
        "shared": (vocabulary, width),
    }
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(TIED, (vocabulary, width))
    for name in _generator_names(config.layers):
        if not name.startswith("embed_projector."):
            shapes[name] = kinds[name.split(".")[-2]]
    shapes["embed_projector.0.weight"] = (config.prefixes * width, dim)
    shapes["embed_projector.0.bias"] = (config.prefixes * width,)
    return shapes


def _generator_names(layers: int) -> dict[str, str]:
    """Every tensor that is used, published name -> ours."""
    first = "id_generator.decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    names = {
        SHARED: "embedding.weight",
        "id_generator.encoder.final_layer_norm.weight": "prefix_norm.weight",
        "id_generator.decoder.final_layer_norm.weight": "final_norm.weight",
        "embed_projector.0.weight": "prefix_projection.weight",
        "embed_projector.0.bias": "prefix_projection.bias",
        first: "position_bias.weight",
    }
    for block in range(layers):
        for theirs, ours in BLOCK.items():
            inner = [f".{part}" for part in "qkvo"] if theirs.endswith("Attention") else [""]
            for part in inner:
                published = f"id_generator.decoder.block.{block}.{theirs}{part}.weight"
                names[published] = f"blocks.{block}.{ours}{part}.weight"
    return names


def _check_books(tensors: Mapping[str, Tensor], levels: int, what: str) -> None:
    for level in (None, *range(1 + levels)):
        started = _book(level, "initted")
        if not bool(tensors[started]):
            raise ArtifactMismatch(
                f"{what}: {started} is 0, so its codes were never started by k-means: an untrained model"
            )
    for kind in BOOK:
        if not _equal(tensors[_book(None, kind)], tensors[_book(0, kind)]):
            raise ArtifactMismatch(
                f"{what}: {_book(None, kind)} differs from {_book(0, kind)}, and they are one in this model"
            )


def _check_same_quantizer(copy: Mapping[str, Tensor], checkpoint: Checkpoint, quantizer: Checkpoint) -> None:
    differing = [
        name
        for name, tensor in quantizer.tensors.items()
        if not is_tolerated(name, TOLERATED) and not (name in copy and _equal(copy[name], tensor))
    ]
    if differing:
        raise ArtifactMismatch(
            f"{checkpoint.path} was trained on another quantizer than {quantizer.path}: {len(differing)} "
            f"tensors of its copy differ, first {INSIDE}{differing[0]}; give the two files that were "
            "published together"
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two copies hold the same numbers; a copy that is stored once is not read."""
    if one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride():
        return True
    return one.dtype == other.dtype and torch.equal(one.reshape(-1), other.reshape(-1))


def _sound(tensors: Mapping[str, Tensor], name: str, what: str) -> Tensor:
    return sound(tensors[name], name=name, what=what).contiguous()


def _possible(config: Config, what: str) -> Config:
    """Sizes within the limits of our settings."""
    try:
        return checked(config)
    except UsageError as error:
        raise ArtifactMismatch(f"{what}: {error}") from None


def _book(level: int | None, kind: str) -> str:
    """A codebook's tensor; level None is the file's second copy of level 0."""
    place = "vq" if level is None else f"residual_rq.layers.{level}"
    return f"{place}._codebook.{kind}"


def _size(tensors: Mapping[str, Tensor], name: str, axis: int, otherwise: int) -> int:
    tensor = tensors.get(name)
    return otherwise if tensor is None or tensor.ndim <= axis else max(1, tensor.shape[axis])


# Two digits: a number that no model has is an unknown name, not millions of names that are missing.
_LEVEL: Final = re.compile(r"residual_rq\.layers\.([0-9]{1,2})\._codebook\.embed")
_BLOCK: Final = re.compile(r"id_generator\.decoder\.block\.([0-9]{1,2})\.")
