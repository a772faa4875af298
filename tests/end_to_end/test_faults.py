"""Nothing is lost when writers of an index are killed, meet other writers, or meet readers.

A process that has not imported torch forks and kills the writers, so that a fork takes
milliseconds. There are a few kills by default, and 24 in the slow tests; ``GENIUS_KILLS=200`` sets
another number.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from genius_search.errors import UsageError
from genius_search.index.info import check
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import IndexManifest, read_manifest
from genius_search.index.writer import ItemArrays, Writer, open_writer
from genius_search.records import Modality

FACTS = IndexManifest(
    identity="0" * 32,
    model="/somewhere/model",
    model_fingerprint="f" * 64,
    embeddings="raw",
    embedding_bits=16,
)
DIM = 32
OPERATIONS = ("add", "delete", "compact")

Contents = dict[str, int]
"""Item id -> the number of the write that wrote the item."""


def make_items(contents: Contents) -> tuple[list[Item], ItemArrays]:
    """Return items whose texts, codes and embeddings depend on the number of the write."""
    writes = np.array(list(contents.values()), dtype=np.int64)
    items = [Item(name, Modality.TEXT, f"write {write}") for name, write in contents.items()]
    half_norms = np.ones(len(writes), dtype=np.float16)
    return items, ItemArrays(codes_of(writes), half_norms, vectors_of(writes))


def codes_of(writes: np.ndarray) -> np.ndarray:
    return np.stack([writes % 3, writes % 5, writes % 7, writes], axis=1).astype(np.int16)


def vectors_of(writes: np.ndarray) -> np.ndarray:
    return np.eye(DIM, dtype=np.float16)[writes % DIM]


def read_contents(folder: Path) -> Contents:
    """Return the contents of an index, whose texts, codes and embeddings must agree."""
    contents: Contents = {}
    for segment in Snapshot.open(folder).segments:
        items = list(segment.items.all())
        writes = np.array([int((item.text or "").removeprefix("write ")) for item in items])
        table = segment.table
        codes = np.empty((table.num_items, table.ids.shape[1]), dtype=np.int16)
        codes[table.items] = np.repeat(table.ids, np.diff(table.bucket_starts), axis=0)
        assert np.array_equal(codes, codes_of(writes)), segment
        assert np.allclose(
            segment.vectors(None)(np.arange(len(items))), vectors_of(writes), atol=1e-3
        ), segment
        dead = set(segment.dead.tolist())
        for row, item in enumerate(items):
            if row not in dead:
                assert item.id not in contents, item
                contents[item.id] = int(writes[row])
    return contents


class Operation(NamedTuple):
    """A change of an index, and the contents of the index after it."""

    work: Callable[[Writer], object]
    after: Contents


def draw_operation(name: str, before: Contents, write: int, chance: random.Random) -> Operation:
    ids = list(before)
    if name == "delete":
        deleted = chance.sample(ids, min(len(ids), chance.randint(1, 20)))
        after = {item_id: write for item_id, write in before.items() if item_id not in deleted}
        return Operation(lambda writer: writer.delete(deleted), after)
    if name == "compact":
        return Operation(lambda writer: writer.compact(min_deleted=0), before)
    new = {f"{write}/{number}": write for number in range(chance.choice((1, 3, 40)))}
    new |= dict.fromkeys(chance.sample(ids, min(len(ids), chance.randint(0, 5))), write)
    return Operation(lambda writer: writer.add([make_items(new)]), before | new)


def kill_after(seconds: float, work: Callable[[], object]) -> float | None:
    """Do work in a process that is killed after some seconds, or when the work is done.

    Return the duration of the work in seconds, or None if it was not done.
    """
    read_end, write_end = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            work()
            os.write(write_end, b"done")
            signal.pause()
        except BaseException:  # noqa: BLE001  the child must not continue as a second parent
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        select.select([pipe], [], [], seconds)
        duration = time.monotonic() - start
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        is_done = pipe.read() == b"done"
    assert os.WIFSIGNALED(status), "the writer failed"
    return duration if is_done else None


def change(folder: Path, work: Callable[[Writer], object]) -> None:
    with open_writer(folder) as writer:
        work(writer)


def is_compact(folder: Path) -> bool:
    entries = read_manifest(folder).segments
    return len(entries) == 1 and not entries[0].deleted


def kill_writers(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill writers at random moments; each must leave the old state or the new one.

    Return the number of kills for each operation and state, and of writers that finished.
    """
    assert "torch" not in sys.modules
    chance = random.Random(seed)
    state: Contents = {f"first/{number}": 0 for number in range(300)}
    (folder / "segments").mkdir(parents=True)
    (folder / "segments" / "notes.txt").write_text("of somebody else")
    with open_writer(folder) as writer:
        writer.begin(FACTS)
        writer.add([make_items(state)])
    # The first operation of each name may finish; it shows how long it takes.
    durations = dict.fromkeys(OPERATIONS, 60.0)
    counts = dict.fromkeys((f"{name} {end}" for name in OPERATIONS for end in ("old", "new")), 0)
    counts["acknowledged"] = 0
    killed, write = 0, 0
    while killed < kills:
        write += 1
        name = min(
            OPERATIONS,
            key=lambda name: (counts[f"{name} old"] + counts[f"{name} new"], chance.random()),
        )
        # There must be something to do. An addition may itself merge all segments; then add again.
        while len(state) < 400 or (name == "compact" and is_compact(folder)):
            change(folder, draw_operation("add", state, write, chance).work)
            state = read_contents(folder)
            write += 1
        operation = draw_operation(name, state, write, chance)
        generation = read_manifest(folder).generation
        moment = chance.triangular(0.0, 1.1, 1.0) * durations[name]
        duration = kill_after(moment, lambda operation=operation: change(folder, operation.work))
        is_new = read_manifest(folder).generation > generation
        assert is_new or duration is None, f"an acknowledged {name} is lost"
        expected = operation.after if is_new else state
        assert check(folder).items == len(expected)
        state = read_contents(folder)
        assert state == expected, f"{name} left neither the old state nor the new one"
        if duration is None:
            killed += 1
            counts[f"{name} {'new' if is_new else 'old'}"] += 1
        else:
            durations[name] = duration
            counts["acknowledged"] += 1
    with open_writer(folder):
        names = sorted(path.name for path in (folder / "segments").iterdir())
    assert names == sorted([*(entry.name for entry in read_manifest(folder).segments), "notes.txt"])
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "index.json", "segments"]
    return counts


