"""Our model, imported from files in the published containers, against the authors' numbers.

`golden.npz` holds what the authors' own classes computed (fp32, CPU) from weights that are a function of the
checkpoint's tensor names, so no checkpoint is shipped. The tests convert the weights in memory, as the importer
does. As a program it writes both files from the rule, in the published containers, imports them as people do, and
prints the largest difference of every array: ``python tests/parity/compare.py``.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import PAPER_SEARCH
from genius_search.model import Genius
from genius_search.nn.codebooks import Codebooks, sum_codes
from genius_search.nn.coder import Coder
from genius_search.nn.generator import Generator
from genius_search.nn.losses import alignment_loss, contrastive_loss
from genius_search.nn.quantizer import Quantizer
from genius_search.progress import Silent
from genius_search.search.beam import find_beams
from genius_search.search.table import IdTable, SearchSegment
from research.published.checkpoint import Checkpoint, open_checkpoint
from research.published.models import (
    COPY_PREFIX,
    EMBEDDING_TABLE,
    EMBEDDING_TABLE_COPIES,
    GENERATOR_FILE,
    QUANTIZER_FILE,
    import_genius,
    read_generator,
    read_quantizer,
)

WIDTHS = (1, 10, 50)
CLOSE = 2e-4
"""IDs may trade places only where their scores are as close as this."""


class Reference:
    """A folder of golden numbers, and the checkpoint that gave them."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "golden.npz") as arrays:
            self.golden = {name: arrays[name] for name in arrays.files}
        self.shapes = {
            name: tuple(shape)
            for name, shape in json.loads((folder / "keys.json").read_text()).items()
        }
        seed_file = folder / "seed"
        self.seed = int(seed_file.read_text()) if seed_file.exists() else 1

    @staticmethod
    def chosen() -> Reference:
        """The one beside this file, or in the folder that ``GENIUS_PARITY`` names."""
        return Reference(Path(os.environ.get("GENIUS_PARITY", Path(__file__).parent)))

    def tensor(self, name: str) -> Tensor:
        """The checkpoint's tensor of this name: noise seeded by the name, scaled by what it is."""
        random = np.random.RandomState((self.seed + zlib.crc32(name.encode("utf-8"))) & 0xFFFFFFFF)
        shape = self.shapes[name]
        if name.endswith("initted"):
            return torch.ones(shape)
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

    def numbers(self, name: str) -> Tensor:
        """A golden array as a tensor."""
        return torch.from_numpy(self.golden[name])


class Files(NamedTuple):
    """The two files of a published model."""

    quantizer: Path
    generator: Path


def published_weights(reference: Reference) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The reference's weights of both files, with the copies that the authors save."""
    quantizer: dict[str, Tensor] = {}
    generator: dict[str, Tensor] = {}
    for name in reference.shapes:
        segment = generator if name.startswith(("id_generator.", "embed_projector.")) else quantizer
        segment[name] = reference.tensor(name)
    for name in [name for name in quantizer if name.endswith("_codebook.embed")]:
        counts = quantizer[name.removesuffix("embed") + "cluster_size"]
        quantizer[name + "_avg"] = quantizer[name] * counts[..., None]
    first = "residual_rq.layers.0._codebook."
    for name in [name for name in quantizer if name.startswith(first)]:
        quantizer["vq._codebook." + name.removeprefix(first)] = quantizer[name].clone()
    generator |= dict.fromkeys(EMBEDDING_TABLE_COPIES, generator[EMBEDDING_TABLE])
    generator |= {COPY_PREFIX + name: tensor for name, tensor in quantizer.items()}
    return quantizer, generator


def write_published(reference: Reference, folder: Path) -> Files:
    """The reference's weights as the authors would have saved them, optimizer, configuration and all."""
    quantizer, generator = published_weights(reference)
    files = Files(folder / QUANTIZER_FILE, folder / GENERATOR_FILE)
    torch.save(container(quantizer), files.quantizer)
    torch.save(container(generator), files.generator)
    return files


def container(weights: dict[str, Tensor]) -> dict[str, Any]:
    """What the authors save beside the weights; the optimizer's state is cut down to a few tensors."""
    moments = {
        number: {
            "step": torch.tensor(9.0),
            "exp_avg": torch.zeros(4, 3),
            "exp_avg_sq": torch.zeros(4, 3),
        }
        for number in range(3)
    }
    return {
        "model": weights,
        "optimizer": {
            "state": moments,
            "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.98), "params": [0, 1, 2]}],
        },
        "scheduler": {"T_max": 30, "base_lrs": [1e-4], "last_epoch": 9, "_last_lr": [9e-5]},
        "config": configuration(),
        "epoch": 30,
        "scaler": {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 7},
    }


def configuration() -> Any:
    """An OmegaConf configuration, where omegaconf is installed."""
    plain = {
        "seed": 2023,
        "model": {"name": "t5-small", "codes": [3, 4096], "clip": None},
        "lr": 1e-4,
    }
    if find_spec("omegaconf") is None:
        return plain
    from omegaconf import OmegaConf  # noqa: PLC0415

    return OmegaConf.create(plain)


class Networks(NamedTuple):
    """The reference's weights in our networks."""

    codebooks: Codebooks
    generator: Generator
    quantizer: Quantizer
    """The quantizer in training."""


def converted(reference: Reference) -> Networks:
    """The reference's weights in our networks, converted in memory."""
    quantizer_weights, generator_weights = published_weights(reference)
    quantizer_file = Checkpoint(Path(QUANTIZER_FILE), quantizer_weights)
    generator_file = Checkpoint(Path(GENERATOR_FILE), generator_weights)
    part = read_generator(generator_file, quantizer_file)
    with torch.device("meta"):
        generator = Generator(part.dim, part.sizes, part.config)
    generator.load_state_dict(part.state, assign=True)
    quantizer = quantizer_of(quantizer_file)
    return Networks(quantizer.to_codebooks(), generator.eval(), quantizer)


