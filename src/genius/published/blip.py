"""UniIR's BLIP-SF and BLIP-FF: BLIP's names to transformers' (specification, section 3.5).

An image tower (``visual_encoder``), BERT (``text_encoder``), and for score fusion two projections. Momentum
copies (``*_m``), queues and ``temp`` serve training only and are left out. The names of single tensors are
those of BLIP's own code. For BLIP-FF their sizes add up to the published file's 7.49 GB, but the file itself
could not be opened here. BLIP-SF was never published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from genius.published.container import Checkpoint
from genius.published.encoder_kind import EncoderKind
from genius.published.encoder_weights import (
    EncoderWeights,
    depth,
    grid,
    heads,
    pixel_settings,
    sizes,
)
from genius.published.names import check_names, is_tolerated
from genius.published.numbers import all_sound

VISION: Final = "visual_encoder."
TEXT: Final = "text_encoder."
TEXT_LAYERS: Final = 12
EXTRA_TOKENS: Final = 2
"""BLIP adds [DEC] and [ENC] to BERT's vocabulary; UniIR reads neither."""

_TRAINING: Final = (
    re.compile(r"(visual_encoder|text_encoder|vision_proj|text_proj)_m\..*"),
    re.compile(r"(query|cand|idx|new_ptr)_queue|temp"),
    re.compile(r"text_encoder\.embeddings\.position_ids"),
)
_CROSS: Final = re.compile(r"text_encoder\.encoder\.layer\.\d+\.crossattention\..*")
_BLOCK: Final = (
    ("norm1", "layer_norm1"),
    ("norm2", "layer_norm2"),
    ("attn.qkv", "self_attn.qkv"),
    ("attn.proj", "self_attn.projection"),
    ("mlp.fc1", "mlp.fc1"),
    ("mlp.fc2", "mlp.fc2"),
)


class BlipArchitecture(NamedTuple):
    """Sizes of a BLIP."""

    layers: int
    width: int
    hidden: int
    patch: int
    grid: int
    text_width: int
    text_hidden: int
    tokens: int
    positions: int


def convert_score_fusion(checkpoint: Checkpoint) -> EncoderWeights:
    """BLIP-SF: the image's and the text's own features, projected. Raises as :func:`clip_sf.convert` does."""
    return _convert(checkpoint, "blip-sf")


def convert_feature_fusion(checkpoint: Checkpoint) -> EncoderWeights:
    """BLIP-FF: BERT looks at the image's tokens. Raises as :func:`clip_sf.convert` does."""
    return _convert(checkpoint, "blip-ff")


def _convert(checkpoint: Checkpoint, kind: EncoderKind) -> EncoderWeights:
    tensors, what = checkpoint.tensors, f"{checkpoint.path} as {kind}"
    architecture = blip_architecture(tensors, what=what)
    fused = kind == "blip-ff"
    expected = blip_shapes(architecture, fused=fused)
    dim = architecture.text_width
    if not fused:
        dim, _ = sizes(tensors, "vision_proj.weight", rank=2, what=what)
        for name, width in (("vision_proj", architecture.width), ("text_proj", architecture.text_width)):
            expected |= {f"{name}.weight": (dim, width), f"{name}.bias": (dim,)}
    # For score fusion BERT's attention to images is in the file, frozen and unused.
    tolerated = _TRAINING if fused else (*_TRAINING, _CROSS)
    check_names(tensors, expected, tolerated=tolerated, what=what)
    return EncoderWeights(
        kind=kind,
        weights={_our_name(name): tensor for name, tensor in all_sound(tensors, expected, what=what).items()},
        config={**_config(architecture, fused=fused), "projection_dim": dim},
        pixels=pixel_settings("BlipImageProcessor", side=architecture.patch * architecture.grid, squash=True),
        tokens=architecture.tokens,
        used=len(expected),
        left_out=tuple(name for name in tensors if is_tolerated(name, tolerated)),
    )


def blip_architecture(tensors: Mapping[str, Tensor], *, what: str) -> BlipArchitecture:
    """Read the sizes off the shapes of a few tensors."""

    def size(name: str, rank: int = 2) -> tuple[int, ...]:
        return sizes(tensors, name, rank=rank, what=what)

    width, _, patch, _ = size(f"{VISION}patch_embed.proj.weight", 4)
    tokens, text_width = size(f"{TEXT}embeddings.word_embeddings.weight")
    return BlipArchitecture(
        layers=depth(tensors, f"{VISION}blocks."),
        width=width,
        hidden=size(f"{VISION}blocks.0.mlp.fc1.weight")[0],
        patch=patch,
        grid=grid(size(f"{VISION}pos_embed", 3)[1], what=what),
        text_width=text_width,
        text_hidden=size(f"{TEXT}encoder.layer.0.intermediate.dense.weight")[0],
        tokens=tokens,
        positions=size(f"{TEXT}embeddings.position_embeddings.weight")[0],
    )


