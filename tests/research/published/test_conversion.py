"""Names and shapes of UniIR's checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from genius_search.errors import ArtifactMismatch
from research.published.checkpoint import Checkpoint
from research.published.encoders import convert


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
    """Return those of the specification; the defaults are those of the published file."""
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
        **{
            f"visual.ln_{name}.{part}": (vision,)
            for name in ("pre", "post")
            for part in ("weight", "bias")
        },
    }
    for layer in range(layers):
        shapes |= block(f"visual.transformer.resblocks.{layer}.", vision)
    for layer in range(12):
        shapes |= block(f"transformer.resblocks.{layer}.", text)
    return {f"clip_model.{name}": shape for name, shape in shapes.items()}


def test_the_published_file_has_446_tensors_and_427_616_513_numbers():
    shapes = names_and_shapes()
    assert (len(shapes), sum(map(math.prod, shapes.values()))) == (446, 427_616_513)
    assert convert(checkpoint_of(shapes), "clip-sf").left_out == ()


def test_missing_unknown_and_misshapen_tensors_are_listed():
    shapes = names_and_shapes(vision=128, text=64, dim=96)
    del shapes["clip_model.ln_final.bias"]
    shapes["clip_model.visual.surprise"] = (1,)
    shapes["clip_model.transformer.resblocks.0.ln_1.weight"] = (65,)
    with pytest.raises(ArtifactMismatch) as refused:
        convert(checkpoint_of(shapes), "clip-sf")
    problems = ("file.pth as clip-sf", "ln_final.bias", "visual.surprise", "(65,), expected (64,)")
    for problem in problems:
        assert problem in str(refused.value)
