"""The relevance of hits of an index that is not calibrated."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, SiglipImageProcessorPil, SiglipModel

from genius_search.encoders.base import PAIRS_IN_BATCH, PairOdds, load_encoder
from genius_search.errors import ArtifactMissing
from genius_search.index.index import Index
from genius_search.index.relevance import PAIRS, fit_relevance
from genius_search.index.settings import Relevance

SCALE = Relevance(related=0.6, unrelated=0.1, spread=0.05)


class Pairs:
    """An encoder of texts that finds each pair alike, but for noise."""

    spec, fingerprint, dim = "pairs:64", "0", 64
    needs_pixels = reads_images = False

    def __init__(self, noise):
        random = torch.Generator().manual_seed(0)
        self.noise = noise and noise * torch.randn(2, len(PAIRS), 64, generator=random)

    def image_features(self, images):
        raise NotImplementedError

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


def test_siglip_rates_pictures_found_by_a_text_and_texts_found_by_a_picture(siglip_folder, tmp_path):
    folder = shutil.copytree(siglip_folder, tmp_path / "siglip")
    model = SiglipModel.from_pretrained(folder)
    torch.nn.init.constant_(model.logit_scale, 3.0)
    torch.nn.init.constant_(model.logit_bias, -16.0)
    model.save_pretrained(folder)
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)) for _ in range(4)]
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"{number}.png")  # in memory they would become JPEG
    texts = ["a red anchor.", "green ground.", "on a red ground."]
    index, _ = Index.create(
        tmp_path / "x.index",
        pool=[*((tmp_path / f"{number}.png").read_bytes() for number in range(4)), *texts],
        encoder=f"siglip:{folder}",
        embedding_bits=16,
    )
    processor = SiglipImageProcessorPil.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    inputs = {
        **processor(images=pictures, return_tensors="pt"),
        "input_ids": tokenizer(texts, padding="max_length", max_length=12, return_tensors="pt")["input_ids"],
    }
    with torch.no_grad():
        log_odds = model.eval()(**inputs).logits_per_image.numpy() + np.log(PAIRS_IN_BATCH / 7)
    expected = 1 / (1 + np.exp(-log_odds))
    for number, text in enumerate(texts):
        hits = index.search(text, modality="image")
        rated = {int(hit.id): hit.relevance for hit in hits}
        assert [rated[one] for one in range(4)] == pytest.approx(expected[:, number], abs=0.01)
        assert index.good_match(hits) is bool(expected[:, number].max() >= 0.5)
    for number, picture in enumerate(pictures):
        rated = {int(hit.id): hit.relevance for hit in index.search(image=picture, modality="text")}
        assert [rated[one] for one in range(4, 7)] == pytest.approx(expected[number], abs=0.01)
    assert {hit.relevance for hit in index.search(image=pictures[0], modality="image")} == {None}
    assert {hit.relevance for hit in index.search("red", image=pictures[0])} == {None}


def test_a_pair_is_as_likely_as_one_item_of_the_index_that_is_expected_to_match():
    odds = PairOdds(scale=100.0, bias=-16.0)
    rated = odds.rate(np.array([0.05, 0.16], dtype=np.float32), PAIRS_IN_BATCH)
    assert rated == pytest.approx([1 / (1 + np.exp(11)), 0.5], rel=1e-3)
    assert (odds.rate(np.array([0.16], dtype=np.float32), 100) > 0.99).all()
