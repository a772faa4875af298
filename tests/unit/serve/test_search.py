"""Searching over HTTP gives what searching in Python gives."""

from __future__ import annotations

import io
import json

import pytest
from PIL import Image, features

from genius_search import SearchPart
from genius_search.config import SearchConfig
from genius_search.index import items
from genius_search.index.index import Index
from genius_search.serve import app
from genius_search.serve.schemas import MAX_HTTP_HITS, MAX_QUERY_PARTS

from .conftest import form, picture, serving
from .test_guard import is_problem


def post(client, **body):
    return client.post("/v1/search", json=body)


@pytest.fixture(scope="module")
def index(client):
    return client.app.state.service.indexes["things"]


def test_a_text_finds_the_same_as_in_python_and_reveals_no_path(client, index):
    response = post(client, text="a red kite", modality="text", k=4)
    assert response.status_code == 200
    body = response.json()
    expected = index.search("a red kite", modality="text", k=4)
    assert [hit["id"] for hit in body["hits"]] == [hit.id for hit in expected]
    first, wanted = body["hits"][0], expected[0]
    assert first["score"] == pytest.approx(wanted.score, abs=1e-6)
    assert (first["rank"], first["modality"], first["text"]) == (1, "text", wanted.text)
    assert (first["fields"], first["codes"]) == (wanted.fields, list(wanted.codes))
    assert body["index"] == "things"
    usual = {"beam": 10, "candidates": 1000, "rerank": "codes", "router": "geometry"}
    assert body["settings"] == usual
    assert body["took_ms"].keys() == {"queue", "search"}
    assert body["request_id"] == response.headers["x-request-id"]


def test_hits_come_with_the_fields_that_are_asked_for(client):
    for asked, names in (([], set()), (["price", "nothing"], {"price"})):
        hits = post(client, text="a red kite", modality="text", fields=asked).json()["hits"]
        assert {name for hit in hits for name in hit["fields"]} == names


def test_a_hit_with_a_picture_says_where_it_is_to_be_had_here(client, index):
    hits = post(client, text="something red", modality="image", k=3).json()["hits"]
    assert {hit["id"] for hit in hits} == {"2:0", "2:1", "2:2"}
    assert str(index.folder.parent) not in json.dumps(hits)
    drawn = client.get(hits[0]["image"])
    assert drawn.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(drawn.content)).size == (40, 30)


def test_a_picture_is_a_part_of_the_upload(client, index):
    sent = picture("green")
    expected = [
        hit.id for hit in index.search(image=Image.open(io.BytesIO(sent)), modality="image", k=3)
    ]
    for query in ({"image": "photo"}, {"parts": [{"image": "photo"}]}):
        answer = client.post(
            "/v1/search", **form({**query, "modality": "image", "k": 3}, photo=sent)
        )
        assert [hit["id"] for hit in answer.json()["hits"]] == expected
    for name, data, why in (
        ("other", sent, "no part 'other'"),
        ("photo", b"GIF89a", "damaged"),
        ("photo", picture(size=(6000, 5000)), "25,000,000 are allowed"),
    ):
        answer = client.post("/v1/search", **form({"image": name}, photo=data))
        assert why in is_problem(answer, 422)["detail"]


@pytest.mark.skipif(not features.check("avif"), reason="needs AVIF")
@pytest.mark.parametrize(("kind", "brand"), [("AVIF", b"avif"), ("AVIF", b"mif1"), ("TIFF", b"")])
def test_pictures_whose_size_cannot_be_known_are_refused(client, kind, brand):
    data = picture(kind=kind).replace(b"ftypavif", b"ftyp" + brand)
    is_problem(client.post("/v1/search", **form({"image": "photo"}, photo=data)), 422)


def test_conditions_words_and_settings_apply(client):
    cheap = post(client, text="a kite", where=["price<3", "size.width!=1"], k=9).json()["hits"]
    assert {hit["id"] for hit in cheap} == {"1:0", "1:2"}
    named = post(client, text="a kite", match="green", k=9).json()["hits"]
    assert {hit["id"] for hit in named} == {"1:3", "1:4", "1:5"}
    for query in (
        {"text": "a kite -boat -clock", "modality": "text"},
        {"match": "kite -boat NOT clock"},
    ):
        kites = post(client, **query, k=9).json()["hits"]
        assert {hit["id"] for hit in kites} == {"1:0", "1:3", "1:6"}
    both = [post(client, text="a kite", k=2, offset=offset).json()["hits"] for offset in (0, 2)]
    assert [hit["rank"] for page in both for hit in page] == [1, 2, 3, 4]
    assert [page[0]["id"] for page in both] == [
        post(client, text="a kite", k=4).json()["hits"][n]["id"] for n in (0, 2)
    ]
    listed = post(client, where=["price<3"], modality="text").json()
    assert ([hit["id"] for hit in listed["hits"]], listed["good_match"]) == (
        ["1:0", "1:1", "1:2"],
        None,
    )
    generated = post(client, text="a kite", beam=7, rerank="none", k=9).json()
    assert generated["settings"] == {
        "beam": 9,
        "candidates": 1000,
        "rerank": "none",
        "router": "generator",
    }
    assert all(hit["log_probabilities"] for hit in generated["hits"])
    for router in ("geometry", "generator"):
        led = post(client, text="a kite", router=router, candidates=0, beam=1, k=1).json()
        assert led["settings"]["router"] == router
        assert {len(hit["log_probabilities"]) > 0 for hit in led["hits"]} == {router == "generator"}


