"""What clients and proxies expect of HTTP: HEAD, Allow, compressed bodies, a prefix, a reference."""

from __future__ import annotations

import gzip
import json

import pytest
from fastapi.testclient import TestClient

from genius_search.serve.app import create_app
from genius_search.serve.describe import public_spec
from genius_search.serve.schemas import JSON_BYTES
from genius_search.serve.service import Service

from .conftest import LOCAL, make_index
from .test_guard import JSON, is_problem


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/docs",
        "/healthz",
        "/metrics",
        "/openapi.json",
        "/assets/main.js",
        "/v1/indexes",
        "/v1/items?id=1:1",
        "/v1/items/picture?id=2:0",
        "/v1/items/original?id=2:0",
    ],
)
def test_head_is_answered_like_get_without_the_body(client, path):
    whole, head = client.get(path), client.head(path)
    assert (whole.status_code, head.status_code, head.content) == (200, 200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == whole.headers["content-length"]


def test_a_method_that_a_path_does_not_have_is_refused_with_its_methods(client):
    for method, path, allowed in (
        ("DELETE", "/v1/search", "GET, HEAD, POST"),
        ("POST", "/v1/indexes", "GET, HEAD"),
        ("PUT", "/v1/items", "DELETE, GET, HEAD, PATCH, POST"),
        ("XYZZY", "/v1/items", "DELETE, GET, HEAD, PATCH, POST"),
        ("DELETE", "/v1/items/examples", "GET, HEAD"),
    ):
        response = client.request(method, path, json={})
        is_problem(response, 405)
        assert response.headers["allow"] == allowed


def test_a_body_with_get_is_refused(client):
    response = client.request("GET", "/v1/search", json={"text": "a kite"})
    assert "POST" in is_problem(response, 413)["detail"]


def test_a_body_may_be_compressed_and_begin_with_a_byte_order_mark(client):
    body = json.dumps({"text": "a red kite", "k": 2}).encode()
    zipped = JSON | {"Content-Encoding": "gzip"}
    expected = client.post("/v1/search", content=body, headers=JSON).json()["hits"]
    for content, headers in (
        (b"\xef\xbb\xbf" + body, JSON),
        (gzip.compress(body), zipped),
        (gzip.compress(b"\xef\xbb\xbf" + body), zipped),
    ):
        assert (
            client.post("/v1/search", content=content, headers=headers).json()["hits"] == expected
        )
    for content, status in (
        (gzip.compress(body)[:-9], 400),
        (b"\x1f\x8b" + body, 400),
        (gzip.compress(b" " * (JSON_BYTES + 1)), 413),
    ):
        is_problem(client.post("/v1/search", content=content, headers=zipped), status)


def test_the_reference_names_all_routes_and_fields(client):
    page = client.get("/docs").text
    for path in client.get("/openapi.json").json()["paths"]:
        assert f" {path}</code>" in page
    for name in ("SearchBody", "vector", "searches", "deadline_ms", "NewItem", "weight"):
        assert f"<code>{name}</code>" in page


def test_a_description_names_the_encoder_and_whether_the_index_is_writable(client):
    [described] = client.get("/v1/indexes").json()["indexes"]
    index = client.app.state.service.indexes["things"]
    assert described["dim"] == index.model.encoder.dim
    assert described["encoder"] == public_spec(index.model.encoder.spec)
    assert described["writable"] is True
    assert public_spec("adapters:/models/a,hub/b") == "adapters:a,hub/b"


def test_a_proxy_may_keep_or_remove_the_prefix(model, tmp_path):
    app = create_app(Service({"things": make_index(tmp_path, model)}), prefix="/at/home")
    with TestClient(app, base_url=LOCAL) as client:
        for start in ("", "/at/home"):
            search = client.post(f"{start}/v1/search", json={"text": "a kite"})
            assert search.status_code == 200
            assert client.get(f"{start}/assets/main.js").status_code == 200
            assert client.get(f"{start}/").text.startswith("<!doctype html>")
        moved = client.get("/at/home", follow_redirects=False)
        assert (moved.status_code, moved.headers["location"]) == (308, "/at/home/")
        assert client.get("/at/homes").status_code == 404
