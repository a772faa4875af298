"""Eight processes change and search an index.

`python benchmarks/many_processes.py MODEL` runs them for longer.
"""

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


def test_readers_see_acknowledged_changes_while_others_write_and_are_killed(trained):
    process = run(trained.model, "--seconds", "2", "--changes", "10")
    assert process.returncode == 0, process.stdout + process.stderr
    assert ", 0 wrong" in process.stdout


@pytest.mark.parametrize("fault", ["lock", "stale"])
def test_the_check_finds_a_fault(trained, fault):
    process = run(trained.model, "--seconds", "60", "--fault", fault)
    assert process.returncode == 1, process.stdout + process.stderr
    assert " wrong\n" in process.stdout
