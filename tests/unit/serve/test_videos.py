"""Videos over HTTP and for agents: the moment of a hit, its thumbnail, and ranges of the file."""

from __future__ import annotations

import asyncio
import io
import json

import numpy as np
import pytest
from mcp import Client
from PIL import Image

from genius_search.encoders import open as open_module
from genius_search.index.index import Index
from genius_search.serve.mcp import make_server
from tests.unit.serve.conftest import serving
from tests.videos import GREEN, RED, colour_plugins, draw_video


@pytest.fixture
def index(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(open_module, "entry_points", colour_plugins)
    (tmp_path / "videos").mkdir()
    draw_video(tmp_path / "videos" / "film.mp4", [(RED, 6), (GREEN, 6)])
    return Index.create(tmp_path / "i", tmp_path / "videos", encoder="colours:x")


def mean_colour(response):
    assert response.status_code == 200, response.text
    return np.asarray(Image.open(io.BytesIO(response.content))).mean(axis=(0, 1))


def test_a_hit_names_its_moment_and_its_thumbnail_shows_it(index):
    with serving(index) as client:
        [hit] = client.post("/v1/search", json={"text": "green"}).json()["hits"]
        assert 6 <= hit["moment"] < 8
        assert hit["fields"]["kind"] == "video"
        assert hit["image"].endswith(f"&moment={hit['moment']:g}")
        assert np.abs(mean_colour(client.get(hit["image"])) - GREEN).max() < 60
        poster = client.get("/v1/items/picture", params={"id": "film.mp4", "size": 64})
        assert np.abs(mean_colour(poster) - RED).max() < 60
        late = client.get("/v1/items/picture", params={"id": "film.mp4", "moment": 999_999})
        assert np.abs(mean_colour(late) - GREEN).max() < 60
        wrong = client.get("/v1/items/picture", params={"id": "film.mp4", "moment": -1})
        assert wrong.status_code == 422


def test_a_thumbnail_needs_no_cached_frames(index, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with serving(index) as client:
        shown = client.get("/v1/items/picture", params={"id": "film.mp4", "moment": 9.0})
        assert np.abs(mean_colour(shown) - GREEN).max() < 60
        poster = client.get("/v1/items/picture", params={"id": "film.mp4"})
        assert np.abs(mean_colour(poster) - RED).max() < 60


def test_players_get_ranges_of_the_file(index, tmp_path):
    content = (tmp_path / "videos" / "film.mp4").read_bytes()
    with serving(index) as client:
        whole = client.get("/v1/items/original", params={"id": "film.mp4"})
        assert (whole.content, whole.headers["content-type"]) == (content, "video/mp4")
        assert whole.headers["accept-ranges"] == "bytes"
        part = client.get(
            "/v1/items/original", params={"id": "film.mp4"}, headers={"Range": "bytes=100-199"}
        )
        assert (part.status_code, part.content) == (206, content[100:200])
        assert part.headers["content-range"] == f"bytes 100-199/{len(content)}"


def test_an_agent_learns_the_moment_and_sees_a_frame(index):
    async def call(tool, **arguments):
        async with Client(make_server({"videos": index})) as client:
            return (await client.call_tool(tool, arguments)).content

    [hit] = asyncio.run(call("search", text="green", k=1))
    assert 6 <= json.loads(hit.text)["moment"] < 8
    facts, picture = asyncio.run(call("read_item", id="film.mp4"))
    assert json.loads(facts.text)["fields"]["duration"] == 12.0
    assert picture.mime_type == "image/jpeg"
