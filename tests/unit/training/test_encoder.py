"""Training `small`: same losses for the same seed, and the features that its encoder gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from genius_search.config import SmallEncoderConfig
from genius_search.data.features import ROW, FeatureBatch, Pairs, Shard
from genius_search.data.mbeir import Instructions, MBeir
from genius_search.encoders.small import DESCRIPTOR_SIZE, create_small, load_small
from genius_search.progress import Silent
from genius_search.recipe import preset
from genius_search.records import Modality, Query
from genius_search.training.encoder import (
    EncoderStep,
    draw_phrases,
    embed_shard,
    train_encoder,
    words_of_images,
)
from genius_search.training.loop import Step
from genius_search.training.records import TrainingRecords, embed_training

STEPS = 4
TINY = preset("tiny").encoder
SETTINGS = replace(
    TINY,
    network=replace(TINY.network, dim=16),
    training=replace(TINY.training, max_steps=STEPS, batch_size=32),
)


def test_the_loss_falls_and_the_saved_encoder_gives_the_features_that_were_written(
    trained, read_losses, tmp_path
):
    records = TrainingRecords(MBeir(trained.data))
    _, result = train_encoder(records, tmp_path / "model", SETTINGS, progress=Silent())
    losses = read_losses(tmp_path / "model" / "encoder")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    encoder = load_small(tmp_path / "model" / "encoder")
    embedded = embed_training(records, encoder, tmp_path / "anew", progress=Silent())
    for written, anew in (
        (result.queries, embedded.queries),
        (result.candidates, embedded.candidates),
    ):
        rows = np.arange(len(written))
        found, expected = written.gather(rows), anew.gather(rows)
        assert np.array_equal(found.has_image, expected.has_image)
        assert np.array_equal(found.has_text, expected.has_text)
        np.testing.assert_allclose(found.total(), expected.total(), atol=0.02, rtol=0.02)


def test_single_words_are_learned_from_whole_captions(make_features):
    """The name is faint in a picture, and its other two words are enough to find it."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, 17, size=(600, 3)) + np.array([0, 16, 32])
    directions = random.standard_normal((50, DESCRIPTOR_SIZE)).astype(np.float32)
    strength = np.array([0.4, 1.0, 1.0], dtype=np.float32)
    pictures = (directions[tokens] * strength[:, None]).sum(axis=1)
    pictures += 0.1 * random.standard_normal(pictures.shape).astype(np.float32)
    numbers, nothing = list(range(1, 401)), [None] * 400
    queries = make_features(
        numbers, nothing, tokens[:400].astype(np.float32), dim=3, wanted=[Modality.IMAGE.code] * 400
    )
    candidates = make_features(numbers, pictures[:400], nothing, dim=DESCRIPTOR_SIZE)
    lines = [
        Query(f"0:{number}", Modality.TEXT, "a caption", None, (f"0:{number}",))
        for number in numbers
    ]
    pairs = Pairs(lines, queries, candidates)
    no_instructions = Instructions(Path("instructions"), {})
    found = {}
    for weight in (0.0, 1.0):
        config = replace(
            preset("tiny").encoder,
            network=SmallEncoderConfig(dim=32, text_width=32, image_width=64, pair_buckets=64),
            word_weight=weight,
        )
        encoder = create_small(config.network, [], seed=0)
        network = encoder.network
        take_step = EncoderStep(encoder, pairs, config, no_instructions)
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
        for number in range(80):
            optimizer.zero_grad()
            take_step(Step(number, torch.Generator())).loss.backward()
            optimizer.step()
        with torch.no_grad():
            words = take_step.picture_queries.write(torch.arange(1, 17)[:, None], torch.Generator())
            names = F.normalize(network.text(words), dim=-1)
            images = F.normalize(network.image(torch.from_numpy(pictures[400:])), dim=-1)
        first = tokens[400:, 0][(names @ images.T).topk(5).indices.numpy()]
        found[weight] = float((first == np.arange(1, 17)[:, None]).mean())
    assert found[1.0] > found[0.0] + 0.2, found


