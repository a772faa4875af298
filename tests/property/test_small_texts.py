"""A few texts in NumPy have the features that the small encoder gives them in PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genius_search.config import SmallEncoderConfig
from genius_search.encoders.base import ItemKey, TextInput, load_encoder
from genius_search.encoders.small import create_small
from genius_search.encoders.small_texts import FEW, StoredSmall, _gelu

KEY = ItemKey("query", "")
WORDS = [
    "a",
    "red",
    "kite",
    "on",
    "blue",
    "anchors",
    "zebra",
    "unheard-of",
    "日本語",
    "🦒",
    "of",
    "42",
    ",",
    "-",
]


def inputs(texts):
    return [TextInput(text, KEY) for text in texts]


@pytest.mark.parametrize("max_tokens", [2, 9, 64])
def test_features_are_those_of_the_network(tmp_path, max_tokens):
    random = np.random.default_rng(max_tokens)
    texts = [" ".join(random.choice(WORDS, random.integers(0, 30))) for _ in range(200)] + ["x" * 5000]
    config = SmallEncoderConfig(
        dim=24, vocabulary=300, pair_buckets=50, max_tokens=max_tokens, text_width=40, image_width=8
    )
    trained = create_small(config, texts, seed=max_tokens)
    with torch.no_grad():
        for weight in trained.network.parameters():  # biases that matter, and a padding row that must not
            weight.add_(torch.rand_like(weight), alpha=0.3)
    trained.save(tmp_path)
    stored = load_encoder(f"small:{tmp_path}")
    assert isinstance(stored, StoredSmall)
    assert stored.fingerprint == trained.fingerprint
    assert stored.text_features([]).shape == (0, 24)
    expected = trained.text_features(inputs(texts))
    np.testing.assert_array_equal(stored.text_features(inputs(texts)), expected)
    scale = expected.norm(dim=1).max().item()
    for start in range(0, len(texts), FEW):
        some = slice(start, start + FEW)
        found = stored.text_features(inputs(texts[some]))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found / scale, expected[some] / scale, atol=1e-5)


def test_gelu_is_that_of_pytorch():
    values = np.linspace(-12, 12, 20_001, dtype=np.float32)[None]
    np.testing.assert_allclose(_gelu(values), torch.nn.functional.gelu(torch.from_numpy(values)), atol=1e-6)
