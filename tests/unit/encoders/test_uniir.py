"""uniir: imported encoders give the features of UniIR's own, written independently in conftest.py."""

# ruff: noqa: PLC0415  transformers is imported where it is needed

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from genius_search.encoders.base import Encoder, JointEncoder
from genius_search.encoders.open import load_encoder
from genius_search.encoders.pretrained import clip_reader, middle_square
from genius_search.progress import Silent
from research.published.clip_tokens import START
from research.published.encoders import import_encoder
from research.published.fusions import open_encoder

from .conftest import (
    WORDS,
    Blip,
    ClipFf,
    ClipSf,
    crop,
    normalised,
    squash,
)

END = START + 1
CONTEXT = 77
BLANK = torch.zeros(3, 224, 224)
TEXTS = [
    "",
    "A red kite.",
    "Find me an everyday image that matches the given caption. a man on a moped!",
    "Crème brûlée &amp; cake. " * 30,
]
BERT = {
    "The red kites.": [2, 11, 6, 7, 8, 12, 3],
    "A anchor on the kite. " * 40: [2, *([5, 9, 10, 11, 7, 12] * 40)[:98], 3],
    "": [2, 3],
}
"""What BERT's tokens of texts are, written out by hand."""
# Made once with the tokenizer of OpenAI's CLIP.
GOLDEN = [
    ("", [49406, 49407]),
    ("a cat", [49406, 320, 2368, 49407]),
    (
        "Caf\xe9 cr\xe8me br\xfbl\xe9e",
        [49406, 15304, 1075, 12138, 614, 711, 127, 119, 75, 13489, 49407],
    ),
    (
        "&lt;b&gt;AT&amp;amp;T&lt;/b&gt;",
        [49406, 283, 321, 285, 536, 261, 339, 34308, 321, 285, 49407],
    ),
    ("l&#39;humanit\xc3\xa9", [49406, 331, 262, 3175, 529, 4166, 49407]),
    (
        "\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467",
        [49406, 7334, 26304, 26304, 964, 356, 49407],
    ),
    (
        "\u4e2d\u6587 \u30c6\u30b9\u30c8 \ud55c\uad6d\uc5b4",
        [
            *[49406, 19759, 255, 29032, 485, 2429, 228, 32421, 486, 15197],
            *[250, 31871, 255, 31625, 368, 49407],
        ],
    ),
    ("it's THEY'RE don\u2019t", [49406, 585, 568, 889, 982, 847, 713, 49407]),
    ("1,000 \xbd \xb2", [49406, 272, 267, 271, 271, 271, 33613, 41175, 49407]),
    ("  a\t\nb\xa0c  ", [49406, 320, 321, 322, 49407]),
    (
        "a<|endoftext|> <|EndOfText|> b",
        [49406, 320, 49407, 49407, 321, 49407],
    ),
    (
        "supercalifragilisticexpialidocious",
        [49406, 1642, 2857, 13093, 2076, 5868, 26850, 835, 639, 38466, 49407],
    ),
]


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Each kind's model, and the encoder that its file became."""
    bert = tmp_path_factory.mktemp("bert")
    (bert / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    made = {}
    for kind, build in (
        ("clip-sf", ClipSf),
        ("clip-ff", ClipFf),
        ("blip-ff", Blip),
    ):
        torch.manual_seed(0)
        model, place = build(), tmp_path_factory.mktemp(kind)
        for name, weight in model.named_parameters():
            if weight.dim() == 1 and name.endswith("weight"):  # so that no norm is like another
                torch.nn.init.uniform_(weight, 0.5, 1.5)
        torch.save({"model": model.state_dict(), "epoch": 19}, place / "file.pth")
        vocabulary = bert if kind.startswith("blip") else None
        import_encoder(
            place / "file.pth", kind, place / kind, progress=Silent(), tokenizer=vocabulary
        )
        spec = f"{'uniir' if kind == 'clip-sf' else 'fusion'}:{place / kind}"
        made[kind] = (model.eval(), open_encoder(spec), place / kind)
    return made


@pytest.fixture(scope="module")
def clip(imported):
    """OpenAI's CLIP as CLIP-SF wraps it, the encoder and its folder."""
    return imported["clip-sf"]


@pytest.fixture(scope="module")
def token_rows(clip):
    return clip_reader(clip[2], CONTEXT)


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("text", "numbers"), GOLDEN)
def test_clips_tokens_are_numbered_as_openai_does(token_rows, text, numbers):
    assert token_rows([text])[0].tolist() == numbers + [0] * (CONTEXT - len(numbers))


