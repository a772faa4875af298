"""Who may ask, from where; and what an error tells."""

from __future__ import annotations

import errno

import pytest

from genius_search.errors import ArtifactMismatch, UsageError
from genius_search.index.query import SnapshotSearcher

from .conftest import make_index, serving

SEARCH = {"text": "a kite"}
JSON = {"Content-Type": "application/json"}


def is_problem(response, status: int) -> dict:
    body = response.json()
    assert response.status_code == status, body
    assert response.headers["content-type"] == "application/problem+json"
    assert body["status"] == status
    assert body["request_id"] == response.headers["x-request-id"]
    assert {"title", "detail"} <= body.keys()
    return body


def test_every_answer_has_an_id_and_forbids_what_browsers_might_do_with_it(client):
    for path, status in (
        ("/", 200),
        ("/assets/main.js", 200),
        ("/v1/indexes", 200),
        ("/nothing", 404),
    ):
        response = client.get(path)
        assert response.status_code == status
        assert response.headers["x-request-id"]
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'self'; img-src 'self' blob: data:;")
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "private, no-cache"


def test_unknown_paths_and_methods_are_problems(client):
    is_problem(client.get("/v1/nothing"), 404)
    is_problem(client.put("/v1/search", json={}), 405)
    is_problem(client.get("/v1/items"), 422)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "localhost#.evil.example",
        "localhost/.evil.example",
        "localhost:80@evil.example",
        "evil@localhost",
        "127.0.0.2",
        "",
        "[",
        "a:b:c",
    ],
)
def test_without_keys_only_this_machine_s_own_names_are_answered(client, host):
    is_problem(client.get("/v1/indexes", headers={"Host": host}), 403)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "LOCALHOST"]
)
def test_this_machine_has_several_names(client, host):
    assert client.get("/v1/indexes", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Origin": "http://[", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "evil://localhost"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_another_site_s_page_can_neither_search_nor_add(client, headers):
    is_problem(client.post("/v1/search", json=SEARCH, headers=headers), 403)
    is_problem(client.post("/v1/items", json={"items": [{"text": "spam"}]}, headers=headers), 403)


def test_the_server_s_own_page_can(client):
    own = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}
    assert client.post("/v1/search", json=SEARCH, headers=own).status_code == 200


def test_with_keys_every_request_needs_one_and_reading_is_not_writing(model, tmp_path, write_keys):
    reader, writer = "reading" * 3, "writing" * 3
    file = write_keys(f"reader read {reader}", f"writer write {writer}")
    item = {"items": [{"id": "new", "text": "a drum"}]}
    with serving(make_index(tmp_path, model), keys=file, base="https://search.example") as client:
        for path in ("/v1/indexes", "/v1/items?id=1:1", "/v1/items/picture?id=2:0", "/metrics"):
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": f"Basic {reader}"},
            ):
                response = client.get(path, headers=headers)
                is_problem(response, 401)
                assert response.headers["www-authenticate"] == "Bearer"
            for headers in (
                {"Authorization": f"Bearer {reader}"},
                {"X-API-Key": reader},
                {"X-API-Key": writer},
            ):
                assert client.get(path, headers=headers).status_code == 200
        is_problem(
            client.post("/v1/search", content=b"{", headers=JSON), 401
        )  # before anything is read
        reads, writes = {"X-API-Key": reader}, {"X-API-Key": writer}
        assert client.post("/v1/search", json=SEARCH, headers=reads).status_code == 200
        is_problem(client.post("/v1/items", json=item, headers=reads), 403)
        is_problem(client.delete("/v1/items?id=1:1", headers=reads), 403)
        assert client.get("/v1/indexes", headers=reads).json()["indexes"][0]["writable"] is False
        assert client.get("/v1/indexes", headers=writes).json()["indexes"][0]["writable"] is True
        assert client.post("/v1/items", json=item, headers=writes).json()["added"] == 1
        assert client.delete("/v1/items?id=1:1", headers=writes).json()["deleted"] == 1
        for path in ("/healthz", "/openapi.json", "/"):
            assert client.get(path).status_code == 200


def test_while_the_file_of_keys_is_unreadable_every_request_is_refused(model, tmp_path, write_keys):
    key = "reading" * 3
    file = write_keys(f"reader read {key}")
    with serving(make_index(tmp_path, model), keys=file) as client:
        assert client.get("/v1/indexes", headers={"X-API-Key": key}).status_code == 200
        file.write_text("no key at all")
        response = client.get("/v1/indexes", headers={"X-API-Key": key})
        is_problem(response, 500)
        assert str(tmp_path) not in response.text


@pytest.mark.parametrize(
    "error", [RuntimeError("secret"), ArtifactMismatch("secret"), OSError(2, "secret", "/secret")]
)
def test_errors_of_the_server_are_logged_and_hidden(client, monkeypatch, caplog, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(SnapshotSearcher, "search", fail)
    response = client.post("/v1/search", json=SEARCH)
    assert "secret" not in response.text
    body = is_problem(response, 500)
    assert body["request_id"] in caplog.text
    assert "secret" in caplog.text


def test_folders_of_the_server_are_redacted(client, monkeypatch):
    index = client.app.state.service.indexes["things"]

    def refuse(*_, **__):
        raise UsageError(f"{index.folder}/items.sqlite has no full text, says {index.model.folder}")

    monkeypatch.setattr(SnapshotSearcher, "search", refuse)
    body = is_problem(client.post("/v1/search", json=SEARCH), 422)
    assert body["detail"] == "things/items.sqlite has no full text, says things"


def test_metrics_count_answers_by_route_and_take_no_label_from_a_client(client):
    client.get("/v1/items?id=nobody")
    client.get("/xyzzy")
    is_problem(client.request("XYZZY", "/v1/items"), 405)
    counted = client.get("/metrics").text
    assert 'http_requests_total{handler="/v1/items",method="GET",status="404"}' in counted
    assert "xyzzy" not in counted.lower()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_and_changes_nothing(writable, monkeypatch, caplog, code):
    def fail(*_, **__):
        raise OSError(code, "full", "/secret")

    before = writable.get("/v1/indexes").json()
    with monkeypatch.context() as patch:
        patch.setattr("genius_search.index.writer.write_manifest", fail)
        for response in (
            writable.post("/v1/items", json={"items": [{"id": "new", "text": "a kite"}]}),
            writable.delete("/v1/items", params={"id": "1:1"}),
        ):
            assert "secret" not in response.text
            is_problem(response, 507)
    assert "failed" in caplog.text
    assert writable.get("/v1/indexes").json() == before
    assert writable.get("/v1/items", params={"id": "new"}).status_code == 404


def test_an_index_that_cannot_be_written_to_says_so(writable, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EROFS, "read-only", "/secret")

    monkeypatch.setattr("genius_search.index.writer.FileLock.acquire", fail)
    for response in (
        writable.post("/v1/items", json={"items": [{"id": "new", "text": "a kite"}]}),
        writable.delete("/v1/items", params={"id": "1:1"}),
    ):
        assert "make it writable" in is_problem(response, 503)["detail"]
        assert "secret" not in response.text
