"""Import of the published model; labelled candidates show the meaning of level 0's codes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from genius_search.data.mbeir import MBeir
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.records import Modality
from research.published.models import import_genius, main

DIM = 6
IMAGE, TEXT = torch.eye(DIM)[:2]


class RecordedProgress(Silent):
    def __init__(self):
        self.messages = []

    def say(self, message):
        self.messages.append(message)


@pytest.fixture
def files(make_published, tmp_path):
    """A model whose fusion is the mean, and whose level 0 means text, image-text, image."""
    published = make_published(dim=DIM)
    level0 = torch.stack([TEXT, (IMAGE + TEXT) / 2**0.5, IMAGE])[None]
    for prefix, weights in (("", published.quantizer), ("quantizer.", published.generator)):
        weights[f"{prefix}encoder.output_layer.weight"] = torch.zeros(DIM, 8)
        weights[f"{prefix}encoder.output_layer.bias"] = torch.zeros(DIM)
        weights[f"{prefix}encoder.dynamic_scalar.3.weight"] = torch.zeros(1, 8)
        weights[f"{prefix}encoder.dynamic_scalar.3.bias"] = torch.zeros(1)
        for copy in ("residual_rq.layers.0", "vq"):
            weights[f"{prefix}{copy}._codebook.embed"] = level0
    return published.save(tmp_path)


@pytest.fixture
def encoder(tmp_path):
    """Precomputed features of thirty items."""
    random = np.random.default_rng(0)
    folder = tmp_path / "features"
    folder.mkdir()
    for part, direction in (("image", IMAGE), ("text", TEXT)):
        noise = 0.05 * random.standard_normal((30, DIM))
        np.save(folder / f"{part}_features.npy", (direction.numpy() + noise).astype(np.float32))
    return f"precomputed:{folder}"


@pytest.fixture
def write_data(tmp_path):
    """A function that writes a data set with ten candidates of each modality."""

    def write(*modalities):
        root = tmp_path / "data"
        (root / "query").mkdir(parents=True)
        pools = root / "cand_pool" / "local"
        pools.mkdir(parents=True)
        lines = []
        for number, modality in enumerate(modalities * 10, start=1):
            image = None if modality is Modality.TEXT else "mbeir_images/x.jpg"
            text = None if modality is Modality.IMAGE else "A text."
            row = {"did": f"9:{number}", "modality": modality.mbeir, "img_path": image, "txt": text}
            lines.append(json.dumps(row))
        (pools / "mbeir_mscoco_task0_cand_pool.jsonl").write_text("\n".join(lines) + "\n")
        return MBeir(root)

    return write


def test_labelled_candidates_show_the_meaning_of_level_zero(files, encoder, write_data, tmp_path):
    progress = RecordedProgress()
    data = write_data(*Modality)
    model = import_genius(*files, encoder, tmp_path / "model", progress=progress, data=data)
    assert model.codebooks.level0_modality.tolist() == [1, 2, 0]
    assert Genius.open(tmp_path / "model").level0_codes(Modality.IMAGE) == {2}
    assert progress.messages == [
        "level 0: 0 = text, 1 = image-text, 2 = image; right for 100.0% of 30 candidates"
    ]
    assert not list(tmp_path.glob("**/candidates"))


def test_without_candidates_a_warning_says_that_level_zero_is_unknown(files, encoder, tmp_path):
    progress = RecordedProgress()
    model = import_genius(*files, encoder, tmp_path / "model", progress=progress)
    assert model.codebooks.level0_modality.tolist() == [-1, -1, -1]
    assert progress.messages[0].startswith("WARNING: without labelled candidates")


def test_the_command_imports(files, encoder, tmp_path, capsys):
    out = tmp_path / "model"
    words = ["--quantizer", files[0], "--generator", files[1], "--encoder", encoder, "--out", out]
    assert main([str(word) for word in words]) == 0
    assert Genius.open(out).fingerprint[:12] in capsys.readouterr().err