def test_clip_sf_has_the_features_of_openai_clip(clip, token_rows, photographs):
    model, encoder, _ = clip
    with torch.inference_mode():
        texts = model.clip_model.encode_text(token_rows(TEXTS))
        images = model.clip_model.encode_image(torch.stack([crop(p) for p in photographs]))
    close(encoder.text_features(TEXTS), texts)
    close(encoder.image_features(photographs), images)
    assert isinstance(encoder, Encoder)
    assert not isinstance(encoder, JointEncoder)
    assert encoder.dim == texts.shape[1] == 96
    assert texts.std(dim=0).min() > 0.05


@pytest.mark.parametrize(
    "size", [(227, 224), (224, 231), (1, 2), (256, 341), (260, 225), (3000, 20)]
)
def test_the_middle_square_is_torchvisions_to_the_pixel(size):
    random = np.random.default_rng(0)
    picture = Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    square = middle_square(picture, side=224)
    assert square.size == (224, 224)
    assert torch.equal(normalised(square), crop(picture))


def test_transformers_and_clip_open_the_folder_too(clip, token_rows, photographs):
    from transformers import AutoTokenizer, CLIPModel

    _, encoder, folder = clip
    theirs = CLIPModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        found = theirs.get_text_features(input_ids=token_rows(TEXTS)).pooler_output
    close(encoder.text_features(TEXTS), found)
    tokens = AutoTokenizer.from_pretrained(folder)("A red kite.").input_ids
    assert tokens == token_rows(["A red kite."])[0, : len(tokens)].tolist()
    plain = load_encoder(f"clip:{folder}")
    pictures = [photographs[0], photographs[2]]  # the other one is cropped a pixel aside
    torch.testing.assert_close(plain.image_features(pictures), encoder.image_features(pictures))
    close(plain.text_features(TEXTS[:3]), encoder.text_features(TEXTS[:3]))


def test_a_text_is_read_up_to_its_first_end(clip, token_rows):
    model, encoder, _ = clip
    text = "a kite <|endoftext|> and what comes after"
    assert token_rows([text])[0].tolist().count(END) == 2
    with torch.inference_mode():
        close(encoder.text_features([text]), model.clip_model.encode_text(token_rows([text])))
    close(encoder.text_features([text]), encoder.text_features(["a kite"]))
    assert encoder.text_features([]).shape == encoder.image_features([]).shape == (0, encoder.dim)


def mixed_items(photographs):
    """An image and a text, a text alone, an image alone."""
    with_image, alone, _ = BERT
    return [photographs[0], None, photographs[1]], [with_image, alone, ""]


def bert_rows():
    return torch.tensor([numbers + [0] * (100 - len(numbers)) for numbers in BERT.values()])


@pytest.mark.parametrize("kind", ["clip-ff", "blip-ff"])
def test_feature_fusion_reads_image_and_text_together_and_blanks_where_one_is_missing(
    imported, token_rows, photographs, kind
):
    model, encoder, _ = imported[kind]
    assert isinstance(encoder, JointEncoder)
    prepare, tokens = (crop, token_rows(list(BERT))) if kind == "clip-ff" else (squash, bert_rows())
    with torch.inference_mode():
        pixels = torch.stack([prepare(photographs[0]), BLANK, prepare(photographs[1])])
        expected = model.encode(tokens, pixels)
    found = encoder.joint_features(*mixed_items(photographs))
    close(found, expected)
    assert found.shape == (3, encoder.dim) == (3, 64)
    close(encoder.text_features([list(BERT)[1]]), found[1:2])
    close(encoder.image_features([photographs[1]]), found[2:])
