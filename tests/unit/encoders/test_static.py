"""text: with static embeddings, and the ones that come with the package wordllama."""

from __future__ import annotations

import numpy as np
import pytest
from model2vec import StaticModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from genius_search.encoders import static
from genius_search.encoders.base import Encoder, ItemKey
from genius_search.encoders.open import load_encoder
from genius_search.encoders.static import StaticEncoder
from genius_search.errors import ArtifactMismatch, MissingExtra, UsageError

KEY = ItemKey("candidate", "9:1")
VECTORS = np.eye(5, 4, dtype=np.float32)


@pytest.fixture
def folder(tmp_path):
    """Static embeddings of four words, as model2vec saves them."""
    words = {word: number for number, word in enumerate(["red", "green", "anchor", "on", "[UNK]"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))  # noqa: S106  no password
    tokenizer.pre_tokenizer = Whitespace()
    StaticModel(VECTORS, tokenizer).save_pretrained(tmp_path / "static")
    return tmp_path / "static"


def features(encoder, *texts):
    return encoder.text_features(texts)


def test_a_text_is_the_normalised_mean_of_its_words(folder):
    encoder = load_encoder(f"text:{folder}")
    assert isinstance(encoder, StaticEncoder)
    assert isinstance(encoder, Encoder)
    assert (encoder.spec, encoder.dim, encoder.needs_pixels) == (f"text:{folder}", 4, False)
    half = 0.5**0.5
    expected = [[half, 0, half, 0], [0, 1, 0, 0]]
    np.testing.assert_allclose(
        features(encoder, "RED anchor", "green ＧＲＥＥＮ"), expected, rtol=1e-6
    )
    assert features(encoder).shape == (0, 4)
    with pytest.raises(UsageError, match=r"reads only texts, and candidate 9:1"):
        encoder.image_features([None], [KEY])


def test_damaged_files_and_missing_packages_are_named(folder, monkeypatch):
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ArtifactMismatch, match="cannot be opened as static embeddings"):
        load_encoder(f"text:{folder}")
    monkeypatch.setattr(static, "WORDLLAMA", "no_such_package")
    with pytest.raises(MissingExtra, match=r"genius-search\[words\]"):
        load_encoder("text:no_such_package")
