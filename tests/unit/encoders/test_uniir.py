"""uniir: an imported CLIP-SF gives the features of OpenAI's CLIP, computed independently."""

# ruff: noqa: PLC0415  transformers is imported where it is needed

import numpy as np
import pytest
import torch
from PIL import Image

from genius_search.encoders.base import load_encoder
from genius_search.encoders.clip_tokens import END, token_rows
from genius_search.encoders.pretrained import ClipEncoder
from genius_search.encoders.uniir import middle_square
from genius_search.progress import Silent
from research.published.encoders import import_encoder

from .conftest import images_of, texts_of

TEXTS = [
    "",
    "A red kite.",
    "Find me an everyday image that matches the given caption. a man on a moped!",
    "Crème brûlée &amp; cake. " * 30,
]


@pytest.fixture(scope="module")
def model(originals):
    torch.manual_seed(0)
    return originals.clip_sf().eval()


@pytest.fixture(scope="module")
def folder(originals, model, tmp_path_factory):
    place = tmp_path_factory.mktemp("uniir")
    originals.save(model, place / "clip_sf_large.pth")
    return import_encoder(place / "clip_sf_large.pth", "clip-sf", place / "clip-sf", progress=Silent()).folder


@pytest.fixture(scope="module")
def encoder(folder):
    return load_encoder(f"uniir:{folder}")


def test_features_are_those_of_openai_clip(model, encoder, originals, photographs):
    with torch.inference_mode():
        texts = model.clip_model.encode_text(token_rows(TEXTS))
        images = model.clip_model.encode_image(torch.stack([originals.crop(p) for p in photographs]))
    torch.testing.assert_close(encoder.text_features(texts_of(TEXTS)), texts, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(encoder.image_features(images_of(photographs)), images, atol=1e-4, rtol=1e-4)
    assert encoder.dim == texts.shape[1] == 96
    assert texts.std(dim=0).min() > 0.05


@pytest.mark.parametrize("size", [(227, 224), (224, 231), (1, 2), (256, 341), (260, 225), (3000, 20)])
def test_the_middle_square_is_torchvisions_to_the_pixel(originals, size):
    random = np.random.default_rng(0)
    picture = Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    square = middle_square(picture, side=224)
    assert square.size == (224, 224)
    assert torch.equal(originals.normalised(square), originals.crop(picture))


def test_transformers_and_clip_open_the_folder_too(folder, encoder, photographs):
    from transformers import AutoTokenizer, CLIPModel

    theirs = CLIPModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        found = theirs.get_text_features(input_ids=token_rows(TEXTS)).pooler_output
    torch.testing.assert_close(encoder.text_features(texts_of(TEXTS)), found, atol=1e-4, rtol=1e-4)
    tokens = AutoTokenizer.from_pretrained(folder)("A red kite.").input_ids
    assert tokens == token_rows(["A red kite."])[0, : len(tokens)].tolist()
    clip = ClipEncoder(str(folder))
    pictures = images_of([photographs[0], photographs[2]])  # the other one is cropped a pixel aside
    torch.testing.assert_close(clip.image_features(pictures), encoder.image_features(pictures))
    texts = texts_of(TEXTS[:3])
    torch.testing.assert_close(clip.text_features(texts), encoder.text_features(texts), atol=1e-5, rtol=1e-4)


def test_a_text_is_read_up_to_its_first_end(model, encoder):
    text = "a kite <|endoftext|> and what comes after"
    assert token_rows([text])[0].tolist().count(END) == 2
    with torch.inference_mode():
        found = model.clip_model.encode_text(token_rows([text]))
    torch.testing.assert_close(encoder.text_features(texts_of([text])), found, atol=1e-4, rtol=1e-4)
    short = encoder.text_features(texts_of(["a kite"]))
    torch.testing.assert_close(encoder.text_features(texts_of([text])), short, atol=1e-5, rtol=1e-4)


def test_a_row_does_not_depend_on_its_batch_and_an_empty_batch_has_no_rows(encoder, photographs):
    texts, images = texts_of([*TEXTS, *["!"] * 70]), images_of(photographs)
    torch.testing.assert_close(
        encoder.text_features(texts)[:1], encoder.text_features(texts[:1]), atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(encoder.image_features(images)[2:], encoder.image_features(images[2:]))
    assert encoder.text_features([]).shape == encoder.image_features([]).shape == (0, 96)
