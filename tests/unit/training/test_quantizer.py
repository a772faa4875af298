"""Stage 1: golden losses, resumption, kinds of level 0, several ranks."""

from __future__ import annotations

import dataclasses
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from genius_search.config import FusionConfig, to_json
from genius_search.data.features import Pairs
from genius_search.errors import TrainingFailed
from genius_search.nn.codebooks import StoredQuantizer
from genius_search.nn.quantizer import encode
from genius_search.progress import Silent
from genius_search.recipe import QuantizerConfig, TrainingConfig
from genius_search.records import Modality, Query
from genius_search.training.quantizer import train_quantizer

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
    ("level0", "shared"), [("learned", False), ("assigned", True), ("classifier", False), ("none", True)]
)
def test_a_saved_quantizer_is_opened_as_it_was_trained(world, tmp_path, level0, shared):
    config = changed(level0=level0, shared_codebook=shared, max_steps=6)
    trained = run(world, tmp_path / "q", config)
    kept = StoredQuantizer(tmp_path / "q")
    opened = kept.quantizer
    state = opened.state_dict()
    assert state.keys() == trained.quantizer.state_dict().keys()
    for name, tensor in trained.quantizer.state_dict().items():
        assert torch.equal(state[name], tensor), name
    if shared:
        assert opened.codebooks[-1] is opened.codebooks[-2]
    expected, found = encode(trained.quantizer, world.candidates), encode(opened, world.candidates)
    assert torch.equal(expected.codes, found.codes)
    assert trained.manifest == kept.manifest
    assert run(world, tmp_path / "q", config).manifest == kept.manifest


def test_a_learned_level_0_learns_what_its_codes_stand_for(world, tmp_path):
    trained = run(world, tmp_path / "q", changed(level0="learned"))
    codes = encode(trained.quantizer, world.candidates).codes[:, 0].numpy()
    for code, modality in enumerate(trained.quantizer.level0_modality.tolist()):
        holders = world.candidates.modality[codes == code]
        assert modality == (np.bincount(holders, minlength=3).argmax() if len(holders) else -1)
    assert trained.manifest.facts["health"]["purity"] is not None


def test_candidates_that_are_all_alike_stop_the_training_unless_allowed(make_features, tmp_path):
    vectors = np.ones((8, 16))
    nothing = [None] * 8
    ids = [10_000_000 + n for n in range(8)]
    candidates = make_features(ids, nothing, list(vectors))
    queries = make_features(
        [500_000 + n for n in range(8)], nothing, list(vectors), wanted=[1] * 8, variant=[0] * 8
    )
    lines = [Query(f"1:{n}", Modality.TEXT, "?", positives=(f"1:{n}",)) for n in range(8)]
    pairs = Pairs(lines, queries, candidates)
    with pytest.raises(TrainingFailed, match="codebooks collapsed"):
        train_quantizer(pairs, tmp_path / "refused", CONFIG, progress=Silent())
    allowed = changed(collapse="allow")
    assert train_quantizer(pairs, tmp_path / "allowed", allowed, progress=Silent()).quantizer.sizes == (
        3,
        8,
        8,
    )


def test_contrastive_learning_brings_queries_to_their_candidates(world, tmp_path, read_losses):
    run(world, tmp_path / "q", changed(max_steps=60))
    losses = read_losses(tmp_path / "q", "contrastive")
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_two_ranks_train_the_same_weights_as_one(world, tmp_path):
    # With 16 codes for 48 items counts are small, so that codes die and are revived.
    configs = [
        changed(level0=level0, codebook_size=16, dead_below=2.5, codebook_start=0, max_steps=3)
        for level0 in ("assigned", "learned")
    ]
    plan = tmp_path / "plan.pt"
    torch.save(
        {
            "configs": [to_json(config) for config in configs],
            "queries": str(world.queries.manifest.folder),
            "candidates": str(world.candidates.manifest.folder),
            "lines": [(line.qid, list(line.positives)) for line in world.lines],
        },
        plan,
    )
    script = Path(__file__).parent / "rank.py"
    processes = [
        subprocess.Popen([sys.executable, script, plan, tmp_path / "two", str(rank), "2"])  # noqa: S603
        for rank in (0, 1)
    ]
    runpy.run_path(str(script))["main"](plan, tmp_path / "one", 0, 1)
    assert [process.wait(120) for process in processes] == [0, 0]
    for number in range(len(configs)):
        one, first, second = (
            torch.load(tmp_path / name / f"weights-{number}.pt", weights_only=True)
            for name in ("one/rank-0", "two/rank-0", "two/rank-1")
        )
        assert one["revived"] > 0
        assert one.keys() == first.keys() == second.keys()
        for name in one:
            assert torch.equal(first[name], second[name]), name
            torch.testing.assert_close(first[name], one[name], rtol=1e-5, atol=2e-5)