def quantizer_of(checkpoint: Checkpoint) -> Quantizer:
    """The quantizer in training, with the weights of a stage-1 file."""
    part = read_quantizer(checkpoint)
    quantizer = Quantizer(part.dim, part.config).eval()
    quantizer.load_state_dict(part.state)
    return quantizer


def imported(reference: Reference, folder: Path) -> Networks:
    """The reference's weights in our networks, by way of the published files and the importer."""
    features = folder / "features"
    features.mkdir()
    np.save(features / "image_features.npy", reference.golden["img"])
    np.save(features / "text_features.npy", reference.golden["txt"])
    files = write_published(reference, folder)
    model = folder / "model"
    import_genius(*files, f"precomputed:{features}", model, progress=Silent())
    quantizer = quantizer_of(open_checkpoint(files.quantizer))
    for file in files:
        file.unlink()
    opened = Genius.open(model)
    return Networks(opened.codebooks, opened.generator, quantizer)


class Measured(NamedTuple):
    """How far our numbers are from the authors', by the array's name."""

    largest: dict[str, float]
    """Largest difference; of IDs and codes, how many differ."""
    misplaced: dict[str, int]
    """Of each beam, IDs in another place that no close score excuses."""


@torch.no_grad()
def measure(reference: Reference, networks: Networks) -> Measured:
    """Compute every array of the reference with our networks."""
    codebooks, generator, quantizer = networks
    ours: dict[str, Tensor] = {}
    image = reference.numbers("img") * reference.numbers("img_mask")
    text = reference.numbers("txt") * reference.numbers("txt_mask")
    ours["z"] = torch.from_numpy(codebooks.fuse(image.numpy(), text.numpy()))
    embeddings = reference.numbers("z").numpy()
    ours["code"] = torch.from_numpy(
        Coder(codebooks).assign_ids(embeddings, np.zeros(len(embeddings), np.int8))
    )
    vectors = sum_codes(codebooks.tables(), reference.numbers("code").numpy())
    ours["quant"] = F.normalize(torch.from_numpy(vectors), dim=-1)
    ours["rerank"] = F.normalize(image + text, dim=-1)
    hidden = generator(reference.numbers("z"), reference.numbers("target"))
    ours["logits"] = generator.row_logits(hidden.flatten(0, 1), slice(None)).unflatten(
        0, hidden.shape[:2]
    )
    ours |= _training(reference, quantizer)
    largest = {name: _difference(tensor, reference.numbers(name)) for name, tensor in ours.items()}
    misplaced = {}
    pool = reference.golden["pool"]
    table = IdTable.build(pool, np.zeros(len(pool)))
    for width in WIDTHS:
        config = dataclasses.replace(PAPER_SEARCH, beam=width, scores="vocabulary")
        beams = find_beams(generator, [SearchSegment(table)], reference.numbers("z"), config)
        expected = reference.golden[f"score{width}"]
        different = (table.ids[beams.low[:, :, 0]] != reference.golden[f"beam{width}"]).any(axis=2)
        gaps = np.abs(expected[:, :, None] - expected[:, None, :]) + np.eye(width)
        excused = gaps.min(axis=2) < CLOSE
        excused[:, 0] = False
        largest[f"beam{width}"] = float(different.sum())
        largest[f"score{width}"] = float(np.abs(beams.scores() - expected).max())
        misplaced[f"beam{width}"] = int((different & ~excused).sum())
    return Measured(largest, misplaced)


def _training(reference: Reference, quantizer: Quantizer) -> dict[str, Tensor]:
    """A training batch: its codes, its losses, and the codebooks after one step of the moving average."""
    sides = []
    for side in "qc":
        mask = reference.numbers(f"train_{side}_mask")
        image = reference.numbers(f"train_{side}_img") * mask[:, :1]
        text = reference.numbers(f"train_{side}_txt") * mask[:, 1:]
        sides.append(quantizer.fusion(image, text))
    nothing = torch.zeros(len(sides[0]), len(sides[0]), dtype=torch.bool)
    quantized = quantizer.quantize(torch.cat(sides))
    after = copy.deepcopy(quantizer)
    after.update_averages(quantized, generator=torch.Generator().manual_seed(0))
    first, second, last = (after.codebooks[level] for level in (0, 1, 8))
    return {
        "train_code": quantized.codes,
        "loss_cl": contrastive_loss(*sides, nothing, temperature=0.01, direction="both"),
        "loss_rq": quantized.loss,
        "loss_mse": alignment_loss(*quantized.vectors.chunk(2)),
        "ema_level0": first.embed,
        "ema_level1": second.embed,
        "ema_level8_mean": last.embed.mean(dim=0),
        "cluster_size_level1": second.cluster_size,
    }


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        raise ValueError(f"shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}")
    if not ours.is_floating_point():
        return float((ours != theirs).sum())
    return float((ours - theirs).abs().max())


def main() -> int:
    """Print the table."""
    reference = Reference.chosen()
    with TemporaryDirectory() as folder:
        measured = measure(reference, imported(reference, Path(folder)))
    for name, difference in sorted(measured.largest.items()):
        whole = name.startswith("beam") or name.endswith("code")
        text = f"{difference:.0f} differ" if whole else f"{difference:.1e}"
        sys.stdout.write(f"{name:<20} {text}\n")
    identical = all(measured.largest[name] == 0 for name in measured.misplaced)
    sys.stdout.write(f"beams identical: {'yes' if identical else 'no'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
