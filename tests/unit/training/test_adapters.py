"""Adapters: two frozen encoders, of other widths, become one encoder that opens like any other."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from genius_search.data.features import FeatureBatch
from genius_search.data.mbeir import MBeir
from genius_search.encoders.adapters import AdapterEncoder
from genius_search.encoders.base import ItemKey
from genius_search.encoders.open import load_encoder
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.publish import save
from genius_search.recipe import preset
from genius_search.training.adapters import AdapterNetwork, train_adapters
from genius_search.training.fit import fit, frozen_encoders
from genius_search.training.records import TrainingRecords

PHOTOS = 500
TINY = preset("tiny")
ADAPTERS = replace(
    TINY.adapters,
    dim=16,
    hidden=64,
    members=2,
    training=replace(TINY.adapters.training, epochs=20.0, batch_size=80, learning_rate=5e-3),
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photos and captions as features of 24 and 10 numbers that have 6 in common; four fifths train."""
    root, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)

    def write(name, rows):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    for split, numbers in (("train", range(1, 401)), ("val", range(401, PHOTOS + 1))):
        pool = [
            {"did": f"1:{n}", "txt": None, "img_path": f"{n}.jpg", "modality": "image"}
            for n in numbers
        ]
        queries = [
            {
                "qid": f"2:{n}",
                "query_txt": "it",
                "query_modality": "text",
                "pos_cand_list": [f"1:{n}"],
            }
            for n in numbers
        ]
        write(f"query/{split}/mbeir_made_task0_{split}.jsonl", queries)
        write(f"cand_pool/local/mbeir_made_task0_{split}_cand_pool.jsonl", pool)
    common = np.tanh(random.standard_normal((PHOTOS, 6)))
    for part, width in (("image", 24), ("text", 10)):
        features = common @ random.standard_normal((6, width)) + 0.1 * random.standard_normal(
            (PHOTOS, width)
        )
        np.save(root / f"{part}_features.npy", (100 * features + 7).astype(np.float32))
    return root


def spec_of(folder):
    return (
        f"adapters:precomputed:{folder}/image_features.npy,precomputed:{folder}/text_features.npy"
    )


def pair_of(folder):
    return frozen_encoders(spec_of(folder), download=False, device="cpu")


def train(photos, folder, progress=None, **changes):
    records = TrainingRecords(MBeir(photos))
    return train_adapters(
        records,
        folder,
        replace(ADAPTERS, **changes),
        pair_of(photos),
        progress=progress or Silent(),
    )


def test_captions_find_photos_that_were_not_trained_on(photos, tmp_path):
    encoder, _ = train(photos, tmp_path)
    image, text = (np.load(photos / f"{part}_features.npy")[400:] for part in ("image", "text"))
    found = (encoder.text(text) @ encoder.image(image).T).argmax(axis=1)
    assert (found == np.arange(100)).mean() > 0.4
    assert encoder.dim == 32
    np.testing.assert_allclose(np.linalg.norm(encoder.image(image), axis=1), 1, atol=1e-5)


def test_the_encoder_gives_what_was_trained_and_what_was_written(photos, tmp_path):
    trained, pairs = train(photos, tmp_path)
    encoder = load_encoder(f"adapters:{tmp_path / 'encoder'}")
    network = AdapterNetwork(pair_of(photos), ADAPTERS).eval()
    weights = encoder.image._asdict() | {}
    for part in ("image", "text"):
        weights = {
            name: torch.from_numpy(value)
            for name, value in getattr(encoder, part)._asdict().items()
        }
        getattr(network, part).load_state_dict(weights)
    texts = np.load(photos / "text_features.npy")[:50]
    present = np.ones(50, dtype=bool)
    batch = FeatureBatch(np.zeros((50, 24), np.float32), texts, ~present, present)
    expected = network(batch).flatten(1).detach().numpy() / np.sqrt(ADAPTERS.members)
    np.testing.assert_allclose(encoder.text(texts), expected, atol=1e-5)
    written = torch.from_numpy(pairs.queries.gather(np.arange(50)).text)
    keys = [ItemKey("query", f"2:{number}") for number in range(1, 51)]
    np.testing.assert_allclose(written, encoder.text_features(["it"] * 50, keys), atol=1e-3)
    assert encoder.fingerprint == trained.fingerprint