@pytest.mark.parametrize(
    "kills", [6, pytest.param(int(os.environ.get("GENIUS_KILLS", "24")), marks=pytest.mark.slow)]
)
def test_writers_killed_at_random_moments_leave_the_old_state_or_the_new_one(tmp_path, kills):
    process = subprocess.run(  # noqa: S603
        [sys.executable, __file__, tmp_path / "index", str(kills)],
        capture_output=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr.decode()
    counts = json.loads(process.stdout)
    for name in OPERATIONS:
        assert counts[f"{name} old"] + counts[f"{name} new"] >= kills // 3, counts
        assert kills < 24 or counts[f"{name} old"], counts


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """Do work in another process at the same time; it must succeed."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    try:
        yield child
        _, status = os.waitpid(child, 0)
        child = 0
        assert status == 0, "the other process failed"
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.fixture
def index(tmp_path) -> Path:
    with open_writer(tmp_path) as writer:
        writer.begin(FACTS)
        writer.add([make_items(dict.fromkeys("abcdefghijkl", 0))])
    return tmp_path


def add_one_by_one(folder: Path, names: Iterable[str], wait_seconds: float) -> int:
    """Add items with a writer for each, retry after refusals, and return the number of refusals."""
    refused = 0
    for name in names:
        while True:
            try:
                with open_writer(folder, wait_seconds=wait_seconds) as writer:
                    writer.add([make_items({name: 1})])
                break
            except UsageError:
                refused += 1
                time.sleep(0.001)
    return refused


@pytest.mark.parametrize("wait_seconds", [0.0, 60.0])
def test_of_two_writers_the_second_waits_or_is_refused_and_nothing_is_lost(index, wait_seconds):
    their_ids, our_ids = (
        [f"{owner} {number}" for number in range(4)] for owner in ("theirs", "ours")
    )
    with forked(lambda: add_one_by_one(index, their_ids, wait_seconds)):
        refused = add_one_by_one(index, our_ids, wait_seconds)
    assert wait_seconds == 0 or refused == 0
    assert len(read_contents(index)) == 12 + 8
    assert check(index).items == 12 + 8


def test_a_writer_is_refused_while_another_process_writes_or_waits_for_it(index):
    read_end, write_end = os.pipe()

    def hold_lock() -> None:
        with open_writer(index) as writer:
            os.write(write_end, b"held")
            time.sleep(0.3)
            writer.delete(["a"])

    with forked(hold_lock):
        assert os.read(read_end, 4) == b"held"
        with pytest.raises(UsageError, match="another process"), open_writer(index):
            pass
        with open_writer(index, wait_seconds=30.0) as writer:
            assert writer.delete(["a", "b"]) == (1, ["a"])
    assert len(read_contents(index)) == 10


def test_readers_never_see_half_a_state_while_another_process_writes(index):
    """Every write replaces all items, or deletes all but one."""

    def write() -> None:
        for number in range(1, 5):
            with open_writer(index) as writer:
                writer.add([make_items(dict.fromkeys("abcdefghijkl", number))])
                writer.delete("bcdefghijkl")
                writer.compact(min_deleted=0)

    reads, last = 0, 0
    with forked(write) as child:
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            snapshot = Snapshot.open(index)
            contents = read_contents(index)
            assert set(contents) in ({"a"}, set("abcdefghijkl")), contents
            assert len(set(contents.values())) == 1, contents
            assert contents["a"] >= last
            last = contents["a"]
            reads += 1
            # The files of an open snapshot remain readable, even if the writer removes them.
            assert sum(len(list(segment.items.all())) for segment in snapshot.segments) >= 1
            assert all(segment.table.ids.min() >= 0 for segment in snapshot.segments)
    assert reads > 3
    assert set(read_contents(index)) == {"a"}


if __name__ == "__main__":
    # A kill loses nothing that the process has written. Without waits for the disk, which take most
    # of the time, more kills happen elsewhere.
    os.fsync = lambda _: None
    sys.stdout.write(json.dumps(kill_writers(Path(sys.argv[1]), int(sys.argv[2]), seed=4)))
