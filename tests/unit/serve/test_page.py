"""The page: its files, their types, and what they may do in a browser."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from genius_search.serve.app import PAGE, create_app
from genius_search.serve.service import Service

FILES = {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir()}
START = FILES["index.html"]
LIBRARY = "preact.js"


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(create_app(Service({})), base_url="http://localhost")


def test_the_page_and_all_it_names_are_served_with_their_types(client):
    start = client.get("/")
    assert start.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r"assets/([\w.]+)", start.text))
    for name, content in FILES.items():
        if name.endswith(".js"):
            named |= set(re.findall(r'from "\./([\w.]+)"', content))
    assert named == set(FILES) - {"index.html"}  # nothing is missing, and nothing is unused
    expected = {".js": "/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for name in named:
        kind = client.get(f"/assets/{name}").headers["content-type"].split(";")[0]
        assert kind.endswith(expected[name[name.index(".") :]]), name


def test_it_has_no_script_or_style_inside_and_makes_no_markup_from_text():
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", START)
    for name, text in FILES.items():
        if name == LIBRARY:  # whose one way to markup is the name that the other files do not use
            assert not re.search(r"\beval\(|new Function|document\.write", text)
            continue
        assert not re.search(
            r"innerHTML|dangerouslySet|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function",
            text,
        ), name
        assert set(re.findall(r"https?://[^\s\"'`<]+", text)) <= {"http://www.w3.org/2000/svg"}, (
            name
        )


@pytest.mark.parametrize("name", ["page.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", ""])
def test_no_other_file_is_served(client, name):
    assert client.get(f"/assets/{name}").status_code == 404
