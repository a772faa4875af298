"""The training loop: scheduled, clipped, and resumed to the same losses."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from genius_search.errors import TrainingFailed, UsageError
from genius_search.nn import parallel
from genius_search.progress import Silent
from genius_search.recipe import TrainingConfig
from genius_search.training.loop import METRICS, StepResult, learning_rate_at, num_steps, train

CONFIG = TrainingConfig(learning_rate=0.05, warmup_steps=2, checkpoint_seconds=0.0, seed=3)


class Killed(BaseException):
    """Nothing in the library catches it."""


def run(folder, *, total=8, config=CONFIG, die_at=None, scale=1.0):
    """Fit a line under dropout on noise of each step's own generator."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))

    def take_step(step):
        if step.number == die_at:
            raise Killed
        inputs = torch.randn(16, 4, generator=step.generator)
        loss = (module(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean() * scale
        return StepResult(loss, {"twice": 2 * loss.detach()})

    train(
        module, take_step, total=total, config=config, folder=folder, progress=Silent(), name="line"
    )
    return module


def lines(folder):
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


@pytest.mark.parametrize("die_at", [1, 4, 7])
def test_a_killed_run_goes_on_to_exactly_the_same_losses(tmp_path, die_at):
    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "killed", die_at=die_at)
    resumed = run(tmp_path / "killed")
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    assert [line["step"] for line in lines(tmp_path / "whole")] == list(range(8))
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_steps_done_after_the_last_checkpoint_are_done_and_logged_once(tmp_path):
    run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "killed", die_at=3)
    # As if steps 3 and 4 had been logged, the second in part, without a checkpoint after them.
    with (tmp_path / "killed" / METRICS).open("a") as log:
        log.write('{"step": 3, "loss": 123.0}\n{"step": 4, "lo\0')
    run(tmp_path / "killed")
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")


def test_the_log_reaches_the_disk_before_the_checkpoint_that_counts_on_it(tmp_path, disk):
    with pytest.raises(Killed):
        run(tmp_path / "killed", die_at=5)
    log, checkpoint = (
        (tmp_path / "killed" / name).stat().st_ino for name in ("metrics.jsonl", "checkpoint.pt")
    )
    assert disk[-4:] == [("sync", log), ("sync", checkpoint), ("move", checkpoint), disk[-1]]


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_fails_with_advice(tmp_path, scale):
    with pytest.raises(
        TrainingFailed, match=r"line: the loss is .* at step 0. Lower the learning rate"
    ):
        run(tmp_path / "a", scale=scale)


def test_a_batch_that_cannot_be_divided_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "num_ranks", lambda: 3)
    with pytest.raises(UsageError, match="cannot be divided evenly among 3 processes"):
        run(tmp_path / "a")


def test_the_learning_rate_warms_up_and_falls_by_a_cosine():
    config = TrainingConfig(learning_rate=2.0, warmup_steps=4, final_share=0.1)
    rates = [learning_rate_at(step, 14, config) for step in range(15)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[9] == pytest.approx(2 * (0.1 + 0.9 / 2))
    assert rates[14] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_steps_are_epochs_of_batches_unless_cut():
    assert num_steps(100, TrainingConfig(epochs=2.5, batch_size=30)) == 9
    assert num_steps(3, TrainingConfig(epochs=0.1, batch_size=30)) == 1
    assert num_steps(100, TrainingConfig(epochs=2.5, batch_size=30, max_steps=4)) == 4


def test_gradients_are_clipped(tmp_path):
    module = run(tmp_path / "a", total=1, scale=1e4)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in module.parameters()))
    assert norm == pytest.approx(1, rel=1e-3)


def test_only_matrices_decay(tmp_path):
    config = TrainingConfig(learning_rate=0.1, weight_decay=0.9)
    module = run(tmp_path / "a", total=1, config=config, scale=0.0)
    torch.manual_seed(1)
    fresh = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    torch.testing.assert_close(module[0].weight, fresh[0].weight * (1 - 0.1 * 0.9))
    assert torch.equal(module[0].bias, fresh[0].bias)
    assert not module.training
