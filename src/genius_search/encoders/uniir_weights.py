"""UniIR's BLIP-SF and BLIP-FF: BLIP's names to transformers' (specification, section 3.5).

An image tower (``visual_encoder``), BERT (``text_encoder``), and for score fusion two projections. Momentum
copies (``*_m``), queues and ``temp`` serve training only and are left out. The names of single tensors are
those of BLIP's own code. For BLIP-FF their sizes add up to the published file's 7.49 GB, but the file itself
could not be opened here. BLIP-SF was never published.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch import Tensor

from genius_search.config import EncoderKind
from genius_search.encoders.pickles import Checkpoint
from genius_search.errors import ArtifactMismatch

SHOWN: Final = 8
"""Names listed of each kind of difference; the rest are counted."""


def check_names(
    found: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    *,
    tolerated: Sequence[re.Pattern[str]] = (),
    what: str,
) -> None:
    """Nothing missing, nothing unknown, every shape right; ``tolerated`` names (matched whole) may be there.

    Parameters
    ----------
    what
        what the tensors are and where they were read, for the message.

    Raises
    ------
    ArtifactMismatch
        lists what differs.
    """
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected and not is_tolerated(name, tolerated)]
    misshapen = [
        f"{name} {tuple(found[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}"
        for kind, names in (("missing", missing), ("unknown", unknown), ("of another shape", misshapen))
        if names
    ]
    if problems:
        raise ArtifactMismatch(
            f"{what}: of {len(expected)} tensors expected, {'; '.join(problems)}. This is another model, or "
            "another version of it"
        )


def is_tolerated(name: str, tolerated: Sequence[re.Pattern[str]]) -> bool:
    """Whether a tensor may be there without being used."""
    return any(pattern.fullmatch(name) for pattern in tolerated)


def sound(tensor: Tensor, *, name: str, what: str) -> Tensor:
    """One tensor in single precision; the file's own memory where it is in single precision already.

    Parameters
    ----------
    what
        what the tensor belongs to and where it was read, for the message.

    Raises
    ------
    ArtifactMismatch
        it holds whole or complex numbers, NaN or infinity, or nothing.
    """
    kind = str(tensor.dtype).removeprefix("torch.")
    if not tensor.is_floating_point():
        raise ArtifactMismatch(
            f"{what}: {name} holds {kind} numbers, expected floating-point weights; this is another model, "
            "or the file is damaged"
        )
    single = tensor.float()
    if tensor.numel() == 0 or not all(bound.isfinite() for bound in single.aminmax()):
        found = "NaN or infinity" if tensor.numel() else "no numbers"
        raise ArtifactMismatch(f"{what}: {name} holds {found}; the file is damaged")
    return single


def all_sound(tensors: Mapping[str, Tensor], names: Iterable[str], *, what: str) -> dict[str, Tensor]:
    """These tensors as :func:`sound` gives them, by name."""
    return {name: sound(tensors[name], name=name, what=what) for name in names}


HEAD: Final = 64
"""Numbers per attention head, in all of them."""
MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
DEVIATION: Final = (0.26862954, 0.26130258, 0.27577711)
BICUBIC: Final = 3


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """An encoder taken from a checkpoint: weights in single precision, under transformers' names."""

    kind: EncoderKind
    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]
    """Architecture, as ``config.json`` tells it."""
    pixels: Mapping[str, Any]
    """How pictures are prepared, as ``preprocessor_config.json`` tells it."""
    tokens: int
    """Rows of the table of tokens."""
    used: int
    """Tensors of the checkpoint that were needed."""
    left_out: tuple[str, ...]
    """Names of those that were not: momentum copies, queues, buffers."""
    remarks: tuple[str, ...] = ()
    """What a person should know before trusting it."""


def sizes(tensors: Mapping[str, Tensor], name: str, *, rank: int, what: str) -> tuple[int, ...]:
    """Shape of the tensor that tells a size; raises :class:`ArtifactMismatch` where it is not there."""
    found = tensors.get(name)
    if found is None or found.dim() != rank:
        shape = "it is missing" if found is None else f"its shape is {tuple(found.shape)}"
        raise ArtifactMismatch(
            f"{what} needs a tensor {name} with {rank} dimensions, and {shape}; this is another model"
        )
    return tuple(found.shape)


