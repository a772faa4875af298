"""BLIP-SF and BLIP-FF: names, sizes, and what only training needed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from genius_search.errors import ArtifactMismatch
from genius_search.lab.published.checkpoint import Checkpoint
from genius_search.lab.published.encoders import (
    BlipArchitecture,
    blip_shapes,
    convert_blip,
)

LARGE = BlipArchitecture(
    layers=24,
    width=1024,
    hidden=4096,
    patch=16,
    grid=14,
    text_width=768,
    text_hidden=3072,
    tokens=30524,
    positions=512,
)
QUEUES = {
    "query_queue": (768, 57960),
    "cand_queue": (768, 57960),
    "idx_queue": (1, 57960),
    "new_ptr_queue": (1,),
}
PROJECTIONS = {
    "vision_proj.weight": (768, 1024),
    "vision_proj.bias": (768,),
    "text_proj.weight": (768, 768),
    "text_proj.bias": (768,),
}


def numbers(shapes, start):
    return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(start))


def with_training(shapes):
    copies = {}
    for name, shape in shapes.items():
        first, _, rest = name.partition(".")
        copies[f"{first}_m.{rest}"] = shape
    return shapes | copies | QUEUES | {"temp": (), "text_encoder.embeddings.position_ids": (1, 512)}


def checkpoint_of(shapes):
    tensors = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}
    return Checkpoint(Path("blip_ff_large.pth"), tensors, (), 0)


def test_the_sizes_add_up_to_the_published_files_7_49_gb():
    shapes = blip_shapes(LARGE, fused=True)
    assert numbers(shapes, "visual_encoder.") == 303_301_632
    assert numbers(shapes, "text_encoder.") == 142_567_680
    trained = numbers(shapes, "")
    weights = 2 * trained + numbers(QUEUES, "")
    adam = 2 * trained
    assert 4 * (weights + adam) == pytest.approx(7.49e9, rel=0.001)


def test_the_names_become_those_of_transformers():
    from transformers import BlipTextConfig, BlipVisionConfig, BlipVisionModel  # noqa: PLC0415  takes seconds
    from transformers.models.blip.modeling_blip_text import BlipTextModel  # noqa: PLC0415

    found = convert_blip(checkpoint_of(with_training(blip_shapes(LARGE, fused=True))), "blip-ff")
    with torch.device("meta"):
        vision = BlipVisionModel(BlipVisionConfig(**found.config["vision_config"]))
        text = BlipTextModel(BlipTextConfig(**found.config["text_config"]))
    theirs = {f"vision_model.{name}": tensor.shape for name, tensor in vision.state_dict().items()}
    theirs |= {f"text_encoder.{name}": tensor.shape for name, tensor in text.state_dict().items()}
    assert {name: tensor.shape for name, tensor in found.weights.items()} == theirs
    assert found.config["vision_config"]["num_attention_heads"] == 16
    assert found.config["text_config"]["num_attention_heads"] == 12
    assert found.config["vision_config"]["layer_norm_eps"] == 1e-6
    assert found.pixels["size"] == {"height": 224, "width": 224}
    assert not found.pixels["do_center_crop"]
    assert found.tokens == 30524


def test_what_only_training_needed_is_left_out():
    shapes = blip_shapes(LARGE, fused=True)
    found = convert_blip(checkpoint_of(with_training(shapes)), "blip-ff")
    assert found.used == len(shapes)
    assert len(found.left_out) == len(shapes) + len(QUEUES) + 2
    assert {"temp", "idx_queue", "text_encoder.embeddings.position_ids"} < set(found.left_out)
    assert any(name.startswith("text_encoder_m.pooler") for name in found.left_out)


def test_score_fusion_has_projections_and_leaves_the_attention_to_images():
    whole = blip_shapes(LARGE, fused=True)
    shapes = {name: shape for name, shape in whole.items() if "pooler" not in name} | PROJECTIONS
    found = convert_blip(checkpoint_of(with_training(shapes)), "blip-sf")
    assert not any("crossattention" in name for name in found.weights)
    assert any("text_encoder.encoder.layer.0.crossattention" in name for name in found.left_out)
    assert tuple(found.weights["vision_proj.weight"].shape) == (768, 1024)
    assert found.config["projection_dim"] == 768


def test_the_two_kinds_are_not_taken_for_each_other():
    fused = checkpoint_of(with_training(blip_shapes(LARGE, fused=True)))
    with pytest.raises(ArtifactMismatch, match=r"needs a tensor vision_proj\.weight"):
        convert_blip(fused, "blip-sf")
    plain = checkpoint_of(with_training(blip_shapes(LARGE, fused=False) | PROJECTIONS))
    with pytest.raises(ArtifactMismatch, match=r"blip_ff_large\.pth as blip-ff.*missing.*pooler.*4 unknown"):
        convert_blip(plain, "blip-ff")
