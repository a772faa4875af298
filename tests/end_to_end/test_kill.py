"""A process killed at any moment loses nothing that was finished and leaves nothing that opens but is wrong.

A few kills each by default; ``GENIUS_KILLS=20`` makes it twenty.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from genius_search.artifact import open_artifact
from genius_search.data.mbeir import MBeir
from genius_search.errors import ArtifactMismatch, ArtifactMissing
from genius_search.index.index import Index
from genius_search.index.items import Item
from genius_search.index.store import WORK
from genius_search.model import Genius

KILLS = int(os.environ.get("GENIUS_KILLS", "2"))
PARTS = ("encoder", "quantizer", "generator")


def genius(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """Start a command of its own process."""
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", "from genius_search.cli import main; raise SystemExit(main())", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def run_whole(*arguments: str | Path) -> float:
    """Run a command to its end; how many seconds it took."""
    began = time.monotonic()
    with genius(*arguments) as process:
        _, said = process.communicate()
    assert process.returncode == 0, said.decode()
    return time.monotonic() - began


def was_killed(delay: float, *arguments: str | Path) -> bool:
    """Run a command and kill it after a while; False if it was finished before."""
    with genius(*arguments) as process:
        try:
            _, said = process.communicate(timeout=delay)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return True
    assert process.returncode == 0, said.decode()
    return False


def kill_until_enough(
    kills: int,
    seconds: float,
    command: tuple[str | Path, ...],
    *,
    check: Callable[[], bool],
    begin_again: Callable[[], None],
) -> None:
    """Kill a command that many times, at seeded moments; ``check`` whatever it leaves, and says if it is done."""
    moments = random.Random(5)
    done = 0
    while done < kills:
        done += was_killed(moments.uniform(0.3, 1.0) * seconds, *command)
        if check():
            begin_again()


class Fitted(NamedTuple):
    """A model that nobody interrupted, and how it was made."""

    folder: Path
    made_at: Path
    """Where the command made it, and free again."""
    flags: tuple[str | Path, ...]
    seconds: float


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory) -> Fitted:
    folder = tmp_path_factory.mktemp("fitted") / "model"
    flags: list[str | Path] = [trained.data, "--encoder", "small", "--preset", "tiny"]
    settings = folder.parent / "settings.toml"
    settings.write_text("".join(f"{part}.training.checkpoint_seconds = 0\n" for part in PARTS))
    flags += ["--config", settings]
    seconds = run_whole("fit", *flags, "--out", folder)
    return Fitted(folder.rename(folder.parent / "whole"), folder, (*flags, "--out", folder), seconds)


@pytest.fixture
def fitted(whole) -> Iterator[Fitted]:
    """The same, the place where it was made cleared afterwards."""
    yield whole
    shutil.rmtree(whole.made_at, ignore_errors=True)


def losses(folder: Path, part: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / part / "metrics.jsonl").read_text().splitlines()]


def finished(folder: Path, part: str) -> str | None:
    """The fingerprint of a part that opens, every byte of it checked."""
    try:
        return open_artifact(folder / part, kind=part, verify=True).fingerprint
    except ArtifactMissing:
        return None


def opened(folder: Path) -> Genius | None:
    try:
        return Genius.open(folder)
    except (ArtifactMissing, ArtifactMismatch):
        return None


def test_a_killed_training_goes_on_to_the_very_same_model(fitted):
    folder = fitted.made_at
    reference = Genius.open(fitted.folder).fingerprint
    parts = {part: finished(fitted.folder, part) for part in PARTS}
    so_far: set[str] = set()

    def check() -> bool:
        for part in PARTS:
            found = finished(folder, part)
            assert found in (None, parts[part]), f"the {part} is another one"
            assert found is not None or part not in so_far, f"the finished {part} was lost"
            if found is not None:
                so_far.add(part)
        model = opened(folder)
        assert model is None or model.fingerprint == reference
        return model is not None

    def begin_again() -> None:
        shutil.rmtree(folder)
        so_far.clear()

    command = ("fit", *fitted.flags)
    kill_until_enough(KILLS, fitted.seconds, command, check=check, begin_again=begin_again)
    run_whole(*command)
    assert check()
    for part in PARTS:
        assert losses(folder, part) == losses(fitted.folder, part)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in fitted.folder.iterdir()
    )


def test_a_killed_second_training_leaves_the_first_model_or_none_but_never_a_mixture(fitted):
    folder = fitted.made_at
    first = Genius.open(fitted.folder)
    generators = {first.generator_manifest.fingerprint}
    shutil.copytree(fitted.folder, folder)

    def check() -> bool:
        model = opened(folder)
        if model is None:
            return False
        assert model.quantizer_manifest.fingerprint == first.quantizer_manifest.fingerprint
        return model.generator_manifest.fingerprint not in generators

    def begin_again() -> None:
        shutil.rmtree(folder)
        shutil.copytree(fitted.folder, folder)

    second = fitted.folder.parent / "second.toml"
    second.write_text((fitted.folder.parent / "settings.toml").read_text() + "generator.training.seed = 1\n")
    command = ("fit", *fitted.flags, "--config", second)
    kill_until_enough(max(1, KILLS // 3), 0.6 * fitted.seconds, command, check=check, begin_again=begin_again)
    run_whole(*command)
    assert check()


def contents(index: Index) -> dict[str, tuple[Item, list[int]]]:
    """Every item with its ID."""
    found: dict[str, tuple[Item, list[int]]] = {}
    for segment in index.snapshot.segments:
        assert not len(segment.dead)
        table = segment.table
        codes = np.empty((table.num_items, table.ids.shape[1]), dtype=np.int16)
        codes[table.items] = np.repeat(table.ids, np.diff(table.bucket_starts), axis=0)
        entries = zip(segment.items.all(), codes.tolist(), strict=True)
        found.update((item.id, (item, id_)) for item, id_ in entries)
    return found


@pytest.fixture(scope="module")
def model(trained) -> Genius:
    return Genius.open(trained.model)


@pytest.fixture(scope="module")
def pools(trained) -> tuple[Path, Path]:
    """Two pools without common items."""
    data = MBeir(trained.data)
    ((first,), (second,)) = data.global_pool("test"), data.global_pool("val")
    return first, second


@pytest.mark.parametrize("kind", ["create", "add"])
def test_a_killed_command_leaves_the_index_before_or_the_whole_one(trained, model, pools, tmp_path, kind):
    folder, before = tmp_path / "index", tmp_path / "before"
    create = ("--model", trained.model, "--pool", pools[0])
    words = ("index", kind, folder, *(create if kind == "create" else (pools[1],)))

    def begin_again() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if kind == "add":
            shutil.copytree(before, folder)

    def found() -> dict[str, tuple[Item, list[int]]] | None:
        try:
            return contents(Index.open(folder, model=model))
        except ArtifactMissing:
            return None

    def check() -> bool:
        assert found() in (old, new)
        return found() == new

    if kind == "add":
        run_whole("index", "create", before, *create)
    begin_again()
    old = found()
    seconds = run_whole(*words)
    new = found()
    assert new is not None
    assert len(new) == (1_250 if kind == "add" else 1_000)
    begin_again()
    kill_until_enough(max(1, KILLS - 1), seconds, words, check=check, begin_again=begin_again)
    run_whole(*words)
    assert check()
    assert not (folder / WORK).exists()
