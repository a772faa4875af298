"""An index that lives: items come, change and go, and every open handle sees it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from genius.config import SearchConfig
from genius.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius.index import Added, Index
from genius.model import Genius
from genius.search.live import Deleted, one_writer
from genius.search.manifest import read_manifest, write_manifest

WIDE = SearchConfig(beam=500)
COLOURS = ("red", "green", "blue", "white", "black", "yellow")


@pytest.fixture(scope="module")
def model(trained) -> Genius:
    return Genius.open(trained.model)


@pytest.fixture
def pool(tmp_path) -> Path:
    """Six texts and two pictures."""
    folder = tmp_path / "pool"
    folder.mkdir()
    for colour in COLOURS:
        (folder / f"{colour}.txt").write_text(f"a {colour} kite")
    for colour in COLOURS[:2]:
        Image.new("RGB", (32, 32), colour).save(folder / f"{colour} square.png")
    return folder


ALL = {*(f"{colour}.txt" for colour in COLOURS), "red square.png", "green square.png"}


@pytest.fixture
def index(model, pool, tmp_path) -> Index:
    made, added = Index.create(tmp_path / "index", model=model, pool=pool, embeddings="fused")
    assert added == Added(8, 0, 0, ())
    return made


def everything(index: Index) -> set[str]:
    return {hit.item_id for hit in index.search("a kite", k=100, config=WIDE)}


def later(file: Path) -> None:
    """As if it had been written a second after it was."""
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def test_a_deleted_item_is_not_found_any_more_and_ids_that_are_not_there_are_returned(index):
    assert index.delete(["red.txt", "nobody", "red square.png", "red.txt"]) == Deleted(2, ["nobody"])
    assert everything(index) == ALL - {"red.txt", "red square.png"}
    for rerank in ("codes", "embeddings"):
        hits = index.search("a red kite", k=100, config=SearchConfig(beam=500, rerank=rerank))
        assert {hit.item_id for hit in hits} == ALL - {"red.txt", "red square.png"}
    info = index.info()
    assert (info.items, info.by_modality) == (6, {"text": 5, "image": 1})
    assert info.bytes_per_item["deleted"] > 0
    assert info.generation == 2
    assert index.delete(["red.txt"]) == Deleted(0, ["red.txt"])
    assert index.info() == info


def test_a_deleted_item_can_be_added_again(index, pool):
    assert index.delete("red.txt") == Deleted(1, [])
    assert everything(index) == ALL - {"red.txt"}
    assert index.add(pool) == Added(1, 0, 7, ())
    assert everything(index) == ALL


def test_what_has_not_changed_is_passed_over(index, pool):
    before = index.info()
    assert index.add(pool) == Added(0, 0, 8, ())
    assert index.info() == before
    (pool / "new.txt").write_text("a new kite")
    assert index.add(pool) == Added(1, 0, 8, ())
    assert everything(index) == {*ALL, "new.txt"}


def test_a_text_that_changed_is_indexed_anew(index, pool):
    (pool / "red.txt").write_text("a boat")
    assert index.add(pool) == Added(1, 1, 7, ())
    texts = {hit.item_id: hit.text for hit in index.search("a kite", k=100, config=WIDE)}
    assert texts["red.txt"] == "a boat"
    assert set(texts) == ALL
    assert index.add(pool) == Added(0, 0, 8, ())


def test_a_picture_that_changed_in_its_place_is_indexed_anew(index, pool):
    def codes() -> tuple[int, ...]:
        found = index.search("a square", modality="image", k=100, config=WIDE)
        return next(hit.codes for hit in found if hit.item_id == "red square.png")

    before = codes()
    Image.effect_noise((32, 32), 90.0).convert("RGB").save(pool / "red square.png")
    later(pool / "red square.png")
    assert index.add(pool) == Added(1, 1, 7, ())
    assert codes() != before


def test_fields_that_changed_are_noticed_though_text_and_picture_did_not(index, pool):
    (pool / "red square.json").write_text(json.dumps({"price": 3}))
    assert index.add(pool) == Added(1, 1, 7, ())
    assert [hit.item_id for hit in index.search("a kite", where=["price=3"])] == ["red square.png"]


def test_an_emptied_index_finds_nothing_and_can_be_added_to_again(index, model, pool):
    assert index.delete(ALL) == Deleted(8, [])
    for opened in (index, Index.open(index.folder, model=model)):
        assert opened.search("a kite") == []
        assert opened.search("a kite", modality="image", where=["price<3"], match="kite") == []
        info = opened.info()
        assert (info.items, info.by_modality, info.distinct_ids, info.collision_rate) == (0, {}, 0, 0.0)
        assert opened.verify().items == 0
        opened.compact()
        assert "0 items" in repr(opened)
    assert index.add(pool) == Added(8, 0, 0, ())
    assert everything(index) == ALL
    assert index.verify().items == 8


def test_compaction_gives_back_room_and_changes_no_answer(index, pool):
    for number in range(3):
        (pool / f"{number}.txt").write_text(f"kite number {number}")
        index.add(pool)
    index.delete(["red.txt", "1.txt"])
    asked = {"k": 100, "config": SearchConfig(beam=500, rerank="embeddings")}
    before = index.search("a kite", **asked)
    assert index.info().bytes_per_item["deleted"] > 0
    index.compact()
    info = index.info()
    assert info.bytes_per_item["deleted"] == 0
    assert [(one.items, one.deleted) for one in info.segments] == [(9, 0)]
    after = index.search("a kite", **asked)
    assert [(hit.item_id, hit.codes, hit.text) for hit in after] == [
        (hit.item_id, hit.codes, hit.text) for hit in before
    ]
    assert [hit.score for hit in after] == pytest.approx([hit.score for hit in before], abs=1e-5)
    assert index.verify().deleted == 0
    generation = info.generation
    index.compact()  # nothing to do
    assert index.info().generation == generation


def test_a_file_that_was_damaged_since_is_named(index):
    found = index.verify()
    assert (found.items, found.segments, found.deleted) == (8, 1, 0)
    damaged = index.folder / "segments" / "000001" / "embeddings.npy"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ArtifactMismatch, match=r"000001.*embeddings\.npy"):
        index.verify()
    damaged.unlink()
    with pytest.raises(ArtifactMissing, match=r"000001.*embeddings\.npy"):
        index.verify()


def test_every_open_handle_sees_what_another_did(index, model, pool):
    other = Index.open(index.folder, model=model)
    other.delete(["red.txt"])
    assert everything(index) == ALL - {"red.txt"}
    (pool / "new.txt").write_text("a new kite")
    index.add(pool)
    assert everything(other) == {*ALL, "new.txt"}
    other.compact()
    assert index.info() == other.info()
    assert index.info().segments[0].items == 9
    assert index.delete(["new.txt"]) == Deleted(1, [])
    assert other.search("a kite", match="new") == []


def test_while_somebody_else_writes_one_can_search_but_not_change(index, pool):
    (pool / "new.txt").write_text("a new kite")
    with one_writer(index.folder):
        for change in (lambda: index.add(pool), lambda: index.delete(["red.txt"]), index.compact):
            with pytest.raises(UsageError, match="being changed by another process"):
                change()
        assert everything(index) == ALL
    assert index.delete(["red.txt"], wait_seconds=1.0) == Deleted(1, [])
    assert index.add(pool, wait_seconds=1.0) == Added(2, 0, 7, ())


def test_an_index_that_was_made_anew_with_another_model_meanwhile_is_not_searched(index, model, pool):
    made, _ = Index.create(index.folder.parent / "second", model=model, pool=pool)
    manifest = read_manifest(made.folder)
    of_another = manifest.facts._replace(model_fingerprint="0" * 64)
    write_manifest(made.folder, manifest._replace(facts=of_another))
    shutil.rmtree(index.folder)
    made.folder.rename(index.folder)
    with pytest.raises(ArtifactMismatch, match="made anew with another model"):
        index.search("a kite")
