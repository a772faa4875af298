"""The service as it is started, and whatever one may throw at it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from genius_search.index.index import Index

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
GENIUS = "import sys; from genius_search.cli import main; sys.exit(main())"


class Server(NamedTuple):
    """A service in a process of its own."""

    url: str
    process: subprocess.Popen
    folder: Path


def start(*arguments: object) -> tuple[subprocess.Popen, str]:
    """Start a service and wait until it says where it answers."""
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", GENIUS, "serve", *map(str, arguments), "--port", "0"],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = process.stderr.readline()
    found = re.search(r"at (http://\S+) after", line)
    if found is None:
        process.kill()
        pytest.fail(line + process.stderr.read())
    return process, found[1]


@pytest.fixture(scope="module")
def server(trained, tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served") / "catalogue.index"
    pool = next((trained.data / "cand_pool" / "global").glob("*test*.jsonl"))
    Index.create(folder, model=trained.model, pool=pool)
    process, url = start(folder)
    yield Server(url, process, folder)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    process.stderr.close()


def run(script: str, *arguments: object) -> dict:
    done = subprocess.run(  # noqa: S603
        [sys.executable, ROOT / "benchmarks" / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return json.loads(done.stdout)


def test_every_answer_to_whatever_is_asked_is_one_that_the_description_names(server):
    answer = run("fuzz_api.py", server.url, "--cases", 300)
    assert answer["failed"] == 0
    assert answer["cases"] >= 290
    assert len(answer["answers"]) == len(
        [
            method
            for path in httpx.get(f"{server.url}/openapi.json").json()["paths"].values()
            for method in path
        ]
    )
    for name, statuses in answer["answers"].items():
        assert "200" in statuses or name == "DELETE /v1/items", name


def test_whatever_is_uploaded_is_refused_clearly_and_harms_nothing(server):
    beside = set(server.folder.parent.iterdir())
    answer = run("fuzz_uploads.py", server.url, "--cases", 500, "--pid", server.process.pid)
    assert (answer["failed"], answer["alive"]) == (0, True)
    assert answer["memory_after"]["most_mb"] < answer["memory_before"]["now_mb"] + 1000
    assert set(server.folder.parent.iterdir()) == beside
    assert {path.name for path in server.folder.iterdir()} <= {
        "index.json",
        ".lock",
        ".reserve",
        "segments",
        "deleted",
        "pictures",
    }


def test_what_the_service_wrote_is_whole(server, trained, tmp_path):
    copy = shutil.copytree(server.folder, tmp_path / "copy.index")
    index = Index.open(copy, model=trained.model)
    items = index.verify().items
    index.compact()
    assert index.verify().items == items
