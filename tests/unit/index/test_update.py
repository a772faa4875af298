"""Fields and texts change without the vectors."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from genius_search import NewItem
from genius_search.config import PAPER_SEARCH
from genius_search.errors import UsageError
from genius_search.index import build
from genius_search.index.index import Index

WIDE = dataclasses.replace(PAPER_SEARCH, beam=500, rerank="codes")


@pytest.fixture
def index(tmp_path) -> Index:
    """Twelve items that were added as vectors."""
    vectors = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
    fields = [{"price": number, "size": {"width": 2}, "sale": True} for number in range(12)]
    texts = [f"number {number}" for number in range(12)]
    return Index.from_vectors(tmp_path / "index", vectors, fields=fields, texts=texts)


@pytest.fixture
def encoded_index(model, tmp_path) -> Index:
    """A file of a folder, a text, and a picture with a caption."""
    pool = tmp_path / "pool"
    pool.mkdir()
    (pool / "kite.txt").write_text("a red kite")
    picture = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(picture, "PNG")
    index = Index.create(tmp_path / "encoded", pool, model=model, embeddings="fused")
    index.add([NewItem("clock", "a clock"), NewItem("square", "a square", picture.getvalue())])
    return index


def test_fields_are_merged_and_the_vector_stays(index):
    before = [(hit.id, hit.score) for hit in index.search(vector=np.ones(8), k=12)]
    assert index.update("3", fields={"price": 99, "sale": None, "new": "x"}) == (1, [], [])
    for handle in (index, Index.open(index.folder)):
        assert handle.get("3").fields == {"price": 99, "size": {"width": 2}, "new": "x"}
        assert handle.get("3").text == "number 3"
        assert [hit.id for hit in handle.search(where=["price=99"])] == ["3"]
        assert handle.search(where=["price=3"]) == []
        assert len(handle) == 12
        after = [(hit.id, hit.score) for hit in handle.search(vector=np.ones(8), k=12)]
        assert after == before
    assert index.check().items == 12


def test_items_change_together_and_unknown_ids_are_returned(index):
    generation = index.info().generation
    done = index.update(
        ["1", "nobody", "2"], fields=[{"price": 70}, {"price": 80}, None], text="new"
    )
    assert done == (2, ["nobody"], [])
    assert index.info().generation == generation + 1
    prices = {item.id: (item.fields["price"], item.text) for item in index}
    assert (prices["1"], prices["2"], prices["3"]) == ((70, "new"), (2, "new"), (3, "number 3"))
    assert index.update("1", fields={"price": 70}).updated == 0
    assert index.update("1", text="").updated == 1
    assert index.get("1").text is None
    assert index.info().generation == generation + 2


def test_what_was_added_before_an_update_comes_back_when_it_is_added_again(index):
    vectors = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
    index.update("4", fields={"price": 50})
    again = index.add_vectors(
        vectors[4:5],
        ids=["4"],
        fields=[{"price": 4, "size": {"width": 2}, "sale": True}],
        texts=["number 4"],
    )
    assert (again.added, again.unchanged, index.get("4").fields["price"]) == (1, 0, 4)


def test_a_changed_text_is_encoded_again_and_changed_fields_are_not(encoded_index, monkeypatch):
    index = encoded_index
    done = index.update(["clock", "square"], text=["a green boat", "a green boat"])
    assert done == (2, [], [])
    index.add([NewItem("boat", "a green boat")])
    codes = {hit.id: hit.codes for hit in index.search("a green boat", config=WIDE, k=4)}
    assert codes["clock"] == codes["boat"]
    assert index.get("square").image is not None
    index.update("square", text="")
    assert index.get("square").modality == "image"
    monkeypatch.setattr(build, "arrays_of_features", None)  # nothing is encoded from here on
    index.update(["clock", "square", "kite.txt"], fields={"price": 3})
    assert len(index.search(where=["price=3"])) == 3
    assert index.add([NewItem("clock", "a green boat", fields={"price": 3})]).unchanged == 1
    index.sync()
    assert index.get("kite.txt").fields["price"] == 3


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ("clock", {}, "nothing to update"),
        ("clock", {"text": ""}, "needs a text"),
        ("clock", {"fields": ["price"]}, "expected a mapping"),
        ("clock", {"fields": {"price": object()}}, "'price' cannot be set"),
        (["clock", "square"], {"fields": [{"price": 1}]}, "2 ids and 1 fields"),
        ("kite.txt", {"text": "a boat"}, "is a file"),
    ],
)
def test_what_cannot_be_changed_is_refused_and_nothing_changes(
    encoded_index, ids, options, message
):
    generation = encoded_index.info().generation
    with pytest.raises(UsageError, match=message):
        encoded_index.update(ids, **options)
    assert encoded_index.info().generation == generation
