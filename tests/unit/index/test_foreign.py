"""Indexes of somebody else, whose checksums are right, and indexes that were damaged afterwards."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from genius_search.artifact import file_fingerprint, fingerprint_of
from genius_search.errors import ArtifactMismatch, GeniusError, UsageError
from genius_search.index import snapshot
from genius_search.index.index import Index
from genius_search.index.info import check
from genius_search.index.roots import new_root
from genius_search.index.store import Root
from genius_search.index.writer import save_table
from genius_search.search.table import IdTable
from genius_search.serve import watch

DIM, ITEMS = 8, 80
REMEDY = "create the index again"
QUERIES = np.random.default_rng(1).standard_normal((3, DIM)).astype(np.float32)


@pytest.fixture(scope="module", params=[4, 16])
def template(request, tmp_path_factory) -> Path:
    """An index of two segments with deleted items."""
    folder = tmp_path_factory.mktemp("foreign") / str(request.param)
    vectors = np.random.default_rng(0).standard_normal((ITEMS, DIM)).astype(np.float32)
    known = {"texts": ["a kite"] * ITEMS, "fields": [{"x": 1}] * ITEMS}
    index = Index.from_vectors(folder, vectors, embedding_bits=request.param, **known)
    index.add_vectors(vectors[:30] + 1, ids=[f"new {row}" for row in range(30)])
    assert index.get(4).id == "4"
    assert index.delete([3, "4", "new 5"]) == (3, [])
    return folder


@pytest.fixture
def folder(template, tmp_path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "index"))


def sign(folder: Path, **changes: object) -> None:
    """Write sizes and checksums as somebody who makes such an index does."""
    body = json.loads((folder / "index.json").read_text())
    for entry in body["segments"]:
        place = folder / "segments" / entry["name"]
        entry["files"] = {
            file.name: {"bytes": file.stat().st_size, "sha256": file_fingerprint(file)}
            for file in place.iterdir()
        }
    body |= changes
    del body["checksum"]
    (folder / "index.json").write_text(json.dumps({**body, "checksum": fingerprint_of(body)}))


def put(place: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array.reshape(-1)[place] = value
        return array

    return change


CHANGES = {
    "ids": [
        lambda a: np.concatenate([a, a], axis=1),
        lambda a: a[:, :0],
        lambda a: a.astype(np.int16) - 1,
        lambda a: a[:-1],
    ],
    "starts": [
        put(5, -1),
        put(5, 2**31 - 1),
        put(0, 0),
        lambda a: a[::-1].copy(),
        lambda a: a[:-1],
    ],
    "level_bounds": [put(1, -5), put(-1, 3), put(0, 1), put(2, 2**40), lambda a: a[:-1]],
    "bucket_starts": [put(4, -1), put(4, 2**31 - 1), put(4, 0), put(0, 1), lambda a: a[:-1]],
    "items": [
        put(0, -1),
        put(0, ITEMS),
        put(0, 2**31 - 1),
        put(slice(2), 7),
        lambda a: a.astype(np.int64),
    ],
    "code_cosines": [lambda a: a[:-1], lambda a: a.astype(np.float32)],
    "embeddings": [
        lambda a: a[:, :1],
        lambda a: a[:-1],
        lambda a: a.astype(object),
        np.asfortranarray,
    ],
    "embedding_densities": [lambda a: a[:0], lambda a: a.astype(">i2")],
    "embedding_lengths": [lambda a: a[:-1], lambda a: a.astype(np.int16)],
    "fine_codes": [lambda a: a[:-1], lambda a: a[:, :1], lambda a: a[:, :, :1], lambda a: a[0]],
    "embedding_scales": [put(3, np.nan), put(3, np.inf), lambda a: a[:-1]],
}


@pytest.mark.parametrize("name", CHANGES)
def test_arrays_that_do_not_fit_are_refused_though_their_checksums_are_right(
    folder, template, name
):
    file = folder / "segments" / "000001" / f"{name}.npy"
    if not file.exists():
        pytest.skip("16 bits have no scales or lengths")
    original = file.read_bytes()
    size = original.index(b"'shape': (") + 10
    wrong = [b"", original[:50], original[:size] + b"9" * 15 + original[size + 15 :]]
    for change in CHANGES[name]:
        np.save(file, change(np.load(file)))
        wrong.append(file.read_bytes())
        file.write_bytes(original)
    for contents in wrong:
        file.write_bytes(contents)
        sign(folder)
        for how in (Index.open, check):
            with pytest.raises(ArtifactMismatch, match=f"000001.*{REMEDY}"):
                how(folder)


@pytest.mark.parametrize("is_outside", [False, True])
def test_ids_of_fewer_levels_than_the_model_has_are_refused(folder, tmp_path, is_outside):
    for place in (folder / "segments").iterdir():
        count = len(np.load(place / "items.npy"))
        save_table(IdTable.build(np.zeros((count, 1), dtype=np.int16), np.zeros(count)), place)
    model = "./model"
    if is_outside:
        model = str(shutil.move(folder / "model", tmp_path / "model"))
    sign(folder, model=model)
    for how in (Index.open, check):
        with pytest.raises(ArtifactMismatch, match="other codes or embeddings than the model"):
            how(folder)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE items SET row = row + 1000",
        "UPDATE items SET row = -1 WHERE row = 0",
        "DELETE FROM items WHERE row = 9",
        "UPDATE items SET modality = 'smell'",
        "UPDATE items SET text = CAST(x'ff' AS TEXT)",
        "DELETE FROM modalities",
        "UPDATE fields SET row = row || 'x'",
        "UPDATE field_names SET path = '['",
        "INSERT INTO words(rowid, text) VALUES (1000000000000, 'zebra')",
    ],
)
def test_items_that_do_not_fit_are_refused(folder, statement):
    with sqlite3.connect(folder / "segments" / "000001" / "items.sqlite") as database:
        database.execute(statement)
    database.close()
    sign(folder)
    searches = [{"vector": QUERIES[0]}, {"where": ["x=1"]}, {"match": "zebra"}]
    with pytest.raises(ArtifactMismatch):
        _ = [Index.open(folder).search(**search, k=ITEMS) for search in searches]


def spoil(folder: Path, seeds: range) -> None:
    """Change files at random and search: nothing but errors of ours, or hits that exist."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".npy", ".sqlite"))
    for seed in seeds:
        random = np.random.default_rng(seed)
        file = files[seed % len(files)]
        original = file.read_bytes()
        contents = bytearray(original)
        start = 0 if seed % 3 else len(contents) // 2
        for place in random.integers(start, len(contents), 1 + seed % 5):
            contents[place] = random.integers(256)
        file.write_bytes(contents)
        sign(folder)
        with contextlib.suppress(GeniusError):
            for hits in Index.open(folder).search_vectors(QUERIES, k=ITEMS):
                if not file.name.startswith("item_id"):  # which says what an item's id is
                    assert all(hit.id.removeprefix("new ").isdigit() for hit in hits)
                assert np.isfinite([hit.score for hit in hits]).all()
        file.write_bytes(original)


