"""A small model with the names of the published files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

Weights = dict[str, torch.Tensor]


class Sizes(NamedTuple):
    """Sizes of a published model."""

    dim: int = 6
    hidden: int = 4
    codes: int = 5
    levels: int = 2
    width: int = 8
    heads: int = 2
    feedforward: int = 12
    layers: int = 2
    prefixes: int = 3


class Published(NamedTuple):
    """Weights as the authors publish them, by name."""

    quantizer: Weights
    generator: Weights

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write the two files."""
        paths = folder / "quantizer.pth", folder / "generator.pth"
        for weights, path in zip(self, paths, strict=True):
            torch.save({"model": weights, "optimizer": {"state": {}}, "epoch": 3}, path)
        return paths


@pytest.fixture
def make_published() -> Callable[..., Published]:
    """A function that draws a small model (names: specification, section 7)."""

    def make(**sizes: int) -> Published:
        random = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random)

        quantizer = draw_quantizer(Sizes(**sizes), draw)
        return Published(quantizer, draw_generator(Sizes(**sizes), quantizer, draw))

    return make


def draw_quantizer(sizes: Sizes, draw: Callable[..., torch.Tensor]) -> Weights:
    joint = 2 * sizes.hidden
    shapes = {
        "text_projection_layer": (sizes.hidden, sizes.dim),
        "image_projection_layer": (sizes.hidden, sizes.dim),
        "combiner_layer": (joint, joint),
        "output_layer": (sizes.dim, joint),
        "dynamic_scalar.0": (joint, joint),
        "dynamic_scalar.3": (1, joint),
    }
    quantizer = {}
    for layer, shape in shapes.items():
        quantizer[f"encoder.{layer}.weight"] = draw(*shape)
        quantizer[f"encoder.{layer}.bias"] = draw(shape[0])
    for level in range(1 + sizes.levels):
        codes = sizes.codes if level else 3
        book = {
            "initted": torch.ones(1),
            "cluster_size": draw(1, codes).abs(),
            "embed_avg": draw(1, codes, sizes.dim),
            "embed": draw(1, codes, sizes.dim),
        }
        for name, tensor in book.items():
            quantizer[f"residual_rq.layers.{level}._codebook.{name}"] = tensor
            if level == 0:
                quantizer[f"vq._codebook.{name}"] = tensor.clone()
    return quantizer


def draw_generator(sizes: Sizes, quantizer: Weights, draw: Callable[..., torch.Tensor]) -> Weights:
    width = sizes.width
    table = draw(6 + sizes.codes * sizes.levels, width)
    generator = {f"quantizer.{name}": tensor for name, tensor in quantizer.items()}
    for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"):
        generator[f"id_generator.{name}.weight"] = table
    for name in ("encoder", "decoder"):
        generator[f"id_generator.{name}.final_layer_norm.weight"] = draw(width)
    for block in range(sizes.layers):
        prefix = f"id_generator.decoder.block.{block}.layer."
        for attention in ("0.SelfAttention", "1.EncDecAttention"):
            for part in "qkvo":
                generator[f"{prefix}{attention}.{part}.weight"] = draw(width, width)
        for layer in range(3):
            generator[f"{prefix}{layer}.layer_norm.weight"] = draw(width)
        generator[f"{prefix}2.DenseReluDense.wi.weight"] = draw(sizes.feedforward, width)
        generator[f"{prefix}2.DenseReluDense.wo.weight"] = draw(width, sizes.feedforward)
    bias = "id_generator.decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    generator[bias] = draw(32, sizes.heads)
    generator["embed_projector.0.weight"] = draw(sizes.prefixes * width, sizes.dim)
    generator["embed_projector.0.bias"] = draw(sizes.prefixes * width)
    return generator
