"""Several processes answer on one port, and the first one makes all changes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from genius_search.index.index import Index
from genius_search.serve import workers
from genius_search.serve.app import create_app
from genius_search.serve.service import Service
from genius_search.serve.workers import Worker

from .conftest import LOCAL, form, make_index, picture
from .test_guard import is_problem

PROGRAM = "from genius_search.cli import main; raise SystemExit(main())"
FORKS = """
import os, signal, sys, time
from pathlib import Path
from genius_search.serve import workers
workers.RESTART_PAUSE_SECONDS = 0.0
worker = workers.start_workers(2)
os.write(1, f"{worker.number} {os.getpid()}\\n".encode())  # in one piece, beside other workers
if worker.number == 0:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(60)
"""


@pytest.fixture
def folder(model, tmp_path):
    return make_index(tmp_path, model).folder


def test_a_change_is_forwarded_to_the_first_worker_with_its_errors(folder, tmp_path, monkeypatch):
    services = [Service({"things": Index.open(folder)}) for _ in range(2)]
    apps = [
        create_app(service, worker=Worker(number, tmp_path))
        for number, service in enumerate(services)
    ]
    second_index = services[1].indexes["things"]
    second_index.add = second_index.delete = None  # type: ignore[method-assign]
    with TestClient(apps[0], base_url=LOCAL), TestClient(apps[1], base_url=LOCAL) as second:
        items = {"items": [{"id": "new", "text": "a drum", "image": "p"}]}
        assert second.post("/v1/items", **form(items, p=picture())).json()["added"] == 1
        hits = second.post("/v1/search", json={"text": "a drum", "match": "drum"}).json()["hits"]
        assert [hit["id"] for hit in hits] == ["new"]
        choice = {"text": "something", "id": "new"}
        assert second.post("/v1/feedback", json=choice).status_code == 204
        refused = is_problem(second.post("/v1/items", json={"items": [{"text": 5}]}), 422)
        assert refused["detail"].startswith("items[0].text")
        is_problem(second.post("/v1/feedback", json=choice | {"id": "nobody"}), 404)
        deleted = second.delete("/v1/items", params={"id": ["new", "nobody"]}).json()
        assert deleted == {"deleted": 1, "missing": ["nobody"]}
    monkeypatch.setattr(workers, "START_SECONDS", 0.2)
    with TestClient(apps[1], base_url=LOCAL) as alone:
        gone = is_problem(alone.delete("/v1/items", params={"id": "1:1"}), 503)
        assert "first worker" in gone["detail"]
        assert alone.post("/v1/search", json={"text": "a drum"}).status_code == 200


@pytest.mark.slow
def test_workers_share_a_port_and_a_change_of_any_is_seen_by_all(folder):
    command = [sys.executable, "-c", PROGRAM, "serve", folder, "--port", "0", "--workers", "2"]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process,  # noqa: S603
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        line = next(line for line in process.stderr if "http://" in line)
        url = re.search(r"http://\S+", line)[0]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for number in range(8):  # each with a new connection
            item = {"id": f"new{number}", "text": f"drum{number}"}
            assert httpx.post(f"{url}/v1/items", json={"items": [item]}, timeout=30).json()["added"]
            search = {"text": "a drum", "match": f"drum{number}"}
            hits = httpx.post(f"{url}/v1/search", json=search, timeout=30).json()["hits"]
            assert [hit["id"] for hit in hits] == [item["id"]]
        counted = httpx.get(f"{url}/metrics").text
        posts = r'http_requests_total{handler="/v1/items",method="POST",status="200"} (\S+)'
        assert float(re.search(posts, counted)[1]) == 8
        if sys.platform == "linux":
            assert len(children.read_text().split()) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_worker_that_ends_is_started_again_and_all_end_together():
    command = [sys.executable, "-c", FORKS]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,  # noqa: S603
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        lines = [process.stdout.readline().split() for _ in range(2)]
        pids = {int(number): int(pid) for number, pid in lines}
        os.kill(pids[1], signal.SIGKILL)
        number, pid = map(int, process.stdout.readline().split())
        assert (number, pid != pids[1]) == (1, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout.read() == ""  # to the end: no worker is left