@pytest.mark.parametrize("changes", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_no_change_of_a_file_ends_the_process_or_is_answered_with_what_does_not_exist(
    folder, changes
):
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=spoil, args=(folder, range(changes)))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        ".work",
        "tmp",
        "pictures",
        "pictures/ab",
        "deleted/x",
        "segments/000009",
        "model/x",
        "learned",
    ],
)
def test_no_link_in_an_index_is_followed(folder, tmp_path, name):
    home = tmp_path / "home"
    (home / "letters").mkdir(parents=True)
    (home / "letters" / "a.npy").write_text("precious")
    index = Index.open(folder)
    link = folder / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    if name == "segments/000009":
        os.mkfifo(link)
    else:
        link.symlink_to(home / "letters" / "a.npy" if name == ".lock" else home)
    for change in (
        lambda: index.compact(min_deleted=0),
        lambda: index.delete("7"),
        lambda: check(folder),
        lambda: Index.open(folder),
    ):
        with pytest.raises(ArtifactMismatch, match="symbolic link"):
            change()
    assert [path.name for path in home.rglob("*")] == ["letters", "a.npy"]
    assert (home / "letters" / "a.npy").read_text() == "precious"


def test_a_folder_in_the_place_of_the_lock_and_a_file_in_that_of_a_folder_are_no_accident(folder):
    (folder / ".lock").unlink()
    (folder / ".lock").mkdir()
    with pytest.raises(UsageError, match=r"\.lock cannot be used"):
        Index.open(folder).delete("7")
    (folder / ".lock").rmdir()
    (folder / "tmp").write_text("a file")
    Index.open(folder).compact(min_deleted=0)
    assert check(folder).segments == 1


