"""Writers of an index that are killed, that meet one another, that are read from meanwhile: nothing is lost.

The kills happen in a process that has not imported torch, so that a writer is forked in milliseconds. A few
kills by default and some dozens among the slow tests; ``GENIUS_KILLS=200`` makes it two hundred.
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
LEVELS, DIM = 4, 32

Contents = dict[str, int]
"""Item id -> the number of the write that put it there."""


def make_items(contents: Contents) -> tuple[list[Item], ItemArrays]:
    """Items whose text, codes and embedding all say which write they are from."""
    writes = np.array(list(contents.values()), dtype=np.int64)
    return [
        Item(name, Modality.TEXT, f"write {write}") for name, write in contents.items()
    ], ItemArrays(codes_of(writes), np.ones(len(writes), dtype=np.float16), vectors_of(writes))


def codes_of(writes: np.ndarray) -> np.ndarray:
    return np.stack([writes % 3, writes % 5, writes % 7, writes], axis=1).astype(np.int16)


def vectors_of(writes: np.ndarray) -> np.ndarray:
    return np.eye(DIM, dtype=np.float16)[writes % DIM]


def read_contents(folder: Path) -> Contents:
    """What an index holds; every table, store and embedding must tell the same story."""
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
    """A change of an index, and what the index holds after it."""

    kind: str
    work: Callable[[Writer], object]
    after: Contents


def draw(kind: str, before: Contents, write: int, chance: random.Random) -> Operation:
    names = list(before)
    if kind == "delete":
        gone = chance.sample(names, min(len(names), chance.randint(1, 20)))
        after = {name: value for name, value in before.items() if name not in gone}
        return Operation(kind, lambda writer: writer.delete(gone), after)
    if kind == "compact":
        return Operation(kind, lambda writer: writer.compact(min_deleted=0), before)
    new = {f"{write}/{number}": write for number in range(chance.choice((1, 3, 40)))}
    new |= dict.fromkeys(chance.sample(names, min(len(names), chance.randint(0, 5))), write)
    return Operation(kind, lambda writer: writer.add([make_items(new)]), before | new)


def killed_after(seconds: float, work: Callable[[], object]) -> float | None:
    """Do work in a process that is killed after a while, or as soon as it says through a pipe that it is done.

    How many seconds it took, if it was done.
    """
    reading, writing = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            work()
            os.write(writing, b"done")
            signal.pause()
        except BaseException:  # noqa: BLE001  the child must not go on as a second parent
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        select.select([pipe], [], [], seconds)
        ended = time.monotonic()
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        is_done = pipe.read() == b"done"
    assert os.WIFSIGNALED(status), "the writer failed"
    return ended - began if is_done else None


def change(folder: Path, work: Callable[[Writer], object]) -> None:
    with open_writer(folder) as writer:
        work(writer)


def is_compact(folder: Path) -> bool:
    entries = read_manifest(folder).segments
    return len(entries) == 1 and not entries[0].deleted


def kill_writers(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill that many writers at random moments; whatever they leave is the old state or the new one, whole."""
    assert "torch" not in sys.modules
    chance = random.Random(seed)
    state: Contents = {f"first/{number}": 0 for number in range(300)}
    (folder / "segments").mkdir(parents=True)
    (folder / "segments" / "notes.txt").write_text("of somebody else")
    with open_writer(folder) as writer:
        writer.begin(FACTS)
        writer.add([make_items(state)])
    usual = dict.fromkeys(("add", "delete", "compact"), 60.0)  # the first of each kind may finish
    counts = {f"{kind} {outcome}": 0 for kind in usual for outcome in ("old", "new")} | {
        "acknowledged": 0
    }
    done, write = 0, 0
    while done < kills:
        write += 1
        kind = min(
            usual, key=lambda kind: (counts[f"{kind} old"] + counts[f"{kind} new"], chance.random())
        )
        # So that there is something to do. An addition may itself merge everything: then another one.
        while len(state) < 400 or (kind == "compact" and is_compact(folder)):
            change(folder, draw("add", state, write, chance).work)
            state = read_contents(folder)
            write += 1
        operation = draw(kind, state, write, chance)
        generation = read_manifest(folder).generation
        moment = chance.triangular(0.0, 1.1, 1.0) * usual[kind]
        seconds = killed_after(moment, lambda operation=operation: change(folder, operation.work))
        is_new = read_manifest(folder).generation > generation
        assert is_new or seconds is None, f"an acknowledged {kind} is gone"
        assert check(folder).items == len(operation.after if is_new else state)
        after = read_contents(folder)
        assert after == (operation.after if is_new else state), (
            f"{kind} left neither the old state nor the new"
        )
        state = after
        if seconds is None:
            done += 1
            counts[f"{kind} {'new' if is_new else 'old'}"] += 1
        else:
            usual[kind] = seconds
            counts["acknowledged"] += 1
    with open_writer(folder):
        left = sorted(path.name for path in (folder / "segments").iterdir())
    assert left == sorted([*(entry.name for entry in read_manifest(folder).segments), "notes.txt"])
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "index.json", "segments"]
    return counts


