"""The script for Slurm, with an `srun` that starts commands on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from genius_search.model import Genius

DEPLOY = Path(__file__).parents[2] / "deploy"
TWO_TASKS = '"$@" & first=$!; "$@"; wait $first'
SETTINGS = ("--preset", "tiny", "--encoder", "small")


@pytest.fixture
def run(tmp_path):
    """Run a script with arguments, and with a line of bash as `srun`."""

    def run(script: str, srun: str, *words: object) -> str:
        commands = {
            "srun": srun,
            "scontrol": "printf 'localhost\\nlocalhost\\n'",
            "genius": f'exec "{sys.executable}" -m genius_search "$@"',
            "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
        }
        (tmp_path / "bin").mkdir()
        for name, line in commands.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/bash\nset -e\n{line}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        slurm = {
            "CPUS_PER_TASK": "2",
            "NNODES": "2",
            "GPUS_PER_NODE": "1",
            "JOB_ID": "7",
            "JOB_NODELIST": "n[1-2]",
        }
        process = subprocess.run(  # noqa: S603
            ["/bin/bash", DEPLOY / script, *map(str, words)],
            env={
                **os.environ,
                **{f"SLURM_{name}": value for name, value in slurm.items()},
                "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        return process.stderr

    return run


@pytest.mark.slow
def test_two_nodes_train_one_model(run, trained, tmp_path):
    output = run(
        "fit.sbatch", TWO_TASKS, trained.data, tmp_path / "model", *SETTINGS, "--device", "cpu"
    )
    assert output.count("next: genius evaluate") == 1
    assert Genius.open(tmp_path / "model").generator is not None
