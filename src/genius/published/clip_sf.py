"""UniIR's CLIP-SF (``clip_sf_large.pth``): OpenAI's names to transformers' (specification, 3.3 and 4).

446 tensors under ``clip_model.``: 24 image layers and 12 text layers. Widths are read off the shapes, so that
a narrow look-alike imports the same way; names are not negotiable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from genius.published.container import Checkpoint
from genius.published.encoder_weights import EncoderWeights, depth, grid, heads, pixel_settings, sizes
from genius.published.names import check_names
from genius.published.numbers import all_sound

PUBLISHED: Final = "5e459b96e1ca6f3060372a136c91c8c3369eee3c77ede3fad6c35599ce701c4d"
"""SHA-256 of the file that UniIR's authors published."""
PREFIX: Final = "clip_model."
VOCABULARY: Final = 49408
TEXT_LAYERS: Final = 12
LARGEST_SCALE: Final = 100.0
"""CLIP's own limit of exp(logit_scale); fine-tuning drifts a little above it."""

_BLOCK: Final = (
    ("attn.out_proj", "self_attn.out_proj"),
    ("ln_1", "layer_norm1"),
    ("ln_2", "layer_norm2"),
    ("mlp.c_fc", "mlp.fc1"),
    ("mlp.c_proj", "mlp.fc2"),
)
_NORMS: Final = (
    ("ln_final", "text_model.final_layer_norm"),
    ("visual.ln_pre", "vision_model.pre_layrnorm"),
    ("visual.ln_post", "vision_model.post_layernorm"),
)
_SAME: Final = (
    ("token_embedding.weight", "text_model.embeddings.token_embedding.weight"),
    ("positional_embedding", "text_model.embeddings.position_embedding.weight"),
    ("visual.class_embedding", "vision_model.embeddings.class_embedding"),
    ("visual.conv1.weight", "vision_model.embeddings.patch_embedding.weight"),
    ("visual.positional_embedding", "vision_model.embeddings.position_embedding.weight"),
)


class Tower(NamedTuple):
    """One transformer: of texts or of images."""

    theirs: str
    """How names of its layers begin in the checkpoint."""
    ours: str
    """And in transformers."""
    layers: int
    width: int
    hidden: int


class ClipArchitecture(NamedTuple):
    """Sizes of a CLIP."""

    text: Tower
    vision: Tower
    dim: int
    context: int
    patch: int
    grid: int


def convert(checkpoint: Checkpoint) -> EncoderWeights:
    """Check every name, shape and number, and give the weights transformers' names.

    Raises
    ------
    ArtifactMismatch
        a tensor is missing, unknown, of another shape, or no weights.
    """
    what = f"{checkpoint.path} as clip-sf"
    architecture = clip_architecture(checkpoint.tensors, what=what)
    expected = clip_shapes(architecture) | {
        f"{PREFIX}text_projection": (architecture.text.width, architecture.dim)
    }
    check_names(checkpoint.tensors, expected, what=what)
    tensors = stripped(all_sound(checkpoint.tensors, expected, what=what))
    return EncoderWeights(
        kind="clip-sf",
        weights={
            "logit_scale": tensors["logit_scale"],
            "text_projection.weight": tensors["text_projection"].t().contiguous(),
            **clip_weights(tensors, architecture),
        },
        config=clip_config(architecture),
        pixels=pixel_settings(
            "CLIPImageProcessor", side=architecture.patch * architecture.grid, squash=False
        ),
        tokens=VOCABULARY,
        used=len(expected),
        left_out=(),
        remarks=scale_remarks(tensors["logit_scale"]),
    )


def clip_architecture(tensors: Mapping[str, Tensor], *, what: str) -> ClipArchitecture:
    """Read the sizes off the shapes of a few tensors."""
    layers = depth(tensors, f"{PREFIX}visual.transformer.resblocks.")

    def size(name: str, rank: int = 2) -> tuple[int, ...]:
        return sizes(tensors, PREFIX + name, rank=rank, what=what)

    context, text_width = size("positional_embedding")
    positions, vision_width = size("visual.positional_embedding")
    return ClipArchitecture(
        text=Tower(
            "transformer.resblocks.",
            "text_model.encoder.layers.",
            TEXT_LAYERS,
            text_width,
            size("transformer.resblocks.0.mlp.c_fc.weight")[0],
        ),
        vision=Tower(
            "visual.transformer.resblocks.",
            "vision_model.encoder.layers.",
            layers,
            vision_width,
            size("visual.transformer.resblocks.0.mlp.c_fc.weight")[0],
        ),
        dim=size("visual.proj")[1],
        context=context,
        patch=size("visual.conv1.weight", 4)[2],
        grid=grid(positions, what=what),
    )


