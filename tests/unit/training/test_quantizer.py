"""Stage 1: golden losses, resumption, kinds of level 0, several ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

from genius_search.config import FusionConfig
from genius_search.data.features import Features, Pairs
from genius_search.errors import TrainingFailed
from genius_search.nn.quantizer import Quantizer
from genius_search.progress import Silent
from genius_search.recipe import QuantizerConfig, TrainingConfig
from genius_search.records import Modality, Query
from genius_search.training.codebooks import encode_features
from genius_search.training.loop import train
from genius_search.training.quantizer import QuantizerStep, train_quantizer

TRAINING = TrainingConfig(batch_size=24, learning_rate=2e-3, max_steps=20, checkpoint_seconds=0.0)
CONFIG = QuantizerConfig(
    levels=2,
    codebook_size=8,
    level0="assigned",
    codebook_start=3,
    fusion=FusionConfig(hidden=16),
    contrastive="both",
    training=TRAINING,
)
# fmt: on


def run(world, folder, config=CONFIG, progress=None):
    return train_quantizer(world.pairs(), folder, config, progress=progress or Silent())


def changed(*, max_steps=20, **settings):
    return dataclasses.replace(
        CONFIG, training=dataclasses.replace(TRAINING, max_steps=max_steps), **settings
    )


@pytest.mark.parametrize("steps", [2, 11])
def test_a_killed_training_goes_on_to_exactly_the_same_losses_and_weights(
    world, tmp_path, killed_after, steps
):
    whole = run(world, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(world, tmp_path / "killed", progress=killed_after(steps))
    resumed = run(world, tmp_path / "killed")
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "killed")]
    assert logs[0] == logs[1]
    assert whole.manifest.fingerprint == resumed.manifest.fingerprint


@pytest.mark.parametrize(
    ("level0", "shared"),
    [("learned", False), ("assigned", True), ("classifier", False), ("none", True)],
)
def test_a_trained_quantizer_is_not_trained_again(world, tmp_path, level0, shared):
    config = changed(level0=level0, shared_codebook=shared, max_steps=6)
    trained = run(world, tmp_path / "q", config)
    *_, last, deepest = trained.codebooks.tables()
    assert np.array_equal(last, deepest) == shared
    codes = encode_features(trained.codebooks, world.candidates).codes
    assert (codes.max(axis=0) < trained.codebooks.sizes).all()
    assert run(world, tmp_path / "q", config).manifest == trained.manifest


def test_a_learned_level_0_learns_what_its_codes_stand_for(world, tmp_path):
    trained = run(world, tmp_path / "q", changed(level0="learned"))
    codes = encode_features(trained.codebooks, world.candidates).codes[:, 0]
    for code, modality in enumerate(trained.codebooks.level0_modality.tolist()):
        holders = world.candidates.modality[codes == code]
        assert modality == (np.bincount(holders, minlength=3).argmax() if len(holders) else -1)


def test_candidates_that_are_all_alike_stop_the_training_unless_nothing_contrasts_them(
    make_features, tmp_path
):
    vectors = np.ones((8, 16))
    nothing = [None] * 8
    ids = [10_000_000 + n for n in range(8)]
    candidates = make_features(ids, nothing, list(vectors))
    queries = make_features([500_000 + n for n in range(8)], nothing, list(vectors), wanted=[1] * 8)
    lines = [Query(f"1:{n}", Modality.TEXT, "?", positives=(f"1:{n}",)) for n in range(8)]
    pairs = Pairs(lines, queries, candidates)
    with pytest.raises(TrainingFailed, match="codebooks collapsed"):
        train_quantizer(pairs, tmp_path / "refused", CONFIG, progress=Silent())
    allowed = changed(contrastive_weight=0.0)
    assert train_quantizer(
        pairs, tmp_path / "allowed", allowed, progress=Silent()
    ).codebooks.sizes == (
        3,
        8,
        8,
    )


def test_contrastive_learning_brings_queries_to_their_candidates(world, tmp_path, read_losses):
    run(world, tmp_path / "q", changed(max_steps=60))
    losses = read_losses(tmp_path / "q", "contrastive")
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def train_on_rank(rank, ranks, folder, configs, lines, features):
    """Train every configuration; leave the weights, and how many codes were revived."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
        )
    pairs = Pairs(lines, *map(Features.open, features))
    for number, config in enumerate(configs):
        own = folder / f"{rank}-{number}"
        own.mkdir()
        torch.manual_seed(config.training.seed)
        quantizer = Quantizer(pairs.candidates.dim, config)
        train(
            quantizer,
            QuantizerStep(quantizer, pairs, config.training.max_steps),
            total=config.training.max_steps,
            config=config.training,
            folder=own,
            progress=Silent(),
            name="rank",
        )
        torch.save(quantizer.state_dict(), own / "weights.pt")
    if ranks > 1:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_the_same_weights_as_one(world, tmp_path, read_losses):
    # With 16 codes for 48 items counts are small, so that codes die and are revived.
    configs = [
        changed(level0=level0, codebook_size=16, dead_below=2.5, codebook_start=0, max_steps=3)
        for level0 in ("assigned", "learned")
    ]
    features = [part.folder for part in (world.queries, world.candidates)]
    for folder in ("1", "2"):
        (tmp_path / folder).mkdir()
    train_on_rank(0, 1, tmp_path / "1", configs, world.lines, features)
    multiprocessing.spawn(
        train_on_rank, (2, tmp_path / "2", configs, world.lines, features), nprocs=2
    )
    for number in range(len(configs)):
        one, first, second = (
            torch.load(tmp_path / name / "weights.pt", weights_only=True)
            for name in (f"1/0-{number}", f"2/0-{number}", f"2/1-{number}")
        )
        assert sum(read_losses(tmp_path / f"1/0-{number}", "revived")) > 0
        for name in one:
            assert torch.equal(first[name], second[name]), name
            torch.testing.assert_close(first[name], one[name], rtol=1e-5, atol=2e-5)
