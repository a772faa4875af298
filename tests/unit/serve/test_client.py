"""The client returns what the service answers, and comes back when it is busy."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import httpx
import pytest

from genius_search.errors import NetworkNeeded
from genius_search.serve import client as module
from genius_search.serve.client import BATCH_ITEMS, Client, NewItem, SearchPart, ServiceProblem
from genius_search.serve.schemas import LeftOut

HIT = {
    "rank": 1,
    "id": "kite",
    "score": 0.5,
    "probability": None,
    "modality": "text",
    "text": "a kite",
    "image": None,
    "fields": {"price": 3},
    "codes": [1, 2],
    "log_probabilities": [-0.1],
    "from_a_newer_service": 1,
}
FOUND = {
    "request_id": "r",
    "index": "kites",
    "took_ms": {"queue": 1.0, "encode": 2.0, "search": 3.0, "total": 6.0},
    "settings": {"beam": 50, "candidates": 0, "rerank": "codes", "router": "geometry"},
    "good_match": True,
    "hits": [HIT],
}


class Service:
    """Gives prepared answers and remembers the requests."""

    def __init__(self, *answers: httpx.Response) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self.answers.pop(0)

    def bodies(self) -> list[dict]:
        return [json.loads(request.content) for request in self.requests]

    def client(self, **settings) -> Client:
        made = Client("http://service", **settings)
        made._http = httpx.Client(
            base_url="http://service", headers=made._http.headers, transport=httpx.MockTransport(self)
        )
        return made


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    """What the client waited, without waiting."""
    waits: list[float] = []
    monkeypatch.setattr(module.time, "sleep", waits.append)
    return waits


def busy(seconds: str = "2", status: int = 429) -> httpx.Response:
    return httpx.Response(status, headers={"Retry-After": seconds}, json={"title": "Busy", "detail": "later"})


def test_a_search_sends_its_parameters_and_returns_objects():
    service = Service(httpx.Response(200, json=FOUND))
    with service.client(key="secret", index="kites") as client:
        found = client.search(
            "a kite", image=b"photo", parts=[SearchPart(id="7", weight=-0.5)], where=["price<9"], k=3
        )
    (request,) = service.requests
    assert request.url.path == "/v1/search"
    assert request.headers["Authorization"] == "Bearer secret"
    assert service.bodies() == [
        {
            "index": "kites",
            "text": "a kite",
            "image": base64.b64encode(b"photo").decode(),
            "parts": [{"id": "7", "weight": -0.5}],
            "where": ["price<9"],
            "k": 3,
        }
    ]
    assert (found.index, found.good_match, found.took_ms.total) == ("kites", True, 6.0)
    (hit,) = found.hits
    assert (hit.rank, hit.id, hit.fields, hit.codes, hit.probability) == (
        1,
        "kite",
        {"price": 3},
        [1, 2],
        None,
    )


def test_many_items_go_in_several_requests_with_one_outcome(tmp_path):
    picture = tmp_path / "kite.jpg"
    picture.write_bytes(b"photo")
    answers = [
        {"added": BATCH_ITEMS, "replaced": 0, "unchanged": 0, "left_out": [], "ids": ["x"] * BATCH_ITEMS},
        {"added": 1, "replaced": 2, "unchanged": 3, "left_out": [{"id": "b", "reason": "bad"}], "ids": ["y"]},
    ]
    service = Service(*(httpx.Response(200, json=answer) for answer in answers))
    items = [NewItem(id=str(n), text="a kite") for n in range(BATCH_ITEMS)]
    added = service.client().add([*items, NewItem(image=picture, fields={"price": 1})])
    assert [len(body["items"]) for body in service.bodies()] == [BATCH_ITEMS, 1]
    assert service.bodies()[1]["items"] == [
        {"image": base64.b64encode(b"photo").decode(), "fields": {"price": 1}}
    ]
    assert (added.added, added.replaced, added.unchanged) == (BATCH_ITEMS + 1, 2, 3)
    assert added.left_out == [LeftOut(id="b", reason="bad")]
    assert len(added.ids) == BATCH_ITEMS + 1


def test_large_items_go_in_requests_of_their_own(monkeypatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 10)
    nothing = {"added": 1, "replaced": 0, "unchanged": 0, "left_out": [], "ids": []}
    service = Service(*(httpx.Response(200, json=nothing) for _ in range(3)))
    service.client().add([NewItem(text="x" * size) for size in (30, 4, 5, 5)])
    assert [len(body["items"]) for body in service.bodies()] == [1, 2, 1]


def test_deleting_and_getting_name_the_index():
    item = {name: HIT[name] for name in ("id", "modality", "text", "image", "fields", "codes")}
    service = Service(
        httpx.Response(200, json={"deleted": 1, "missing": ["b"]}),
        httpx.Response(200, json=item),
        httpx.Response(200, json={"indexes": [{"name": "kites"}]}),
    )
    client = service.client(index="kites")
    deleted = client.delete(["a", "b"])
    assert (deleted.deleted, deleted.missing) == (1, ["b"])
    assert client.get("a&b").text == "a kite"
    assert client.indexes() == ["kites"]
    assert [request.url.params.get("index") for request in service.requests] == ["kites", "kites", None]
    assert service.requests[1].url.params["id"] == "a&b"


def test_a_busy_service_is_tried_again_when_it_says(slept):
    service = Service(busy("2"), busy("7", status=503), busy("100000"), httpx.Response(200, json=FOUND))
    assert service.client().search("a kite").hits
    assert slept == [2.0, 7.0, module.MAX_WAIT_SECONDS]


def test_a_service_that_stays_busy_is_left_alone_at_last(slept):
    service = Service(*(busy() for _ in range(module.ATTEMPTS)))
    with pytest.raises(ServiceProblem, match="429 Busy: later"):
        service.client().search("a kite")
    assert len(slept) == module.ATTEMPTS - 1


def test_other_errors_are_raised_at_once(slept):
    problem = {"title": "Unprocessable", "detail": "k: too many", "request_id": "abc", "errors": []}
    service = Service(
        httpx.Response(422, json=problem), httpx.Response(502, text="<html>proxy"), busy("soon")
    )
    client = service.client()
    with pytest.raises(ServiceProblem) as refused:
        client.search("a kite", k=10**9)
    assert (refused.value.status, refused.value.request_id) == (422, "abc")
    assert refused.value.body["errors"] == []
    with pytest.raises(ServiceProblem, match="502 Bad Gateway: <html>proxy"):
        client.search("a kite")
    with pytest.raises(ServiceProblem, match="429"):
        client.search("a kite")
    assert slept == []


def test_the_client_and_the_service_understand_each_other(writable):
    def pass_on(request: httpx.Request) -> httpx.Response:
        headers = {name: request.headers[name] for name in ("Content-Type",) if name in request.headers}
        done = writable.request(request.method, str(request.url), content=request.content, headers=headers)
        return httpx.Response(done.status_code, headers=dict(done.headers), content=done.content)

    client = Client("http://localhost")
    client._http = httpx.Client(base_url="http://localhost", transport=httpx.MockTransport(pass_on))
    assert client.indexes() == ["things"]
    added = client.add(
        [NewItem(id="a/b", text="a striped drum", fields={"price": 99}), NewItem(id="bad", text=" ")]
    )
    assert (added.added, [one.id for one in added.left_out], added.ids) == (1, ["bad"], ["a/b", "bad"])
    (hit,) = client.search("a drum", where=["price=99"]).hits
    assert (hit.id, hit.rank, hit.fields) == ("a/b", 1, {"price": 99})
    parts = [SearchPart(id="a/b"), SearchPart(text="red", weight=-0.5)]
    assert client.search(parts=parts, k=3, beam=50, deadline_ms=60_000).hits
    item = client.get("a/b")
    assert (item.text, item.codes) == ("a striped drum", hit.codes)
    explained = client.explain("a/b", "a drum")
    assert [level.code for level in explained.levels] == item.codes
    assert all(level.siblings for level in explained.levels)
    root = client.codes()
    assert root.items == 13
    assert sum(child.items for child in root.children) == 13
    assert client.codes(item.codes).examples[0].id == "a/b"
    with pytest.raises(ServiceProblem, match="404"):
        client.get("nobody")
    with pytest.raises(ServiceProblem, match="422"):
        client.search()
    assert client.delete(["a/b"]).deleted == 1


def test_a_service_that_does_not_answer_is_named_by_its_address():
    with (
        pytest.raises(NetworkNeeded, match=r"http://127\.0\.0\.1:9.* does not answer"),
        Client("http://127.0.0.1:9") as client,
    ):
        client.indexes()


def test_the_client_needs_neither_pytorch_nor_fastapi():
    code = (
        "import sys; from genius_search.serve import Client; "
        "print(sorted({'torch', 'fastapi', 'starlette', 'numpy', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == "[]"
