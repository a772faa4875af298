"""small with a pretrained network of pictures: which folders serve as one, and a copy that goes with the encoder."""

# ruff: noqa: PLC0415  transformers is imported where it is needed

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from genius_search.config import SmallEncoderConfig
from genius_search.encoders.base import load_encoder
from genius_search.encoders.pretrained import ClipEncoder, ImageTower
from genius_search.encoders.small import create_small, load_small
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.presets import EncoderConfig

from .conftest import images_of, texts_of

CONFIG = SmallEncoderConfig(
    dim=12, vocabulary=400, max_tokens=10, pair_buckets=64, text_width=16, image_width=16, shortcuts=True
)
TEXTS = ["a red kite", "a blue anchor"]
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}


@pytest.fixture
def dino(tmp_path):
    """A small DINOv2 with random weights, in the published layout, which has no tokenizer."""
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    folder = tmp_path / "dino"
    Dinov2Model(Dinov2Config(hidden_size=20, **LAYERS)).save_pretrained(folder)
    size = {"height": 16, "width": 16}
    BitImageProcessorPil(size={"shortest_edge": 16}, crop_size=size).save_pretrained(folder)
    return folder


@pytest.fixture
def vit(tmp_path):
    """A small ViT of DINO's kind: the layer on top of its first token was not saved."""
    from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

    torch.manual_seed(0)
    folder = tmp_path / "vit"
    config = ViTConfig(hidden_size=20, intermediate_size=24, **LAYERS)
    ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


@torch.no_grad()
def features(folder, pictures):
    return ImageTower(folder).encode_images(pictures)


@pytest.mark.parametrize("kind", ["clip_folder", "siglip_folder"])
def test_the_features_of_pictures_are_those_of_the_whole_model(kind, request, pictures):
    folder = request.getfixturevalue(kind)
    whole = ClipEncoder(folder)
    torch.testing.assert_close(features(folder, pictures), whole.image_features(images_of(pictures)))
    assert ImageTower(folder).dim == whole.dim


def test_a_network_of_pictures_alone_gives_its_pooled_features(dino, pictures):
    from transformers import BitImageProcessorPil, Dinov2Model

    pixels = BitImageProcessorPil.from_pretrained(dino)(images=pictures, return_tensors="pt")
    with torch.inference_mode():
        expected = Dinov2Model.from_pretrained(dino)(**pixels).pooler_output
    torch.testing.assert_close(features(dino, pictures), expected)
    assert ImageTower(dino).dim == 20


def test_without_the_layer_on_top_features_are_those_of_the_first_token(vit, pictures):
    from transformers import ViTImageProcessorPil, ViTModel

    pixels = ViTImageProcessorPil.from_pretrained(vit)(images=pictures, return_tensors="pt")
    with torch.inference_mode():
        states = ViTModel.from_pretrained(vit, add_pooling_layer=False)(**pixels).last_hidden_state
    torch.testing.assert_close(features(vit, pictures), states[:, 0])


def test_a_model_of_texts_is_refused_by_the_file_it_lacks(sentence_folder):
    with pytest.raises(
        ArtifactMissing, match=r"not a complete model of images: it lacks preprocessor_config"
    ):
        ImageTower(sentence_folder)


def test_a_model_of_texts_with_all_files_is_refused_by_its_kind(sentence_folder, clip_folder, tmp_path):
    folder = shutil.copytree(sentence_folder, tmp_path / "text")
    shutil.copy(clip_folder / "preprocessor_config.json", folder)
    with pytest.raises(ArtifactMismatch, match=r"holds a 'bert' model, .*give one of images, such as CLIP"):
        ImageTower(folder)


def test_weights_of_another_network_are_refused(dino, vit):
    shutil.copy(vit / "model.safetensors", dino)
    with pytest.raises(ArtifactMismatch, match=r"the weights of .*dino lack .* of its settings' network"):
        ImageTower(dino)


def test_an_unknown_preparation_of_pictures_is_refused(dino):
    file = dino / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_processor_type": "Nothing"}))
    with pytest.raises(ArtifactMismatch, match=r"cannot be used for images: .*Pillow"):
        ImageTower(dino)


def test_the_encoder_opens_again_without_the_folder_it_was_made_from(dino, pictures, tmp_path):
    encoder = create_small(CONFIG, TEXTS, pictures=ImageTower(dino), seed=0)
    images = encoder.image_features(images_of(pictures))
    with torch.inference_mode():
        torch.testing.assert_close(images, encoder.network.image(ImageTower(dino).encode_images(pictures)))
    folder = tmp_path / "encoder"
    folder.mkdir()
    encoder.save(folder)
    fingerprint = encoder.fingerprint
    shutil.rmtree(dino)
    stored = load_encoder(f"small:{folder}")
    assert fingerprint == stored.fingerprint == load_small(folder).fingerprint
    assert torch.equal(torch.as_tensor(stored.image_features(images_of(pictures))), images)
    found = torch.as_tensor(stored.text_features(texts_of(TEXTS)))
    torch.testing.assert_close(found, encoder.text_features(texts_of(TEXTS)), atol=1e-4, rtol=0)


def test_the_fingerprint_follows_the_network_of_pictures(dino, tmp_path):
    encoder = create_small(CONFIG, TEXTS, pictures=ImageTower(dino), seed=0)
    encoder.save(tmp_path)
    weights = bytearray((tmp_path / "pictures/model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "pictures/model.safetensors").write_bytes(weights)
    changed = {load_encoder(f"small:{tmp_path}").fingerprint, load_small(tmp_path).fingerprint}
    assert len(changed) == 1
    assert encoder.fingerprint not in changed


def test_a_few_texts_are_encoded_without_the_network_of_pictures(dino, tmp_path, monkeypatch):
    create_small(CONFIG, TEXTS, pictures=ImageTower(dino), seed=0).save(tmp_path)

    def opened(*_, **__):
        raise AssertionError("the network of pictures was opened")

    monkeypatch.setattr("genius_search.encoders.small.ImageTower", opened)
    stored = load_encoder(f"small:{tmp_path}")
    assert np.isfinite(stored.text_features(texts_of(TEXTS))).all()
    with pytest.raises(AssertionError, match="was opened"):
        stored.image_features(images_of([Image.new("RGB", (8, 8))]))


def test_a_network_of_pictures_is_for_encoders_of_two_towers():
    with pytest.raises(UsageError, match="pictures is for clip-sf and blip-sf, not for blip-ff"):
        EncoderConfig(pictures="models/clip", network=SmallEncoderConfig(kind="blip-ff"))