def test_a_training_that_finds_nothing_more_stops_with_the_best_weights(
    photos, tmp_path, read_losses, monkeypatch
):
    monkeypatch.setattr("genius_search.training.adapters.MAX_CHECKS_WITHOUT_GAIN", 2)
    training = replace(ADAPTERS.training, learning_rate=1.0, epochs=40.0)
    worse, _ = train(photos, tmp_path, training=training)
    scores = read_losses(tmp_path / "encoder", "validation")
    assert len(scores) < 200
    assert scores == sorted(scores)
    assert isinstance(worse, AdapterEncoder)


def test_a_killed_training_goes_on_to_the_same_weights(photos, tmp_path, killed_after):
    whole = train(photos, tmp_path / "whole")[0]
    training = replace(ADAPTERS.training, checkpoint_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        train(photos, tmp_path / "killed", killed_after(60), training=training)
    resumed = train(photos, tmp_path / "killed", training=training)[0]
    assert resumed.fingerprint == whole.fingerprint


def test_the_whole_method_runs_on_top_and_moves(trained, tmp_path):
    small = f"small:{trained.model / 'encoder'}"
    quick = replace(TINY.quantizer.training, max_steps=3, batch_size=32)
    settings = replace(
        TINY,
        adapters=replace(ADAPTERS, training=quick),
        quantizer=replace(TINY.quantizer, training=quick),
        generator=replace(TINY.generator, training=quick),
    )
    fit(
        MBeir(trained.data),
        f"adapters:{small},{small}",
        tmp_path / "model",
        settings,
        progress=Silent(),
    )
    assert not (tmp_path / "model" / "prepared").exists()
    model = Genius.open((tmp_path / "model").rename(tmp_path / "moved"))
    assert model.dim == model.encoder.dim == 32
    again = fit(MBeir(trained.data), f"adapters:{small},{small}", tmp_path / "moved", settings)
    assert again.fingerprint == model.fingerprint
    with pytest.raises(UsageError, match="on this machine only"):
        save(model.folder, tmp_path / "saved", name="me/model")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("adapters:small:x", "adapters:IMAGE,TEXT"),
        ("adapters:a:b,c:d,e:f", "adapters:IMAGE,TEXT"),
        ("adapters:adapters:x,text:y", "cannot be inside adapters"),
        ("adapters:text:wordllama,text:wordllama", "must read images"),
    ],
)
def test_what_names_no_two_encoders_is_refused(photos, tmp_path, spec, problem):
    with pytest.raises(UsageError, match=problem):
        fit(MBeir(photos), spec, tmp_path / "model", TINY)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("damage", "error", "problem"),
    [
        (lambda folder: (folder / "config.json").unlink(), ArtifactMissing, "config.json"),
        (
            lambda folder: (folder / "config.json").write_text("{}"),
            ArtifactMismatch,
            "does not name",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"x"),
            ArtifactMismatch,
            "safetensors",
        ),
        (lambda folder: swap(folder / "config.json"), ArtifactMismatch, "safetensors"),
    ],
)
def test_a_folder_that_does_not_fit_together_is_refused(photos, tmp_path, damage, error, problem):
    untrained = replace(ADAPTERS.training, max_steps=1)
    train(photos, tmp_path / "model", training=untrained)
    folder = shutil.copytree(tmp_path / "model" / "encoder", tmp_path / "encoder")
    damage(folder)
    with pytest.raises(error, match=problem):
        load_encoder(f"adapters:{folder}")


def swap(file):
    """Give the networks encoders of other widths."""
    specs = json.loads(file.read_text())
    file.write_text(json.dumps({"image": specs["text"], "text": specs["image"]}))
