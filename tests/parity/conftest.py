"""The authors' numbers and the weights behind them, generated from each tensor's name.

`golden.npz` holds what the authors' own classes computed (fp32, CPU) from weights that are a function of
the checkpoint's tensor names, so no checkpoint is shipped. ``GENIUS_PARITY=FOLDER`` points at another
folder with `golden.npz`, `keys.json` and, when its weights were drawn from another seed, a text file `seed`.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from genius.config import FusionConfig, GeneratorConfig, QuantizerConfig
from genius.models.generator import Generator
from genius.models.quantizer import Quantizer

CODEBOOK_SIZE = 64
SEMANTIC_LEVELS = 8
GENERATOR_NAMES = {
    "layer.0.SelfAttention.relative_attention_bias": None,
    "layer.0.SelfAttention": "self_attention",
    "layer.0.layer_norm": "self_norm",
    "layer.1.EncDecAttention": "cross_attention",
    "layer.1.layer_norm": "cross_norm",
    "layer.2.DenseReluDense.wi": "wi",
    "layer.2.DenseReluDense.wo": "wo",
    "layer.2.layer_norm": "feedforward_norm",
}


class Reference:
    """A folder of golden numbers, and the checkpoint that gave them."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "golden.npz") as arrays:
            self.golden = {name: arrays[name] for name in arrays.files}
        self.shapes = {
            name: tuple(shape) for name, shape in json.loads((folder / "keys.json").read_text()).items()
        }
        seed_file = folder / "seed"
        self.seed = int(seed_file.read_text()) if seed_file.exists() else 1

    def tensor(self, name: str) -> torch.Tensor:
        """The checkpoint's tensor of this name: noise seeded by the name, scaled by what it is."""
        random = np.random.RandomState((self.seed + zlib.crc32(name.encode("utf-8"))) & 0xFFFFFFFF)
        shape = self.shapes[name]
        if name.endswith("cluster_size"):
            return torch.from_numpy(random.uniform(5, 15, shape).astype(np.float32))
        noise = random.standard_normal(shape).astype(np.float32)
        if "layer_norm" in name:
            noise = 1 + 0.1 * noise
        elif name.endswith(".bias"):
            noise = 0.02 * noise
        elif "_codebook.embed" in name:
            noise = noise / np.sqrt(shape[-1]) * 0.7 ** int(name.split(".")[2])
        elif "shared" not in name and "relative_attention_bias" not in name:
            noise = noise / np.sqrt(shape[-1])
        return torch.from_numpy(noise.astype(np.float32))

    def numbers(self, name: str) -> torch.Tensor:
        """A golden array as a tensor."""
        return torch.from_numpy(self.golden[name])


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The golden numbers."""
    return Reference(Path(os.environ.get("GENIUS_PARITY", Path(__file__).parent)))


@pytest.fixture(scope="session")
def checkpoint_quantizer(reference) -> Quantizer:
    """Our quantizer with the checkpoint's stage-1 weights; leave it as it is."""
    config = QuantizerConfig(
        levels=SEMANTIC_LEVELS, codebook_size=CODEBOOK_SIZE, fusion=FusionConfig(hidden=2560)
    )
    state = {}
    for name in reference.shapes:
        if name.startswith("encoder."):
            state["fusion." + name.removeprefix("encoder.")] = reference.tensor(name)
        elif name.endswith("_codebook.embed"):
            layer = name.removesuffix(".embed")
            level = name.split(".")[2]
            embed, counts = reference.tensor(name)[0], reference.tensor(layer + ".cluster_size")[0]
            state[f"codebooks.{level}.embed"] = embed
            state[f"codebooks.{level}.cluster_size"] = counts
            state[f"codebooks.{level}.embed_avg"] = embed * counts[:, None]
    with torch.device("meta"):
        quantizer = Quantizer(768, config)
    state["level0_modality"] = torch.full((3,), -1)
    quantizer.load_state_dict(state, strict=True, assign=True)
    return quantizer.eval()


@pytest.fixture(scope="session")
def checkpoint_generator(reference) -> Generator:
    """Our generator with the checkpoint's stage-2 weights."""
    state = {
        "embedding.weight": reference.tensor("id_generator.shared.weight"),
        "prefix_norm.weight": reference.tensor("id_generator.encoder.final_layer_norm.weight"),
        "final_norm.weight": reference.tensor("id_generator.decoder.final_layer_norm.weight"),
        "prefix_projection.weight": reference.tensor("embed_projector.0.weight"),
        "prefix_projection.bias": reference.tensor("embed_projector.0.bias"),
    }
    for name in reference.shapes:
        if name.startswith("id_generator.decoder.block."):
            block, inner = name.removeprefix("id_generator.decoder.block.").split(".", 1)
            part = next(part for part in GENERATOR_NAMES if inner.startswith(part))
            ours = GENERATOR_NAMES[part]
            target = f"blocks.{block}.{ours}{inner.removeprefix(part)}" if ours else "position_bias.weight"
            state[target] = reference.tensor(name)
    sizes = (3, *[CODEBOOK_SIZE] * SEMANTIC_LEVELS)
    generator = Generator(768, sizes, GeneratorConfig())
    generator.load_state_dict(state, strict=True)
    return generator.eval()
