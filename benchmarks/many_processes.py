"""Change and search one index from eight processes at once, kill writers now and then, and check every answer.

Usage: python benchmarks/many_processes.py MODEL [--seconds 90] [--changes 1] [--fault lock|stale]

Four writers add, replace and delete items of their own, and compact the index; before and after each change
they write to a journal what it does. Four readers compare what they see with the journals: what was
acknowledged before a search began is found in its last version, what was deleted is not, a change is there
whole or not at all, and generations never go back. Items that were being changed meanwhile are not compared. A
fault shows that the check can fail: writers without a lock, or readers that keep an old state.

Ends after so many seconds and changes, or when anything is wrong. Prints what was done; exits with 1 if anything
was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from genius_search.index import index as index_module
from genius_search.index import writer as writer_module
from genius_search.index.index import Index, current_state
from genius_search.model import Genius

WRITERS = READERS = 4
WAIT_SECONDS = 120.0
KILL_SECONDS = (0.5, 2.5)
MOST_ITEMS = 60
"""Of a writer."""
WORDS = ("red", "green", "blue", "white", "black", "yellow", "kite", "umbrella", "ball", "lamp")

State = dict[str, int | None]
"""The version of items; None for deleted ones."""


class Event(NamedTuple):
    """A line of a journal."""

    seconds: float
    kind: str
    """``begin`` or ``done`` of a change."""
    state: State
    generation: int


class Journal:
    """What the writers of one slot did, one after the other; written by one process, read by all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.events: list[Event] = []

    def write(self, kind: str, state: State, generation: int = 0) -> None:
        line = json.dumps([time.monotonic(), kind, state, generation]) + "\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(line.encode())

    def update(self) -> Journal:
        """Read what was written since."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                lines, _, _ = file.read().rpartition(b"\n")
            self._read += len(lines) + bool(lines)
            self.events += [Event(*json.loads(line)) for line in lines.splitlines()]
        return self

    def settled(self, began: float, ended: float) -> State:
        """Return the items of which nothing was changed in that time, as they were; and the deleted ones."""
        state: State = {}
        pending: State = {}
        for event in self.events:
            if event.kind == "begin" and event.seconds <= ended:
                pending |= event.state
            elif event.kind == "done" and event.seconds < began:
                state |= event.state
                pending = {
                    one: version for one, version in pending.items() if one not in event.state
                }
        return {one: version for one, version in state.items() if one not in pending}

    def generation(self, before: float) -> int:
        return max((event.generation for event in self.events if event.seconds < before), default=0)


class Run(NamedTuple):
    """What all processes share."""

    folder: Path
    model: Genius

    @property
    def index(self) -> Path:
        return self.folder / "items.index"

    @property
    def is_over(self) -> bool:
        return (self.folder / "over").exists()

    def journals(self) -> list[Journal]:
        return [Journal(self.folder / f"journal-{number}") for number in range(WRITERS)]

    def count(self, what: str, number: int = 1) -> None:
        self._append("counts", [what, number])

    def wrong(self, what: str) -> None:
        self._append("wrong", what)

    def done(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for what, number in self.all("counts"):
            counts[what] += number
        return counts

    def _append(self, name: str, what: object) -> None:
        with (self.folder / name).open("ab", buffering=0) as file:
            file.write(json.dumps(what).encode() + b"\n")

    def all(self, name: str) -> list[Any]:
        path = self.folder / name
        return (
            [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        )


def item(name: str, version: int) -> dict[str, Any]:
    words = random.Random(f"{name} {version}").sample(WORDS, 3)
    return {
        "id": name,
        "text": f"a {' '.join(words)}",
        "fields": {"version": version, "name": name, "owner": name.partition("-")[0]},
    }


def versions(index: Index, names: list[str]) -> State:
    """Return what an index has of some items."""
    snapshot = current_state(index).snapshot
    alive = snapshot.item_states(names)
    found: State = dict.fromkeys(names)
    for name in alive:
        found[name] = snapshot.item_at(snapshot.locate(name)).fields["version"]
    return found


def write(run: Run, number: int) -> None:
    """Change the index until the time is over or this process is killed."""
    chance = random.Random(os.getpid())
    journal = run.journals()[number].update()
    index = Index.open(run.index, model=run.model)
    settle(run, journal, index)
    for step in itertools.count():
        if run.is_over:
            return
        known = journal.update().settled(time.monotonic(), time.monotonic())
        alive = [name for name, version in known.items() if version is not None]
        size = chance.randint(1, 8)
        kind = chance.choices(["add", "replace", "delete", "compact"], [4, 2, 3, 0.5])[0]
        if len(alive) > MOST_ITEMS:
            kind = "delete"
        if kind == "compact":
            index.compact(wait_seconds=WAIT_SECONDS)
            run.count("compacted")
            continue
        some = chance.sample(alive, min(size, len(alive)))
        version = time.monotonic_ns()
        if kind == "add" or not some:
            some = [f"{number}-{os.getpid()}-{step}-{place}" for place in range(size)]
        state: State = dict.fromkeys(
            some, None if kind == "delete" and some[0] in alive else version
        )
        journal.write("begin", state)
        if None in state.values():
            missing = index.delete(some, wait_seconds=WAIT_SECONDS).missing
            if missing:
                run.wrong(f"writer {number}: {missing} are gone")
        else:
            index.add([item(name, version) for name in some], wait_seconds=WAIT_SECONDS)
            run.count("items added or replaced", len(some))
        journal.write("done", state, current_state(index).snapshot.manifest.generation)
        run.count("changes")


def settle(run: Run, journal: Journal, index: Index) -> None:
    """Look whether the last change before a kill was made: whole, or not at all."""
    if not journal.events or journal.events[-1].kind == "done":
        return
    wanted = journal.events[-1].state
    before: State = dict.fromkeys(wanted)
    for event in journal.events:
        if event.kind == "done":
            before |= {one: version for one, version in event.state.items() if one in wanted}
    found = versions(index, list(wanted))
    if found not in (wanted, before):
        run.wrong(f"half a change after a kill: wanted {wanted}, before {before}, found {found}")
    run.count("changes cut short, " + ("made" if found == wanted else "not made"))
    journal.write("done", found, current_state(index).snapshot.manifest.generation)


def read(run: Run, number: int) -> None:
    """Search until the time is over, and compare everything that is found."""
    chance = random.Random(os.getpid())
    journals = run.journals()
    index = Index.open(run.index, model=run.model)
    generation = 0
    while not run.is_over:
        began = time.monotonic()
        for journal in journals:
            journal.update()
        known = {
            one: version
            for journal in journals
            for one, version in journal.settled(began, began).items()
            if version is not None or chance.random() < 0.05
        }
        some = chance.sample(sorted(known), min(12, len(known)))
        snapshot = current_state(index).snapshot
        if snapshot.manifest.generation < max(
            generation, *(journal.generation(began) for journal in journals)
        ):
            run.wrong(
                f"reader {number}: generation {snapshot.manifest.generation} after {generation}"
            )
        generation = snapshot.manifest.generation
        seen = [versions(index, some)]
        for name in some[:3]:
            hits = index.search(item(name, 0)["text"], where=[f"name={name}"], k=5)
            seen.append(
                {name: None}
                | {hit.id: (hit.fields or {}).get("version") for hit in hits if hit.id != "first"}
            )
        hits = index.search(" ".join(chance.sample(WORDS, 3)), k=50, beam=50)
        seen.append(
            {hit.id: (hit.fields or {}).get("version") for hit in hits if hit.id != "first"}
        )
        ended = time.monotonic()
        settled: State = {}
        for journal in journals:
            settled |= journal.update().settled(began, ended)
        for found in seen:
            compared = [name for name in found if name in settled]
            for name in compared:
                if found[name] != settled[name]:
                    run.wrong(
                        f"reader {number}: {name} is {found[name]}, and should be {settled[name]}"
                    )
            run.count("items compared", len(compared))
        run.count("searches", len(seen) - 1)


@contextlib.contextmanager
def fault(kind: str | None) -> Iterator[None]:
    """Break something on purpose."""

    class NoLock:
        def __init__(self, path: object) -> None:
            pass

        def acquire(self, **_: object) -> None:
            pass

        release = acquire

    heads: dict[str, tuple[bytes, bytes]] = {}

    def first_heads(folder: str, read: Any = index_module._read_heads) -> tuple[bytes, bytes]:  # noqa: SLF001
        return heads.setdefault(folder, read(folder))

    with contextlib.ExitStack() as stack:
        if kind == "lock":
            stack.enter_context(patch.object(writer_module, "FileLock", NoLock))
        if kind == "stale":
            stack.enter_context(patch.object(index_module, "_read_heads", first_heads))
        yield


def work(run: Run, job: Any, number: int, broken: str | None) -> None:
    try:
        with fault(broken):
            job(run, number)
    except Exception as error:  # noqa: BLE001
        run.wrong(f"{job.__name__} {number}: {type(error).__name__}: {error}"[:500])


def check_end(run: Run) -> int:
    """Compare the whole index with the journals, and verify its files; return the number of items."""
    index = Index.open(run.index, model=run.model)
    expected: State = {}
    for journal in run.journals():
        settle(run, journal.update(), index)
        expected |= journal.update().settled(time.monotonic(), time.monotonic())
    found = versions(index, list(expected))
    for name in expected:
        if found[name] != expected[name]:
            run.wrong(f"at the end {name} is {found[name]}, and should be {expected[name]}")
    alive = sum(version is not None for version in expected.values())
    if len(index) != alive + 1:
        run.wrong(f"at the end there are {len(index)} items, and should be {alive + 1}")
    index.check()
    return alive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--changes", type=int, default=1)
    parser.add_argument("--fault", choices=("lock", "stale"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # others would be missing after a fork, and be waited for
    forks = multiprocessing.get_context("fork")
    chance = random.Random(5)
    kills = 0
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), Genius.open(arguments.model))
        Index.create(run.index, [item("first", 0)], model=run.model)
        began = time.monotonic()

        def start(job: Any, number: int) -> BaseProcess:
            broken = arguments.fault if (job is write) is (arguments.fault == "lock") else None
            process = forks.Process(target=work, args=(run, job, number, broken))
            process.start()
            return process

        writers = [start(write, number) for number in range(WRITERS)]
        readers = [start(read, number) for number in range(READERS)]
        while not run.all("wrong"):
            if (
                time.monotonic() - began > arguments.seconds
                and run.done()["changes"] >= arguments.changes
            ):
                break
            time.sleep(chance.uniform(*KILL_SECONDS))
            number = chance.randrange(WRITERS)
            writers[number].kill()
            writers[number].join()
            kills += writers[number].exitcode == -signal.SIGKILL
            writers[number] = start(write, number)
        seconds = time.monotonic() - began
        (run.folder / "over").touch()
        for process in [*writers, *readers]:
            process.join()
        try:
            alive = check_end(run)
        except Exception as error:  # noqa: BLE001
            alive = 0
            run.wrong(f"at the end: {type(error).__name__}: {error}"[:500])
        counts = run.done()
        wrong = run.all("wrong")
    print(f"{seconds:.0f} s, {kills} writers killed, {alive} items at the end, {len(wrong)} wrong")
    print(", ".join(f"{what}: {number:,}" for what, number in sorted(counts.items())))
    for line in wrong[:10]:
        print(line)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
