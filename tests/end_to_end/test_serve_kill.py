"""A server killed while many add at once has everything that it acknowledged when it is started again.

One kill by default; ``GENIUS_KILLS=20`` makes it twenty.
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
    """A server and its address, once it answers; killed at the end."""
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
    """A picture that no other number has."""
    written = io.BytesIO()
    Image.new("RGB", (32, 32), (number % 256, number // 256 % 256, 99)).save(written, "PNG")
    return written.getvalue()


def add_until_killed(
    address: str, adder: int, kill: int, known: dict[str, str], first: threading.Event
) -> None:
    """Add one or a few items at a time, and note each that was acknowledged, with its word."""
    with httpx.Client(base_url=address, timeout=60) as client:
        for number in range(10_000):
            names = [f"{kill}/{adder}/{number}/{place}" for place in range(1 + number % 3)]
            word = f"w{kill}x{adder}x{number}"
            items = [{"id": name, "text": f"a kite {word}"} for name in names]
            parts = {}
            if adder % 2:
                items = [{**item, "image": f"p{place}"} for place, item in enumerate(items)]
                parts = {f"p{place}": photo(hash(name) % 65536) for place, name in enumerate(names)}
            body = json.dumps({"items": items})
            try:
                answer = client.post("/v1/items", files={"json": (None, body), **parts})
            except httpx.TransportError:
                return
            assert answer.json()["added"] == len(names)
            known.update(dict.fromkeys(names, word))
            first.set()


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    ((pool,),) = [MBeir(trained.data).global_pool("val")]
    Index.create(tmp_path / "kites.index", pool, model=trained.model)
    return tmp_path / "kites.index"


def check(address: str, known: dict[str, str]) -> None:
    """Everything that was acknowledged is there, and searches find it."""
    with httpx.Client(base_url=address, timeout=60) as client:
        words = sorted(set(known.values()))
        for word in words[-40:]:  # the last before the kill among them
            hits = client.post("/v1/search", json={"text": "a kite", "match": word}).json()["hits"]
            assert {name for name, own in known.items() if own == word} <= {
                hit["id"] for hit in hits
            }
        for name in known:
            assert client.get("/v1/items", params={"id": name}).json()["id"] == name


def test_what_a_killed_server_acknowledged_is_there_when_it_is_started_again(trained, folder):
    moments = random.Random(7)
    known: dict[str, str] = {}
    for kill in range(KILLS):
        first = threading.Event()
        with serving(folder) as (process, address), ThreadPoolExecutor(ADDERS) as pool:
            check(address, known)
            adders = [
                pool.submit(add_until_killed, address, adder, kill, known, first)
                for adder in range(ADDERS)
            ]
            assert first.wait(60)
            time.sleep(moments.uniform(0.1, 1.5))
            process.kill()
            for adder in adders:
                adder.result()
    assert known
    with serving(folder) as (process, address):
        check(address, known)
        process.terminate()
        assert process.wait(30) == 0
    index = Index(folder, Genius.open(trained.model))
    index.check()
    assert set(index._snapshot.item_states(list(known))) == set(known)
