"""Power failures: what a disk image holds at each step, without anything that was not synced."""

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
    """Mount an image outside pytest's folders: if a killed run leaves it there, they can still be removed."""
    place = Path(tempfile.mkdtemp(prefix="genius-disk-"))
    try:
        run("mount", "-o", ",".join(("loop", *options)), image, place)
        try:
            yield place
        finally:
            run("umount", place)
    finally:
        place.rmdir()


class Disk:
    """A disk of which copies are taken as a power failure would leave it."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.image = image
        self.folder = folder
        self.copies: list[Path] = []

    def fail(self) -> None:
        """Keep what would be there after a power failure now."""
        self.copies.append(self.image.with_name(f"{len(self.copies)}.img"))
        run("cp", "--sparse=always", self.image, self.copies[-1])

    @contextmanager
    def failing_at_each_rename(self, monkeypatch) -> Iterator[None]:
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
        """Mount a copy, which repairs the file system as a restart would."""
        return mounted(copy)


@pytest.fixture
def disk(tmp_path, record_property) -> Iterator[Disk]:
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    try:
        run("mkfs.ext4", "-q", image)
        with mounted(image, "commit=300") as folder:
            made = Disk(image, folder)
            yield made
            record_property("power failures", len(made.copies))
    except (OSError, subprocess.CalledProcessError) as error:
        if not isinstance(error, subprocess.CalledProcessError) or error.cmd[0] not in TOOLS:
            raise
        pytest.skip(f"disk images cannot be mounted here: {error}")


def quick(levels: int):
    config = preset("tiny")
    parts = {
        name: replace(
            getattr(config, name), training=replace(getattr(config, name).training, max_steps=1)
        )
        for name in ("encoder", "quantizer", "generator")
    }
    return replace(config, **{**parts, "quantizer": replace(parts["quantizer"], levels=levels)})


@pytest.mark.slow
def test_a_file_that_was_not_synced_is_lost(disk):
    """The control: otherwise the other tests show nothing."""
    (disk.folder / "x").write_text("not synced")
    disk.fail()
    with disk.after(disk.copies[0]) as found:
        assert not (found / "x").exists() or not (found / "x").read_bytes()


@pytest.mark.slow
def test_a_model_that_is_trained_again_is_whole_or_refused_and_its_training_goes_on(
    disk, retrained, monkeypatch
):
    folder = Path(shutil.copytree(retrained.model, disk.folder / "model"))
    os.sync()
    old = Genius.open(folder).fingerprint
    with disk.failing_at_each_rename(monkeypatch):
        new = fit(MBeir(retrained.data), "small", folder, quick(2), progress=Silent()).fingerprint
    found = []
    for copy in disk.copies:
        with disk.after(copy) as place:
            check_parts(place / "model")
            for name in ("queries", "candidates"):
                open_artifact(
                    place / "model" / "features" / name, kind="features", check_contents=True
                )
            try:
                found.append(Genius.open(place / "model").fingerprint)
            except ArtifactError:
                found.append(None)
            gc.collect()  # of a model that is refused, other parts are mapped still
    assert found == sorted(found, key=[old, None, new].index)
    assert found[-1] == new
    with disk.after(disk.copies[found.index(None)]) as place:
        again = fit(
            MBeir(retrained.data), "small", place / "model", quick(2), progress=Silent()
        ).fingerprint
        assert again == new
        gc.collect()


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
    return [{"id": f"{number} {place}", "text": f"a kite {number} {place}"} for place in range(5)]


@pytest.mark.slow
def test_items_that_are_added_or_deleted_stay(disk, trained, monkeypatch):
    model = Genius.open(trained.model)
    index = Index.create(disk.folder / "index", texts(0), model=model)
    alive = {one["id"] for one in texts(0)}
    states: list[set[str]] = []
    with disk.failing_at_each_rename(monkeypatch):
        disk.copies.clear()
        for number in range(1, 4):
            for change in ("add", "delete"):
                before = set(alive)
                if change == "add":
                    index.add(texts(number))
                    alive |= {one["id"] for one in texts(number)}
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
        with disk.after(copy) as place:
            check(place / "index")
            found = set(Index.open(place / "index", model=model)._snapshot.ids())
            gc.collect()
            assert found in allowed


def build(disk: Disk, trained) -> Settings:
    pool = trained.data / "cand_pool" / "global" / "mbeir_union_val_cand_pool.jsonl"
    settings = Settings(str(pool), model=str(trained.model), shards=3)
    build_cluster(disk.folder / "X", settings)
    return settings


@pytest.mark.slow
def test_a_cluster_is_there_whole_or_not_at_all_and_its_build_can_go_on(disk, trained, monkeypatch):
    with disk.failing_at_each_rename(monkeypatch):
        settings = build(disk, trained)
    items = read_cluster(disk.folder / "X").items
    found: list[int | None] = []
    for copy in disk.copies:
        with disk.after(copy) as place:
            shards = [one.parent for one in (place / "X").glob("shards/*/index.json")]
            total = sum(check(one).items for one in shards)
            try:
                found.append(read_cluster(place / "X").items)
            except ArtifactMissing:
                found.append(None)
            else:
                assert (len(shards), total) == (3, items)
    assert set(found) == {None, items}
    assert found == sorted(found, key=[None, items].index)
    last = disk.copies[found.index(items) - 1]
    with disk.after(last) as place:
        assert build_cluster(place / "X", settings).items == items
        assert sum(check(one).items for one in (place / "X" / "shards").iterdir()) == items


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        test_a_model_that_is_trained_again_is_whole_or_refused_and_its_training_goes_on,
        test_items_that_are_added_or_deleted_stay,
        test_a_cluster_is_there_whole_or_not_at_all_and_its_build_can_go_on,
    ],
)
def test_what_is_not_synced_is_lost(check, disk, trained, monkeypatch):
    """The control of each test above."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    with pytest.raises((ArtifactError, AssertionError, BadData, OSError)):
        check(disk, trained, monkeypatch)
