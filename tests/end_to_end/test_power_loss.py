"""Power failures: at each step, a copy of a disk image lacks everything that was not synced."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from genius_search.artifact import MANIFEST, open_artifact, read_json
from genius_search.cluster.build import Settings, build_cluster
from genius_search.cluster.searcher import read_cluster
from genius_search.data.mbeir import MBeir
from genius_search.errors import ArtifactError, ArtifactMissing, BadData
from genius_search.index.index import Index
from genius_search.index.info import check
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.recipe import preset
from genius_search.training.fit import fit

IMAGE_BYTES = 96 << 20
TOOLS = ("mount", "umount", "mkfs.ext4")


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)  # noqa: S603


@contextmanager
def mounted(image: Path, *options: str) -> Iterator[Path]:
    """Mount an image outside pytest's folders, which pytest must remove even after a killed run."""
    folder = Path(tempfile.mkdtemp(prefix="genius-disk-"))
    try:
        run("mount", "-o", ",".join(("loop", *options)), image, folder)
        try:
            yield folder
        finally:
            run("umount", folder)
    finally:
        folder.rmdir()


class Disk:
    """A disk, and copies of it as power failures would leave it."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.image = image
        self.folder = folder
        self.copies: list[Path] = []

    def fail(self) -> None:
        """Copy the disk as a power failure would leave it now."""
        self.copies.append(self.image.with_name(f"{len(self.copies)}.img"))
        run("cp", "--sparse=always", self.image, self.copies[-1])

    @contextmanager
    def failing_at_each_rename(self, monkeypatch) -> Iterator[None]:
        """Fail before and after each rename of a file or folder, and at the end."""
        with monkeypatch.context() as patch:
            for name in ("rename", "replace"):
                original = getattr(Path, name)

                def move(path, target, original=original):
                    self.fail()
                    moved = original(path, target)
                    self.fail()
                    return moved

                patch.setattr(Path, name, move)
            yield
        self.fail()

    def after(self, copy: Path) -> Iterator[Path]:
        """Mount a copy, which repairs the file system like a restart."""
        return mounted(copy)


@pytest.fixture
def disk(tmp_path, record_property) -> Iterator[Disk]:
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    try:
        run("mkfs.ext4", "-q", image)
        with mounted(image, "commit=300") as folder:
            disk = Disk(image, folder)
            yield disk
            record_property("power failures", len(disk.copies))
    except (OSError, subprocess.CalledProcessError) as error:
        if not isinstance(error, subprocess.CalledProcessError) or error.cmd[0] not in TOOLS:
            raise
        pytest.skip(f"disk images cannot be mounted here: {error}")


def one_step_config(levels: int):
    config = preset("tiny")
    stages = {}
    for name in ("encoder", "quantizer", "generator"):
        stage = getattr(config, name)
        stages[name] = replace(stage, training=replace(stage.training, max_steps=1))
    stages["quantizer"] = replace(stages["quantizer"], levels=levels)
    return replace(config, **stages)


@pytest.mark.slow
def test_a_file_that_was_not_synced_is_lost(disk):
    """The control, without which the other tests would show nothing."""
    (disk.folder / "x").write_text("not synced")
    disk.fail()
    with disk.after(disk.copies[0]) as folder:
        assert not (folder / "x").exists() or not (folder / "x").read_bytes()


@pytest.mark.slow
def test_a_model_that_is_trained_again_is_whole_or_refused_and_its_training_continues(
    disk, retrained, monkeypatch
):
    folder = Path(shutil.copytree(retrained.model, disk.folder / "model"))
    os.sync()
    old = Genius.open(folder).fingerprint
    with disk.failing_at_each_rename(monkeypatch):
        new = train(retrained, folder)
    fingerprints = []
    for copy in disk.copies:
        with disk.after(copy) as restored:
            check_parts(restored / "model")
            for name in ("queries", "candidates"):
                features = restored / "model" / "features" / name
                open_artifact(features, kind="features", check_contents=True)
            try:
                fingerprints.append(Genius.open(restored / "model").fingerprint)
            except ArtifactError:
                fingerprints.append(None)
            gc.collect()  # closes files of parts that were opened before one was refused
    assert fingerprints == sorted(fingerprints, key=[old, None, new].index)
    assert fingerprints[-1] == new
    with disk.after(disk.copies[fingerprints.index(None)]) as restored:
        assert train(retrained, restored / "model") == new
        gc.collect()


def train(retrained, folder: Path) -> str:
    """Train the model of `retrained` again with two levels, and return its fingerprint."""
    data, config = MBeir(retrained.data), one_step_config(levels=2)
    return fit(data, "small", folder, config, progress=Silent()).fingerprint


def check_parts(model: Path) -> None:
    """Compare every file of a model with its checksum."""
    for part in ("encoder", "quantizer", "generator"):
        if (model / part / MANIFEST).exists():
            open_artifact(
                model / part,
                kind=str(read_json(model / part / MANIFEST)["kind"]),
                check_contents=True,
            )


def texts(number: int) -> list[dict[str, str]]:
    names = [f"{number} {row}" for row in range(5)]
    return [{"id": name, "text": f"a kite {name}"} for name in names]


@pytest.mark.slow
def test_items_that_are_added_or_deleted_stay(disk, trained, monkeypatch):
    model = Genius.open(trained.model)
    index = Index.create(disk.folder / "index", texts(0), model=model)
    alive = {item["id"] for item in texts(0)}
    states: list[set[str]] = []
    with disk.failing_at_each_rename(monkeypatch):
        disk.copies.clear()
        for number in range(1, 4):
            for change in ("add", "delete"):
                before = set(alive)
                if change == "add":
                    index.add(texts(number))
                    alive |= {item["id"] for item in texts(number)}
                else:
                    index.delete(f"{number} 0")
                    alive.discard(f"{number} 0")
                disk.fail()
                states += [before] * (len(disk.copies) - len(states) - 1) + [set(alive)]
        states.append(states[-1])
    del index
    gc.collect()  # closes its files
    for number, (copy, ids) in enumerate(zip(disk.copies, states, strict=True)):
        allowed = [ids, *(later for later in states[number:] if later != ids)][:2]
        with disk.after(copy) as restored:
            check(restored / "index")
            restored_ids = set(Index.open(restored / "index", model=model)._snapshot.ids())
            gc.collect()
            assert restored_ids in allowed


def build(disk: Disk, trained) -> Settings:
    pool = trained.data / "cand_pool" / "global" / "mbeir_union_val_cand_pool.jsonl"
    settings = Settings(str(pool), model=str(trained.model), shards=3)
    build_cluster(disk.folder / "X", settings)
    return settings


@pytest.mark.slow
def test_a_cluster_is_whole_or_missing_and_its_build_can_continue(disk, trained, monkeypatch):
    with disk.failing_at_each_rename(monkeypatch):
        settings = build(disk, trained)
    items = read_cluster(disk.folder / "X").items
    restored_items: list[int | None] = []
    for copy in disk.copies:
        with disk.after(copy) as restored:
            shards = [path.parent for path in (restored / "X").glob("shards/*/index.json")]
            total = sum(check(shard).items for shard in shards)
            try:
                restored_items.append(read_cluster(restored / "X").items)
            except ArtifactMissing:
                restored_items.append(None)
            else:
                assert (len(shards), total) == (3, items)
    assert set(restored_items) == {None, items}
    assert restored_items == sorted(restored_items, key=[None, items].index)
    last_unfinished = disk.copies[restored_items.index(items) - 1]
    with disk.after(last_unfinished) as restored:
        assert build_cluster(restored / "X", settings).items == items
        assert sum(check(shard).items for shard in (restored / "X" / "shards").iterdir()) == items


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        test_a_model_that_is_trained_again_is_whole_or_refused_and_its_training_continues,
        test_items_that_are_added_or_deleted_stay,
        test_a_cluster_is_whole_or_missing_and_its_build_can_continue,
    ],
)
def test_without_syncs_each_test_fails(check, disk, trained, monkeypatch):
    """The control of the tests above."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    with pytest.raises((ArtifactError, AssertionError, BadData, OSError)):
        check(disk, trained, monkeypatch)
