"""Names and shapes of UniIR's checkpoints, and where each tensor goes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from genius_search.errors import ArtifactMismatch
from research.published.checkpoint import Checkpoint
from research.published.encoders import checkpoint_shapes, convert, network_shapes


def checkpoint_of(shapes, *, scale=4.6):
    tensors = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}
    if "clip_model.logit_scale" in tensors:
        tensors["clip_model.logit_scale"] = torch.tensor(scale)
    return Checkpoint(Path("file.pth"), tensors)


def block(prefix, width):
    return {
        f"{prefix}attn.in_proj_weight": (3 * width, width),
        f"{prefix}attn.in_proj_bias": (3 * width,),
        f"{prefix}attn.out_proj.weight": (width, width),
        f"{prefix}attn.out_proj.bias": (width,),
        **{f"{prefix}ln_{n}.{part}": (width,) for n in (1, 2) for part in ("weight", "bias")},
        f"{prefix}mlp.c_fc.weight": (4 * width, width),
        f"{prefix}mlp.c_fc.bias": (4 * width,),
        f"{prefix}mlp.c_proj.weight": (width, 4 * width),
        f"{prefix}mlp.c_proj.bias": (width,),
    }


def names_and_shapes(*, vision=1024, text=768, dim=768, layers=24, patch=14):
    """As the specification lists them; the defaults are the published file."""
    shapes = {
        "positional_embedding": (77, text),
        "text_projection": (text, dim),
        "logit_scale": (),
        "token_embedding.weight": (49408, text),
        "ln_final.weight": (text,),
        "ln_final.bias": (text,),
        "visual.class_embedding": (vision,),
        "visual.positional_embedding": ((224 // patch) ** 2 + 1, vision),
        "visual.proj": (vision, dim),
        "visual.conv1.weight": (vision, 3, patch, patch),
        **{f"visual.ln_{name}.{part}": (vision,) for name in ("pre", "post") for part in ("weight", "bias")},
    }
    for layer in range(layers):
        shapes |= block(f"visual.transformer.resblocks.{layer}.", vision)
    for layer in range(12):
        shapes |= block(f"transformer.resblocks.{layer}.", text)
    return {f"clip_model.{name}": shape for name, shape in shapes.items()}


def test_the_published_file_has_446_tensors_and_427_616_513_numbers():
    listed = names_and_shapes()
    assert (len(listed), sum(map(math.prod, listed.values()))) == (446, 427_616_513)
    assert convert(checkpoint_of(listed), "clip-sf").left_out == ()


def test_missing_unknown_and_misshapen_tensors_are_listed():
    shapes = names_and_shapes(vision=128, text=64, dim=96)
    del shapes["clip_model.ln_final.bias"]
    shapes["clip_model.visual.surprise"] = (1,)
    shapes["clip_model.transformer.resblocks.0.ln_1.weight"] = (65,)
    with pytest.raises(ArtifactMismatch) as refused:
        convert(checkpoint_of(shapes), "clip-sf")
    for part in ("file.pth as clip-sf", "ln_final.bias", "visual.surprise", "(65,), expected (64,)"):
        assert part in str(refused.value)


LARGE = {
    "projection_dim": 768,
    "text_config": {
        "vocab_size": 30524,
        "hidden_size": 768,
        "encoder_hidden_size": 1024,
        "num_attention_heads": 12,
        "is_decoder": True,
    },
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 16,
    },
}
WHOLE = checkpoint_shapes("blip-ff", network_shapes("blip-ff", LARGE))
QUEUES = {
    "query_queue": (768, 57960),
    "cand_queue": (768, 57960),
    "idx_queue": (1, 57960),
    "new_ptr_queue": (1,),
}


def with_training(shapes):
    copies = {}
    for name, shape in shapes.items():
        first, _, rest = name.partition(".")
        copies[f"{first}_m.{rest}"] = shape
    return shapes | copies | QUEUES | {"temp": (), "text_encoder.embeddings.position_ids": (1, 512)}


def test_the_settings_are_those_of_blip_large():
    found = convert(checkpoint_of(with_training(WHOLE)), "blip-ff")
    for part, settings in (("text_config", LARGE["text_config"]), ("vision_config", LARGE["vision_config"])):
        assert settings.items() <= found.config[part].items()
    assert found.config["vision_config"]["layer_norm_eps"] == 1e-6
    assert found.pixels["size"] == {"height": 224, "width": 224}
    assert not found.pixels["do_center_crop"]


def test_what_only_training_needed_is_left_out():
    shapes = WHOLE
    found = convert(checkpoint_of(with_training(shapes)), "blip-ff")
    assert len(found.left_out) == len(shapes) + len(QUEUES) + 2
    assert {"temp", "idx_queue", "text_encoder.embeddings.position_ids"} < set(found.left_out)
    assert any(name.startswith("text_encoder_m.pooler") for name in found.left_out)
