"""UniIR's CLIP-FF: CLIP without its text projection, and T5 layers over both towers' tokens (section 3.5).

No such file was ever published, so the names rest on the specification and on transformers' T5 of that time.
``t5_layers.embed_tokens`` may be there, as in some versions of T5, and is never used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from genius.errors import ArtifactMismatch
from genius.published.clip_sf import (
    VOCABULARY,
    clip_architecture,
    clip_config,
    clip_shapes,
    clip_weights,
    scale_remarks,
    stripped,
)
from genius.published.container import Checkpoint
from genius.published.encoder_weights import EncoderWeights, pixel_settings, sizes
from genius.published.names import check_names, is_tolerated
from genius.published.numbers import all_sound

PREFIX: Final = "t5_layers."
LAYERS: Final = 2
_TOLERATED: Final = (re.compile(r"t5_layers\.embed_tokens\.weight"),)
_BIAS: Final = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def convert(checkpoint: Checkpoint) -> EncoderWeights:
    """Check every name, shape and number, and give the weights transformers' names.

    Raises
    ------
    ArtifactMismatch
        a tensor is missing, unknown, of another shape, or no weights.
    """
    tensors, what = checkpoint.tensors, f"{checkpoint.path} as clip-ff"
    architecture = clip_architecture(tensors, what=what)
    mixer = mixer_config(tensors, what=what)
    if not architecture.text.width == architecture.dim == mixer["d_model"]:
        raise ArtifactMismatch(
            f"{what}: text tokens are {architecture.text.width} wide, image tokens {architecture.dim}, the "
            f"layers over both {mixer['d_model']}; all three must be equal"
        )
    expected = clip_shapes(architecture) | mixer_shapes(mixer)
    check_names(tensors, expected, tolerated=_TOLERATED, what=what)
    used = all_sound(tensors, expected, what=what)
    weights = clip_weights(stripped(used), architecture)
    weights |= {
        f"mixer.{name.removeprefix(PREFIX)}": used[name] for name in expected if name.startswith(PREFIX)
    }
    return EncoderWeights(
        kind="clip-ff",
        weights=weights,
        config={**clip_config(architecture), "architectures": ["ClipFusion"], "mixer_config": mixer},
        pixels=pixel_settings(
            "CLIPImageProcessor", side=architecture.patch * architecture.grid, squash=False
        ),
        tokens=VOCABULARY,
        used=len(expected),
        left_out=tuple(name for name in tensors if is_tolerated(name, _TOLERATED)),
        remarks=scale_remarks(used["clip_model.logit_scale"]),
    )


def mixer_config(tensors: Mapping[str, Tensor], *, what: str) -> dict[str, Any]:
    """Settings of the T5 layers: sizes from the shapes, the rest T5's own defaults, ReLU among them."""
    buckets, num_heads = sizes(tensors, PREFIX + _BIAS, rank=2, what=what)
    inner, width = sizes(tensors, f"{PREFIX}block.0.layer.0.SelfAttention.q.weight", rank=2, what=what)
    hidden, _ = sizes(tensors, f"{PREFIX}block.0.layer.1.DenseReluDense.wi.weight", rank=2, what=what)
    return mixer_settings(
        width=width, head=inner // num_heads, hidden=hidden, num_heads=num_heads, buckets=buckets
    )


def mixer_settings(*, width: int, head: int, hidden: int, num_heads: int, buckets: int) -> dict[str, Any]:
    """Settings of the T5 layers for transformers."""
    return {
        "d_model": width,
        "d_kv": head,
        "d_ff": hidden,
        "num_layers": LAYERS,
        "num_heads": num_heads,
        "relative_attention_num_buckets": buckets,
        "vocab_size": 1,
        "eos_token_id": None,
        "is_encoder_decoder": False,
        "use_cache": False,
    }


def mixer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the T5 layers and its shape."""
    width, hidden, inner = config["d_model"], config["d_ff"], config["d_kv"] * config["num_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        _BIAS: (config["relative_attention_num_buckets"], config["num_heads"]),
        "final_layer_norm.weight": (width,),
    }
    for layer in range(LAYERS):
        attention, dense = f"block.{layer}.layer.0", f"block.{layer}.layer.1"
        shapes |= {f"{attention}.SelfAttention.{name}.weight": (inner, width) for name in "qkv"}
        shapes |= {
            f"{attention}.SelfAttention.o.weight": (width, inner),
            f"{attention}.layer_norm.weight": (width,),
            f"{dense}.DenseReluDense.wi.weight": (hidden, width),
            f"{dense}.DenseReluDense.wo.weight": (width, hidden),
            f"{dense}.layer_norm.weight": (width,),
        }
    return {PREFIX + name: shape for name, shape in shapes.items()}
