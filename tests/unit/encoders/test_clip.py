"""clip: the same features as transformers' own pipeline; fast, teaching refusals."""

# ruff: noqa: PLC0415  transformers is imported where it is needed; tokens are no passwords

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from genius_search.encoders.base import Encoder
from genius_search.encoders.open import load_encoder
from genius_search.errors import ArtifactMismatch, ArtifactMissing, NetworkNeeded

TEXTS = ["a red anchor", "a green anchor on a red ground", "anchor"]


def clip_pipeline(folder, pictures):
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

    pixels = CLIPImageProcessorPil.from_pretrained(folder)(images=pictures, return_tensors="pt")
    tokens = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    return CLIPModel.from_pretrained(folder).eval()(**pixels, **tokens)


def siglip_pipeline(folder, pictures):
    from transformers import PreTrainedTokenizerFast, SiglipImageProcessorPil, SiglipModel

    pixels = SiglipImageProcessorPil.from_pretrained(folder)(images=pictures, return_tensors="pt")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokens = tokenizer(
        TEXTS, padding="max_length", truncation=True, max_length=12, return_tensors="pt"
    )
    return SiglipModel.from_pretrained(folder).eval()(**pixels, input_ids=tokens["input_ids"])


@pytest.mark.parametrize(
    ("kind", "pipeline", "dim"), [("clip", clip_pipeline, 12), ("siglip", siglip_pipeline, 16)]
)
def test_features_are_those_of_transformers_own_pipeline(kind, pipeline, dim, request, pictures):
    folder = request.getfixturevalue(f"{kind}_folder")
    encoder = load_encoder(f"{kind}:{folder}")
    with torch.inference_mode():
        both = pipeline(folder, pictures)
    images, texts = encoder.image_features(pictures), encoder.text_features(TEXTS)
    assert images.shape == texts.shape == (3, encoder.dim) == (3, dim)
    torch.testing.assert_close(torch.nn.functional.normalize(images), both.image_embeds)
    torch.testing.assert_close(torch.nn.functional.normalize(texts), both.text_embeds)
    assert isinstance(encoder, Encoder)
    assert encoder.needs_pixels
    assert encoder.spec == f"{kind}:{folder}"
    assert torch.equal(load_encoder(f"st:{folder}").text_features(TEXTS), texts)


@pytest.mark.parametrize("kind", ["clip_folder", "siglip_folder"])
def test_a_row_does_not_depend_on_its_batch_and_an_empty_batch_has_no_rows(kind, request, pictures):
    encoder = load_encoder(f"clip:{request.getfixturevalue(kind)}")
    images, texts = pictures, TEXTS
    torch.testing.assert_close(
        encoder.image_features(images)[:1], encoder.image_features(images[:1])
    )
    torch.testing.assert_close(encoder.text_features(texts)[2:], encoder.text_features(texts[2:]))
    assert encoder.image_features([]).shape == encoder.text_features([]).shape == (0, encoder.dim)


def test_a_folder_that_lacks_files_is_refused_naming_them(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ArtifactMissing, match=r"model\.safetensors, tokenizer\.json"):
        load_encoder(f"clip:{tmp_path}")


def test_without_the_settings_of_images_a_clip_does_not_become_an_encoder_of_texts(
    clip_folder, tmp_path
):
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ArtifactMissing, match=r"preprocessor_config\.json"):
        load_encoder(f"clip:{folder}")


def test_a_text_that_is_an_address_is_read_as_a_text_and_not_fetched(clip_folder, monkeypatch):
    def touched(*_, **__):
        raise AssertionError("the network was touched")

    monkeypatch.setattr("socket.getaddrinfo", touched)
    found = load_encoder(f"st:{clip_folder}").text_features(
        ["https://example.org/red.jpg", "/a.png"]
    )
    assert found.isfinite().all()


def test_weights_that_are_missing_are_an_error_and_not_random(clip_folder, tmp_path):
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    weights = load_file(folder / "model.safetensors")
    del weights["text_projection.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ArtifactMismatch, match=r"lack text_projection\.weight"):
        load_encoder(f"clip:{folder}")


def test_without_the_wish_to_download_an_absent_model_is_refused_at_once(monkeypatch):
    def touched(*_, **__):
        raise AssertionError("the network was touched")

    monkeypatch.setattr("socket.getaddrinfo", touched)
    monkeypatch.setattr("socket.socket.connect", touched)
    with pytest.raises(NetworkNeeded, match="genius pull"):
        load_encoder("clip:nobody/has-this-model")
