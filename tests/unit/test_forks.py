"""Forked children search while threads of their parent search and write."""

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cached_property

import numpy as np
import pytest

from genius_search import Index, forks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def in_child(work: Callable[[], object]) -> int:
    """Run a function in a forked child; return the child's status, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            work()
        except BaseException:  # noqa: BLE001  the child's error is shown, and its status tells
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Held:
    """A property that another thread computes while this one forks."""

    __module__ = forks.__name__

    @cached_property
    def value(self) -> int:
        return 1


def test_locks_that_another_thread_holds_are_free_in_a_child(monkeypatch):
    monkeypatch.setattr(forks, "MAX_FORK_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(forks, "Held", Held, raising=False)
    locks = [forks.free_in_children(threading.Lock()), Held.__dict__["value"].lock]
    locks.append(forks.free_in_children(threading.RLock(), of_library=True))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        held.set()
        done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def use() -> None:
        assert all(lock.acquire(timeout=0) for lock in locks)
        assert Held().value == 1

    try:
        assert in_child(use) == 0
    finally:
        done.set()
        thread.join()


def test_a_fork_waits_for_a_thread_in_a_library_which_lets_it_go_on(monkeypatch):
    lock = forks.free_in_children(threading.RLock(), of_library=True)
    begun, done = threading.Event(), threading.Event()

    def call_library() -> None:
        with lock:
            begun.set()
            while not done.is_set():
                forks.yield_to_fork(lock)

    thread = threading.Thread(target=call_library)
    thread.start()
    begun.wait()
    monkeypatch.setattr(forks, "MAX_FORK_WAIT_SECONDS", 60.0)
    try:
        assert in_child(lambda: lock.acquire(timeout=0) or os._exit(3)) == 0
    finally:
        done.set()
        thread.join()


def test_children_search_and_change_an_index_while_threads_of_the_parent_do(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(2000, 16)).astype(np.float32)
    names = [f"item-{number}" for number in range(2000)]
    texts = [f"thing {number}" for number in range(2000)]
    index = Index.from_vectors(tmp_path / "index", vectors, ids=names, texts=texts)
    done = threading.Event()

    def search() -> None:
        while not done.is_set():
            index.search(vector=vectors[0], k=100, match="thing")
            sum(1 for _ in index)

    def write() -> None:
        while not done.is_set():
            index.add_vectors(
                vectors[:500], ids=names[:500], texts=texts[500:1000], wait_seconds=60
            )

    def use() -> None:
        assert index.search(vector=vectors[1900], k=1, match="thing")[0].id == "item-1900"
        assert index.get("item-1900").text == "thing 1900"
        assert "item-1999" in index

    threads = [threading.Thread(target=target) for target in (search, search, write)]
    for thread in threads:
        thread.start()
    try:
        assert [in_child(use) for _ in range(4)] == [0] * 4
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert in_child(lambda: index.delete("item-3")) == 0
    assert "item-3" not in index


def test_a_child_sees_the_present_state_though_its_parent_has_not_searched_since(tmp_path):
    index = Index.from_vectors(tmp_path / "index", np.eye(16, dtype=np.float32))
    snapshot = index._snapshot
    other = Index.open(tmp_path / "index")
    other.delete("3")
    other.compact(min_deleted=0)  # removes the file that the parent has open

    def use() -> None:
        assert len(index) == 15
        assert index.get("4").id == "4"

    assert in_child(use) == 0
    assert snapshot.item_at(snapshot.locate("3")).id == "3"


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_handles_are_given_to_worker_processes(tmp_path, method):
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
import numpy as np
from genius_search import Index

def find(job):
    index, vector = job
    return index.search(vector=vector, k=1)[0].id

if __name__ == "__main__":
    vectors = np.random.default_rng(0).normal(size=(300, 16)).astype("f4")
    index = Index.from_vectors("v.index", vectors)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context({method!r})) as pool:
        print(list(pool.map(find, [(index, vector) for vector in vectors[:4]])))
"""
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(  # noqa: S603
        [sys.executable, program],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "['0', '1', '2', '3']\n", done.stderr
