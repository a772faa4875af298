"""From a pretrained network of pictures to a search by a picture: trained, moved, published, indexed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from genius_search.cli import main
from genius_search.data.mbeir import MBeir
from genius_search.encoders.base import load_encoder
from genius_search.encoders.pretrained import ImageTower
from genius_search.encoders.small_texts import StoredSmall
from genius_search.errors import ArtifactMissing
from genius_search.index.index import Index
from genius_search.model import Genius
from genius_search.model.file import read_model_file
from genius_search.presets import preset
from genius_search.progress import Silent
from genius_search.training.embed import TrainingRecords, embed_training
from genius_search.training.encoder import train_encoder
from genius_search.training.fit import fit


def one_step(pictures):
    """Settings by which every stage takes one step."""
    config = preset("tiny")
    parts = {
        name: replace(part, training=replace(part.training, max_steps=1))
        for name, part in vars(config).items()
        if name in ("encoder", "quantizer", "generator")
    }
    return replace(config, **{**parts, "encoder": replace(parts["encoder"], pictures=str(pictures))})


def test_the_written_features_are_those_of_the_saved_encoder(trained, clip_folder, tmp_path):
    records = TrainingRecords(MBeir(trained.data))
    settings = one_step(clip_folder).encoder
    features = train_encoder(records, tmp_path / "model", settings, progress=Silent()).features
    encoder = load_encoder(f"small:{tmp_path / 'model' / 'encoder'}")
    embedded = embed_training(records, encoder, tmp_path / "again", progress=Silent())
    for written, anew in zip(features, embedded, strict=True):
        rows = np.arange(len(written))
        found, expected = written.gather(rows), anew.gather(rows)
        torch.testing.assert_close(found.image, expected.image, atol=0.02, rtol=0.02)
        torch.testing.assert_close(found.text, expected.text, atol=0.02, rtol=0.02)


def test_the_command_says_that_a_folder_of_texts_is_no_network_of_pictures(
    trained, sentence_folder, tmp_path, capsys
):
    flags = ["--encoder.pictures", str(sentence_folder), "--out", str(tmp_path / "model")]
    assert main(["train", "encoder", str(trained.data), *flags]) == ArtifactMissing.exit_code
    assert "not a complete model of images: it lacks preprocessor_config.json" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(trained, clip_folder, tmp_path_factory):
    """A model that was trained with a folder that is gone, and moved; without instructions beside pictures."""
    folder = tmp_path_factory.mktemp("towers")
    tower = shutil.copytree(clip_folder, folder / "tower")
    fit(MBeir(trained.data), "small", folder / "model", one_step(tower), progress=Silent())
    shutil.rmtree(tower)
    moved = Path(shutil.move(folder / "model", folder / "moved"))
    read_model_file(moved).model_copy(update={"instructions": []}).write(moved)
    return moved


def test_a_moved_model_searches_by_a_picture(model, tmp_path):
    pool = tmp_path / "pool"
    pool.mkdir()
    random = np.random.default_rng(0)
    for number in range(12):
        pixels = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((40, 40)).save(pool / f"{number}.png")
    index, added = Index.create(tmp_path / "index", pool=pool, model=model, embeddings="fused")
    assert added.added == 12
    config = replace(index.settings, rerank="embeddings", density_weight=0.0)
    hits = [index.search(image=pool / f"{number}.png", config=config)[0].id for number in (3, 8)]
    assert hits == ["3.png", "8.png"]
    assert index.search("a red kite", k=2)


def test_a_published_model_has_the_network_of_pictures(model, clip_folder, tmp_path):
    saved = Genius.open(model).save_pretrained(tmp_path / "saved")
    encoder = Genius.open(saved).encoder
    assert isinstance(encoder, StoredSmall)
    assert encoder.trained.pictures.fingerprint == ImageTower(clip_folder).fingerprint
