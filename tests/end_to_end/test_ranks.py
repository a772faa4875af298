"""Training by torchrun: two processes train what one trains, and go on after one of them was killed."""

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

STAGES = ("encoder", "quantizer", "generator")
SETTINGS = """
preset = "tiny"
[quantizer.training]
epochs = 20
checkpoint_seconds = 0
"""


def start(data: Path, out: Path, *, ranks: int, restarts: int = 0) -> subprocess.Popen:
    options = f"--standalone --nproc-per-node {ranks} --max-restarts {restarts}"
    torchrun = ["-m", "torch.distributed.run", *options.split()] if ranks > 1 else []
    config = out.with_suffix(".toml")
    config.write_text(SETTINGS)
    fit = ["-m", "genius_search", "fit", data, "--encoder", "small", "--out", out, "--config", config]
    return subprocess.Popen(  # noqa: S603
        [sys.executable, *torchrun, *fit],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return errors


@pytest.fixture(scope="module")
def fitted(trained, tmp_path_factory):
    """Models of one process and of two."""
    folder = tmp_path_factory.mktemp("ranks")
    finish(start(trained.data, folder / "one", ranks=1))
    output = finish(start(trained.data, folder / "two", ranks=2))
    assert output.count("next: genius evaluate") == 1
    return folder


def losses(model: Path, stage: str) -> np.ndarray:
    lines = (model / stage / "metrics.jsonl").read_text().splitlines()
    return np.array([json.loads(line)["loss"] for line in lines])


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_descend_as_one(fitted, stage):
    one, two = (losses(fitted / name, stage) for name in ("one", "two"))
    assert len(one) == len(two)
    if stage != "generator":  # its codes come from a quantizer that has moved apart by then
        np.testing.assert_allclose(two[:5], one[:5], rtol=2e-3)
    np.testing.assert_allclose(two[-5:].mean(), one[-5:].mean(), rtol=0.1)


def test_the_model_of_two_processes_is_whole(fitted):
    model = Genius.open(fitted / "two")
    assert model.generator is not None
    assert not list((fitted / "two").glob(".*"))
    assert not (fitted / "two" / "generator" / "fused").exists()


def test_a_killed_process_changes_no_weight(fitted, trained, tmp_path):
    process = start(trained.data, tmp_path / "killed", ranks=2, restarts=3)
    logs = ".quantizer.*.partial/metrics.jsonl"
    while not any(log.read_text().count("\n") > 40 for log in (tmp_path / "killed").glob(logs)):
        assert process.poll() is None, finish(process)
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert "exitcode: -9" in finish(process)
    for stage in STAGES:
        expected, found = (
            load_file(next((model / stage).glob("*.safetensors")))
            for model in (fitted / "two", tmp_path / "killed")
        )
        assert all(np.array_equal(found[name], expected[name]) for name in expected), stage
