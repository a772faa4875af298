"""small: described pictures and numbered words, a network that learns from them, a folder that keeps it."""

import re

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from PIL import Image

from genius_search.config import SmallEncoderConfig
from genius_search.encoders.base import is_cut
from genius_search.encoders.passages import query_passages
from genius_search.encoders.small import (
    create_small,
    load_small,
)
from genius_search.errors import ArtifactMismatch

CONFIG = SmallEncoderConfig(
    dim=12, vocabulary=400, max_tokens=10, pair_buckets=64, text_width=16, image_width=16
)
COLOURS = {
    "red": (200, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 60, 200),
    "yellow": (230, 210, 40),
}
TEXTS = [f"a {first} bar on {second}" for first in COLOURS for second in COLOURS if first != second]


@pytest.fixture(scope="module")
def encoder():
    return create_small(CONFIG, TEXTS, seed=0)


def noise(seed, size=(64, 64)):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), items=st.integers(1, 20), place=st.integers(0, 19))
def test_a_row_does_not_depend_on_its_batch(encoder, seed, items, place):
    pictures = [noise(seed + item, (20, 30)) for item in range(items)]
    texts = [TEXTS[(seed + item) % len(TEXTS)] * (1 + item % 3) for item in range(items)]
    place %= items
    alone = slice(place, place + 1)
    images, words = encoder.image_features(pictures), encoder.text_features(texts)
    np.testing.assert_allclose(
        images[alone], encoder.image_features(pictures[alone]), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        words[alone], encoder.text_features(texts[alone]), rtol=1e-4, atol=1e-5
    )


def test_saving_and_loading_changes_nothing(encoder, tmp_path):
    encoder.save(tmp_path)
    loaded = load_small(tmp_path)
    assert loaded.fingerprint == encoder.fingerprint
    assert loaded.config == encoder.config
    assert loaded.spec == f"small:{tmp_path}"
    pictures = [noise(1), noise(2, (300, 40))]
    assert np.array_equal(loaded.image_features(pictures), encoder.image_features(pictures))
    assert np.array_equal(loaded.text_features(TEXTS), encoder.text_features(TEXTS))


def test_the_order_of_words_matters(encoder):
    features = encoder.text_features(["a red bar on green", "a green bar on red"])
    assert not np.allclose(features[0], features[1], atol=1e-3)


@pytest.mark.parametrize("text", ["", "日本語 🦒", "zyxwv unheard-of", "x" * 5000])
def test_any_text_has_a_finite_feature(encoder, text):
    assert np.isfinite(encoder.text_features([text])).all()


def test_a_text_that_is_longer_than_the_encoder_reads_is_divided(encoder, caplog):
    text = " ".join(TEXTS[:4])
    passages = query_passages(encoder, text, "Find: {}".format)
    assert not is_cut(encoder, TEXTS[0])
    assert len(passages) > 1
    assert not any(is_cut(encoder, passage) for passage in passages)
    assert not caplog.records
    assert query_passages(encoder, text, f"{text}: {{}}".format) == [f"{text}: {text}"]
    assert "reads only the beginning of the query: its instruction" in caplog.text


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_file_is_refused(encoder, tmp_path, name):
    encoder.save(tmp_path)
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(ArtifactMismatch, match=re.escape(name)):
        load_small(tmp_path)