def clip_shapes(architecture: ClipArchitecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint's CLIP and its shape, but ``text_projection``, which CLIP-FF lacks."""
    text, vision, dim, context, patch, side = architecture
    shapes: dict[str, tuple[int, ...]] = {
        "logit_scale": (),
        "token_embedding.weight": (VOCABULARY, text.width),
        "positional_embedding": (context, text.width),
        "visual.class_embedding": (vision.width,),
        "visual.positional_embedding": (side * side + 1, vision.width),
        "visual.conv1.weight": (vision.width, 3, patch, patch),
        "visual.proj": (vision.width, dim),
    }
    for name, width in (
        ("ln_final", text.width),
        ("visual.ln_pre", vision.width),
        ("visual.ln_post", vision.width),
    ):
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    for tower in (text, vision):
        width, hidden = tower.width, tower.hidden
        block: dict[str, tuple[int, ...]] = {
            "attn.in_proj_weight": (3 * width, width),
            "attn.in_proj_bias": (3 * width,),
            "attn.out_proj.weight": (width, width),
            "mlp.c_fc.weight": (hidden, width),
            "mlp.c_fc.bias": (hidden,),
            "mlp.c_proj.weight": (width, hidden),
            **{f"ln_{number}.{part}": (width,) for number in (1, 2) for part in ("weight", "bias")},
            **{f"{name}.bias": (width,) for name in ("attn.out_proj", "mlp.c_proj")},
        }
        shapes |= {
            f"{tower.theirs}{layer}.{name}": shape
            for layer in range(tower.layers)
            for name, shape in block.items()
        }
    return {PREFIX + name: shape for name, shape in shapes.items()}


def stripped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under ``clip_model.``, without it."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}


def clip_weights(tensors: Mapping[str, Tensor], architecture: ClipArchitecture) -> dict[str, Tensor]:
    """The two towers and the image projection under transformers' names."""
    weights = {ours: tensors[theirs] for theirs, ours in _SAME}
    weights["visual_projection.weight"] = tensors["visual.proj"].t().contiguous()
    pairs = [
        *_NORMS,
        *(
            (f"{tower.theirs}{layer}.{theirs}", f"{tower.ours}{layer}.{ours}")
            for tower in (architecture.text, architecture.vision)
            for layer in range(tower.layers)
            for theirs, ours in _BLOCK
        ),
    ]
    weights |= {
        f"{ours}.{part}": tensors[f"{theirs}.{part}"] for theirs, ours in pairs for part in ("weight", "bias")
    }
    for tower in (architecture.text, architecture.vision):
        for layer in range(tower.layers):
            for part in ("weight", "bias"):
                joined = tensors[f"{tower.theirs}{layer}.attn.in_proj_{part}"]
                for name, third in zip("qkv", joined.chunk(3), strict=True):
                    weights[f"{tower.ours}{layer}.self_attn.{name}_proj.{part}"] = third
    return weights


def clip_config(architecture: ClipArchitecture) -> dict[str, Any]:
    """``config.json`` of transformers' CLIPModel. QuickGELU: plain GELU loads too, and features are wrong."""
    text, vision, dim, context, patch, side = architecture

    def tower(sized: Tower) -> dict[str, Any]:
        return {
            "hidden_act": "quick_gelu",
            "hidden_size": sized.width,
            "intermediate_size": sized.hidden,
            "num_attention_heads": heads(sized.width, what="the checkpoint"),
            "num_hidden_layers": sized.layers,
            "projection_dim": dim,
        }

    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "dtype": "float32",
        "projection_dim": dim,
        "text_config": {
            **tower(text),
            "model_type": "clip_text_model",
            "vocab_size": VOCABULARY,
            "max_position_embeddings": context,
            "bos_token_id": VOCABULARY - 2,
            "eos_token_id": VOCABULARY - 1,
            "pad_token_id": VOCABULARY - 1,
        },
        "vision_config": {
            **tower(vision),
            "model_type": "clip_vision_model",
            "image_size": patch * side,
            "patch_size": patch,
        },
    }


def scale_remarks(logit_scale: Tensor) -> tuple[str, ...]:
    """A scale of the logits that no training of CLIP leaves behind is worth a word."""
    scale = float(logit_scale.exp())
    if 1.0 <= scale <= 1.1 * LARGEST_SCALE:
        return ()
    remark = (
        f"exp(logit_scale) is {scale:.4g}, and CLIP's lies between 1 and {LARGEST_SCALE:g}: the file may be "
        "damaged, or its training went wrong"
    )
    return (remark,)