def depth(names: Iterable[str], prefix: str) -> int:
    """Layers of an image tower: 24 (ViT-L) where a name speaks of layer 12 or above, else 12 (ViT-B)."""
    starts = tuple(f"{prefix}{layer}." for layer in range(12, 24))
    return 24 if any(name.startswith(starts) for name in names) else 12


def heads(width: int, *, what: str) -> int:
    """Attention heads of a tower of this width."""
    if width % HEAD:
        raise ArtifactMismatch(f"{what} has layers {width} wide, expected a multiple of {HEAD}")
    return width // HEAD


def grid(positions: int, *, what: str) -> int:
    """Patches along one side, from the number of positions: the patches and one for the class."""
    side = math.isqrt(max(positions - 1, 0))
    if side * side + 1 != positions:
        raise ArtifactMismatch(f"{what} has {positions} image positions, expected a square number and one")
    return side


def pixel_settings(processor: str, *, side: int, squash: bool) -> dict[str, Any]:
    """``preprocessor_config.json``: bicubic to ``side``, squashed or cropped, CLIP's mean and deviation."""
    square = {"height": side, "width": side}
    crop = {"size": square} if squash else {"size": {"shortest_edge": side}, "crop_size": square}
    return {
        "image_processor_type": processor,
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": BICUBIC,
        **crop,
        "do_center_crop": not squash,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(MEAN),
        "image_std": list(DEVIATION),
    }


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


CLIP_FF_PREFIX: Final = "t5_layers."
LAYERS: Final = 2
_TOLERATED: Final = (re.compile(r"t5_layers\.embed_tokens\.weight"),)
_BIAS: Final = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def clip_ff_convert(checkpoint: Checkpoint) -> EncoderWeights:
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
        f"mixer.{name.removeprefix(CLIP_FF_PREFIX)}": used[name]
        for name in expected
        if name.startswith(CLIP_FF_PREFIX)
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
    buckets, num_heads = sizes(tensors, CLIP_FF_PREFIX + _BIAS, rank=2, what=what)
    inner, width = sizes(
        tensors, f"{CLIP_FF_PREFIX}block.0.layer.0.SelfAttention.q.weight", rank=2, what=what
    )
    hidden, _ = sizes(tensors, f"{CLIP_FF_PREFIX}block.0.layer.1.DenseReluDense.wi.weight", rank=2, what=what)
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
    return {CLIP_FF_PREFIX + name: shape for name, shape in shapes.items()}


VISION: Final = "visual_encoder."
TEXT: Final = "text_encoder."
BLIP_TEXT_LAYERS: Final = 12
EXTRA_TOKENS: Final = 2
"""BLIP adds [DEC] and [ENC] to BERT's vocabulary; UniIR reads neither."""

_TRAINING: Final = (
    re.compile(r"(visual_encoder|text_encoder|vision_proj|text_proj)_m\..*"),
    re.compile(r"(query|cand|idx|new_ptr)_queue|temp"),
    re.compile(r"text_encoder\.embeddings\.position_ids"),
)
_CROSS: Final = re.compile(r"text_encoder\.encoder\.layer\.\d+\.crossattention\..*")
_blip_BLOCK: Final = (
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
    """BLIP-SF: the image's and the text's own features, projected. Raises as :func:`convert` does."""
    return _convert(checkpoint, "blip-sf")


def convert_feature_fusion(checkpoint: Checkpoint) -> EncoderWeights:
    """BLIP-FF: BERT looks at the image's tokens. Raises as :func:`convert` does."""
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
    for layer in range(BLIP_TEXT_LAYERS):
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
    return f"vision_model.encoder.layers.{layer}.{dict(_blip_BLOCK)[inside]}.{part}"


def _config(architecture: BlipArchitecture, *, fused: bool) -> dict[str, Any]:
    return {
        "architectures": ["BlipFusion" if fused else "BlipTowers"],
        "model_type": "blip",
        "text_config": reader_config(
            tokens=architecture.tokens,
            width=architecture.text_width,
            seen=architecture.width,
            hidden=architecture.text_hidden,
            layers=BLIP_TEXT_LAYERS,
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
