"""An index as others get it: whole, of one moment, without what was deleted and without a place of this machine."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from genius_search.artifact import file_fingerprint
from genius_search.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.index.items import ITEMS_FILE, Item
from genius_search.index.publish import check_index, save_index
from genius_search.index.segment_writer import write_manifest
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import IndexManifest, ItemArrays, StoredEmbeddings, read_manifest
from genius_search.index.verify import _check_items, verify
from genius_search.index.writer import one_writer
from genius_search.records import Modality

MODEL = "/srv/somebody/models/secret"


def given(start: int, count: int, *, stored: StoredEmbeddings = "fused") -> tuple[list[Item], ItemArrays]:
    """Texts that say their number, each with a field and a stamp."""
    numbers = np.arange(start, start + count)
    items = [
        Item(f"item {number}", Modality.TEXT, f"words {number}", source=f'{{"price": {number}}}', stamp="s")
        for number in numbers
    ]
    embeddings = np.eye(8, dtype=np.float16)[numbers % 8] if stored != "none" else None
    codes = np.stack([numbers % 2, numbers % 3, numbers], axis=1).astype(np.int16)
    return items, ItemArrays(codes, np.ones(count, dtype=np.float16), embeddings, stored)


def make(folder: Path, *, count: int = 40) -> Path:
    with one_writer(folder) as writer:
        writer.create(
            IndexManifest(model=MODEL, model_fingerprint="f" * 64, embeddings="fused", embedding_bits=8),
            *given(0, count),
        )
    return folder


@pytest.fixture
def index(tmp_path) -> Path:
    """Two segments, with deleted items in one."""
    folder = make(tmp_path / "index")
    with one_writer(folder) as writer:
        writer.add(*given(40, 5))
        writer.delete(["item 3", "item 7"])
    return folder


def contents(folder: Path) -> dict[str, tuple[Item, tuple[int, ...]]]:
    """Items that are alive, each with its ID."""
    found = {}
    for segment in Snapshot.open(folder).segments:
        table = segment.table
        codes = np.empty((table.num_items, table.num_levels), dtype=np.int16)
        codes[table.items] = np.repeat(table.ids, np.diff(table.bucket_starts), axis=0)
        for row, item in enumerate(segment.items.all()):
            if row not in segment.dead:
                found[item.id] = (item, tuple(codes[row].tolist()))
    return found


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_saved_index_has_the_same_items_and_ids_and_passes_as_pulled(index, tmp_path):
    saved = save_index(index, tmp_path / "saved")
    assert contents(saved) == contents(index)
    assert len(contents(saved)) == 43
    check_index(saved, read_all=True)
    check_index(saved)
    assert verify(saved).items == 43


def test_what_was_deleted_is_in_no_file_of_what_is_published(index, tmp_path):
    saved = save_index(index, tmp_path / "saved")
    assert b"words 12" in b"".join(file.read_bytes() for file in saved.rglob("*.sqlite"))
    for file in saved.rglob("*"):
        assert not file.is_file() or b"words 7" not in file.read_bytes()
    assert verify(saved).deleted == 0


def test_only_what_the_index_consists_of_is_published(index, tmp_path):
    with one_writer(index) as writer:
        writer.compact()
    for other in (".work/features/x.npy", "notes.txt", "segments/notes.txt", "deleted/x.npy"):
        (index / other).parent.mkdir(parents=True, exist_ok=True)
        (index / other).write_text("mine")
    saved = save_index(index, tmp_path / "saved")
    (segment,) = read_manifest(index).segments
    inside = {f"segments/{segment.name}/{name}" for name in names(index / "segments" / segment.name)}
    assert names(saved) == {"README.md", "index.json", *inside}
    for name in inside:
        assert file_fingerprint(saved / name) == file_fingerprint(index / name)


@pytest.mark.parametrize("model", [None, "me/model"])
def test_the_place_of_the_model_is_replaced_by_its_name_or_by_none(index, tmp_path, model):
    saved = save_index(index, tmp_path / "saved", model=model)
    facts = [one.replace(generation=0, segments=()) for one in (read_manifest(saved), read_manifest(index))]
    assert facts[0] == facts[1].replace(model=model or "")
    for file in saved.rglob("*"):
        assert not file.is_file() or b"somebody" not in file.read_bytes()
    assert read_manifest(index).model == MODEL


def test_the_card_says_what_goes_out(index, tmp_path):
    card = (save_index(index, tmp_path / "saved", name="me/some") / "README.md").read_text()
    assert "| items: text | 43 |" in card
    assert (
        "| holds | codes and item ids; texts of the items; their other fields, as JSON; "
        "an embedding of each item |" in card
    )
    bare = tmp_path / "bare"
    with one_writer(bare) as writer:
        items, arrays = given(0, 3, stored="none")
        pictures = [Item(item.id, Modality.IMAGE, None, "a.png") for item in items]
        writer.create(
            IndexManifest(model=MODEL, model_fingerprint="f" * 64, embeddings="none"), pictures, arrays
        )
    card = (save_index(bare, tmp_path / "second") / "README.md").read_text()
    assert "| holds | codes and item ids |" in card


def with_picture(folder: Path, path: str) -> Path:
    items, arrays = given(0, 3)
    items[1] = items[1]._replace(modality=Modality.IMAGE_TEXT, image=path)
    with one_writer(folder) as writer:
        writer.create(IndexManifest(model="", model_fingerprint="f" * 64, embeddings="fused"), items, arrays)
    return folder


@pytest.mark.parametrize("path", ["/elsewhere/x.png", "../x.png", "pictures/../../x.png", "pictures/ab/x"])
def test_no_path_of_a_machine_leaves_it_and_none_is_accepted(tmp_path, path):
    index = with_picture(tmp_path / "index", path)
    with pytest.raises(ArtifactMismatch, match="on the machine that published it"):
        check_index(index, read_all=True)
    saved = save_index(index, tmp_path / "saved")
    check_index(saved, read_all=True)
    assert [item.image for item in Snapshot.open(saved).segments[0].items.all()] == [None] * 3
    assert not [file for file in saved.rglob("*") if file.is_file() and path.encode() in file.read_bytes()]


def test_bytes_in_the_place_of_a_text_are_found(tmp_path):
    segment = Snapshot.open(make(tmp_path / "index")).segments[0]
    _check_items(segment)
    with closing(sqlite3.connect(segment.folder / ITEMS_FILE)) as database, database:
        database.execute("UPDATE items SET source = x'00ff' WHERE row = 3")
    with pytest.raises(ArtifactMismatch, match="1 items have bytes"):
        _check_items(segment)


def test_a_picture_inside_the_index_keeps_its_name(tmp_path):
    name = f"pictures/ab/{'ab' * 32}"
    saved = save_index(with_picture(tmp_path / "index", name), tmp_path / "saved")
    assert list(Snapshot.open(saved).segments[0].items.images()) == [name]


def test_an_index_that_changes_while_it_is_saved_is_saved_as_it_was_or_as_it_is(index, tmp_path, monkeypatch):
    before, copy, calls = contents(index), shutil.copyfile, []

    def disturbed(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 3:  # the writer takes away what is being copied
            with one_writer(index) as writer:
                writer.add(*given(100, 2))
                writer.compact()
        copy(source, target)

    monkeypatch.setattr("genius_search.writing.shutil.copyfile", disturbed)
    saved = save_index(index, tmp_path / "saved")
    assert len(calls) > 3
    assert contents(saved) == contents(index) != before
    assert set(contents(saved)) == {*before, "item 100", "item 101"}
    check_index(saved, read_all=True)
    assert {path.name for path in tmp_path.iterdir()} == {"index", "saved"}


def test_an_index_that_is_damaged_is_not_saved_and_nothing_is_left(index, tmp_path):
    lost = index / "segments" / read_manifest(index).segments[0].name / "ids.npy"
    lost.unlink()
    with pytest.raises(ArtifactMissing, match=r"ids\.npy is missing"):
        save_index(index, tmp_path / "saved")
    assert {path.name for path in tmp_path.iterdir()} == {"index"}


def test_an_index_without_items_can_be_published(tmp_path):
    folder = make(tmp_path / "index", count=2)
    with one_writer(folder) as writer:
        writer.delete(["item 0", "item 1"])
    saved = save_index(folder, tmp_path / "saved")
    assert names(saved) == {"README.md", "index.json"}
    check_index(saved, read_all=True)


def test_an_index_is_not_saved_over_anything_nor_from_nothing(index, tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match="there already"):
        save_index(index, tmp_path / "taken")
    with pytest.raises(ArtifactMissing, match="no index"):
        save_index(tmp_path / "taken", tmp_path / "out")
    with pytest.raises(UsageError, match="licence"):
        save_index(index, tmp_path / "out", license="the MIT licence")


def test_lists_of_deleted_items_that_others_publish_are_checked_too(index):
    """Ours have none, but what somebody uploads by hand has."""
    manifest = read_manifest(index)
    write_manifest(index, manifest.replace(model=""))
    check_index(index, read_all=True)
    (entry,) = [entry for entry in manifest.segments if entry.deleted is not None]
    place = index / "deleted" / str(entry.deleted)
    whole = place.read_bytes()
    place.write_bytes(whole[:-8] + np.array([9], dtype=np.int64).tobytes())
    check_index(index)  # as long as it was
    with pytest.raises(ArtifactMismatch, match=place.name):
        check_index(index, read_all=True)
    for damage in (lambda: place.write_bytes(whole[:-8]), place.unlink):
        damage()
        with pytest.raises(ArtifactError, match=place.name):
            check_index(index)


@pytest.mark.parametrize("model", [MODEL, "../model", "small:x", "me/model\n"])
def test_a_strangers_index_may_not_name_a_folder_here_as_its_model(index, model):
    manifest = read_manifest(index)
    write_manifest(index, manifest.replace(model=model))
    with pytest.raises(ArtifactMismatch, match="owner/name or nothing"):
        check_index(index)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "nothing", 3, None])
def test_a_strangers_index_may_only_name_segments_inside_it(index, name):
    body = json.loads((index / "index.json").read_text())
    body["segments"][0]["name"] = name
    (index / "index.json").write_text(json.dumps(body))
    with pytest.raises(ArtifactMismatch, match=r"index\.json is damaged"):
        check_index(index, read_all=True)


def test_a_segment_of_another_index_is_refused(index, tmp_path):
    other = make(tmp_path / "other", count=41)
    for folder in (index, other):
        manifest = read_manifest(folder)
        write_manifest(folder, manifest.replace(model=""))
    shutil.rmtree(index / "segments" / "000001")
    shutil.copytree(other / "segments" / "000001", index / "segments" / "000001")
    with pytest.raises(ArtifactError, match=r"000001/manifest\.json .*another index"):
        check_index(index, read_all=True)
