"""CLIP-FF: CLIP without its text projection, and T5's layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from genius_search.errors import ArtifactMismatch
from genius_search.lab.published.checkpoint import Checkpoint
from genius_search.lab.published.encoders import (
    ClipArchitecture,
    Tower,
    clip_shapes,
    convert_clip,
    mixer_shapes,
)

MIXER = {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_heads": 12, "relative_attention_num_buckets": 32}


def shapes_of(*, dim=768):
    text = Tower("transformer.resblocks.", "", 12, 768, 3072)
    vision = Tower("visual.transformer.resblocks.", "", 24, 1024, 4096)
    return clip_shapes(ClipArchitecture(text, vision, dim, 77, 14, 16)) | mixer_shapes(MIXER)


def checkpoint_of(shapes):
    tensors = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}
    return Checkpoint(Path("clip_ff_large.pth"), tensors, (), 0)


def test_the_layers_have_t5s_names():
    from transformers import T5Config  # noqa: PLC0415  takes seconds to import
    from transformers.models.t5.modeling_t5 import T5Stack  # noqa: PLC0415

    with torch.device("meta"):
        stack = T5Stack(T5Config(num_layers=2, num_heads=12, d_model=768, d_kv=64))
    theirs = {f"t5_layers.{name}": tuple(tensor.shape) for name, tensor in stack.state_dict().items()}
    table = theirs.pop("t5_layers.embed_tokens.weight")
    assert mixer_shapes(MIXER) == theirs
    found = convert_clip(checkpoint_of(shapes_of() | {"t5_layers.embed_tokens.weight": table}), "clip-ff")
    assert found.left_out == ("t5_layers.embed_tokens.weight",)
    assert {name: found.config["mixer_config"][name] for name in MIXER} == MIXER


def test_a_text_projection_is_one_tensor_too_many():
    with pytest.raises(ArtifactMismatch, match=r"1 unknown: clip_model\.text_projection"):
        convert_clip(checkpoint_of(shapes_of() | {"clip_model.text_projection": (768, 768)}), "clip-ff")


def test_a_clip_sf_file_is_refused_by_what_it_lacks():
    shapes = {name: shape for name, shape in shapes_of().items() if not name.startswith("t5_layers.")}
    with pytest.raises(ArtifactMismatch, match=r"needs a tensor t5_layers\..*relative_attention_bias"):
        convert_clip(checkpoint_of(shapes), "clip-ff")


def test_tokens_of_different_widths_cannot_be_mixed():
    with pytest.raises(
        ArtifactMismatch, match="text tokens are 768 wide, image tokens 512, the layers over both 768"
    ):
        convert_clip(checkpoint_of(shapes_of(dim=512)), "clip-ff")
