"""Eight processes change and search one index; the long run is `python benchmarks/many_processes.py MODEL`."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "many_processes.py"


def run(model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603
        [sys.executable, PROGRAM, model, *flags], capture_output=True, text=True, check=False
    )


def test_readers_see_what_was_acknowledged_while_others_write_and_are_killed(trained):
    done = run(trained.model, "--seconds", "2", "--changes", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 wrong" in done.stdout


@pytest.mark.parametrize("fault", ["lock", "stale"])
def test_the_check_finds_a_fault(trained, fault):
    done = run(trained.model, "--seconds", "60", "--fault", fault)
    assert done.returncode == 1, done.stdout + done.stderr
    assert " wrong\n" in done.stdout
