"""Hypothesis profiles: derandomised by default; ``HYPOTHESIS_PROFILE=explore`` looks further.

And the tiny model that the tests of search, index and command line share.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


class Trained(NamedTuple):
    """A tiny drawn world and the model trained on it, shared by all tests; nobody may change it."""

    data: Path
    model: Path


_TRAIN = """
import sys
from pathlib import Path
from genius_search.recipe import preset
from research.synth.catalogue import draw_catalogue
from genius_search.data.mbeir import MBeir
from genius_search.training.fit import fit
from genius_search.progress import Silent

data, model = map(Path, sys.argv[1:])
draw_catalogue(data, items=1_000, train_products=60, queries_per_task=12)
fit(MBeir(data), "small", model, preset("tiny"), progress=Silent())
"""


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Trained:
    """Drawn and trained once, by the first worker that needs it, in a process where types are not checked."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which all workers share
    made = Trained(folder / "trained" / "data", folder / "trained" / "model")
    with (folder / "trained.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made.model / "model.json").exists():
            subprocess.run(  # noqa: S603
                [sys.executable, "-c", _TRAIN, *made],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd=Path(__file__).parents[1],  # whose `research` draws
                check=True,
            )
    return made


@pytest.fixture
def one_thread(monkeypatch):
    """What a benchmark sets for its own process is taken back."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