def blip_shapes(architecture: BlipArchitecture, *, fused: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor that encodes and its shape, but the projections of score fusion."""
    width, hidden, patch = architecture.width, architecture.hidden, architecture.patch
    shapes: dict[str, tuple[int, ...]] = {
        f"{VISION}cls_token": (1, 1, width),
        f"{VISION}pos_embed": (1, architecture.grid**2 + 1, width),
        f"{VISION}patch_embed.proj.weight": (width, 3, patch, patch),
        f"{VISION}patch_embed.proj.bias": (width,),
        **_norm(f"{VISION}norm", width),
    }
    for layer in range(architecture.layers):
        block = f"{VISION}blocks.{layer}."
        shapes |= _norm(f"{block}norm1", width) | _norm(f"{block}norm2", width)
        shapes |= _linear(f"{block}attn.qkv", 3 * width, width) | _linear(f"{block}attn.proj", width, width)
        shapes |= _linear(f"{block}mlp.fc1", hidden, width) | _linear(f"{block}mlp.fc2", width, hidden)
    return shapes | _text_shapes(architecture, fused=fused)


def reader_config(
    *,
    tokens: int,
    width: int,
    seen: int,
    hidden: int,
    layers: int,
    num_heads: int,
    positions: int,
    fused: bool,
) -> dict[str, Any]:
    """Settings of BLIP's BERT; ``seen`` is the width of the image tokens it looks at when ``fused``."""
    return {
        "vocab_size": tokens,
        "hidden_size": width,
        "encoder_hidden_size": seen,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": positions,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "bos_token_id": None,
        "eos_token_id": None,
        "sep_token_id": None,
        "use_cache": False,
        # Transformers' word for "has attention to images"; nothing is decoded.
        "is_decoder": fused,
    }


def _text_shapes(architecture: BlipArchitecture, *, fused: bool) -> dict[str, tuple[int, ...]]:
    width, hidden = architecture.text_width, architecture.text_hidden
    shapes: dict[str, tuple[int, ...]] = {
        f"{TEXT}embeddings.word_embeddings.weight": (architecture.tokens, width),
        f"{TEXT}embeddings.position_embeddings.weight": (architecture.positions, width),
        **_norm(f"{TEXT}embeddings.LayerNorm", width),
    }
    if fused:
        shapes |= _linear(f"{TEXT}pooler.dense", width, width)
    for layer in range(TEXT_LAYERS):
        block = f"{TEXT}encoder.layer.{layer}."
        shapes |= _attention(f"{block}attention.", width, seen=width)
        if fused:
            shapes |= _attention(f"{block}crossattention.", width, seen=architecture.width)
        shapes |= _linear(f"{block}intermediate.dense", hidden, width)
        shapes |= _linear(f"{block}output.dense", width, hidden) | _norm(f"{block}output.LayerNorm", width)
    return shapes


def _attention(prefix: str, width: int, *, seen: int) -> dict[str, tuple[int, ...]]:
    return {
        **_linear(f"{prefix}self.query", width, width),
        **_linear(f"{prefix}self.key", width, seen),
        **_linear(f"{prefix}self.value", width, seen),
        **_linear(f"{prefix}output.dense", width, width),
        **_norm(f"{prefix}output.LayerNorm", width),
    }


def _linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _our_name(name: str) -> str:
    """Transformers' name of one tensor; its BERT has BLIP's own names."""
    if not name.startswith(VISION):
        return name
    rest = name.removeprefix(VISION)
    whole = {
        "cls_token": "embeddings.class_embedding",
        "pos_embed": "embeddings.position_embedding",
    }
    if rest in whole:
        return f"vision_model.{whole[rest]}"
    module, _, part = rest.rpartition(".")
    if module in ("norm", "patch_embed.proj"):
        module = "post_layernorm" if module == "norm" else "embeddings.patch_embedding"
        return f"vision_model.{module}.{part}"
    _, layer, inside = module.split(".", 2)
    return f"vision_model.encoder.layers.{layer}.{dict(_BLOCK)[inside]}.{part}"


def _config(architecture: BlipArchitecture, *, fused: bool) -> dict[str, Any]:
    return {
        "architectures": ["BlipFusion" if fused else "BlipTowers"],
        "model_type": "blip",
        "text_config": reader_config(
            tokens=architecture.tokens,
            width=architecture.text_width,
            seen=architecture.width,
            hidden=architecture.text_hidden,
            layers=TEXT_LAYERS,
            num_heads=heads(architecture.text_width, what="the checkpoint"),
            positions=architecture.positions,
            fused=fused,
        ),
        "vision_config": {
            "hidden_size": architecture.width,
            "intermediate_size": architecture.hidden,
            "num_hidden_layers": architecture.layers,
            "num_attention_heads": heads(architecture.width, what="the checkpoint"),
            "image_size": architecture.patch * architecture.grid,
            "patch_size": architecture.patch,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-6,
        },
    }
