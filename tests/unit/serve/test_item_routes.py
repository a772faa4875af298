"""Items updated, counted, listed and deleted by conditions over HTTP; hits sorted and grouped."""

from __future__ import annotations

import numpy as np
from PIL import Image

from genius_search.data.picture_text import PictureText
from genius_search.index.index import Index
from genius_search.index.picture_text import write_texts

from .conftest import serving
from .test_guard import is_problem


def test_items_are_updated_together(writable):
    updates = [
        {"id": "1:1", "fields": {"price": 99, "colour": None}},
        {"id": "nobody", "text": "x"},
    ]
    answer = writable.patch("/v1/items", json={"updates": updates})
    assert answer.json() == {"updated": 1, "missing": ["nobody"], "left_out": []}
    fields = writable.get("/v1/items", params={"id": "1:1"}).json()["fields"]
    assert (fields["price"], "colour" in fields, "size" in fields) == (99, False, True)
    hits = writable.post("/v1/search", json={"where": ["price=99"]}).json()["hits"]
    assert [hit["id"] for hit in hits] == ["1:1"]
    is_problem(writable.patch("/v1/items", json={"updates": []}), 422)
    assert writable.patch("/v1/items", json={"updates": [{"id": "1:1"}]}).json()["updated"] == 0


def test_items_are_counted_listed_and_deleted_by_conditions(writable):
    assert writable.get("/v1/items/count").json() == {"items": 12}
    conditions = {"where": ["price<3 and modality=text"]}
    assert writable.get("/v1/items/count", params=conditions).json() == {"items": 3}
    page = writable.get("/v1/items/scroll", params=conditions | {"limit": 2}).json()
    assert ([item["id"] for item in page["items"]], page["cursor"]) == (["1:0", "1:1"], "1:1")
    page = writable.get("/v1/items/scroll", params=conditions | {"cursor": "1:1"}).json()
    assert ([item["id"] for item in page["items"]], page["cursor"]) == (["1:2"], None)
    assert writable.delete("/v1/items", params=conditions).json() == {"deleted": 3, "missing": []}
    assert writable.get("/v1/items/count").json() == {"items": 9}
    is_problem(writable.delete("/v1/items"), 422)
    for path in ("/v1/items/count", "/v1/items/scroll"):
        is_problem(writable.get(path, params={"where": ["image~pool"]}), 422)


def test_the_text_in_a_picture_comes_with_its_boxes(tmp_path):
    photo = Image.new("RGB", (40, 30), "red")
    items = [{"id": "ticket", "image": photo}, {"id": "note", "text": "a gate"}]
    index = Index.create(tmp_path / "i", items, encoder="text:wordllama")
    text = PictureText("Boarding pass\nGate B42", "[[0, 0.1, 1, 0.2], [0.1, 0.5, 0.4, 0.6]]")
    with index._open_writer(0) as writer:
        assert write_texts(writer, index.model, {"ticket": text, "nobody": text}) == 1
    with serving(index) as client:
        lines = client.get("/v1/items", params={"id": "ticket"}).json()["picture_text"]
        assert lines[1] == {"words": "Gate B42", "box": [0.1, 0.5, 0.4, 0.6]}
        assert client.get("/v1/items", params={"id": "note"}).json()["picture_text"] == []
        hits = client.post("/v1/search", json={"text": "boarding"}).json()["hits"]
        assert (hits[0]["id"], hits[0]["matched"]) == ("ticket", ["picture text"])


def test_vectors_are_returned(tmp_path):
    index = Index.from_vectors(tmp_path / "x.index", np.eye(8), embedding_bits=16)
    with serving(index) as client:
        answer = client.get("/v1/items/vectors", params={"id": ["2", "0"]})
        np.testing.assert_allclose(answer.json()["vectors"], np.eye(8)[[2, 0]], atol=1e-3)
        is_problem(client.get("/v1/items/vectors", params={"id": "nobody"}), 404)


def test_hits_are_sorted_counted_and_grouped(client):
    body = {"modality": "text", "order_by": "-price", "k": 2, "facets": ["size.width"]}
    result = client.post("/v1/search", json=body).json()
    prices = [hit["fields"]["price"] for hit in result["hits"]]
    assert prices == sorted(prices, reverse=True)
    count = client.get("/v1/items/count", params={"where": "modality=text"}).json()["items"]
    assert sum(value["items"] for value in result["facets"]["size.width"]) == count
    result = client.post("/v1/search", json={"modality": "text", "group_by": "colour"}).json()
    assert sum(result["more_in_group"]) + len(result["hits"]) == count
    result = client.post("/v1/search", json={"text": "a kite", "order_by": "price"}).json()
    assert result["cut_off"] in ("first hits", "least score")
    is_problem(client.post("/v1/search", json={"order_by": "image"}), 422)
    is_problem(client.post("/v1/search", json={"facets": ["colours"]}), 422)