@pytest.mark.parametrize(
    "kills", [6, pytest.param(int(os.environ.get("GENIUS_KILLS", "24")), marks=pytest.mark.slow)]
)
def test_writers_killed_at_random_moments_leave_the_old_state_or_the_new_one(tmp_path, kills):
    done = subprocess.run(  # noqa: S603
        [sys.executable, __file__, tmp_path / "index", str(kills)],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    counts = json.loads(done.stdout)
    for kind in ("add", "delete", "compact"):
        assert counts[f"{kind} old"] + counts[f"{kind} new"] >= kills // 3, counts
        assert kills < 24 or counts[f"{kind} old"], counts


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """Do work in another process meanwhile, which must succeed."""
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
    """Add items, a writer for each; trying again when refused. Returns how often that was."""
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
def test_of_two_writers_at_once_one_waits_or_is_refused_and_nothing_is_lost(index, wait_seconds):
    with forked(
        lambda: add_one_by_one(index, [f"theirs {number}" for number in range(4)], wait_seconds)
    ):
        refused = add_one_by_one(index, [f"ours {number}" for number in range(4)], wait_seconds)
    assert wait_seconds == 0 or refused == 0
    assert len(read_contents(index)) == 12 + 8
    assert check(index).items == 12 + 8


def test_a_writer_is_refused_while_another_process_writes_and_let_in_after_waiting(index):
    reading, writing = os.pipe()

    def hold() -> None:
        with open_writer(index) as writer:
            os.write(writing, b"held")
            time.sleep(0.3)
            writer.delete(["a"])

    with forked(hold):
        assert os.read(reading, 4) == b"held"
        with pytest.raises(UsageError, match="another process"), open_writer(index):
            pass
        with open_writer(index, wait_seconds=30.0) as writer:
            assert writer.delete(["a", "b"]) == (1, ["a"])
    assert len(read_contents(index)) == 10


def test_readers_never_meet_half_a_state_while_another_process_writes(index):
    """Every write renews all items, or takes them all away but for one that stays behind."""

    def write() -> None:
        for number in range(1, 5):
            with open_writer(index) as writer:
                writer.add([make_items(dict.fromkeys("abcdefghijkl", number))])
                writer.delete("bcdefghijkl")
                writer.compact(min_deleted=0)

    reads, last = 0, 0
    with forked(write) as child:
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            state = Snapshot.open(index)
            contents = read_contents(index)
            assert set(contents) in ({"a"}, set("abcdefghijkl")), contents
            assert len(set(contents.values())) == 1, contents
            assert contents["a"] >= last
            last = contents["a"]
            reads += 1
            # What is open stays whole, whatever the writer removes meanwhile.
            assert sum(len(list(segment.items.all())) for segment in state.segments) >= 1
            assert all(segment.table.ids.min() >= 0 for segment in state.segments)
    assert reads > 3
    assert set(read_contents(index)) == {"a"}


if __name__ == "__main__":
    # What a process has written outlives its being killed; without waiting for the disk, kills hit everything else.
    os.fsync = lambda _: None
    sys.stdout.write(json.dumps(kill_writers(Path(sys.argv[1]), int(sys.argv[2]), seed=4)))
