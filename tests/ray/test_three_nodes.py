"""Building and searching on three nodes while nodes, copies, drivers and routers are killed."""

from __future__ import annotations

import collections
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from genius_search.cluster.folder import Cluster, read_cluster

from genius_search.cluster.build import Settings, build_cluster
from genius_search.index.requests import SearchRequest

pytestmark = pytest.mark.filterwarnings("ignore")  # of processes that are killed

PARTITIONS = 12
SECONDS = 240.0
QUERIES = [f"text {number}" for number in range(6)]


def wait(is_so, seconds: float = SECONDS) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def local(trained, tmp_path_factory) -> Path:
    """A cluster built by one process, and its pool beside it."""
    folder = tmp_path_factory.mktemp("local")
    rows = [{"id": str(number), "text": f"text {number}", "price": number} for number in range(240)]
    (folder / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = Settings(str(folder / "pool.jsonl"), model=str(trained.model), shards=3, rows=240 // PARTITIONS)
    build_cluster(folder / "X", given)
    return folder / "X"


def build(nodes, trained, local, out):
    return nodes.genius(
        *("cluster", "build", local.parent / "pool.jsonl", "--model", trained.model, "--out", out),
        *("--shards", 3, "--rows", 240 // PARTITIONS, "--address", nodes.address),
    )


def finished_parts(folder: Path) -> int:
    return len([path for path in folder.glob("parts/*") if not path.name.startswith(".")])


def check_same_files(folder: Path, local: Path) -> None:
    files = [path.relative_to(local) for path in local.rglob("*") if path.is_file() and path.name != ".lock"]
    assert len(files) > 20
    for path in files:
        assert (folder / path).read_bytes() == (local / path).read_bytes(), path


def test_a_build_ends_the_same_though_a_node_is_killed(nodes, trained, local, tmp_path):
    building = build(nodes, trained, local, tmp_path / "X")
    wait(lambda: finished_parts(tmp_path / "X") >= 1)
    nodes.nodes["127.0.0.4"].kill()
    output, _ = building.communicate(timeout=SECONDS)
    assert building.returncode == 0, output
    check_same_files(tmp_path / "X", local)
    nodes.restart("127.0.0.4")


def test_a_driver_killed_and_started_again_encodes_only_what_is_missing(nodes, trained, local, tmp_path):
    building = build(nodes, trained, local, tmp_path / "X")
    wait(lambda: finished_parts(tmp_path / "X") >= 2)
    building.kill()
    building.wait()
    time.sleep(2)  # what it had begun ends or is given up
    there = {
        path.name: path.stat().st_ino
        for path in (tmp_path / "X" / "parts").iterdir()
        if not path.name.startswith(".")
    }
    building = build(nodes, trained, local, tmp_path / "X")
    output, _ = building.communicate(timeout=SECONDS)
    assert building.returncode == 0, output
    if len(there) < PARTITIONS:
        kept = re.search(rf"encode partitions: (\d+) of {PARTITIONS} are there already", output)
        assert kept, output
        assert int(kept[1]) >= len(there)
    check_same_files(tmp_path / "X", local)


class Router:
    """A server that searches a cluster on the nodes."""

    def __init__(self, nodes, folder: Path) -> None:
        self.process = nodes.genius(
            *("serve", folder, "--address", nodes.address, "--replicas", 2, "--port", 0),
        )
        self.lines: list[str] = []
        self.url = ""
        self.is_killed = False
        threading.Thread(target=self._read, daemon=True).start()
        wait(lambda: self.url or self.process.poll() is not None)
        assert self.url, "".join(self.lines)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"http://\S+", line):
                self.url = found[0].rstrip(";")

    def kill(self) -> None:
        self.is_killed = True
        self.process.kill()
        self.process.wait()

    def ask(self, path: str, body: object | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310  a server of ours
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=90) as response:  # noqa: S310
            return response.read().decode()

    def search(self, text: str) -> list[tuple[str, float]]:
        hits = json.loads(self.ask("/v1/search", {"text": text, "k": 10}))["hits"]
        return [(hit["id"], round(hit["score"], 4)) for hit in hits]

    def metrics(self, name: str) -> dict[str, float]:
        found = re.findall(rf'^{name}{{index="X",shard="(\d+)"}} (\S+)$', self.ask("/metrics"), re.MULTILINE)
        return {shard: float(value) for shard, value in found}


class Load:
    """Clients that search all the time, each at another router when one is gone."""

    def __init__(self, routers, expected) -> None:
        self.routers, self.expected = list(routers), expected
        self.answered = collections.Counter()
        self.failed: list[str] = []
        self._is_ended = False
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(3)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._is_ended = True
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        turn = number
        while not self._is_ended:
            text = QUERIES[turn % len(QUERIES)]
            turn += 1
            try:
                found = self._search(text, turn)
            except Exception as error:  # noqa: BLE001  counted
                self.failed.append(repr(error))
                continue
            if found == self.expected[text]:
                self.answered[text] += 1
            else:
                self.failed.append(f"{text}: {found} instead of {self.expected[text]}")

    def _search(self, text: str, turn: int) -> list[tuple[str, float]]:
        for router in [*self.routers[turn % 2 :], *self.routers[: turn % 2]]:
            try:
                return router.search(text)
            except (OSError, http.client.HTTPException):
                if not router.is_killed:
                    raise
        raise RuntimeError("no router answers")

    def wait_for_more(self, count: int = 20) -> None:
        goal = self.answered.total() + count
        wait(lambda: self.answered.total() >= goal or self.failed)


@pytest.fixture
def served(trained, tmp_path) -> Path:
    """A cluster of two shards."""
    rows = [{"id": str(number), "text": f"text {number}"} for number in range(60)]
    (tmp_path / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_cluster(tmp_path / "X", Settings(str(tmp_path / "pool.jsonl"), model=str(trained.model), shards=2))
    return tmp_path / "X"


def test_no_query_fails_while_a_copy_a_node_and_a_router_are_killed_or_the_cluster_changes(
    nodes, served, record_property
):
    here = Cluster.open(served)
    found = here.search_many([SearchRequest(text=text, k=10) for text in QUERIES])
    expected = {
        text: [(hit.id, round(hit.score, 4)) for hit in hits]
        for text, hits in zip(QUERIES, found, strict=True)
    }
    first, second = routers = [Router(nodes, served) for _ in range(2)]
    try:
        with Load(routers, expected) as load:
            load.wait_for_more()
            assert set(first.metrics("genius_shard_copies").values()) == {2.0}

            # A copy of a shard, whose next call has to be made again.
            workers = [nodes.nodes[address] for address in ("127.0.0.3", "127.0.0.4")]
            os.kill(next(copy for node in workers for copy in node.processes("ShardCopy")), signal.SIGKILL)
            wait(lambda: any("asked again" in line for one in routers for line in one.lines))
            load.wait_for_more()

            # A node with its copies.
            workers[0].kill()
            load.wait_for_more(40)
            failures = sum(sum(one.metrics("genius_shard_failures_total").values()) for one in routers)
            assert failures >= 1

            # A router.
            second.kill()
            load.wait_for_more()

            # The shards, cut anew.
            old = {shard.name for shard in read_cluster(served).shards}
            rebalancing = nodes.genius("cluster", "rebalance", served, "--shards", 1)
            output, _ = rebalancing.communicate(timeout=SECONDS)
            assert rebalancing.returncode == 0, output
            wait(lambda: not old & first.metrics("genius_shard_calls_total").keys())
            load.wait_for_more()
        assert load.failed == []
        assert load.answered.total() >= 120

        # Changes through the service.
        added = json.loads(first.ask("/v1/items", {"items": [{"id": "new", "text": "text 1"}]}))
        assert added["added"] == 1, added
        assert "new" in [name for name, _ in first.search("text 1")]
        first.ask("/v1/items/delete", {"ids": ["new"]})
        assert first.search("text 1") == expected["text 1"]
        health = json.loads(first.ask("/healthz"))
        assert (health["shards"], health["silent_shards"]) == (1, 0)
        record_property("answered", load.answered.total())
        record_property("calls made again", failures)
    finally:
        for one in routers:
            one.kill()
            record_property("said", "".join(one.lines[-40:]))


def test_a_driver_without_the_token_is_refused(nodes):
    script = "import ray, sys; ray.init(address=sys.argv[1])"
    environment = {**nodes.environment, "RAY_AUTH_TOKEN": "0" * 64}
    refused = subprocess.run(  # noqa: S603  our own words
        [sys.executable, "-c", script, nodes.address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert refused.returncode != 0
    assert "token" in refused.stderr.lower()
