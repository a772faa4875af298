"""Pools in memory, pictures of every kind, and hits in a notebook."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from genius_search import Index, NewItem
from genius_search.data.images import open_image
from genius_search.errors import UsageError

BLUE = (0, 0, 255)


def image(colour):
    return Image.new("RGB", (40, 30), colour)


def as_bytes(colour):
    file = io.BytesIO()
    image(colour).save(file, "PNG")
    return file.getvalue()


def create(tmp_path, clip_folder, pool):
    return Index.create(tmp_path / "i", pool, encoder=f"clip:{clip_folder}")


def test_a_list_of_everything_becomes_an_index(tmp_path, clip_folder):
    image("gold").save(tmp_path / "gold.png")
    pool = [
        image("red"),
        np.asarray(image("green")),
        as_bytes("blue"),
        "a red anchor",
        tmp_path / "gold.png",
        NewItem("mine", "a green anchor", image("green"), {"price": 3}),
        {"text": "green ground", "fields": {"price": 4}},
    ]
    index = create(tmp_path, clip_folder, iter(pool))
    added = index.last_change
    assert (added.added, added.left_out) == (7, [])
    gold = (tmp_path / "gold.png").as_posix()
    assert sorted(index._snapshot.ids()) == sorted(["0", "1", "2", "3", gold, "mine", "6"])
    assert [hit.id for hit in index.search("anchor", where=["price>3"])] == ["6"]
    (blue,) = index.search("anchor", where=["id=2"])
    assert open_image(Path(blue.image)).getpixel((3, 3)) == BLUE
    assert index.check().items == 7


@pytest.mark.parametrize("given", ["path", "str", "bytes", "pillow", "array"])
def test_a_query_takes_every_kind_of_picture(tmp_path, clip_folder, given):
    index = create(tmp_path, clip_folder, [image("red"), image("blue")])
    image("blue").save(tmp_path / "q.png")
    query = {
        "path": tmp_path / "q.png",
        "str": str(tmp_path / "q.png"),
        "bytes": as_bytes("blue"),
        "pillow": image("blue"),
        "array": np.asarray(image("blue")),
    }[given]
    assert index.search(image=query)[0].id == "1"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "builtins.int"),
        (__file__, "Path("),
        ("https://example.org/a.jpg", "URL"),
        ({"id": "a", "price": 3}, "price"),
        ({"id": 7.5, "text": "a"}, "7.5"),
        ({"text": 5}, "text is of type"),
        ({"text": "a", "fields": [1]}, "fields is of type"),
    ],
)
def test_other_elements_are_refused_by_name(tmp_path, clip_folder, given, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        create(tmp_path, clip_folder, [image("red"), given])
    with pytest.raises(UsageError, match="items are no list"):
        create(tmp_path, clip_folder, {"id": "a", "text": "b"})
    assert not (tmp_path / "i").exists()


def test_hits_become_a_data_frame(tmp_path, clip_folder, monkeypatch):
    pytest.importorskip("pandas")
    index = create(
        tmp_path, clip_folder, [NewItem("a", "red", fields={"price": 3}), NewItem("b", "green")]
    )
    hits = index.search("red")
    frame = hits.to_pandas().set_index("id")
    assert frame.loc["a", "fields.price"] == 3
    assert list(frame["rank"]) == [1, 2]
    assert "score" in type(hits)().to_pandas().columns
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError):
        hits.to_pandas()


def broken(kind):
    closed = image("red")
    closed.close()
    file = io.BytesIO()
    Image.effect_noise((99, 99), 9).save(file, "JPEG")
    return {
        "closed": closed,
        "cut": Image.open(io.BytesIO(file.getvalue()[:800])),
        "long": np.zeros((1, 70_000, 3), np.uint8),
        "numbers": np.full((4, 4, 3), np.nan),
        "device": Path("/dev/zero"),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("closed", "closed"),
        ("cut", "truncated"),
        ("long", "70,000 pixels long"),
        ("numbers", "float64"),
        ("device", "not a file"),
    ],
)
def test_a_broken_picture_is_left_out_and_nothing_of_it_is_kept(tmp_path, clip_folder, kind, said):
    items = [NewItem("red", "red"), NewItem("x", image=broken(kind))]
    index = create(tmp_path, clip_folder, items)
    added = index.last_change
    assert (added.added, [said in one.reason for one in added.left_out]) == (1, [True])
    (outcome,) = index.add([NewItem("y", "a text", broken(kind))]).left_out
    assert said in outcome.reason
    index.compact(min_deleted=0)
    assert not list((tmp_path / "i").glob("pictures/*/*"))


def test_a_list_that_fails_half_way_leaves_nothing(tmp_path, clip_folder):
    def pool():
        yield image("red")
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        create(tmp_path, clip_folder, pool())
    assert not (tmp_path / "i").exists()


def test_a_whole_number_of_any_size_is_a_field(tmp_path, clip_folder):
    index = create(tmp_path, clip_folder, [NewItem("a", "a", fields={"n": 10**400}), "red"])
    assert [hit.id for hit in index.search("a", where=["n>3"])] == ["a"]
    assert not index.search("a", where=["n<3"])
