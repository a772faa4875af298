from __future__ import annotations

import re

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from genius_search.serve.app import page_files, page_router


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI(openapi_url=None)
    app.include_router(page_router())
    return TestClient(app)


def test_the_page_and_all_it_names_are_served_with_their_types(client):
    start = client.get("/")
    assert start.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r"/assets/([\w.]+)", start.text))
    for content in [file.content.decode() for name, file in page_files().items() if name.endswith(".js")]:
        named |= set(re.findall(r'from "\./([\w.]+)"', content))
    assert named == set(page_files()) - {"index.html"}  # nothing is missing, and nothing is idle
    types = {name: client.get(f"/assets/{name}").headers["content-type"].split(";")[0] for name in named}
    assert {types[name] for name in named if name.endswith(".js")} == {"text/javascript"}
    assert {types[name] for name in named if name.endswith(".css")} == {"text/css"}


def test_it_may_load_and_call_its_own_server_only(client):
    policy = client.get("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'self'; img-src 'self' blob: data:;")
    assert "unsafe" not in policy


def test_it_has_no_script_or_style_inside_and_makes_no_markup_from_text():
    start = page_files()["index.html"].content.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", start)
    for name, file in page_files().items():
        text = file.content.decode()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), name
        assert set(re.findall(r"https?://[^\s\"'`<]+", text)) <= {"http://www.w3.org/2000/svg"}, name


def test_what_did_not_change_is_not_sent_again(client):
    first = client.get("/assets/main.js")
    again = client.get("/assets/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/assets/main.js", headers={"If-None-Match": '"another"'}).status_code == 200


def test_it_is_compressed_for_those_who_read_that(client):
    plain = client.get("/assets/base.css", headers={"Accept-Encoding": "identity"})
    packed = client.get("/assets/base.css", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 2
    assert packed.text == plain.text


@pytest.mark.parametrize(
    "name", ["index.html", "page.py", "..%2fpage.py", "%2e%2e/page.py", "/etc/passwd", ""]
)
def test_no_other_file_is_served(client, name):
    assert client.get(f"/assets/{name}").status_code == 404
