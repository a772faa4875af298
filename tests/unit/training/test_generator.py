"""Stage 2: augmentation of queries, contrasts, and losses that fall; `test_kill.py` kills it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from genius_search.config import FusionConfig
from genius_search.nn.generator import Generator, load_generator
from genius_search.nn.losses import prefix_loss
from genius_search.progress import Silent
from genius_search.recipe import GeneratorConfig, QuantizerConfig, TrainingConfig
from genius_search.training.generator import augment, contrast, train_generator
from genius_search.training.quantizer import train_quantizer

TRAINING = TrainingConfig(batch_size=12, learning_rate=5e-3, seed=1)
CONFIG = GeneratorConfig(
    layers=1,
    width=16,
    feedforward=32,
    heads=2,
    head_width=8,
    prefixes=3,
    dropout=0.1,
    training=TRAINING,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def directions(items, seed=0, dim=64):
    return F.normalize(torch.randn(2, items, dim, generator=seeded(seed)), dim=-1)


def test_the_papers_augmentation_mixes_by_one_beta_share_a_sample():
    queries, candidates = directions(20_000, dim=4)
    mixed = augment(queries, candidates, GeneratorConfig(augmentation="paper"), seeded())
    shares = (mixed - candidates) / (queries - candidates)
    median = shares.median(dim=1, keepdim=True).values
    assert ((shares - median).abs().median(dim=1).values < 1e-3).all()
    # Beta(2, 2): mean 1/2, variance 1/20, third central moment 0, kurtosis 15/7.
    share = median.ravel().double()
    assert float(share.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(share.var()) == pytest.approx(0.05, abs=0.002)
    assert float(((share - 0.5) ** 3).mean()) == pytest.approx(0, abs=0.001)
    assert float(((share - 0.5) ** 4).mean()) == pytest.approx(15 / 7 / 400, rel=0.05)


def test_the_released_codes_augmentation_mixes_each_dimension_by_square_roots_to_unit_norm():
    ones, zeros = torch.ones(4000, 8), torch.zeros(4000, 8)
    config = GeneratorConfig(augmentation="reference")
    mixed = augment(*directions(50), config, seeded())
    torch.testing.assert_close(mixed.norm(dim=1), torch.ones(50))
    # With queries on four axes and candidates on the others, squares are shares up to the norm.
    half = torch.arange(8) < 4
    squares = augment(
        torch.where(half, ones, zeros), torch.where(half, zeros, ones), config, seeded()
    ).square()
    torch.testing.assert_close(squares.mean(dim=0), torch.full((8,), 1 / 8), rtol=0.05, atol=0)
    assert (squares[:, 0] - squares[:, 1]).abs().max() > 0.1
    # Where query and candidate agree, the mix exceeds both: sqrt(s) + sqrt(1 - s).
    both = augment(ones, ones, config, seeded())
    assert float(both.std()) < 0.1


@pytest.mark.parametrize("augmentation", ["paper", "reference"])
def test_the_plain_share_of_queries_stays_as_it_is(augmentation):
    queries, candidates = directions(4000, dim=6)
    config = GeneratorConfig(augmentation=augmentation, plain_share=0.3)
    plain = (augment(queries, candidates, config, seeded()) == queries).all(dim=1)
    assert float(plain.float().mean()) == pytest.approx(0.3, abs=0.03)
    for unchanged in (
        dataclasses.replace(config, plain_share=1.0),
        GeneratorConfig(augmentation="none"),
    ):
        assert torch.equal(augment(queries, candidates, unchanged, seeded()), queries)


@pytest.fixture(scope="module")
def quantizer(world, tmp_path_factory):
    config = QuantizerConfig(
        levels=2,
        codebook_size=8,
        level0="assigned",
        fusion=FusionConfig(hidden=16),
        training=TrainingConfig(batch_size=30, learning_rate=1e-3, max_steps=10),
    )
    folder = tmp_path_factory.mktemp("model") / "quantizer"
    return train_quantizer(world.pairs(), folder, config, progress=Silent())


def run(world, quantizer, folder, config):
    return train_generator(world.pairs(), quantizer, folder, config, progress=Silent())


@pytest.mark.parametrize("head", ["tied", "per-level"])
def test_a_saved_generator_is_opened_as_it_was_trained(world, quantizer, tmp_path, head):
    config = dataclasses.replace(
        CONFIG, head=head, training=dataclasses.replace(TRAINING, max_steps=2)
    )
    run(world, quantizer, tmp_path / "g", config)
    opened = load_generator(tmp_path / "g")
    assert opened.config == config
    assert not opened.training


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"head": "tied"}, ["level_0", "level_1", "level_2"]),
        ({"head": "per-level"}, ["level_0", "level_1", "level_2"]),
        # Of the first code alone, the query already tells.
        ({"guide": "geometry", "contrasted": 5}, ["prefix_2", "prefix_3"]),
    ],
)
def test_training_lowers_the_loss_of_every_level(
    world, quantizer, tmp_path, settings, names, read_losses
):
    training = dataclasses.replace(
        TRAINING, max_steps=80, epochs=20.0, batch_size=60, learning_rate=1e-2
    )
    run(
        world,
        quantizer,
        tmp_path / "g",
        dataclasses.replace(CONFIG, softmax="level", dropout=0.0, training=training, **settings),
    )
    for name in names:
        losses = read_losses(tmp_path / "g", name)
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_query_is_contrasted_with_the_nearest_ids_that_do_not_answer_it():
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, guide="geometry", dropout=0.0)
    generator = Generator(8, (3, 4, 4), config).eval()
    tables = [torch.randn(size, 8) for size in (3, 4, 4)]
    generator.start_codes(tables, generator=seeded())
    queries, codes = torch.randn(6, 8), torch.randint(0, 3, (6, 3), generator=seeded())
    answers = torch.zeros(6, 6, dtype=torch.bool)
    answers[0, 3] = answers[2, 1] = True
    expected = torch.zeros(3)
    for query in range(6):
        vectors = sum(table[codes[:, level]] for level, table in enumerate(tables))
        distances = (queries[query] - vectors).square().sum(dim=1)
        left = [
            row for row in distances.argsort().tolist() if row != query and not answers[query, row]
        ]
        ids = codes[[query, *left[:2]]]
        repeated = queries[query].repeat(3, 1)
        scores = generator.score_ids(repeated, ids, repeated)
        expected += prefix_loss(scores[None], ids[None], torch.zeros(1, 3, dtype=torch.bool)) / 6
    torch.testing.assert_close(contrast(generator, queries, queries, codes, answers, 2), expected)
    assert not contrast(
        generator, queries, queries, codes, ~torch.eye(6, dtype=torch.bool), 9
    ).any()
