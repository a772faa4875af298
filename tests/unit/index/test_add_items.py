"""Items that come from memory, and searching with several parts."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from genius_search import NewItem, SearchPart
from genius_search.config import PAPER_SEARCH
from genius_search.errors import ArtifactMismatch, UsageError
from genius_search.index import build
from genius_search.index import writer as writer_module
from genius_search.index.index import Index
from genius_search.index.snapshot import UnknownItem
from genius_search.index.writer import alive_batches, open_writer
from genius_search.records import Modality

WIDE = dataclasses.replace(PAPER_SEARCH, beam=500, rerank="codes")


def picture(colour: str) -> bytes:
    kept = io.BytesIO()
    Image.new("RGB", (32, 32), colour).save(kept, "PNG")
    return kept.getvalue()


@pytest.fixture
def index(model, tmp_path) -> Index:
    pool = tmp_path / "pool"
    pool.mkdir()
    (pool / "kite.txt").write_text("a red kite")
    return Index.create(tmp_path / "index", pool, model=model, embeddings="fused")


def by_id(index: Index) -> dict[str, str | None]:
    return {hit.id: hit.text for hit in index.search("a kite", k=100, config=WIDE)}


def kept(index: Index) -> list[Path]:
    return sorted(path for path in (index.folder / "pictures").rglob("*") if path.is_file())


def test_items_in_memory_are_found_with_their_fields_and_their_picture(index, model):
    added = index.add(
        [
            NewItem("a/../b", "a green boat", picture("green"), {"price": 3}),
            NewItem("red", image=picture("red")),
            NewItem("words", "a clock"),
        ]
    )
    assert (added.added, added.replaced, added.left_out) == (3, 0, [])
    for opened in (index, Index.open(index.folder, model=model)):
        (hit,) = opened.search("a boat", where=["price=3"], config=WIDE)
        assert (hit.id, hit.modality, hit.fields) == ("a/../b", Modality.IMAGE_TEXT, {"price": 3})
        assert Path(hit.image).read_bytes() == picture("green")
        assert set(by_id(opened)) == {"kite.txt", "a/../b", "red", "words"}
    assert index.check().items == 4


def test_what_has_not_changed_is_passed_over_and_what_has_is_replaced(index):
    first = [NewItem("one", "a kite", picture("red")), NewItem("two", "a boat")]
    assert index.add(first).added == 2
    generation = index.info().generation
    assert index.add(first).unchanged == 2
    assert index.info().generation == generation
    changed = [NewItem("one", "a kite", picture("blue")), NewItem("two", "a boat")]
    done = index.add(changed)
    assert (done.added, done.replaced, done.unchanged) == (1, 1, 1)
    (left,) = index.add([NewItem("kite.txt", "a drum")]).left_out
    assert (left.file, by_id(index)["kite.txt"]) == ("kite.txt", "a red kite")  # that of a folder


def test_of_items_with_one_id_the_last_counts(index):
    kite, boat = NewItem("one", "a kite"), NewItem("one", "a boat")
    done = index.add([kite, kite, boat, NewItem("one")])
    assert (done.added, [one.file for one in done.left_out]) == (1, ["one"] * 3)
    assert by_id(index)["one"] == "a boat"
    assert index.check().items == 2


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (NewItem("", "x"), "1 to 500 characters"),
        (NewItem("x" * 501, "x"), "1 to 500 characters"),
        (NewItem("a\0b", "x"), "control character"),
        (NewItem("a\x1b[2J", "x"), "control character"),
        (NewItem("\ud800", "x"), "half a character"),
        (NewItem("x", "\udc00"), "half a character"),
        (NewItem("x", "  "), "needs a text, an image"),
        (NewItem("x", image=b"no picture"), "is not a picture"),
    ],
)
def test_an_item_that_cannot_be_used_is_left_out_with_its_reason(index, item, why):
    before = index.info().items
    done = index.add([item, NewItem("good", "a kite")])
    (bad,) = done.left_out
    assert (bad.file, done.added) == (item.id, 1)
    assert why in bad.reason
    assert index.info().items == before + 1
    assert index.add([item]).left_out == [bad]
    assert index.check().items == before + 1


def test_a_picture_is_kept_once_and_goes_with_its_last_item(index):
    index.add([NewItem("one", image=picture("red")), NewItem("two", "x", picture("red"))])
    (file,) = kept(index)
    index.delete("one")
    assert kept(index) == [file]
    file.write_bytes(picture("green"))
    with pytest.raises(ArtifactMismatch, match=file.name):
        index.check()
    index.delete("two")
    assert kept(index) == []


def test_a_picture_that_is_replaced_left_out_or_of_a_failed_change_is_not_kept(index, monkeypatch):
    index.add([NewItem("one", image=picture("red"))])
    index.add([NewItem("one", image=picture("blue"))])
    (blue,) = kept(index)
    assert blue.read_bytes() == picture("blue")
    assert (
        len(index.add([NewItem("two", image=b"no picture"), NewItem("three", "a drum")]).left_out)
        == 1
    )
    assert kept(index) == [blue]

    def fail(*_: object) -> None:
        raise OSError("failed")

    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "write_manifest", fail)
        with pytest.raises(OSError, match="failed"):
            index.add([NewItem("one", image=picture("green"))])
    assert kept(index) == [blue]


def test_pictures_of_a_killed_change_are_removed_by_the_next_writer(
    model, index, tmp_path, killed_at
):
    index.add([NewItem("one", image=picture("red")), NewItem("two", "a drum")])
    for number in range(1, 1_000, 5):
        folder = shutil.copytree(index.folder, tmp_path / str(number))
        copy = Index.open(folder, model=model)
        new = [NewItem("one", image=picture("blue"))]
        was_killed = killed_at(number, lambda copy=copy, new=new: copy.add(new))
        Index.open(folder, model=model).delete("two")
        (file,) = kept(copy)
        assert file.read_bytes() == Path(copy.get("one").image).read_bytes()
        shutil.rmtree(folder)
        if not was_killed:
            break
    assert number > 5


def test_a_path_in_an_item_that_only_begins_like_that_of_a_stored_picture_is_not_removed(index):
    (index.folder / "pictures").mkdir()
    precious = index.folder / "pictures" / "precious"
    precious.write_text("of somebody else")
    with open_writer(index.folder) as writer:
        ((items, arrays),) = alive_batches(writer.snapshot.segments)
        for image in ("pictures/precious", "pictures/../index.json"):
            writer.add([([items[0]._replace(id="foreign", image=image)], arrays)])
            writer.delete(["foreign"])
    assert precious.exists()
    assert index.check().items == 1
    assert index.check().items == 1


def test_an_index_takes_its_pictures_along_when_it_is_moved(index, model, tmp_path):
    index.add([NewItem("one", image=picture("red"))])
    moved = Index.open(shutil.move(index.folder, tmp_path / "moved"), model=model)
    (hit,) = moved.search("x", modality="image", config=WIDE)
    assert Path(hit.image).read_bytes() == picture("red")
    assert moved.add([NewItem("one", image=picture("red"))]).unchanged == 1


def test_one_part_alone_is_the_query_itself(index):
    index.add([NewItem(name, f"a {name} boat") for name in ("red", "green", "blue")])
    plain = index.search("a green boat", modality="text", k=4, config=WIDE, hybrid=False)
    assert (
        index.search(parts=[SearchPart(text="a green boat")], modality="text", k=4, config=WIDE)
        == plain
    )
    assert (
        index.search(
            parts=[SearchPart(text="a green boat", weight=2.5)], modality="text", k=4, config=WIDE
        )
        == plain
    )


@pytest.mark.parametrize("embeddings", ["none", "fused", "raw"])
def test_an_item_finds_itself_first_and_last_when_it_counts_against(model, tmp_path, embeddings):
    pool = tmp_path / "pool.jsonl"
    rows = [
        {"did": f"1:{number}", "modality": "text", "txt": f"a {colour} {thing}", "img_path": None}
        for number, (colour, thing) in enumerate(
            (colour, thing)
            for colour in ("red", "green", "blue")
            for thing in ("kite", "boat", "clock")
        )
    ]
    pool.write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = Index.create(tmp_path / "index", pool, model=model, embeddings=embeddings)
    for rerank in ("codes",) if embeddings == "none" else ("codes", "embeddings"):
        config = dataclasses.replace(PAPER_SEARCH, beam=500, rerank=rerank, density_weight=0.0)
        alike = index.search(parts=[SearchPart(id="1:4")], modality="text", k=9, config=config)
        assert "1:4" in [hit.id for hit in alike[:2]]
        away = index.search(
            parts=[SearchPart(id="1:4", weight=-1.0)], modality="text", k=9, config=config
        )
        places = [hit.id for hit in away].index("1:4"), [hit.id for hit in alike].index("1:4")
        assert (
            places[0] == 8 if rerank == "embeddings" else places[0] > places[1]
        )  # codes also count lengths


def test_parts_that_mean_nothing_are_refused(index):
    for parts, why in [
        ([SearchPart()], "needs a text, an image"),
        ([SearchPart(text="x", id="kite.txt")], "or else an item"),
        ([SearchPart(text="x", weight=float("inf"))], "finite"),
        ([SearchPart(text="x"), SearchPart(text="x", weight=-1.0)], "cancel each other out"),
        ([SearchPart(text="x", weight=0.0)], "cancel each other out"),
    ]:
        with pytest.raises(UsageError, match=why):
            index.search(parts=parts)
    with pytest.raises(UnknownItem, match="'nobody'"):
        index.search(parts=[SearchPart(id="nobody")])
    index.add([NewItem("other", "a boat")])
    index.delete("kite.txt")
    with pytest.raises(UnknownItem, match=r"'kite\.txt'"):
        index.search(parts=[SearchPart(id="kite.txt")])


@pytest.fixture
def files(tmp_path):
    """Six pictures, four of which have a text beside them, and four texts."""
    folder = tmp_path / "pool"
    folder.mkdir()
    for number in range(6):
        Image.new("RGB", (40, 40), (40 * number, 99, 250 - 40 * number)).save(
            folder / f"{number}.png"
        )
        if number < 4:
            (folder / f"{number}.txt").write_text(f"a kite, number {number}")
            (folder / f"drum {number}.txt").write_text(f"a drum, number {number}")
    return folder


def contents(index: Index) -> dict[str, tuple[tuple[int, ...], float]]:
    """ID and score of each item."""
    ranked = "codes" if index.info().embeddings == "none" else "embeddings"
    hits = index.search(
        "a kite", k=100, config=dataclasses.replace(PAPER_SEARCH, beam=500, rerank=ranked)
    )
    return {hit.id: (hit.codes, pytest.approx(hit.score, abs=2e-3)) for hit in hits}


@pytest.mark.parametrize("embeddings", ["none", "fused", "raw"])
def test_items_from_memory_get_the_ids_and_embeddings_of_the_same_files(
    model, files, tmp_path, monkeypatch, embeddings
):
    monkeypatch.setattr(build, "MAX_BATCH_ITEMS", 4)  # so that there are several
    of_files = Index.create(tmp_path / "files", files, model=model, embeddings=embeddings)
    index = Index.create(tmp_path / "memory", files, model=model, embeddings=embeddings)
    expected = contents(of_files)
    index.delete(list(expected))
    items = []
    for name in expected:
        path = files / name
        if path.suffix == ".png":
            beside = path.with_suffix(".txt")
            items.append(
                NewItem(name, beside.read_text() if beside.exists() else None, path.read_bytes())
            )
        else:
            items.append(NewItem(name, path.read_text()))
    assert index.add(items).added == len(items)
    index.compact(min_deleted=0)
    assert contents(index) == expected
    assert not (index.folder / ".work").exists()
