"""A library of several folders, in which no item is lost or doubled."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from genius_search.cli import main
from genius_search.errors import BadData, UsageError
from genius_search.index import pictures, source
from genius_search.index.index import Index
from genius_search.index.items import Item
from genius_search.index.pool import stamp_of
from genius_search.records import Modality


def draw(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.ImageDescription] = f"a red anchor {seed}"
    Image.fromarray(pixels).save(path, exif=exif)


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"a red anchor: {folder.name} {name}")
    return folder


def ids(index):
    return sorted(index._snapshot.ids())


@pytest.fixture
def notes(tmp_path):
    return write(tmp_path / "notes", "a.txt", "b.txt", "sub/a.txt", "sub/b.txt")


@pytest.fixture
def index(notes, tmp_path):
    return Index.create(tmp_path / "i", notes, encoder="text:wordllama")


@pytest.fixture
def opened(monkeypatch):
    """Names of the pictures that were decoded; the ninth is interrupted."""
    names: Counter[str] = Counter()
    real = pictures.decode_image
    monkeypatch.setattr(source, "MAX_BLOCK_IMAGES", 1)

    def decode(path, image, **settings):
        if len(names) == 8 and not names["interrupted"]:
            names["interrupted"] += 1
            raise KeyboardInterrupt
        names["/".join(path.parts[-3:])] += 1
        return real(path, image, **settings)

    monkeypatch.setattr(pictures, "decode_image", decode)
    return names


@pytest.fixture
def block(monkeypatch):
    """Make a folder unreadable, even for root."""

    def block(folder):
        for name in ("scandir", "listdir"):
            real = getattr(os, name)

            def refuse(path=".", real=real):
                if str(path) == str(folder):
                    raise PermissionError(13, "Permission denied", str(path))
                return real(path)

            monkeypatch.setattr(os, name, refuse)

    return block


def test_of_two_folders_with_the_same_names_nothing_is_lost_doubled_or_encoded_twice(
    tmp_path, clip_folder, opened, block
):
    first, second = tmp_path / "camA", tmp_path / "camB"
    for number in range(6):
        draw(first / "DCIM" / f"{number}.png", number)
        draw(second / "DCIM" / f"{number}.png", number + 10)
    index = Index.create(tmp_path / "i", first, encoder=f"clip:{clip_folder}")
    with pytest.raises(KeyboardInterrupt):
        index.add(second)
    draw(second / "DCIM" / "6.png", 16)
    assert index.add(second).added == 7
    expected = [f"{root}DCIM/{n}.png" for root in ("", "camB/") for n in range(6 + bool(root))]
    assert ids(index) == sorted(expected)

    (first / "DCIM" / "0.png").rename(second / "moved.png")
    os.utime(first / "DCIM" / "1.png", (0, 0))
    block(second / "DCIM")
    planned = index.sync(dry_run=True)
    assert [(change.kind, change.before, change.id) for change in planned.changes] == [
        ("move", "DCIM/0.png", "camB/moved.png")
    ]
    done = index.sync()
    assert (done.added, done.moved, done.unchanged, done.deleted, done.missing) == (1, 1, 5, 0, 0)
    assert ids(index) == sorted([*expected[1:], "camB/moved.png"])
    assert index.get("camB/moved.png").image == str(second / "moved.png")
    second.rename(tmp_path / "camC")
    done = index.sync(tmp_path / "camC")
    assert (done.added, done.reused, done.missing, len(ids(index))) == (8, 8, 0, 13)
    moved = index.get("camB/moved.png")
    assert (moved.image, moved.text) == (str(tmp_path / "camC" / "moved.png"), "a red anchor 0")
    assert set(opened.values()) == {1}
    assert index.check().items == 13


def test_folders_in_and_around_a_remembered_one_add_what_is_new_only(index, notes, tmp_path):
    write(notes, "sub/new.txt")
    assert (index.add(notes / "sub").added, index.add(notes / "sub" / "a.txt").added) == (1, 0)
    write(tmp_path, "above.txt")
    with pytest.raises(BadData, match="no such file"):
        index.add(notes / "sub" / "gone.txt")
    with pytest.raises(UsageError, match="geniusignore"):
        index.add(notes, exclude=["sub/a.txt"])
    assert index.add(tmp_path).added == 1
    assert ids(index) == [
        "a.txt",
        "b.txt",
        "sub/a.txt",
        "sub/b.txt",
        "sub/new.txt",
        f"{tmp_path.name}/above.txt",
    ]
    assert index.sync().unchanged == 6
    assert [root.folder for root in index.roots] == [str(notes), str(tmp_path)]


def test_a_link_into_another_root_is_not_followed(index, notes, tmp_path):
    other = write(tmp_path / "other", "c.txt", "deep/d.txt")
    write(other, *(f"deep/{number}.txt" for number in range(9)))
    (notes / "inside").symlink_to(other / "deep")
    assert index.sync().added == 10
    (notes / ".geniusignore").write_text("[1-8].txt")
    assert index.sync().deleted == 8
    (other / ".geniusignore").write_text("[0-8].txt")
    index.add(other)
    (notes / "circle").symlink_to(tmp_path)
    (other / "back").symlink_to(notes)
    index.sync()
    found = ["a.txt", "b.txt", "other/c.txt", "other/deep/d.txt", "sub/a.txt", "sub/b.txt"]
    assert (ids(index), index.sync().unchanged) == (found, 6)


def test_ids_of_several_roots_never_meet(index, notes, tmp_path):
    index.add(write(tmp_path / "x" / "more", "a.txt"))
    index.add(write(tmp_path / "y" / "more", "a.txt"))
    index.add(write(tmp_path / "z", "a.txt") / "a.txt")
    index.add(write(tmp_path / "y" / "sub", "a.txt"))
    index.sync()
    write(notes, "more/a.txt")
    assert index.sync().added == 1
    given = ["./more/a.txt", "a-2.txt", "more-2/a.txt", "more/a.txt", "sub-2/a.txt"]
    assert ids(index) == sorted(["a.txt", "b.txt", "sub/a.txt", "sub/b.txt", *given])
    assert index.sync().unchanged == 9


def test_what_lists_and_memory_brought_is_neither_deleted_nor_replaced(index, notes, tmp_path):
    rows = [{"did": name, "modality": "text", "txt": "a list"} for name in ("1:1", "1:2")]
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index.add(tmp_path / "list.jsonl")
    words = "a red anchor: notes mine.txt"  # those of the file, too
    index.add([{"id": "mine.txt", "text": words}])
    done = index.sync()
    assert (done.unchanged, done.deleted, done.missing) == (4, 0, 0)
    write(notes, "mine.txt")
    done = index.sync()
    assert ([entry.file for entry in done.left_out], done.unchanged) == (["mine.txt"], 4)


def test_a_picture_that_was_replaced_is_seen_whatever_its_size_and_time_are(tmp_path):
    file, other = tmp_path / "a.png", tmp_path / "other.png"
    file.write_bytes(b"one")
    item, before = Item("a.png", Modality.IMAGE, image=str(file)), file.stat()
    stamp = stamp_of(item)
    other.write_bytes(b"two")
    while other.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    assert stamp_of(item) != stamp


@pytest.mark.parametrize(
    "loss",
    ["no root", "an empty root", "most files", "a folder unreadable", "a folder moved there"],
)
def test_what_cannot_be_seen_is_deleted_only_when_its_number_is_given(
    index, notes, tmp_path, block, loss
):
    count = {"most files": 3, "a folder unreadable": 2, "a folder moved there": 2}.get(loss, 4)
    if loss == "no root":
        notes.rename(tmp_path / "elsewhere")
    elif loss == "a folder unreadable":
        (notes / "sub").rename(tmp_path / "elsewhere")
        (notes / "sub").mkdir()
        block(notes / "sub")
    elif loss == "a folder moved there":
        (notes / "locked").mkdir()
        (notes / "sub").rename(notes / "locked" / "sub")
        block(notes / "locked")
    else:
        for file in ["sub/a.txt", "sub/b.txt", "b.txt", "a.txt"][:count]:
            (notes / file).unlink()
    done = index.sync()
    assert (done.deleted, done.missing, len(ids(index))) == (0, count, 4)
    with pytest.raises(UsageError, match="more than the 1"):
        index.sync(delete_missing=1)
    assert index.sync(delete_missing=count).deleted == count
    assert len(ids(index)) == 4 - count


def test_a_file_that_cannot_be_read_keeps_its_item_and_one_that_is_gone_loses_it(index, notes):
    (notes / "a.txt").write_bytes(b"\xff\x00\xff")
    (notes / "b.txt").unlink()
    done = index.sync()
    assert ([Path(one.file).name for one in done.left_out], done.deleted) == (["a.txt"], 1)
    assert ids(index) == ["a.txt", "sub/a.txt", "sub/b.txt"]


def test_a_renamed_picture_keeps_text_and_fields_that_a_list_gave_its_old_name(tmp_path):
    place = tmp_path / "trip"
    for name in "abc":
        draw(place / f"{name}.png", ord(name))
    rows = "a.png,a red kite,Ulm\nb.png,a boat,Bonn\nc.png,a car,Hof\n"
    (place / "metadata.csv").write_text(f"file_name,text,town\n{rows}")
    index = Index.create(tmp_path / "i", place, encoder="text:wordllama")
    (place / "sub").mkdir()
    for again in ("a.png", "sub/d.png"):
        (place / again).rename(place / "sub" / "d.png")
        os.utime(place / "sub" / "d.png", (0, 0))
        done = index.sync()
        assert (done.deleted, done.missing, len(index)) == (0, 0, 3)
        item = index.get("sub/d.png")
        assert (item.text, item.fields["town"], item.fields["name"]) == ("a red kite", "Ulm", "d")
    (place / "metadata.csv").write_text(
        "file_name,text\nb.png,a boat\nc.png,a car\nsub/d.png,a green kite\n"
    )
    index.sync()
    assert (index.get("sub/d.png").text, "town" in index.get("b.png").fields) == (
        "a green kite",
        False,
    )


def test_captions_stay_while_their_file_cannot_be_read(tmp_path, clip_folder):
    draw(tmp_path / "trip" / "a.png", 1)
    (tmp_path / "trip" / "metadata.csv").write_text("file_name,text\na.png,a red kite\n")
    index = Index.create(tmp_path / "i", tmp_path / "trip", encoder=f"clip:{clip_folder}")
    (tmp_path / "trip" / "metadata.csv").write_bytes(b"\xff\x00\xff")
    assert (index.sync().unchanged, index.get("a.png").text) == (1, "a red kite")


def test_a_single_file_that_was_renamed_in_another_root_is_one_item(notes, tmp_path):
    index = Index.create(tmp_path / "i", notes / "a.txt", encoder="text:wordllama")
    index.add(notes)
    (notes / "a.txt").rename(notes / "z.txt")
    assert (index.sync().moved, "notes/z.txt" in index, len(index)) == (1, True, 4)


@pytest.mark.parametrize("command", ["add", "sync"])
def test_a_folder_that_was_moved_is_recognised(index, notes, tmp_path, monkeypatch, command):
    place = notes.rename(tmp_path / "there")
    monkeypatch.setattr(source, "encode_rows", None)
    assert main(["index", command, str(index.folder), str(place)]) == 0
    assert [root.folder for root in index.roots] == [str(place)]
    assert len(ids(index)) == index.sync().unchanged == 4


def test_another_folder_with_the_same_names_is_not_the_one_that_is_gone(index, notes, tmp_path):
    notes.rename(tmp_path / "away")
    index.add(write(tmp_path / "other", "a.txt", "b.txt", "sub/a.txt", "sub/b.txt"))
    assert len(ids(index)) == 8
    with pytest.raises(UsageError, match="no folder that"):
        index.sync(write(tmp_path / "third", "c.txt"))