def test_the_words_of_an_image_are_those_of_texts_that_describe_it():
    """Tokens 1 and 2 describe, 3 and 4 ask for a change."""
    nothing = [0, 0]
    queries = batch_of([[1, 2], [3, 4], [3, 4], nothing], [False, True, True, True])
    candidates = batch_of([nothing, [1, 0], nothing, nothing], [True, False, True, True])
    words, present = words_of_images(queries, candidates)
    assert words.tolist() == [1, 2]
    assert present.tolist() == [
        [True, False],  # the second query's image, by its candidate's text
        [False, False],  # a query's request for a change describes neither image
        [False, False],
        [True, True],  # the first candidate's image, by its query
        [False, False],
        [False, False],
    ]


def batch_of(tokens, has_image):
    """Items with these tokens; zeros are no words."""
    text = np.array(tokens, dtype=np.float32)
    image = np.array(has_image)
    return FeatureBatch(np.zeros((len(text), 1), dtype=np.float32), text, image, text.any(axis=1))


def test_the_items_of_a_phrase_are_those_that_have_all_its_words():
    present = torch.rand((40, 12), generator=torch.Generator().manual_seed(0)) < 0.3
    phrases, relevant = draw_phrases(present, torch.Generator().manual_seed(1))
    assert {len(set(row) - {-1}) for row in phrases.tolist()} == {1, 2, 3, 4}
    for columns, items in zip(phrases, relevant, strict=True):
        assert torch.equal(present[:, columns[columns >= 0]].all(dim=1), items)
        assert items.any()


def test_single_words_find_the_texts_that_contain_them(make_features):
    random = np.random.default_rng(0)
    tokens = (random.integers(1, 17, size=(600, 3)) + np.array([0, 16, 32])).astype(np.float32)
    numbers, nothing = list(range(1, 401)), [None] * 400
    wanted = [Modality.TEXT.code] * 400
    queries = make_features(numbers, nothing, tokens[:400], dim=3, wanted=wanted)
    candidates = make_features(numbers, nothing, tokens[:400, ::-1], dim=3)
    ids = [f"0:{number}" for number in numbers]
    lines = [Query(one, Modality.TEXT, "a fact", None, (one,)) for one in ids]
    share = {}
    for weight in (0.0, 1.0):
        config = replace(SETTINGS, word_weight=weight)
        encoder = create_small(config.network, [], seed=0)
        pairs = Pairs(lines, queries, candidates)
        take_step = EncoderStep(encoder, pairs, config, Instructions(Path("instructions"), {}))
        optimizer = torch.optim.AdamW(encoder.network.parameters(), lr=3e-3)
        for number in range(60):
            optimizer.zero_grad()
            take_step(Step(number, torch.Generator())).loss.backward()
            optimizer.step()
        with torch.no_grad():
            words = take_step.text_queries.write(torch.arange(1, 17)[:, None], torch.Generator())
            names, texts = (
                F.normalize(encoder.network.text(rows), dim=-1)
                for rows in (words, torch.from_numpy(tokens[400:]).long())
            )
        first = tokens[400:, 0][(names @ texts.T).topk(5).indices.numpy()]
        share[weight] = float((first == np.arange(1, 17)[:, None]).mean())
    assert share[1.0] > share[0.0] + 0.1, share


def test_a_shard_of_texts_only_is_embedded():
    encoder = create_small(SETTINGS.network, ["a red kite", "a blue anchor"], seed=0)
    rows = np.array([(row, -1, row, Modality.TEXT.code, -1, row) for row in range(2)], ROW)
    tokens = encoder.prepare_texts(["a red kite", "a blue anchor"]).numpy()
    shard = Shard(rows, np.zeros((0, 0), dtype=np.float16), tokens)
    with torch.no_grad():
        embedded = embed_shard(encoder, shard)
    assert embedded.image.shape == (0, encoder.dim)
    assert embedded.text.shape == (2, encoder.dim)
    assert np.isfinite(embedded.text).all()