def test_parts_are_composed_with_their_weights(client, index):
    parts = [{"id": "1:0"}, {"text": "green", "weight": 0.5}, {"text": "red", "weight": -0.5}]
    found = post(client, parts=parts, modality="text", k=9, beam=100).json()["hits"]
    expected = index.search(
        parts=[
            SearchPart(id="1:0"),
            SearchPart(text="green", weight=0.5),
            SearchPart(text="red", weight=-0.5),
        ],
        modality="text",
        k=9,
        config=SearchConfig(beam=100),
    )
    assert [hit["id"] for hit in found] == [hit.id for hit in expected]
    is_problem(post(client, parts=[{"id": "nobody"}]), 404)


def test_an_index_made_without_training_is_searched_with_its_own_settings(clip_folder, tmp_path):
    pool = tmp_path / "pool"
    pool.mkdir()
    for number, words in enumerate(
        ("red ground", "green ground", "blue ground", "red a", "green a", "blue a")
    ):
        (pool / f"{number}.txt").write_text(words)
    index = Index.create(tmp_path / "index", pool, encoder=f"clip:{clip_folder}")
    assert index.settings.rerank == "embeddings"
    with serving(index) as running:
        hits = post(running, text="green ground").json()["hits"]
        refused = is_problem(post(running, text="x", router="generator"), 422)
    assert "no generator" in refused["detail"]
    expected = index.search("green ground")
    assert [hit["score"] for hit in hits] == pytest.approx(
        [hit.score for hit in expected], abs=1e-6
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "needs a text"),
        ({"text": " "}, "needs a text"),
        ({"text": "x", "kk": 1}, "kk"),
        ({"text": "x", "k": 0}, "k: "),
        ({"text": "x", "offset": MAX_HTTP_HITS}, "offset: "),
        ({"where": ["a=b"] * 51}, "where: "),
        ({"text": "x", "k": MAX_HTTP_HITS + 1}, "k: "),
        ({"text": "x", "beam": 1_000 + 1}, "beam: "),
        ({"text": "x", "candidates": 100_000 + 1}, "candidates: "),
        ({"text": "x", "rerank": "embeddings"}, "stores no embeddings"),
        ({"text": "x", "rerank": "none", "beam": 101}, "rerank: "),
        ({"parts": [{"text": "x"}] * 16, "combine": "any", "rerank": "none"}, "rerank: "),
        ({"text": "x" * (10_000 + 1)}, "text: "),
        ({"text": "x", "modality": "sound"}, "modality: "),
        ({"text": "x", "where": ["price"]}, "expected a field and an operator"),
        ({"text": "x", "where": ["price<1"] * (50 + 1)}, "where: "),
        ({"text": "x", "where": ["price in " + ",".join(["1"] * 1001)]}, "where.0"),
        ({"text": "x", "where": ["image~/home"]}, "where: "),
        ({"text": "x", "match": "!"}, "no word in it"),
        ({"parts": [{"text": "x"}] * (MAX_QUERY_PARTS + 1)}, "parts: "),
        ({"parts": [{"text": "x", "weight": 1e9}]}, "parts.0.weight"),
        ({"parts": [{"text": "x", "id": "1:1"}]}, "or else an item"),
        ({"image": "http://127.0.0.1/x.png"}, "URLs are not fetched"),
        ({"text": "x", "deadline_ms": 0}, "deadline_ms"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_search_is_refused_with_its_reason(client, body, why):
    assert why in is_problem(post(client, **body), 422)["detail"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": NaN}',
        b'{"text": "\\ud800"}',
        b'{"parts":' * 5000,
        b'{"k": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_invalid_json_is_refused(client, content):
    response = client.post(
        "/v1/search", content=content, headers={"Content-Type": "application/json"}
    )
    is_problem(response, response.status_code)
    assert response.status_code in (400, 413, 422)


def test_an_index_that_is_not_there_is_not_found(client):
    assert "things" in is_problem(post(client, index="photos", text="x"), 404)["detail"]
    assert post(client, index="things", text="x").status_code == 200


def test_a_passed_deadline_is_a_problem(client, monkeypatch):
    monkeypatch.setattr(items, "STEPS_BETWEEN_CLOCK_CHECKS", 1)
    for path in ("/v1/search", "/v1/explain"):
        body = {"text": "x", "where": ["colour~e"], "deadline_ms": 1}
        is_problem(client.post(path, json=body | ({"id": "1:4"} if "explain" in path else {})), 504)


def test_hits_that_are_too_large_together_are_refused(client, monkeypatch):
    monkeypatch.setattr(app, "MAX_HITS_BYTES", 1_000)
    assert "smaller k" in is_problem(post(client, text="a kite", k=9), 413)["detail"]
    assert post(client, text="a kite", k=1).status_code == 200
