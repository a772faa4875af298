"""What one is answer of an index; and the API's own description."""

from __future__ import annotations

import json
from pathlib import Path

from fastapi.testclient import TestClient

from genius_search.index.adding import NewItem
from genius_search.serve.app import create_app
from genius_search.serve.document import document
from genius_search.serve.engine import Engine

from .conftest import LOCAL, make_index
from .test_guard import is_problem

DOCS = Path(__file__).parents[3] / "docs"


def test_an_index_is_described_as_far_as_a_search_needs_it(client):
    (answer,) = client.get("/v1/indexes").json()["indexes"]
    assert client.get("/v1/indexes/things").json() == answer
    assert (answer["name"], answer["items"], answer["modalities"]) == ("things", 12, {"image": 3, "text": 9})
    assert answer["levels"][0] == 3
    assert {"name": "price", "kind": "number", "examples": [0, 1, 2, 3, 4]} in answer["fields"]
    assert {"name": "size.width", "kind": "number", "examples": [0, 1, 2, 3]} in answer["fields"]
    assert {"query": "text", "modality": "image"}.items() <= answer["instructions"][0].items()
    assert (answer["stores_embeddings"], answer["calibrated"], answer["writable"]) == (False, False, True)
    assert answer["reads_images"]
    usual = {"beam": 10, "candidates": 1000, "rerank": "codes", "router": "geometry"}
    assert answer["settings"] == usual
    assert str(client.app.state.service.engine.indexes["things"].folder.parent) not in json.dumps(answer)


def test_every_listed_field_can_be_filtered_by(writable):
    index = writable.app.state.service.engine.indexes["things"]
    odd = {
        "unit price": 1,
        "a.b": 2,
        "text": 3,
        'say "x"': 4,
        "deep": {"in side": 5},
        "list": [6],
        "yes": True,
    }
    index.add_items([NewItem("odd", "a drum", fields=odd)])
    answer = {field["name"]: field for field in writable.get("/v1/indexes/things").json()["fields"]}
    for name, value in [
        ('"unit price"', 1),
        ('"a.b"', 2),
        ('"text"', 3),
        ("'say \"x\"'", 4),
        ('deep."in side"', 5),
        ("list", 6),
        ("yes", "true"),
    ]:
        assert name in answer
        answered = writable.post(
            "/v1/search", json={"text": "x", "where": [f"{name}={value}"], "k": 20}
        ).json()
        assert "odd" in [hit["id"] for hit in answered["hits"]]
    assert answer["list"]["kind"] == "list"
    assert answer["yes"]["kind"] == "truth"


def test_fields_that_are_not_strict_json_are_cleaned(writable):
    index = writable.app.state.service.engine.indexes["things"]
    pool = index.folder.parent / "odd.jsonl"
    source = '{"nan": NaN, "half": "\\ud800", "deep": ' + "[" * 200 + "]" * 200 + "}"
    row = {"did": "9:9", "modality": "text", "txt": "a drum", "img_path": None, "src_content": source}
    pool.write_text(json.dumps(row) + "\n")
    index.add(pool)
    shown = writable.get("/v1/items?id=9:9").json()["fields"]
    assert (shown["nan"], shown["half"]) == (None, "?")
    assert writable.get("/v1/indexes").status_code == 200


def test_with_several_indexes_a_request_names_one(model, tmp_path):
    one, other = (make_index(tmp_path / name, model) for name in ("one", "other"))
    with TestClient(create_app(Engine({"one": one, "other": other})), base_url=LOCAL) as client:
        assert [answer["name"] for answer in client.get("/v1/indexes").json()["indexes"]] == ["one", "other"]
        assert "one, other" in is_problem(client.post("/v1/search", json={"text": "x"}), 422)["detail"]
        assert client.post("/v1/search", json={"text": "x", "index": "other"}).json()["index"] == "other"


def test_the_kept_description_of_the_api_is_what_the_api_says():
    kept = (DOCS / "openapi.json").read_text(encoding="utf-8")
    assert kept == document(), "docs/openapi.json is stale: run `make docs`"


def test_the_description_names_everything_it_refers_to(client):
    answer = client.get("/openapi.json").json()
    assert answer == json.loads(document())
    assert answer["openapi"].startswith("3.1")
    text = json.dumps(answer)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in answer["components"]["schemas"]
