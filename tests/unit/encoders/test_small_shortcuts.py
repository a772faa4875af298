"""small with shortcuts and with given word vectors: what is alike before training stays alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from genius_search.config import SmallEncoderConfig
from genius_search.encoders.base import ItemKey, TextInput, load_encoder
from genius_search.encoders.descriptors import descriptor_size
from genius_search.encoders.small import create_small, load_small
from genius_search.encoders.static import WordVectors
from genius_search.errors import UsageError
from genius_search.presets import EncoderConfig

CONFIG = SmallEncoderConfig(
    dim=12, vocabulary=400, max_tokens=10, pair_buckets=64, text_width=16, image_width=16, shortcuts=True
)
TEXTS = [f"a {colour} {thing}" for colour in ("red", "blue") for thing in ("kite", "anchor", "bell")]


def inputs(texts):
    return [TextInput(text, ItemKey("query", "")) for text in texts]


def shaken(encoder):
    with torch.no_grad():
        for weight in encoder.network.parameters():
            weight.add_(torch.rand_like(weight), alpha=0.3)
    return encoder


@pytest.fixture
def words():
    """The vocabulary of the texts, with vectors of its own."""
    tokenizer = create_small(CONFIG, TEXTS, seed=0).tokenizer
    vectors = np.random.default_rng(0).standard_normal((tokenizer.get_vocab_size(), 20))
    return WordVectors(tokenizer, vectors.astype(np.float32))


def test_a_few_texts_take_the_shortcut_too(tmp_path):
    encoder = shaken(create_small(CONFIG, TEXTS, seed=0))
    encoder.save(tmp_path)
    stored = load_encoder(f"small:{tmp_path}")
    np.testing.assert_allclose(
        stored.text_features(inputs(TEXTS)), encoder.text_features(inputs(TEXTS)), atol=1e-4
    )


def test_images_alike_before_training_are_alike_in_the_shortcut():
    """Its principal components keep the nearest of pictures that differ along few directions."""
    random = np.random.default_rng(0)
    places = random.standard_normal((200, 6))
    described = places @ random.standard_normal((6, descriptor_size(outlines=False)))
    network = create_small(CONFIG, TEXTS, seed=0).network
    network.begin_with_images(torch.from_numpy(described).float())
    normed = F.layer_norm(torch.from_numpy(described).float(), described.shape[1:])
    shortcut = network.image_shortcut(normed).detach()
    torch.testing.assert_close(shortcut.mean(dim=0), torch.zeros(12), atol=1e-3, rtol=0)
    distances = [torch.cdist(one, one).flatten() for one in (normed, shortcut)]
    assert np.corrcoef(torch.stack(distances))[0, 1] > 0.98


def test_dropout_is_for_training_only():
    network = create_small(replace(CONFIG, dropout=0.5), TEXTS, seed=0).network
    described = torch.randn(3, descriptor_size(outlines=False))
    assert not torch.equal(network.train().image(described), network.image(described))
    assert torch.equal(network.eval().image(described), network.image(described))


def test_given_word_vectors_are_kept_but_for_their_lengths(words, tmp_path):
    encoder = create_small(CONFIG, (), words=words, seed=0)
    assert encoder.config.text_width == 20
    network = encoder.network
    trained = {name for name, one in network.named_parameters() if one.requires_grad}
    assert "word_gains" in trained
    assert "words.weight" not in trained
    with torch.no_grad():
        network.word_gains.uniform_(-1, 1)
    before = encoder.text_features(inputs(TEXTS))
    network.keep_word_lengths()
    torch.testing.assert_close(encoder.text_features(inputs(TEXTS)), before)
    cosines = F.cosine_similarity(network.words.weight, torch.from_numpy(words.vectors))
    torch.testing.assert_close(cosines, torch.ones(len(cosines)))
    encoder.save(tmp_path)
    assert torch.equal(
        load_small(tmp_path).text_features(inputs(TEXTS)), encoder.text_features(inputs(TEXTS))
    )


def test_given_word_vectors_are_for_encoders_of_two_towers():
    with pytest.raises(UsageError, match="words is for clip-sf and blip-sf, not for clip-ff"):
        EncoderConfig(words="text:wordllama", network=SmallEncoderConfig(kind="clip-ff"))
