"""A service over a small index of its own, in this process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from genius_search.index.index import Index
from genius_search.model import Genius
from genius_search.serve.app import create_app
from genius_search.serve.service import Service

COLOURS = ("red", "green", "blue")
THINGS = ("kite", "boat", "clock")
LOCAL = "http://localhost"


def picture(
    colour: str = "red", *, size: tuple[int, int] = (40, 30), kind: str = "PNG", **more: Any
) -> bytes:
    kept = io.BytesIO()
    Image.new("RGB", size, colour).save(kept, kind, **more)
    return kept.getvalue()


def make_index(folder: Path, model: Genius) -> Index:
    """Nine texts with fields, and three pictures."""
    pool = folder / "pool"
    pool.mkdir(parents=True)
    rows = []
    for number, (colour, thing) in enumerate(
        (colour, thing) for colour in COLOURS for thing in THINGS
    ):
        fields = json.dumps({"price": number, "colour": colour, "size": {"width": number % 4}})
        rows.append(
            {
                "did": f"1:{number}",
                "modality": "text",
                "txt": f"a {colour} {thing}",
                "src_content": fields,
            }
        )
    for number, colour in enumerate(COLOURS):
        (pool / f"{colour}.png").write_bytes(picture(colour))
        rows.append({"did": f"2:{number}", "modality": "image", "img_path": f"{colour}.png"})
    file = pool / "pool.jsonl"
    file.write_text(
        "".join(json.dumps({"txt": None, "img_path": None, **row}) + "\n" for row in rows)
    )
    return Index.create(folder / "things.index", file, model=model)


def form(body: object, **pictures: bytes) -> dict[str, Any]:
    """What httpx sends as multipart/form-data: JSON, and the pictures that it names."""
    return {"files": {"json": (None, json.dumps(body)), **pictures}}


@contextmanager
def serving(index: Index, *, keys: Path | None = None, base: str = LOCAL) -> Iterator[TestClient]:
    """A client of a running service."""
    app = create_app(Service({"things": index}), keys=keys)
    with TestClient(app, base_url=base) as client:
        yield client


@pytest.fixture(scope="module")
def client(model, tmp_path_factory) -> Iterator[TestClient]:
    """A service whose index no test changes."""
    with serving(make_index(tmp_path_factory.mktemp("served"), model)) as running:
        yield running


@pytest.fixture
def writable(model, tmp_path) -> Iterator[TestClient]:
    """A service of one's own."""
    with serving(make_index(tmp_path, model)) as running:
        yield running


@pytest.fixture
def ids_of_all(writable) -> Callable[[], set[str]]:
    """Ids of everything that a search finds."""

    def find() -> set[str]:
        answered = writable.post("/v1/search", json={"text": "a kite", "k": 100, "beam": 500})
        return {hit["id"] for hit in answered.json()["hits"]}

    return find
