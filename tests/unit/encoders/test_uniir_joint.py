"""uniir: CLIP-FF, BLIP-SF and BLIP-FF give the vectors of the same models written independently."""

from __future__ import annotations

import pytest
import torch

from genius_search.encoders.base import (
    Encoder,
    ImageInput,
    ItemKey,
    JointEncoder,
    JointInput,
    TextInput,
    load_encoder,
)
from genius_search.encoders.clip_tokens import token_rows
from genius_search.progress import Silent
from research.published.encoders import import_encoder

KEY = ItemKey("query", "9:1")
BLANK = torch.zeros(3, 224, 224)
TEXTS = ["The red kites.", "", "A anchor on the kite. " * 40]
NUMBERS = {
    "The red kites.": [2, 11, 6, 7, 8, 12, 3],
    "": [2, 3],
    "A anchor on the kite. " * 40: [2, *([5, 9, 10, 11, 7, 12] * 40)[:98], 3],
}
"""What BERT's tokens of the texts are, written out by hand."""


def bert_rows(texts):
    return torch.tensor([NUMBERS[text] + [0] * (100 - len(NUMBERS[text])) for text in texts])


def mixed_items(photographs):
    """An image and a text, a text alone, an image alone."""
    return [
        JointInput(photographs[0], TEXTS[0], KEY, has_image=True),
        JointInput(None, TEXTS[2], KEY, has_image=False),
        JointInput(photographs[1], "", KEY, has_image=True),
    ]


@pytest.fixture(scope="module")
def vocabulary(originals, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(originals.words) + "\n")
    return folder


@pytest.fixture(scope="module")
def imported(originals, vocabulary, tmp_path_factory):
    """Each kind's model, and the encoder that its file became."""

    def build(kind):
        torch.manual_seed(0)
        model = originals.clip_ff() if kind == "clip-ff" else originals.blip(fused=kind == "blip-ff")
        place = tmp_path_factory.mktemp(kind)
        originals.save(model, place / "file.pth")
        tokenizer = None if kind == "clip-ff" else vocabulary
        import_encoder(place / "file.pth", kind, place / kind, progress=Silent(), tokenizer=tokenizer)
        return model.eval(), load_encoder(f"uniir:{place / kind}")

    return {kind: build(kind) for kind in ("clip-ff", "blip-sf", "blip-ff")}


def test_clip_ff_mixes_every_token_of_text_and_image(imported, originals, photographs):
    model, encoder = imported["clip-ff"]
    pixels = torch.stack([originals.crop(photographs[0]), BLANK, originals.crop(photographs[1])])
    with torch.inference_mode():
        expected = model.encode(token_rows([TEXTS[0], TEXTS[2], ""]), pixels)
    found = encoder.joint_features(mixed_items(photographs))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert found.shape == (3, encoder.dim) == (3, 64)


def test_blip_ff_reads_the_text_beside_the_image(imported, originals, photographs):
    model, encoder = imported["blip-ff"]
    pixels = torch.stack([originals.squash(photographs[0]), BLANK, originals.squash(photographs[1])])
    with torch.inference_mode():
        expected = model.encode(bert_rows([TEXTS[0], TEXTS[2], ""]), pixels)
    found = encoder.joint_features(mixed_items(photographs))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert found.shape == (3, encoder.dim) == (3, 64)


def test_blip_sf_gives_both_features_projected(imported, originals, photographs):
    model, encoder = imported["blip-sf"]
    with torch.inference_mode():
        texts = model.encode_text(bert_rows(TEXTS))
        images = model.encode_image(torch.stack([originals.squash(p) for p in photographs]))
    found = encoder.text_features([TextInput(text, KEY) for text in TEXTS])
    torch.testing.assert_close(found, texts, atol=1e-4, rtol=1e-4)
    pictures = [ImageInput(photograph, KEY) for photograph in photographs]
    torch.testing.assert_close(encoder.image_features(pictures), images, atol=1e-4, rtol=1e-4)
    assert found.shape == (3, encoder.dim) == (3, 40)


@pytest.mark.parametrize("kind", ["clip-ff", "blip-ff"])
def test_one_modality_alone_is_joined_with_a_blank(imported, photographs, kind):
    _, encoder = imported[kind]
    together = encoder.joint_features(mixed_items(photographs))
    image = encoder.image_features([ImageInput(photographs[1], KEY)])
    torch.testing.assert_close(image, together[2:], atol=1e-5, rtol=1e-4)
    text = encoder.text_features([TextInput(TEXTS[2], KEY)])
    torch.testing.assert_close(text, together[1:2], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("kind", "joint"), [("clip-ff", True), ("blip-sf", False), ("blip-ff", True)])
def test_feature_fusion_is_joint_and_score_fusion_is_not(imported, kind, joint):
    _, encoder = imported[kind]
    assert isinstance(encoder, Encoder)
    assert isinstance(encoder, JointEncoder) == joint
    assert encoder.needs_pixels
    assert encoder.spec.startswith("uniir:")
    assert len(encoder.fingerprint) == 64
    assert encoder.text_features([]).shape == encoder.image_features([]).shape == (0, encoder.dim)
