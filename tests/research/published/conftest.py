"""A small model under the names of the published files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch


class Published(NamedTuple):
    """Weights as the authors publish them, by their names."""

    quantizer: dict[str, torch.Tensor]
    generator: dict[str, torch.Tensor]

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write the two files."""
        paths = folder / "quantizer.pth", folder / "generator.pth"
        for weights, path in zip(self, paths, strict=True):
            torch.save({"model": weights, "optimizer": {"state": {}}, "epoch": 3}, path)
        return paths


@pytest.fixture
def make_published():
    """A small model under the published names (specification, section 7); numbers drawn."""

    def make(
        *,
        dim=6,
        hidden=4,
        codes=5,
        levels=2,
        width=8,
        heads=2,
        feedforward=12,
        layers=2,
        prefixes=3,
    ):
        random = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(shape, generator=random)

        joint = 2 * hidden
        wide = {
            "text_projection_layer": (hidden, dim),
            "image_projection_layer": (hidden, dim),
            "combiner_layer": (joint, joint),
            "output_layer": (dim, joint),
            "dynamic_scalar.0": (joint, joint),
            "dynamic_scalar.3": (1, joint),
        }
        quantizer = {}
        for layer, shape in wide.items():
            quantizer[f"encoder.{layer}.weight"] = draw(*shape)
            quantizer[f"encoder.{layer}.bias"] = draw(shape[0])
        for level in range(1 + levels):
            size = codes if level else 3
            book = {
                "initted": torch.ones(1),
                "cluster_size": draw(1, size).abs(),
                "embed_avg": draw(1, size, dim),
                "embed": draw(1, size, dim),
            }
            quantizer |= {
                f"residual_rq.layers.{level}._codebook.{name}": book[name] for name in book
            }
            if level == 0:
                quantizer |= {f"vq._codebook.{name}": book[name].clone() for name in book}
        rows = draw(6 + codes * levels, width)
        generator = {f"quantizer.{name}": tensor for name, tensor in quantizer.items()}
        tied = ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
        generator |= {f"id_generator.{name}.weight": rows for name in tied}
        generator |= {
            f"id_generator.{name}.final_layer_norm.weight": draw(width)
            for name in ("encoder", "decoder")
        }
        for block in range(layers):
            start = f"id_generator.decoder.block.{block}.layer."
            for attention in ("0.SelfAttention", "1.EncDecAttention"):
                generator |= {
                    f"{start}{attention}.{part}.weight": draw(width, width) for part in "qkvo"
                }
            generator |= {f"{start}{layer}.layer_norm.weight": draw(width) for layer in range(3)}
            generator[f"{start}2.DenseReluDense.wi.weight"] = draw(feedforward, width)
            generator[f"{start}2.DenseReluDense.wo.weight"] = draw(width, feedforward)
        first = "id_generator.decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        generator[first] = draw(32, heads)
        generator["embed_projector.0.weight"] = draw(prefixes * width, dim)
        generator["embed_projector.0.bias"] = draw(prefixes * width)
        return Published(quantizer, generator)

    return make
