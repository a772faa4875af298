from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from genius_search.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.index.info import CheckReport, check
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import CURRENT, IndexManifest
from genius_search.index.writer import ItemArrays, open_writer, write_manifest
from genius_search.records import Modality

FACTS = IndexManifest(
    identity="0" * 32,
    model="/somewhere/model",
    model_fingerprint="f" * 64,
    embeddings="raw",
    embedding_bits=16,
)


def make_items(seed: int, count: int) -> tuple[list[Item], ItemArrays]:
    random = np.random.default_rng(seed)
    items = [Item(f"{seed}/{number}", Modality.TEXT, f"text {number}") for number in range(count)]
    return items, ItemArrays(
        random.integers(0, 4, (count, 3)).astype(np.int16),
        random.random(count).astype(np.float16),
        random.standard_normal((count, 5)).astype(np.float16),
    )


def make(folder: Path, seed: int) -> Path:
    with open_writer(folder) as writer:
        writer.begin(FACTS)
        writer.add([make_items(seed, 60)])
        writer.add([make_items(seed + 1, 20)])
        writer.delete([f"{seed}/1", f"{seed}/7", f"{seed + 1}/0"])
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An index of two segments with deleted items in both; nobody may change it."""
    return make(tmp_path_factory.mktemp("whole") / "index", 1)


@pytest.fixture
def index(whole, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "index"))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")


def refused(index: Path, file: Path, how: type[ArtifactError] = ArtifactMismatch) -> None:
    """The index is refused by a message that names the file and says what to do."""
    with pytest.raises(how) as error:
        check(index)
    message = str(error.value)
    assert file.name in message
    assert str(file.parent) in message
    assert "create the index again" in message


def test_the_check_of_an_intact_index_reports_its_size(index):
    assert check(index) == CheckReport(segments=2, items=77, deleted=3)


def test_a_flipped_bit_in_any_file_is_found(index):
    random = np.random.default_rng(0)
    assert len(files(index)) == 1 + 2 * 10
    for file in files(index):
        contents = file.read_bytes()
        for place in {
            0,
            len(contents) // 2,
            int(random.integers(len(contents))),
            len(contents) - 2,
        }:
            flipped = bytearray(contents)
            flipped[place] ^= 1 << int(random.integers(8))
            file.write_bytes(flipped)
            refused(index, file)
        file.write_bytes(contents)
    check(index)


def test_a_truncated_or_missing_file_is_found_when_the_index_is_opened(index):
    for file in files(index):
        contents = file.read_bytes()
        for length in (0, len(contents) // 2, len(contents) - 1):
            file.write_bytes(contents[:length])
            if file.name == CURRENT and length == len(contents) - 1:
                continue  # the line's end
            with pytest.raises(ArtifactMismatch, match=file.name):
                Snapshot.open(index)
            refused(index, file)
        if file.name != CURRENT:
            file.unlink()
            with pytest.raises(ArtifactMissing, match=file.name):
                Snapshot.open(index)
            refused(index, file, ArtifactMissing)
        file.write_bytes(contents)
    check(index)


def test_an_index_that_changes_while_it_is_checked_is_checked_again(index, monkeypatch):
    load = Snapshot.load

    def meanwhile(*_: object) -> None:
        monkeypatch.setattr(Snapshot, "load", load)
        with open_writer(index) as writer:
            writer.compact(min_deleted=0)
        raise OSError

    monkeypatch.setattr(Snapshot, "load", meanwhile)
    assert check(index).segments == 1


def test_the_check_of_an_index_that_keeps_changing_ends(index, monkeypatch):
    attempts = []

    def meanwhile(folder: Path, manifest: IndexManifest) -> None:
        attempts.append(0)
        write_manifest(folder, manifest.replace(generation=manifest.generation + 1))
        raise OSError

    monkeypatch.setattr(Snapshot, "load", meanwhile)
    with pytest.raises(UsageError, match="changed 10 times while it was read"):
        check(index)
    assert len(attempts) == 10


def flip(file: Path) -> bytes:
    """Flip a bit in the middle of a file; returns what was there."""
    contents = file.read_bytes()
    flipped = bytearray(contents)
    flipped[len(contents) * 2 // 3] ^= 4
    file.write_bytes(flipped)
    return contents


def merge(index: Path, count: int | None) -> None:
    """Compact, or add so many that all are merged."""
    with open_writer(index) as writer:
        if count is None:
            writer.compact(min_deleted=0)
        else:
            writer.add([make_items(9, count)])


def test_damage_is_not_merged_into_a_new_segment(index):
    for file in files(index):
        if file.name == CURRENT:
            continue
        contents = flip(file)
        before = files(index)
        for count in (None, 50):
            with pytest.raises(ArtifactError, match="create the index again") as error:
                merge(index, count)
            assert file.name in str(error.value)
        assert files(index) == before
        file.write_bytes(contents)
    with open_writer(index) as writer:
        writer.compact(min_deleted=0)
    assert check(index).items == 77


@pytest.mark.parametrize("name", ["index.json", "segments/000001/ids.npy"])
def test_a_folder_in_the_place_of_a_file_is_refused_when_the_index_is_opened(index, name):
    (index / name).unlink()
    (index / name).mkdir()
    for opened in (Snapshot.open, check):
        with pytest.raises(ArtifactError, match=Path(name).name):
            opened(index)
