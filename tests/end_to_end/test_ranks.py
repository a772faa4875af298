"""Training by torchrun: two processes train the model of one, even if one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from genius_search.model import Genius

pytestmark = pytest.mark.slow

STAGES = ("encoder", "quantizer", "generator")


def start(retrained, out: Path, *, restarts: int = 0) -> subprocess.Popen:
    options = f"--standalone --nproc-per-node 2 --max-restarts {restarts}"
    torchrun = ["-m", "torch.distributed.run", *options.split(), "-m", "genius_search"]
    return subprocess.Popen(  # noqa: S603
        [sys.executable, *torchrun, *retrained.command, "--out", out],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return errors


@pytest.fixture(scope="module")
def model_of_two(retrained, tmp_path_factory) -> Path:
    """A model that two processes trained with the settings of `retrained`."""
    folder = tmp_path_factory.mktemp("ranks") / "two"
    assert finish(start(retrained, folder)).count("next: genius evaluate") == 1
    return folder


def losses(model: Path, stage: str) -> np.ndarray:
    lines = (model / stage / "metrics.jsonl").read_text().splitlines()
    return np.array([json.loads(line)["loss"] for line in lines])


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_have_the_losses_of_one(model_of_two, retrained, stage):
    expected, measured = (losses(model, stage) for model in (retrained.model, model_of_two))
    assert len(expected) == len(measured)
    if stage != "generator":  # its codes come from a quantizer with slightly different weights
        np.testing.assert_allclose(measured[:5], expected[:5], rtol=2e-3)
    np.testing.assert_allclose(measured[-5:].mean(), expected[-5:].mean(), rtol=0.1)


def test_the_model_of_two_processes_is_whole(model_of_two):
    assert Genius.open(model_of_two).generator is not None
    assert not list(model_of_two.glob(".*"))
    assert not (model_of_two / "generator" / "fused").exists()


def test_a_killed_process_changes_no_weight(model_of_two, retrained, tmp_path):
    process = start(retrained, tmp_path / "killed", restarts=3)
    logs = ".quantizer.*.partial/metrics.jsonl"
    while not any("\n" in log.read_text() for log in (tmp_path / "killed").glob(logs)):
        assert process.poll() is None, finish(process)
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert "exitcode: -9" in finish(process)
    for stage in STAGES:
        expected, weights = (
            load_file(next((model / stage).glob("*.safetensors")))
            for model in (model_of_two, tmp_path / "killed")
        )
        assert all(np.array_equal(weights[name], expected[name]) for name in expected), stage
