"""Killed processes lose no finished part, and leave nothing that opens but is wrong.

There are a few kills in each test by default; ``GENIUS_KILLS=20`` sets another number.
"""

from __future__ import annotations

import json
import multiprocessing.forkserver
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from genius_search.artifact import open_artifact
from genius_search.cli import main
from genius_search.data.mbeir import MBeir
from genius_search.errors import ArtifactMismatch, ArtifactMissing
from genius_search.index.index import Index
from genius_search.index.items import Item
from genius_search.index.store import WORK
from genius_search.model import Genius

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("GENIUS_KILLS", "2"))
PARTS = ("encoder", "quantizer", "generator")

PROCESSES = multiprocessing.get_context("forkserver")
"""Starts each command in a fork of a process that has imported everything."""


def run_command(*words: str) -> None:
    sys.exit(main(words))


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    PROCESSES.set_forkserver_preload([__name__, "genius_search.training.fit"])
    yield
    multiprocessing.forkserver._forkserver._stop()


def genius(*words: str | Path) -> multiprocessing.Process:
    """Start a command."""
    process = PROCESSES.Process(target=run_command, args=tuple(map(str, words)))
    process.start()
    return process


def run_whole(*words: str | Path) -> float:
    """Run a command to its end, and return its duration in seconds."""
    start = time.monotonic()
    process = genius(*words)
    process.join()
    assert process.exitcode == 0
    return time.monotonic() - start


def kill_after(delay: float, *words: str | Path) -> bool:
    """Run a command and kill it after some seconds; return False if it finished before."""
    process = genius(*words)
    process.join(delay)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def kill_often(
    kills: int,
    seconds: float,
    command: tuple[str | Path, ...],
    *,
    check: Callable[[], bool],
    reset: Callable[[], None],
) -> None:
    """Kill a command several times at random moments.

    After each kill, ``check`` verifies the files and returns whether the command's work is done.
    """
    chance = random.Random(5)
    killed = 0
    while killed < kills:
        killed += kill_after(chance.uniform(0.3, 1.0) * seconds, *command)
        if check():
            reset()


@pytest.fixture
def seconds(retrained) -> float:
    """The duration of the training, without imports."""
    start = retrained.settings.stat().st_mtime
    return (retrained.model / "model.json").stat().st_mtime - start


def losses(folder: Path, part: str) -> list[float]:
    return [
        json.loads(line)["loss"]
        for line in (folder / part / "metrics.jsonl").read_text().splitlines()
    ]


def finished(folder: Path, part: str) -> str | None:
    """Return the fingerprint of a part whose files equal their checksums; None if it is missing."""
    try:
        return open_artifact(folder / part, kind=part, check_contents=True).fingerprint
    except ArtifactMissing:
        return None


def open_finished(folder: Path) -> Genius | None:
    try:
        return Genius.open(folder)
    except (ArtifactMissing, ArtifactMismatch):
        return None


def test_a_killed_training_continues_to_the_same_model(retrained, seconds, tmp_path):
    folder = tmp_path / "model"
    reference = Genius.open(retrained.model).fingerprint
    fingerprints = {part: finished(retrained.model, part) for part in PARTS}
    finished_parts: set[str] = set()

    def check() -> bool:
        for part in PARTS:
            fingerprint = finished(folder, part)
            assert fingerprint in (None, fingerprints[part]), f"the {part} differs"
            if fingerprint is None:
                assert part not in finished_parts, f"the finished {part} was lost"
            else:
                finished_parts.add(part)
        model = open_finished(folder)
        assert model is None or model.fingerprint == reference
        return model is not None

    def reset() -> None:
        shutil.rmtree(folder)
        finished_parts.clear()

    command = (*retrained.command, "--out", folder)
    kill_often(KILLS, seconds, command, check=check, reset=reset)
    run_whole(*command)
    assert check()
    for part in PARTS:
        assert losses(folder, part) == losses(retrained.model, part)
    assert {path.name for path in folder.iterdir()} == {
        path.name for path in retrained.model.iterdir()
    }


def test_a_killed_second_training_leaves_the_first_model_or_none_but_never_a_mixture(
    retrained, seconds, tmp_path
):
    folder = tmp_path / "model"
    first = Genius.open(retrained.model)
    generators = {first.generator_manifest.fingerprint}
    shutil.copytree(retrained.model, folder)

    def check() -> bool:
        model = open_finished(folder)
        if model is None:
            return False
        assert model.quantizer_manifest.fingerprint == first.quantizer_manifest.fingerprint
        return model.generator_manifest.fingerprint not in generators

    def reset() -> None:
        shutil.rmtree(folder)
        shutil.copytree(retrained.model, folder)

    second = tmp_path / "second.toml"
    second.write_text(retrained.settings.read_text() + "\ngenerator.training.seed = 1\n")
    command = (*retrained.command, "--config", second, "--out", folder)
    kill_often(max(1, KILLS // 3), 0.6 * seconds, command, check=check, reset=reset)
    run_whole(*command)
    assert check()


def contents(index: Index) -> dict[str, tuple[Item, list[int]]]:
    """Return every item with its ID."""
    items: dict[str, tuple[Item, list[int]]] = {}
    for segment in index._snapshot.segments:
        assert not len(segment.dead)
        table = segment.table
        codes = np.empty((table.num_items, table.ids.shape[1]), dtype=np.int16)
        codes[table.items] = np.repeat(table.ids, np.diff(table.bucket_starts), axis=0)
        entries = zip(segment.items.all(), codes.tolist(), strict=True)
        items.update((item.id, (item, id_)) for item, id_ in entries)
    return items


@pytest.fixture(scope="module")
def pools(trained) -> tuple[Path, Path]:
    """Two pools without common items."""
    data = MBeir(trained.data)
    ((first,), (second,)) = data.global_pool("test"), data.global_pool("val")
    return first, second


@pytest.mark.parametrize("command", ["create", "add"])
def test_a_killed_command_leaves_the_old_index_or_the_new_one(
    trained, model, pools, tmp_path, command
):
    folder, before = tmp_path / "index", tmp_path / "before"
    create = ("--model", trained.model, "--no-ocr", "--pool", pools[0])
    options = {"create": create, "add": ("--no-ocr", pools[1])}
    words = ("index", command, folder, *options[command])

    def reset() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if command == "add":
            shutil.copytree(before, folder)

    def read_index() -> dict[str, tuple[Item, list[int]]] | None:
        try:
            return contents(Index.open(folder, model=model))
        except ArtifactMissing:
            return None

    def check() -> bool:
        assert read_index() in (old, new)
        return read_index() == new

    if command == "add":
        run_whole("index", "create", before, *create)
    reset()
    old = read_index()
    seconds = run_whole(*words)
    new = read_index()
    assert new is not None
    assert len(new) == (1_250 if command == "add" else 1_000)
    reset()
    kill_often(max(1, KILLS - 1), seconds, words, check=check, reset=reset)
    run_whole(*words)
    assert check()
    assert not (folder / WORK).exists()
