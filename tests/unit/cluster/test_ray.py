"""Building on Ray; only where Ray is installed, because its extra is large."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from genius_search.cluster.build import Settings, build_cluster
from genius_search.errors import BadData, UsageError

RayTasks = pytest.importorskip("genius_search.cluster.ray", reason="needs Ray").RayTasks
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def tasks():
    with RayTasks("local", cores=2) as started:
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
    with pytest.raises(UsageError, match="HOST:PORT"), RayTasks(address):
        pass


def test_an_address_where_nothing_answers_is_said_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UsageError, match="nothing answers"), RayTasks(f"127.0.0.1:{port}"):
        pass