def test_an_index_follows_so_many_folders(folder, tmp_path):
    roots = [{"folder": f"/nowhere/{number}", "name": f"{number}"} for number in range(1_001)]
    sign(folder, roots=roots)
    with pytest.raises(ArtifactMismatch, match="at most 1000"):
        Index.open(folder)
    with pytest.raises(UsageError, match="at most 1,000"):
        new_root(tmp_path, [Root(**root) for root in roots[1:]], [], captions=True, exclude=())


def test_a_file_of_holes_is_refused_before_it_is_read(folder):
    segments = json.loads((folder / "index.json").read_text())["segments"]
    segments[0]["files"]["items.sqlite"]["bytes"] = 1 << 40
    sign(folder, segments=segments)
    os.truncate(folder / "segments" / "000001" / "items.sqlite", 1 << 40)
    for how in (Index.open, check):
        with pytest.raises(ArtifactMismatch, match=f"all holes.*{REMEDY}"):
            how(folder)


def test_a_model_outside_the_index_is_not_its_own(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "home")
    sign(folder, model="./model/../../home")
    with pytest.raises(GeniusError):
        Index.open(folder).refit()
    assert (tmp_path / "home" / "model.json").exists()


def answers(folder: Path) -> list[object]:
    index = Index.open(folder)
    return [list(hits) for hits in index.search_vectors(QUERIES, k=20)]


@pytest.mark.parametrize("flips", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_what_is_read_is_never_answered_from(folder, flips):
    random, expected = np.random.default_rng(0), answers(folder)
    for file in sorted(
        file for file in folder.rglob("*") if file.is_file() and file.stat().st_size
    ):
        original = file.read_bytes()
        for place in random.integers(len(original), size=flips):
            flipped = bytearray(original)
            flipped[place] ^= 1 << int(random.integers(8))
            file.write_bytes(flipped)
            with contextlib.suppress(GeniusError):
                assert answers(folder) == expected
        file.write_bytes(original)


def flip_embeddings(folder: Path) -> None:
    with (folder / "segments" / "000001" / "embeddings.npy").open("r+b") as file:
        file.seek(-3, 2)
        last = file.read(1)
        file.seek(-3, 2)
        file.write(bytes([last[0] ^ 1]))


def test_an_index_that_is_too_large_to_be_compared_first_is_compared_by_its_watch(
    folder, monkeypatch, caplog
):
    monkeypatch.setattr(snapshot, "MAX_BYTES_CHECKED_FIRST", 0.0)
    monkeypatch.setattr(watch, "MIN_PAUSE_SECONDS", 0.02)
    flip_embeddings(folder)
    index = Index.open(folder)
    assert index.search(vector=QUERIES[0])
    file_watch = watch.FileWatch(index)
    for _ in range(500):
        if file_watch.damage:
            break
        time.sleep(0.02)
    file_watch.end()
    assert "embeddings.npy" in caplog.text
    for _ in range(2):
        with pytest.raises(ArtifactMismatch, match=r"embeddings\.npy have changed"):
            index.search(vector=QUERIES[0])


def test_two_states_that_share_a_segment_are_compared_at_the_same_time(folder, monkeypatch):
    before = Index.open(folder)._snapshot
    after = snapshot.Snapshot.load(folder, before.manifest, before)
    fingerprint = snapshot.file_fingerprint

    def meanwhile(path: Path) -> str:
        monkeypatch.setattr(snapshot, "file_fingerprint", fingerprint)
        after.check_files()
        return fingerprint(path)

    monkeypatch.setattr(snapshot, "file_fingerprint", meanwhile)
    before.check_files()
    assert not before.segments[0].unchecked


def test_a_change_keeps_the_segments_that_are_open_and_closes_those_that_are_gone(folder):
    index, other = Index.open(folder), Index.open(folder)
    index.search(vector=QUERIES[0])
    table = index._snapshot.segments[0].table
    other.delete("9")
    assert index._snapshot.segments[0].table is table
    assert not index._snapshot.segments[0].unchecked
    del table
    other.compact(min_deleted=0)
    assert index.search(vector=QUERIES[0])
    assert f"{folder}/segments/000001" not in Path("/proc/self/maps").read_text()
