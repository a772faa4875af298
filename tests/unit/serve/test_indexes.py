"""What a client is told of an index and its codes."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient

from genius_search.index.pool import NewItem
from genius_search.records import Modality
from genius_search.serve.app import create_app
from genius_search.serve.service import Service

from .conftest import LOCAL, make_index
from .test_guard import is_problem


def test_an_index_is_described_as_far_as_a_search_needs_it(client):
    (answer,) = client.get("/v1/indexes").json()["indexes"]
    assert (answer["name"], answer["items"], answer["modalities"]) == (
        "things",
        12,
        {"image": 3, "text": 9},
    )
    assert answer["levels"][0] == 3
    assert answer["fields"] == ["colour", "price", "size.width"]
    assert answer["instructions"]
    assert (answer["stores_embeddings"], answer["calibrated"], answer["writable"]) == (
        False,
        False,
        True,
    )
    assert answer["reads_images"]
    usual = {"beam": 10, "candidates": 1000, "rerank": "codes", "router": "geometry"}
    assert answer["settings"] == usual
    assert str(client.app.state.service.indexes["things"].folder.parent) not in json.dumps(answer)


def test_every_listed_field_can_be_filtered_by(writable):
    index = writable.app.state.service.indexes["things"]
    odd = {
        "unit price": 1,
        "a.b": 2,
        "text": 3,
        'say "x"': 4,
        "deep": {"in side": 5},
        "list": [6],
        "yes": True,
    }
    index.add([NewItem("odd", "a drum", fields=odd)])
    known = set(writable.get("/v1/indexes").json()["indexes"][0]["fields"])
    names = ('"unit price"', '"a.b"', '"text"', "'say \"x\"'", 'deep."in side"', "list")
    conditions = [*(f"{name}={value}" for value, name in enumerate(names, start=1)), "yes=true"]
    assert {*names, "yes"} <= known
    found = writable.post("/v1/search", json={"text": "x", "where": conditions, "k": 20}).json()
    assert [hit["id"] for hit in found["hits"]] == ["odd"]


def test_fields_that_are_not_strict_json_are_cleaned(writable):
    index = writable.app.state.service.indexes["things"]
    pool = index.folder.parent / "odd.jsonl"
    source = '{"nan": NaN, "half": "\\ud800", "deep": ' + "[" * 200 + "]" * 200 + "}"
    row = {
        "did": "9:9",
        "modality": "text",
        "txt": "a drum",
        "img_path": None,
        "src_content": source,
    }
    pool.write_text(json.dumps(row) + "\n")
    index.add(pool)
    shown = writable.get("/v1/items?id=9:9").json()["fields"]
    assert (shown["nan"], shown["half"]) == (None, "?")
    assert writable.get("/v1/indexes").status_code == 200


def test_with_several_indexes_a_request_names_one(model, tmp_path):
    one, other = (make_index(tmp_path / name, model) for name in ("one", "other"))
    with TestClient(create_app(Service({"one": one, "other": other})), base_url=LOCAL) as client:
        assert [answer["name"] for answer in client.get("/v1/indexes").json()["indexes"]] == [
            "one",
            "other",
        ]
        assert (
            "one, other" in is_problem(client.post("/v1/search", json={"text": "x"}), 422)["detail"]
        )
        assert (
            client.post("/v1/search", json={"text": "x", "index": "other"}).json()["index"]
            == "other"
        )
        (other.folder / "index.json").write_text("{")
        answer = client.get("/v1/indexes").json()
        assert ([index["name"] for index in answer["indexes"]], answer["damaged"]) == (
            ["one"],
            ["other"],
        )


@pytest.fixture(scope="module")
def index(client):
    return client.app.state.service.indexes["things"]


def test_some_items_give_an_impression_of_an_index(client, index):
    items = client.get("/v1/items/examples").json()["items"]
    assert 1 < len(items) <= 16
    assert {item["id"] for item in items} <= set(index._snapshot.ids())


def test_a_hit_is_explained_code_by_code(client, index):
    query = {"text": "a red kite", "modality": "text", "k": 3}
    hit = client.post("/v1/search", json=query).json()["hits"][0]
    answer = client.post("/v1/explain", json={**query, "id": hit["id"]}).json()
    expected = index.explain(hit["id"], "a red kite", modality=Modality.TEXT, k=3)
    assert answer["codes"] == hit["codes"]
    assert (answer["item"]["id"], answer["rank"], answer["is_allowed"]) == (hit["id"], 1, True)
    assert [level["rank"] for level in answer["levels"]] == [
        level.rank for level in expected.levels
    ]
    is_problem(client.post("/v1/explain", json={"text": "a kite", "id": "nobody"}), 404)
    is_problem(client.post("/v1/explain", json={"text": "a kite"}), 422)
