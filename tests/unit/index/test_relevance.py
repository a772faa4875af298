"""The relevance of hits of an index that is not calibrated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genius_search.encoders.base import load_encoder
from genius_search.encoders.batches import TextEncoder
from genius_search.errors import ArtifactMissing
from genius_search.index.relevance import PAIRS, fit_relevance
from genius_search.index.settings import Relevance

SCALE = Relevance(related=0.6, unrelated=0.1, spread=0.05)


class Pairs(TextEncoder):
    """An encoder that finds each pair alike, but for noise."""

    spec, fingerprint, dim = "pairs:64", "0", 64

    def __init__(self, noise):
        random = torch.Generator().manual_seed(0)
        self.noise = noise and noise * torch.randn(2, len(PAIRS), 64, generator=random)

    def text_features(self, texts):
        if self.noise is None:
            raise ArtifactMissing(texts[0].text)
        known = torch.eye(len(PAIRS), 64)
        return known + self.noise[0 if texts[0].key.role == "query" else 1]


def test_relevance_rises_with_the_cosine_and_falls_with_the_size_of_the_index():
    cosines = np.linspace(-1, 1, 50, dtype=np.float32)
    rated = SCALE.rate(cosines, 1000)
    assert (np.diff(rated) > 0).all()
    assert rated[0] < 1e-4 < 1 - 1e-4 < rated[-1]
    assert (SCALE.rate(cosines, 10**6) < rated).all()
    assert (SCALE.rate(cosines, 1) == SCALE.rate(cosines, 2)).all()
    by_chance = 0.1 + 0.05 * np.sqrt(2 * np.log(1000))
    middle = np.array([(0.6 + by_chance) / 2], dtype=np.float32)
    assert SCALE.rate(middle, 1000) == pytest.approx(0.5, abs=1e-5)


def test_the_scale_is_that_of_the_encoders_own_texts():
    scale = fit_relevance(Pairs(0.05))
    assert scale.related > 0.8 > scale.unrelated + 3 * scale.spread
    assert fit_relevance(Pairs(5.0)) is None


def test_an_encoder_that_has_no_vectors_of_new_texts_has_no_scale():
    assert fit_relevance(Pairs(None)) is None


def test_an_encoder_that_knows_english_tells_related_texts_apart():
    scale = fit_relevance(load_encoder("text:wordllama"))
    assert scale is not None
    assert scale.related > scale.unrelated + 3 * scale.spread
