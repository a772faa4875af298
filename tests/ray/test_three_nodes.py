"""Building and searching on three nodes while nodes, copies and drivers are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import chain
from pathlib import Path

import pytest

from genius_search.cluster.build import Settings, build_cluster
from genius_search.cluster.searcher import Searcher, read_cluster, shard_folder
from genius_search.index.index import Index
from genius_search.index.request import SearchRequest

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of killed processes

SHARDS = 8
QUERIES = [f"text {number}" for number in range(6)]
MAX_SECONDS = 240.0


def wait_until(condition) -> None:
    deadline = time.monotonic() + MAX_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    for number in range(120):
        (folder / f"{number}.txt").write_text(f"text {number}")
    return folder


@pytest.fixture(scope="module")
def local(trained, pool, tmp_path_factory) -> Path:
    """A cluster built by one process."""
    folder = tmp_path_factory.mktemp("local") / "X"
    build_cluster(folder, Settings(str(pool), model=str(trained.model), shards=SHARDS))
    return folder


def build(nodes, trained, pool, out):
    return nodes.genius(
        *("cluster", "build", pool, "--model", trained.model, "--out", out),
        *("--shards", SHARDS, "--address", nodes.address),
    )


def finished_shards(folder: Path) -> dict[str, int]:
    """Return finished shards, each with an inode, which changes if the shard is written again."""
    return {path.parent.name: path.stat().st_ino for path in folder.glob("shards/*/index.json")}


def check_same_items(folder: Path, local: Path) -> None:
    assert read_cluster(folder).items == read_cluster(local).items == 120
    for number in range(SHARDS):
        shard, local_shard = (
            Index.open(shard_folder(cluster, number)) for cluster in (folder, local)
        )
        assert list(shard._snapshot.ids()) == list(local_shard._snapshot.ids())
        assert shard.search("text 3", k=50) == local_shard.search("text 3", k=50)


def test_a_build_during_which_a_node_is_killed_creates_the_same_cluster(
    nodes, trained, pool, local, tmp_path
):
    building = build(nodes, trained, pool, tmp_path / "X")
    wait_until(lambda: finished_shards(tmp_path / "X"))
    nodes.nodes["127.0.0.4"].kill()
    output, _ = building.communicate(timeout=MAX_SECONDS)
    assert building.returncode == 0, output
    check_same_items(tmp_path / "X", local)
    nodes.restart("127.0.0.4")


def test_a_driver_killed_and_started_again_creates_only_what_is_missing(
    nodes, trained, pool, local, tmp_path
):
    building = build(nodes, trained, pool, tmp_path / "X")
    wait_until(lambda: len(finished_shards(tmp_path / "X")) >= 2)
    building.kill()
    building.wait()
    time.sleep(2)  # its workers finish or give up
    shards = finished_shards(tmp_path / "X")
    building = build(nodes, trained, pool, tmp_path / "X")
    output, _ = building.communicate(timeout=MAX_SECONDS)
    assert building.returncode == 0, output
    assert shards.items() <= finished_shards(tmp_path / "X").items()
    check_same_items(tmp_path / "X", local)


class Load:
    """A process whose clients search without a pause, with 120 queries in each call."""

    def __init__(self, nodes, folder: Path, expected) -> None:
        self.process = subprocess.Popen(  # noqa: S603
            [
                sys.executable,
                Path(__file__).with_name("load.py"),
                folder,
                nodes.address,
                json.dumps(expected),
            ],
            env=nodes.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        self.lines.extend(self.process.stdout)

    @property
    def answered(self) -> int:
        return self.lines.count("right\n")

    @property
    def failed(self) -> list[str]:
        return [line for line in self.lines if line.startswith("failed")]

    def wait_for_more(self, count: int = 20) -> None:
        goal = self.answered + count
        wait_until(lambda: self.answered >= goal or self.failed or self.process.poll() is not None)
        assert self.process.poll() is None, "".join(self.lines[-40:])

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=MAX_SECONDS)
        self._reading.join()


@pytest.fixture(scope="module")
def served(nodes, trained, pool, tmp_path_factory) -> Path:
    """A cluster of two shards with two copies each, on two nodes."""
    folder = tmp_path_factory.mktemp("served") / "X"
    build_cluster(folder, Settings(str(pool), model=str(trained.model), shards=2))
    serving = nodes.genius("cluster", "serve", folder, "--address", nodes.address, "--copies", 2)
    output, _ = serving.communicate(timeout=MAX_SECONDS)
    assert serving.returncode == 0, output
    return folder


def test_no_query_fails_while_a_copy_hangs_and_others_and_a_node_are_killed(
    nodes, served, record_property
):
    answers = Searcher.open(served).search([SearchRequest(text=text) for text in QUERIES])
    expected = {
        text: [(hit.id, round(hit.score, 4)) for hit in hits]
        for text, hits in zip(QUERIES, answers, strict=True)
    }
    load = Load(nodes, served, expected)
    try:
        load.wait_for_more()
        workers = [nodes.nodes[address] for address in ("127.0.0.3", "127.0.0.4")]

        def copies():
            copies_of_nodes = [node.processes("ServeReplica:X-") for node in nodes.nodes.values()]
            return list(chain.from_iterable(copies_of_nodes))

        wait_until(lambda: all(node.processes("ServeReplica:X-") for node in workers))

        # A copy that hangs is replaced.
        hanging = copies()[-1]
        os.kill(hanging, signal.SIGSTOP)
        load.wait_for_more(30)
        wait_until(lambda: hanging not in copies())

        # A copy of a shard is killed.
        os.kill(copies()[-1], signal.SIGKILL)
        load.wait_for_more(30)

        # A node with its copies is killed.
        workers[0].kill()
        load.wait_for_more(60)
        nodes.restart("127.0.0.3")
        load.wait_for_more()
    finally:
        load.stop()
        record_property("said", "".join(load.lines[-40:]))
    record_property("answered", load.answered)
    repeated = sum("calling again" in line for line in load.lines)
    record_property("calls made again", repeated)
    assert load.failed == []
    assert load.answered >= 120
    assert repeated >= 1


def test_the_commands_search_and_change_what_is_served(nodes, served, tmp_path):
    def run(*words):
        running = nodes.genius(*words, "--address", nodes.address)
        output, _ = running.communicate(timeout=MAX_SECONDS)
        return running.returncode, output

    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "new.txt").write_text("text 1")
    assert "1 item added" in run("index", "add", served, tmp_path / "new")[1]
    status, output = run("search", served, "text 1", "-k", "200")
    assert (status, "new.txt" in output) == (0, True)
    assert "1 item deleted" in run("index", "delete", served, "new/new.txt")[1]
    assert run("index", "delete", served, "new/new.txt")[0] == 3


def test_a_driver_without_the_token_is_refused(nodes):
    script = "import ray, sys; ray.init(address=sys.argv[1])"
    environment = {**nodes.environment, "RAY_AUTH_TOKEN": "0" * 64}
    refused = subprocess.run(  # noqa: S603
        [sys.executable, "-c", script, nodes.address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
        check=False,
    )
    assert refused.returncode != 0
    assert "token" in refused.stderr.lower()
