"""A server that is killed during additions loses none that it has acknowledged.

There is one kill by default; ``GENIUS_KILLS=20`` sets another number.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from PIL import Image

from genius_search.data.mbeir import MBeir
from genius_search.index.index import Index
from genius_search.model import Genius

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("GENIUS_KILLS", "1"))
ADDERS = 6


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server, yield it and its address once it answers, and kill it at the end."""
    command = "from genius_search.cli import main; raise SystemExit(main())"
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", command, "serve", folder, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        try:
            address = re.search(r"http://\S+", line)
            assert address, line + process.stderr.read()
            yield process, address[0]
        finally:
            process.kill()


def photo(number: int) -> bytes:
    """Return a picture that depends on the number."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (number % 256, number // 256 % 256, 99)).save(buffer, "PNG")
    return buffer.getvalue()


def add_until_killed(
    address: str, adder: int, kill: int, acknowledged: dict[str, str], first: threading.Event
) -> None:
    """Add one to three items at a time, and note acknowledged ids with a word of their texts."""
    with httpx.Client(base_url=address, timeout=60) as client:
        for number in range(10_000):
            names = [f"{kill}/{adder}/{number}/{row}" for row in range(1 + number % 3)]
            word = f"w{kill}x{adder}x{number}"
            items = [{"id": name, "text": f"a kite {word}"} for name in names]
            pictures = {}
            if adder % 2:
                items = [{**item, "image": f"p{row}"} for row, item in enumerate(items)]
                pictures = {f"p{row}": photo(hash(name) % 65536) for row, name in enumerate(names)}
            body = json.dumps({"items": items})
            try:
                response = client.post("/v1/items", files={"json": (None, body), **pictures})
            except httpx.TransportError:
                return
            assert response.json()["added"] == len(names)
            acknowledged.update(dict.fromkeys(names, word))
            first.set()


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    ((pool,),) = [MBeir(trained.data).global_pool("val")]
    Index.create(tmp_path / "kites.index", pool, model=trained.model)
    return tmp_path / "kites.index"


def check(address: str, acknowledged: dict[str, str]) -> None:
    """Check that all acknowledged items are stored, and that searches find them by their word."""
    with httpx.Client(base_url=address, timeout=60) as client:
        for word in sorted(set(acknowledged.values()))[-40:]:  # with the last before the kill
            names = {name for name in acknowledged if acknowledged[name] == word}
            hits = client.post("/v1/search", json={"text": "a kite", "match": word}).json()["hits"]
            assert names <= {hit["id"] for hit in hits}
        for name in acknowledged:
            assert client.get("/v1/items", params={"id": name}).json()["id"] == name


def test_a_killed_server_has_all_acknowledged_items_after_a_restart(trained, folder):
    chance = random.Random(7)
    acknowledged: dict[str, str] = {}
    for kill in range(KILLS):
        first = threading.Event()
        with serving(folder) as (process, address), ThreadPoolExecutor(ADDERS) as pool:
            check(address, acknowledged)
            adders = [
                pool.submit(add_until_killed, address, adder, kill, acknowledged, first)
                for adder in range(ADDERS)
            ]
            assert first.wait(60)
            time.sleep(chance.uniform(0.1, 1.5))
            process.kill()
            for adder in adders:
                adder.result()
    assert acknowledged
    with serving(folder) as (process, address):
        check(address, acknowledged)
        process.terminate()
        assert process.wait(30) == 0
    index = Index(folder, Genius.open(trained.model))
    index.check()
    assert set(index._snapshot.item_states(list(acknowledged))) == set(acknowledged)
