"""Hypothesis profiles: derandomised by default; ``HYPOTHESIS_PROFILE=explore`` looks further.

And the tiny model that the tests of search, index and command line share.
"""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # workers inherit it; threads that wait keep their cores busy

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


class Trained(NamedTuple):
    """A tiny drawn world and the model trained on it, shared by all tests; nobody may change it."""

    data: Path
    model: Path
    settings: Path
    """Written right before the training: those of `tiny`, and a checkpoint after every step."""

    @property
    def command(self) -> tuple[str | Path, ...]:
        """The command that trained it, but for the folder of the model."""
        return "fit", self.data, "--encoder", "small", "--config", self.settings


_TRAIN = """
import sys
from pathlib import Path
from genius_search.cli import main
from research.synth.catalogue import draw_catalogue
import genius_search.training.fit

data, model, settings = map(Path, sys.argv[1:])
draw_catalogue(data, items=1_000, train_products=60, queries_per_task=12)
stages = ("encoder", "quantizer", "generator")
often = [f"{stage}.training.checkpoint_seconds = 0" for stage in stages]
settings.write_text("\\n".join(['preset = "tiny"', *often]))
sys.exit(main(["fit", str(data), "--encoder", "small", "--config", str(settings), "--out", str(model)]))
"""


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Trained:
    """Drawn and trained once, by the first worker that needs it, in a process where types are not checked."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which all workers share
    made = Trained(*(folder / "trained" / name for name in ("data", "model", "settings.toml")))
    with (folder / "trained.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made.model / "model.json").exists():
            subprocess.run(  # noqa: S603
                [sys.executable, "-c", _TRAIN, *made],
                cwd=Path(__file__).parents[1],  # whose `research` draws
                check=True,
            )
    return made


@pytest.fixture(scope="session", autouse=True)
def _word_vectors_opened_once():
    """Read the vectors of the package wordllama once; it takes half a second, a hundred times."""
    from genius_search.encoders import static  # noqa: PLC0415  once the hook that checks types is there

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static, "_open_wordllama", functools.cache(static._open_wordllama))
        yield


@pytest.fixture(scope="session")
def model(trained):
    """The shared model; nobody may change it."""
    from genius_search.model import Genius  # noqa: PLC0415  once the hook that checks types is there

    return Genius.open(trained.model)


@pytest.fixture
def write_keys(tmp_path):
    """Write lines into the file of API keys that the result names."""

    def write(*lines: str) -> Path:
        file = tmp_path / "keys"
        file.write_text("".join(f"{line}\n" for line in lines))
        file.chmod(0o600)
        return file

    return write


@pytest.fixture(scope="module", autouse=True)
def _hurried(request):
    """What is written outlives a process that is killed; only tests of commands wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        if "end_to_end" not in request.path.parts:
            patch.setattr(os, "fsync", lambda _: None)
        yield
