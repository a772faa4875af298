"""Building on Ray; only where Ray is installed, because its extra is large."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from genius_search.cluster.folder import Cluster

from genius_search.cluster.build import Settings, build_cluster
from genius_search.config import SearchConfig
from genius_search.errors import BadData, DeadlinePassed, UsageError
from genius_search.index.requests import SearchRequest

module = pytest.importorskip("genius_search.cluster.ray", reason="needs Ray")
Ray, place_shards, ray, RayActorError = module.Ray, module.place_shards, module.ray, module.RayActorError
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def tasks():
    with Ray("local", cores=2) as started:
        yield started


def kill_once(folder: Path, number: int) -> None:
    if number == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / str(number)).write_text(os.environ.get("RAY_AUTH_MODE", ""))


def fail(folder: Path, number: int) -> None:
    raise BadData(f"{folder.name} {number} is bad")


def test_work_of_a_killed_process_is_done_again(tasks, tmp_path):
    assert sorted(tasks(kill_once, tmp_path, range(6))) == list(range(6))
    assert (tmp_path / "killed").exists()
    assert {(tmp_path / str(number)).read_text() for number in range(6)} == {"token"}


def test_an_error_of_the_work_is_raised_as_it_is(tasks, tmp_path):
    with pytest.raises(BadData, match="3 is bad"):
        list(tasks(fail, tmp_path, [3]))


def test_ray_builds_what_one_process_builds(tasks, trained, tmp_path):
    pool = tmp_path / "pool.jsonl"
    rows = ({"id": str(number), "text": f"text {number}"} for number in range(60))
    pool.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = Settings(str(pool), model=str(trained.model), shards=3, rows=10)
    build_cluster(tmp_path / "here", given)
    build_cluster(tmp_path / "ray", given, run=tasks)
    kept = [path.relative_to(tmp_path / "here") for path in (tmp_path / "here").rglob("*") if path.is_file()]
    for path in kept:
        assert (tmp_path / "ray" / path).read_bytes() == (tmp_path / "here" / path).read_bytes(), path


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:x"])
def test_an_address_without_a_port_is_refused(address):
    with pytest.raises(UsageError, match="HOST:PORT"), Ray(address):
        pass


def test_an_address_where_nothing_answers_is_said_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UsageError, match="nothing answers"), Ray(f"127.0.0.1:{port}"):
        pass


@pytest.fixture(scope="module")
def built(trained, tmp_path_factory) -> Path:
    """A cluster of sixty texts in two shards."""
    folder = tmp_path_factory.mktemp("served")
    rows = ({"id": str(number), "text": f"text {number}", "price": number} for number in range(60))
    (folder / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = Settings(
        str(folder / "pool.jsonl"), model=str(trained.model), shards=2, rows=30, embeddings="fused"
    )
    build_cluster(folder / "X", given)
    return folder / "X"


def process_of(copy):
    until = time.monotonic() + 120
    while True:
        try:
            return ray.get(copy.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
        except RayActorError:  # it is being started again
            assert time.monotonic() < until
            time.sleep(0.2)


def kill(copies):
    for process in [process_of(copy) for copy in copies]:
        os.kill(process, signal.SIGKILL)


def test_placed_shards_answer_as_one_index_while_copies_are_killed_and_again_after_all_were(
    tasks, built, caplog
):
    here = Cluster.open(built)
    placed = place_shards(built, here.model, copies=2)
    requests = [
        SearchRequest(text=f"a text, {number}", k=7, where=["price>9"] if number % 2 else ())
        for number in range(6)
    ]
    config = SearchConfig(rerank="codes", candidates=20, beam=5)
    expected = here.search_many(requests, config=config)

    def check():
        for found, known in zip(placed.search_many(requests, config=config), expected, strict=True):
            assert [hit.id for hit in found] == [hit.id for hit in known]
            assert [hit.text for hit in found] == [hit.text for hit in known]
            assert [hit.score for hit in found] == pytest.approx([hit.score for hit in known], abs=1e-5)

    check()
    assert placed.shards["000001"].health.failures == 0
    with pytest.raises(UsageError, match="no item"):
        placed.search("a text", where=["colour=red"])

    # A copy is killed: its calls are made again to the other one.
    shard = placed.shards["000001"]
    kill(shard.copies[:1])
    check()
    assert shard.health.failures >= 1
    assert any("000001" in one.message and "asked again" in one.message for one in caplog.records)

    # All copies are killed, which is said at once if nobody waits for them.
    kill(shard.copies)
    shard.patience = 0.0
    with pytest.raises(DeadlinePassed, match="000001"):
        placed.search_many(requests, config=config)
    assert shard.health.answering < 2

    # Ray starts them again.
    shard.patience = 120.0
    check()
    check()
    assert shard.health.answering == 2
