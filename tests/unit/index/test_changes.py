"""An index that lives: items come, change and go, and every open handle sees it."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from genius_search.config import PAPER_SEARCH
from genius_search.encoders.rows import encode_rows
from genius_search.index import build, source
from genius_search.index.build import ChangeSummary
from genius_search.index.index import Index
from genius_search.index.snapshot import Snapshot
from genius_search.index.writer import Deleted

WIDE = dataclasses.replace(PAPER_SEARCH, beam=500)
COLOURS = ("red", "green", "blue", "white", "black", "yellow")


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
    made = Index.create(tmp_path / "index", pool, model=model, embeddings="fused")
    added = made.last_change
    assert added == ChangeSummary(8, 0, 0)
    return made


def everything(index: Index) -> set[str]:
    return {hit.id for hit in index.search("a kite", k=100, config=WIDE)}


def later(file: Path) -> None:
    """As if it had been written a second after it was."""
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def test_a_deleted_item_is_not_found_any_more_and_ids_that_are_not_there_are_returned(index):
    assert index.delete(["red.txt", "nobody", "red square.png", "red.txt"]) == Deleted(
        2, ["nobody"]
    )
    assert everything(index) == ALL - {"red.txt", "red square.png"}
    for rerank in ("codes", "embeddings"):
        hits = index.search(
            "a red kite", k=100, config=dataclasses.replace(PAPER_SEARCH, beam=500, rerank=rerank)
        )
        assert {hit.id for hit in hits} == ALL - {"red.txt", "red square.png"}
    info = index.info()
    assert (info.items, info.by_modality) == (6, {"text": 5, "image": 1})
    assert (info.segments, info.deleted) == (1, 2)
    assert info.generation == 2
    assert index.delete(["red.txt"]) == Deleted(0, ["red.txt"])
    assert index.info() == info


def test_what_changed_is_indexed_anew_and_what_did_not_is_passed_over(index, pool):
    before = index.info()
    assert index.add(pool) == ChangeSummary(0, 0, 8)
    assert index.info() == before
    codes = {hit.id: hit.codes for hit in index.search("a kite", k=100, config=WIDE)}
    (pool / "new.txt").write_text("a new kite")
    (pool / "red.txt").write_text("a boat")
    (pool / "green square.json").write_text(json.dumps({"price": 3}))
    Image.effect_noise((32, 32), 90.0).convert("RGB").save(pool / "red square.png")
    later(pool / "red square.png")
    assert index.add(pool) == ChangeSummary(
        4, 3, 5, reused=1
    )  # of one picture, only a field changed
    hits = {hit.id: hit for hit in index.search("a kite", k=100, config=WIDE)}
    assert set(hits) == {*ALL, "new.txt"}
    assert hits["red.txt"].text == "a boat"
    assert hits["red square.png"].codes != codes["red square.png"]
    assert [hit.id for hit in index.search("a kite", where=["price=3"])] == ["green square.png"]
    assert index.add(pool) == ChangeSummary(0, 0, 9)


def test_an_emptied_index_finds_nothing_and_can_be_added_to_again(index, model, pool):
    assert index.delete(ALL) == Deleted(8, [])
    for opened in (index, Index.open(index.folder, model=model)):
        assert opened.search("a kite") == []
        assert opened.search("a kite", modality="image", where=["price<3"], match="kite") == []
        info = opened.info()
        assert (info.items, info.by_modality, info.distinct_ids, info.collision_rate) == (
            0,
            {},
            0,
            0.0,
        )
        assert opened.check().items == 0
        opened.compact(min_deleted=0)
        assert "0 items" in repr(opened)
    assert index.add(pool) == ChangeSummary(8, 0, 0)
    assert everything(index) == ALL
    assert index.check().items == 8


def test_compaction_gives_back_room_and_changes_no_answer(index, pool):
    for number in range(3):
        (pool / f"{number}.txt").write_text(f"kite number {number}")
        index.add(pool)
    index.delete(["red.txt", "1.txt"])
    asked = {"k": 100, "config": dataclasses.replace(PAPER_SEARCH, beam=500, rerank="embeddings")}
    before = index.search("a kite", **asked)
    index.compact(min_deleted=0)
    info = index.info()
    assert (info.items, info.segments, info.deleted) == (9, 1, 0)
    after = index.search("a kite", **asked)
    assert [(hit.id, hit.codes, hit.text) for hit in after] == [
        (hit.id, hit.codes, hit.text) for hit in before
    ]
    assert [hit.score for hit in after] == pytest.approx([hit.score for hit in before], abs=1e-5)
    assert index.check().deleted == 0
    generation = info.generation
    index.compact(min_deleted=0)  # nothing to do
    assert index.info().generation == generation


def test_every_open_handle_sees_what_another_did(index, model, pool):
    other = Index.open(index.folder, model=model)
    other.delete(["red.txt"])
    assert everything(index) == ALL - {"red.txt"}
    (pool / "new.txt").write_text("a new kite")
    index.add(pool)
    assert everything(other) == {*ALL, "new.txt"}
    other.compact(min_deleted=0)
    assert index.info() == other.info()
    assert index.delete(["new.txt"]) == Deleted(1, [])
    assert other.search("a kite", match="new") == []


def test_a_picture_that_cannot_be_read_does_not_keep_the_others_from_being_added_again(index, pool):
    (pool / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n torn")
    for _ in range(2):
        added = index.add(pool)
        assert (added.added, added.replaced, added.unchanged) == (0, 0, 8)
        assert [Path(entry.file).name for entry in added.left_out] == ["torn.png"]
        assert added.left_out[0].reason
        assert not (index.folder / ".work").exists()
    (pool / "new.txt").write_text("a new kite")
    assert index.add(pool).added == 1


def test_a_picture_that_was_replaced_while_it_was_embedded_is_indexed_anew_next_time(
    model, pool, tmp_path, monkeypatch
):
    def encode_and_replace(*args: Any, **named: Any) -> Any:
        encoded = encode_rows(*args, **named)
        Image.effect_noise((32, 32), 90.0).convert("RGB").save(pool / "red square.png")
        later(pool / "red square.png")
        return encoded

    with monkeypatch.context() as patched:
        patched.setattr(source, "encode_rows", encode_and_replace)
        made = Index.create(tmp_path / "index", pool, model=model)
    assert made.add(pool) == ChangeSummary(1, 1, 7)
    assert made.add(pool) == ChangeSummary(0, 0, 8)


def test_the_work_of_a_killed_writer_is_gone_once_there_is_nothing_more_to_do(
    index, pool, monkeypatch
):
    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    (pool / "new.txt").write_text("a new kite")
    with monkeypatch.context() as patched:
        patched.setattr(build, "remove_work", killed)
        with pytest.raises(KeyboardInterrupt):
            index.add(pool)
    assert (index.folder / ".work").exists()
    assert index.add(pool) == ChangeSummary(0, 0, 9)
    assert not (index.folder / ".work").exists()


def test_no_thread_puts_an_older_state_in_the_place_of_a_newer_one(model, index, monkeypatch):
    other = Index.open(index.folder, model=model)
    other.delete("red.txt")
    threads = []
    open_snapshot = Snapshot.open

    def open_slowly(folder: Path, before: Snapshot | None = None) -> Snapshot:
        opened = open_snapshot(folder, before)
        if (
            not threads
        ):  # while the first state is opened, there is another change, and another thread looks
            threads.append(threading.Thread(target=lambda: index._snapshot))
            other.delete("blue.txt")
            threads[0].start()
            threads[0].join(timeout=0.3)
        return opened

    monkeypatch.setattr(Snapshot, "open", staticmethod(open_slowly))
    assert index._snapshot is not None
    threads[0].join()
    assert index._snapshot.manifest.generation == 3
