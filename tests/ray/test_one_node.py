"""Building and serving on one Ray node; skipped without Ray, because its extra is large."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from genius_search.cluster.build import Settings, build_cluster, run_on_ray
from genius_search.cluster.searcher import Searcher
from genius_search.errors import BadData, DeadlinePassed, UsageError
from genius_search.index.filters import UnknownField
from genius_search.index.request import SearchRequest

served = pytest.importorskip("genius_search.cluster.serve", reason="needs Ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Ray


@pytest.fixture(scope="module")
def node():
    with served.connect("local"):
        yield


def kill_once(folder: Path, number: int) -> None:
    if number == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / str(number)).write_text(os.environ.get("RAY_AUTH_MODE", ""))


def fail(folder: Path, number: int) -> None:
    raise BadData(f"{folder.name} {number} is bad")


def test_work_of_a_killed_process_is_done_again(node, tmp_path):
    assert sorted(run_on_ray(kill_once, tmp_path, range(6))) == list(range(6))
    assert (tmp_path / "killed").exists()
    assert {(tmp_path / str(number)).read_text() for number in range(6)} == {"token"}


def test_an_error_of_the_work_ends_the_build(node, tmp_path):
    with pytest.raises(BadData, match="3 is bad"):
        list(run_on_ray(fail, tmp_path, [3]))


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:x"])
def test_an_address_without_a_port_is_refused(address):
    with pytest.raises(UsageError, match="HOST:PORT"), served.connect(address):
        pass


def test_an_address_where_nothing_answers_is_said_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UsageError, match="cannot connect"), served.connect(f"127.0.0.1:{port}"):
        pass


@pytest.fixture(scope="module")
def cluster_folder(node, trained, tmp_path_factory) -> Path:
    """A cluster of sixty texts in two shards, built on Ray."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "notes").mkdir()
    for number in range(60):
        (folder / "notes" / f"{number}.txt").write_text(f"text {number}")
    settings = Settings(str(folder / "notes"), model=str(trained.model), embeddings="fused")
    assert build_cluster(folder / "X", settings, run=run_on_ray).items == 60
    return folder / "X"


def copies() -> list[int]:
    """Return the processes of the copies."""
    return [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if process.is_dir() and b"ServeReplica:X-" in (process / "cmdline").read_bytes()
    ]


def test_deployed_shards_answer_as_open_ones_and_again_after_all_copies_were_killed(
    cluster_folder, monkeypatch
):
    local = Searcher.open(cluster_folder)
    served.deploy(cluster_folder, copies=1)
    searcher = served.connect_searcher(cluster_folder)
    requests = [
        SearchRequest(text=f"a text, {number}", k=7, where=["name>3"] if number % 2 else ())
        for number in range(6)
    ]
    expected = local.search(requests)

    def check():
        for hits, local_hits in zip(searcher.search(requests), expected, strict=True):
            assert [hit.id for hit in hits] == [hit.id for hit in local_hits]
            scores = [hit.score for hit in local_hits]
            assert [hit.score for hit in hits] == pytest.approx(scores, abs=1e-5)

    check()
    with pytest.raises(UnknownField, match="no item"):
        searcher.search("a text", where=["colour=red"])

    # If nobody waits for copies that were killed, the answer is an error, never fewer hits.
    with monkeypatch.context() as patch:
        patch.setattr(served, "MAX_RETRY_SECONDS", 0.0)
        assert len(copies()) == 2
        for process in copies():
            os.kill(process, signal.SIGKILL)
        try:
            check()  # if Ray's router has noticed, it waits for the copies that it starts
        except DeadlinePassed as error:
            assert "X-00000" in str(error)  # noqa: PT017  both are right

    # Ray Serve starts copies again, which takes long on a busy machine.
    monkeypatch.setattr(served, "MAX_RETRY_SECONDS", 600.0)
    check()

    # Changes reach the copies at once.
    assert searcher.add([{"id": "new", "text": "text 1"}]).added == 1
    assert "new" in [hit.id for hit in searcher.search("text 1", match="text 1")]
    assert searcher.delete(["new", "none"]).missing == ["none"]
    time.sleep(0.1)
    check()
