from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from genius_search.artifact import fingerprint_of
from genius_search.data.features import Features
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.index.index import Index
from genius_search.model import MODEL_FILE, MODEL_FORM, Genius, read_model_file
from genius_search.nn.codebooks import normalize
from genius_search.records import Modality


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    """The model's folder, which the test may spoil."""
    shutil.copytree(trained.model, tmp_path / "copy")
    return tmp_path / "copy"


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 5, "encoder": {}}'])
def test_a_damaged_model_file_is_said_to_be_damaged(copied, text):
    (copied / MODEL_FILE).write_text(text)
    with pytest.raises(ArtifactMismatch, match=r"model\.json is damaged"):
        Genius.open(copied)


def test_an_instruction_that_has_changed_is_damage(copied):
    file = read_model_file(copied)
    file.write(copied)
    assert read_model_file(copied).instructions == file.instructions
    text = (copied / MODEL_FILE).read_text()
    (copied / MODEL_FILE).write_text(text.replace(file.instructions[0].text, "Find a cat."))
    with pytest.raises(ArtifactMismatch, match="do not match its checksum"):
        Genius.open(copied)


def test_a_model_of_another_version_is_refused_with_advice(copied):
    body = json.loads((copied / MODEL_FILE).read_text())
    del body["checksum"]
    sealed = MODEL_FORM._replace(format=3).seal({**body, "format": 3})
    (copied / MODEL_FILE).write_text(json.dumps(sealed))
    with pytest.raises(ArtifactMismatch, match="format 3, this version reads 5: train the model"):
        Genius.open(copied)


@pytest.mark.parametrize("part", ["quantizer", "generator"])
def test_a_part_that_a_later_training_replaced_is_found_out_and_named(copied, part):
    manifest = copied / part / "manifest.json"
    edit(manifest, inputs={})
    with pytest.raises(ArtifactMismatch, match=r"manifest\.json is damaged"):
        Genius.open(copied)
    body = json.loads(manifest.read_text())
    del body["fingerprint"]
    edit(manifest, fingerprint=fingerprint_of(body))
    with pytest.raises(ArtifactMismatch, match=f"the {part} is not the one"):
        Genius.open(copied)


def test_an_encoder_with_other_weights_is_found_out_also_after_opening(copied, tmp_path):
    index = Index.create(tmp_path / "index", ["a kite", "a boat"], model=copied)
    weights = copied / "encoder" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4:] = np.float32(0.5).tobytes()
    weights.write_bytes(content)
    with pytest.raises(ArtifactMismatch, match="encoder"):
        Genius.open(copied)
    for read in (index.check, lambda: index.search("a kite")):
        with pytest.raises(ArtifactMismatch, match=r"model\.safetensors have changed"):
            read()


@pytest.mark.parametrize("number", [np.nan, -np.inf, 3e38])
def test_weights_that_are_no_numbers_are_refused(copied, number):
    file = copied / "quantizer" / "quantizer.safetensors"
    weights = load_file(file)
    weights["codebooks.1.embed"][0, 0] = number
    save_file(weights, file)
    with pytest.raises(
        ArtifactMismatch, match=r"quantizer\.safetensors.*codebooks\.1\.embed has infinite numbers"
    ):
        Genius.open(copied)


def test_a_model_can_be_moved_with_its_encoder_inside_and_opens_by_a_relative_path(
    copied, model, tmp_path, monkeypatch
):
    copied.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    moved = Genius.open("moved")
    assert moved.fingerprint == model.fingerprint
    assert moved.encoder.fingerprint == model.encoder.fingerprint
    assert (
        json.loads((tmp_path / "moved" / MODEL_FILE).read_text())["encoder"]["spec"]
        == "small:./encoder"
    )


def test_embeddings_are_unit_vectors_and_the_code_cosine_is_that_with_the_ids_vector(model):
    features = Features.open(model.folder / "features" / "candidates")
    batch = features.gather(np.arange(20))
    encoded = model.encode(batch, features.modality[:20].astype(np.int64))
    np.testing.assert_allclose(np.linalg.norm(encoded.embeddings, axis=1), 1, atol=1e-6)
    assert np.array_equal(model.embed_features(batch), encoded.embeddings)
    vectors = normalize(model.ranker.vectors(encoded.codes))
    np.testing.assert_allclose(
        encoded.code_cosine, np.vecdot(vectors, encoded.embeddings), atol=1e-6
    )


def test_every_modality_has_level_0_codes_of_its_own(model):
    found = [model.level0_codes(modality) for modality in Modality]
    assert all(found)
    assert sum(map(len, found)) == len(frozenset().union(*found)) == model.codebooks.sizes[0]


def test_a_modality_that_no_code_stands_for_is_refused(model, monkeypatch):
    only_texts = np.full_like(model.codebooks.level0_modality, Modality.TEXT.code)
    monkeypatch.setattr(model.codebooks, "level0_modality", only_texts)
    with pytest.raises(UsageError, match="image"):
        model.level0_codes(Modality.IMAGE)


def test_the_instructions_of_training_are_remembered_for_every_task(model, trained):
    for query in (Modality.TEXT, Modality.IMAGE, Modality.IMAGE_TEXT):
        known = model.instruction_for(query, Modality.TEXT)
        assert known is not None
        assert known in (trained.data / "instructions" / "query_instructions.tsv").read_text()
    assert model.instruction_for(Modality.IMAGE, Modality.IMAGE_TEXT) is None


def test_a_folder_without_a_model_says_what_makes_one(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ArtifactMissing, match="genius fit"):
            Genius.open(folder)
