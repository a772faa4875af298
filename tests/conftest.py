"""Hypothesis profiles: few derandomised examples by default; ``HYPOTHESIS_PROFILE=night`` looks further.

And the tiny model that the tests of search, index and command line share.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

from tests import tiny_model

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # workers inherit it; threads that wait keep their cores busy

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=20,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "night", deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


gc.disable()


def pytest_collection_finish():
    """From here on, the garbage collector passes over what was imported, which is most of all objects."""
    gc.freeze()
    gc.enable()


class Trained(NamedTuple):
    """A tiny drawn world and the model trained on it, shared by all tests; nobody may change it."""

    data: Path
    model: Path
    settings: Path
    """Written right before the training."""

    @property
    def command(self) -> tuple[str | Path, ...]:
        """The command that trained it, but for the folder of the model."""
        return "fit", self.data, "--encoder", "small", "--config", self.settings


@contextlib.contextmanager
def _shared_folder(tmp_path_factory, name: str) -> Iterator[Path]:
    """Lock a folder that all workers share; it is empty for the first worker."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder / name


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Trained:
    """The world, drawn by the first worker that needs it, and the model of tests/model."""
    with _shared_folder(tmp_path_factory, "trained") as folder:
        trained = Trained(folder / "data", folder / "model", folder / "settings.toml")
        if not trained.settings.exists():
            tiny_model.draw(trained.data)
            shutil.copytree(tiny_model.MODEL, trained.model)
            trained.settings.write_text(tiny_model.SETTINGS)
    return trained


@pytest.fixture(scope="session")
def retrained(trained, tmp_path_factory) -> Trained:
    """The same model, trained here and now in a process where types are not checked."""
    with _shared_folder(tmp_path_factory, "retrained") as folder:
        retrained = trained._replace(model=folder / "model", settings=folder / "settings.toml")
        if not (retrained.model / "model.json").exists():
            folder.mkdir()
            code = "import sys; from tests.tiny_model import *; train(*map(Path, sys.argv[1:]))"
            words = [sys.executable, "-c", code, trained.data, retrained.settings, retrained.model]
            subprocess.run(words, cwd=Path(__file__).parents[1], check=True)  # noqa: S603
    return retrained


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


CHECKED = {"nn", "search", "model"}
"""Folders of tests in which every call of a function on arrays is checked against its types."""


@pytest.fixture(scope="module", autouse=True)
def _types_checked(request):
    """Check types where functions on arrays are tested; everywhere takes twice as long.

    The tests of the night check them everywhere: ``GENIUS_TYPES=everywhere``.
    """
    is_checked = CHECKED.intersection(request.path.parts) or "GENIUS_TYPES" in os.environ
    jaxtyping.config.update("jaxtyping_disable", not is_checked)


@pytest.fixture(scope="module", autouse=True)
def _hurried(request):
    """What is written outlives a process that is killed; only tests of commands wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        if "end_to_end" not in request.path.parts:
            patch.setattr(os, "fsync", lambda _: None)
        yield
