"""Searching over HTTP gives what searching in Python gives."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time

import numpy as np
import pytest
from PIL import Image, features

from genius_search import SearchPart
from genius_search.config import SearchConfig
from genius_search.index import items
from genius_search.index.index import Index
from genius_search.index.snapshot import UnknownItem
from genius_search.serve import queries, search
from genius_search.serve.schemas import MAX_HTTP_HITS, MAX_QUERY_PARTS, MAX_SEARCHES
from genius_search.serve.service import Service, Threads

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
        led = post(client, text="a kite", router=router, beam=1, k=1).json()
        assert (led["settings"]["router"], len(led["hits"])) == (router, 1)


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
        ({"text": "x", "candidates": 100}, "candidates: "),
        ({"text": "x", "rerank": "embeddings"}, "stores no embeddings"),
        ({"text": "x", "rerank": "none", "beam": 101}, "rerank: "),
        ({"parts": [{"text": "x"}] * 16, "combine": "any", "rerank": "none"}, "rerank: "),
        ({"text": "x" * (10_000 + 1)}, "text: "),
        ({"text": "x", "modality": "sound"}, "modality: "),
        ({"text": "x", "where": ["price"]}, "expected a field and an operator"),
        ({"text": "x", "where": ["price<1"] * (50 + 1)}, "where: "),
        ({"text": "x", "where": ["price in " + ",".join(["1"] * 1001)]}, "where[0]"),
        ({"text": "x", "where": ["image~/home"]}, "where: "),
        ({"text": "x", "match": "!"}, "no word in it"),
        ({"parts": [{"text": "x"}] * (MAX_QUERY_PARTS + 1)}, "parts: "),
        ({"parts": [{"text": "x", "weight": 1e9}]}, "parts[0].weight"),
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
    monkeypatch.setattr(queries, "MAX_HITS_BYTES", 1_000)
    assert "smaller k" in is_problem(post(client, text="a kite", k=9), 413)["detail"]
    assert post(client, text="a kite", k=1).status_code == 200


@pytest.fixture(scope="module")
def vector(index):
    return index.model.encoder.text_features(["a red kite"])[0].astype("<f4")


def as_base64(vector) -> str:
    return base64.b64encode(vector.tobytes()).decode()


def test_a_vector_finds_the_same_as_in_python(client, index, vector):
    expected = [hit.id for hit in index.search(vector=vector, modality="text", k=4)]
    for written in (vector.tolist(), as_base64(vector)):
        for query in ({"vector": written}, {"parts": [{"vector": written}]}):
            hits = post(client, **query, modality="text", k=4).json()["hits"]
            assert [hit["id"] for hit in hits] == expected
    mixed = post(client, text="blue", vector=vector.tolist(), modality="text", k=4).json()["hits"]
    assert [hit["id"] for hit in mixed] == [
        hit.id for hit in index.search("blue", vector=vector, modality="text", k=4)
    ]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ([0.5] * 3, "expected {dim} numbers, got 3"),
        ([0] * 8, "expected {dim} numbers, got 8"),
        ([], "expected {dim} numbers, got 0"),
        (["1"], "expected a list of numbers"),
        ([[1.0]], "expected a list of numbers"),
        ([1.0, None], "expected a list of numbers"),
        ("not base64", "expected a list of numbers, or base64"),
        ("QUJD", "expected 4 bytes for each number in base64, got 3"),
        (5, "expected a list of numbers"),
    ],
    ids=str,
)
def test_an_invalid_vector_is_refused_by_the_name_of_its_field(client, vector, broken, why):
    why = why.format(dim=len(vector))
    for name, body in (
        ("vector", {"vector": broken}),
        ("parts[1].vector", {"parts": [{"text": "x"}, {"vector": broken}]}),
        ("searches[1].vector", {"searches": [{"text": "x"}, {"vector": broken}]}),
    ):
        detail = is_problem(post(client, **body), 422)["detail"]
        assert detail.startswith(f"{name}: {why}")
    zeros = is_problem(post(client, vector=[0.0] * len(vector)), 422)["detail"]
    assert zeros.startswith("vector: has no direction")


def test_several_searches_are_answered_in_their_order(client, index, vector):
    searches = [
        {"text": "a red kite", "k": 3},
        {"vector": vector.tolist(), "k": 2, "fields": []},
        {"text": "a boat", "where": ["price<5"], "rerank": "codes"},
        {"where": ["price<3"], "modality": "text"},
    ]
    body = post(client, searches=searches, index="things").json()
    assert body.keys() == {"request_id", "index", "took_ms", "results"}
    for query, result in zip(searches, body["results"], strict=True):
        alone = post(client, **query).json()
        assert [hit["id"] for hit in result["hits"]] == [hit["id"] for hit in alone["hits"]]
        assert result["settings"] == alone["settings"]
        assert result["good_match"] == alone["good_match"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"searches": []}, "searches: "),
        ({"searches": [{"text": "x"}] * (MAX_SEARCHES + 1)}, "searches: "),
        ({"searches": [{"text": "x"}], "text": "x"}, "searches: write text in each search"),
        ({"searches": [{"text": "x"}, {}]}, "searches[1]: a query needs a text"),
        ({"searches": [{"text": "x", "index": "things"}]}, "searches[0].index"),
        ({"searches": [{"text": "x"}, {"text": "x", "where": ["image~x"]}]}, "searches[1].where: "),
        ({"searches": [{"text": "x", "k": 501}] * 2}, "searches: k and offset of all"),
        ({"searches": [{"text": "x", "rerank": "none", "k": 60}] * 2}, "searches: rerank none"),
        ({"searches": [{"text": "x"}, {"text": "x", "where": ["nofield=1"]}]}, "searches[1]: "),
        ({"parts": [{"text": "x", "weight": 2}], "combine": "any"}, "parts[0].weight: "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_searches_are_refused_by_the_names_of_their_fields(client, body, why):
    assert is_problem(post(client, **body), 422)["detail"].startswith(why)


def test_one_of_several_searches_that_asks_for_an_unknown_item_is_named(client):
    searches = [{"text": "x"}, {"parts": [{"id": "nobody"}]}]
    detail = is_problem(post(client, searches=searches), 404)["detail"]
    assert detail.startswith("searches[1]: ")
    assert "nobody" in detail


def test_an_index_of_vectors_is_searched_and_grows_by_vectors(tmp_path):
    vectors = np.eye(8, dtype="<f4")[:6] + 0.1
    made = Index.from_vectors(tmp_path / "mine.index", vectors, ids=list("abcdef"))
    with serving(made) as running:
        assert [
            hit["id"] for hit in post(running, vector=vectors[2].tolist(), k=1).json()["hits"]
        ] == ["c"]
        refused = is_problem(post(running, text="a kite"), 422)["detail"]
        assert refused.startswith("text: this index was created from vectors")
        new = np.eye(8, dtype="<f4")[7] + 0.1
        items = [
            {"id": "new", "vector": new.tolist(), "fields": {"price": 3}},
            {"id": "image", "vector": as_base64(new + 1), "modality": "image", "text": "words"},
            {"id": "short", "vector": [1.0]},
            {"vector": new.tolist(), "image": "p"},
            {"id": "modality", "modality": "image", "text": "words"},
        ]
        added = running.post("/v1/items", json={"items": items}).json()
        assert (added["added"], added["ids"][:2]) == (2, ["new", "image"])
        assert added["left_out"] == [
            {"id": "short", "reason": "vector: expected 8 numbers, got 1"},
            {"id": "items[3]", "reason": "image: an item has a vector or an image, not both"},
            {
                "id": "modality",
                "reason": "modality: only items with a vector name it; leave it out",
            },
        ]
        [hit] = post(running, vector=new.tolist(), k=1).json()["hits"]
        assert (hit["id"], hit["fields"]) == ("new", {"price": 3})
        assert running.get("/v1/items", params={"id": "image"}).json()["modality"] == "image"
        choice = {"vector": vectors[0].tolist(), "id": "e"}
        assert running.post("/v1/feedback", json=choice).status_code == 204
        [chosen] = made.choices()
        assert chosen["chosen"] == "e"


def test_quick_searches_run_in_batches_on_the_event_loop_with_the_same_hits(index, monkeypatch):
    served = Service({"things": index})
    served.quick_texts, served.quick_vectors = {"things"}, {"things"}
    monkeypatch.setattr(Threads, "run", None)  # no search is handed to a thread
    batches = []
    search_all = search.search_all
    monkeypatch.setattr(
        search, "search_all", lambda *args: batches.append(len(args[1])) or search_all(*args)
    )
    bodies = [{"text": f"a red kite {number}", "k": number + 1} for number in range(20)]
    bodies.append({"parts": [{"id": "nobody"}]})

    async def answer(route: search.SearchRoute) -> list[bytes | BaseException]:
        states = [
            {
                "request_id": str(number),
                "began": time.monotonic(),
                "content_type": "application/json",
                "body": json.dumps(body).encode(),
            }
            for number, body in enumerate(bodies)
        ]
        answers = [route.answer(state) for state in states]
        return await asyncio.gather(*answers, return_exceptions=True)

    *answers, error = asyncio.run(answer(search.SearchRoute(served)))
    assert batches[0] == search.MAX_BATCH
    assert isinstance(error, UnknownItem)
    for body, written in zip(bodies, answers, strict=False):
        expected = index.search(body["text"], k=body["k"])
        assert [hit["id"] for hit in json.loads(written)["hits"]] == [hit.id for hit in expected]


def test_a_batch_runs_in_a_thread_after_a_change(writable, monkeypatch):
    served = writable.app.state.service
    served.quick_texts = {"things"}
    index = served.indexes["things"]
    Index.open(index.folder, model=index.model).delete("1:0")  # as another process would
    # The watch of the files may have opened the new state already, on a busy machine.
    is_current = iter([False, True])
    monkeypatch.setattr(search, "is_current", lambda _: next(is_current))
    threads = []
    run = search.Batches._run
    monkeypatch.setattr(
        search.Batches,
        "_run",
        lambda *args: threads.append(threading.current_thread().name) or run(*args),
    )
    for _ in range(2):
        hits = post(writable, text="a kite", k=20).json()["hits"]
        assert "1:0" not in {hit["id"] for hit in hits}
    assert threads[0].startswith("ThreadPoolExecutor")
    assert not threads[1].startswith("ThreadPoolExecutor")


def test_an_address_searches_like_a_body(client):
    parameters = {
        "text": "a red kite",
        "where": ["price<5", "colour=red"],
        "k": 2,
        "fields": "price",
    }
    response = client.get("/v1/search", params=parameters)
    body = {**parameters, "fields": ["price"]}
    assert response.status_code == 200
    assert response.json()["hits"] == post(client, **body).json()["hits"]
    facets = client.get("/v1/search?where=price<5&facets=colour").json()["facets"]
    assert sum(value["items"] for value in facets["colour"]) == 5
    for wrong in ("?k=0&text=a", "?colour=red", "", "?text=a&where=nothing=1"):
        is_problem(client.get(f"/v1/search{wrong}"), 422)
