"""Change and search an index from eight processes at once, kill writers, and check every answer.

Usage: python benchmarks/many_processes.py MODEL [--seconds 90] [--changes 1] [--fault lock|stale]

Four writers add, replace and delete items, each with different ids, and compact the index. They
record each change in a journal before and after it. Four readers compare searches with the
journals: a search finds the last version of all items whose change was acknowledged before the
search began, and no deleted items; a killed change is complete or has no effect; generations never
decrease. Items that change during a search are not compared. A fault shows that the check can fail:
writers without a lock, or readers that do not notice changes.

Ends after the given seconds and changes, or at the first error. Prints counts and errors, and exits
with 1 if there are errors.
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
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from genius_search import Hits
from genius_search.index import index as index_module
from genius_search.index import writer as writer_module
from genius_search.index.index import Index, current_state
from genius_search.model import Genius

NUM_WRITERS = 4
NUM_READERS = 4
WAIT_SECONDS = 120.0
KILL_SECONDS = (0.5, 2.5)
"""Minimum and maximum time between two kills."""
MAX_WRITER_ITEMS = 60
"""A writer with more items deletes some."""
MAX_PRINTED_ERRORS = 10
WORDS = ("red", "green", "blue", "white", "black", "yellow", "kite", "umbrella", "ball", "lamp")

State = dict[str, int | None]
"""The version of items by id; None for deleted items."""


class Event(NamedTuple):
    """A line of a journal."""

    seconds: float
    step: str
    """``begin`` or ``done`` of a change."""
    state: State
    generation: int


class Journal:
    """The changes of a writer and its successors; one process writes it, and all read it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_bytes_read = 0
        self.events: list[Event] = []

    def write(self, step: str, state: State, generation: int = 0) -> None:
        line = json.dumps([time.monotonic(), step, state, generation]) + "\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(line.encode())

    def update(self) -> Journal:
        """Read new events, and return the journal."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._num_bytes_read)
                lines, _, _ = file.read().rpartition(b"\n")
            self._num_bytes_read += len(lines) + bool(lines)
            self.events += [Event(*json.loads(line)) for line in lines.splitlines()]
        return self

    def unchanged_state(self, began: float, ended: float) -> State:
        """Return the items that had no change between two times, including deleted items."""
        state: State = {}
        pending: set[str] = set()
        for event in self.events:
            if event.step == "begin" and event.seconds <= ended:
                pending |= event.state.keys()
            elif event.step == "done" and event.seconds < began:
                state |= event.state
                pending -= event.state.keys()
        return {name: version for name, version in state.items() if name not in pending}

    def current_state(self) -> State:
        """Return the items without a pending change, including deleted items."""
        now = time.monotonic()
        return self.update().unchanged_state(now, now)

    def generation(self, before: float) -> int:
        """Return the last generation that was acknowledged before a time."""
        return max((event.generation for event in self.events if event.seconds < before), default=0)


class Run(NamedTuple):
    """The files that all processes share, and the model."""

    folder: Path
    model: Genius

    @property
    def index_folder(self) -> Path:
        return self.folder / "items.index"

    @property
    def is_over(self) -> bool:
        return (self.folder / "over").exists()

    def end(self) -> None:
        """Tell all processes to end."""
        (self.folder / "over").touch()

    def open_index(self) -> Index:
        return Index.open(self.index_folder, model=self.model)

    def journals(self) -> list[Journal]:
        return [Journal(self.folder / f"journal-{number}") for number in range(NUM_WRITERS)]

    def count(self, name: str, number: int = 1) -> None:
        self._append("counts", [name, number])

    def report_error(self, text: str) -> None:
        self._append("errors", text)

    def counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for name, number in self._read("counts"):
            counts[name] += number
        return counts

    def errors(self) -> list[str]:
        return self._read("errors")

    def _append(self, name: str, record: object) -> None:
        with (self.folder / name).open("ab", buffering=0) as file:
            file.write(json.dumps(record).encode() + b"\n")

    def _read(self, name: str) -> list[Any]:
        path = self.folder / name
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


def make_item(name: str, version: int) -> dict[str, Any]:
    words = random.Random(f"{name} {version}").sample(WORDS, 3)
    return {
        "id": name,
        "text": f"a {' '.join(words)}",
        "fields": {"version": version, "name": name, "owner": name.partition("-")[0]},
    }


def stored_generation(index: Index) -> int:
    return current_state(index).snapshot.manifest.generation


def stored_versions(index: Index, names: list[str]) -> State:
    """Return the versions of items in an index."""
    snapshot = current_state(index).snapshot
    state: State = dict.fromkeys(names)
    for name in snapshot.item_states(names):
        state[name] = snapshot.item_at(snapshot.locate(name)).fields["version"]
    return state


def run_writer(run: Run, number: int) -> None:
    """Change the index until the end of the run or of this process."""
    draws = random.Random(os.getpid())
    journal = run.journals()[number].update()
    index = run.open_index()
    finish_killed_change(run, journal, index)
    for step in itertools.count():
        if run.is_over:
            return
        state = journal.current_state()
        alive = [name for name, version in state.items() if version is not None]
        size = draws.randint(1, 8)
        change = draws.choices(["add", "replace", "delete", "compact"], [4, 2, 3, 0.5])[0]
        if len(alive) > MAX_WRITER_ITEMS:
            change = "delete"
        if change == "compact":
            index.compact(wait_seconds=WAIT_SECONDS)
            run.count("compacted")
            continue
        names = draws.sample(alive, min(size, len(alive)))
        if change == "delete" and names:
            delete_items(run, journal, index, names)
        else:
            if change == "add" or not names:
                names = [f"{number}-{os.getpid()}-{step}-{position}" for position in range(size)]
            add_items(run, journal, index, names)
        run.count("changes")


def add_items(run: Run, journal: Journal, index: Index, names: list[str]) -> None:
    """Add or replace items."""
    version = time.monotonic_ns()
    state: State = dict.fromkeys(names, version)
    journal.write("begin", state)
    index.add([make_item(name, version) for name in names], wait_seconds=WAIT_SECONDS)
    run.count("items added or replaced", len(names))
    journal.write("done", state, stored_generation(index))


def delete_items(run: Run, journal: Journal, index: Index, names: list[str]) -> None:
    """Delete items, which must exist."""
    state: State = dict.fromkeys(names)
    journal.write("begin", state)
    missing = index.delete(names, wait_seconds=WAIT_SECONDS).missing
    if missing:
        run.report_error(f"deleted items are missing: {missing}")
    journal.write("done", state, stored_generation(index))


def finish_killed_change(run: Run, journal: Journal, index: Index) -> None:
    """Check that the last change before a kill is complete or has no effect, and record which."""
    if not journal.events or journal.events[-1].step == "done":
        return
    after = journal.events[-1].state
    before: State = dict.fromkeys(after)
    for event in journal.events:
        if event.step == "done":
            before |= {name: event.state[name] for name in event.state.keys() & after.keys()}
    stored = stored_versions(index, list(after))
    if stored not in (after, before):
        run.report_error(f"half a change after a kill: {before} to {after}, stored {stored}")
    run.count("changes cut short, " + ("made" if stored == after else "not made"))
    journal.write("done", stored, stored_generation(index))


def run_reader(run: Run, number: int) -> None:
    """Search until the end of the run, and compare the hits with the journals."""
    draws = random.Random(os.getpid())
    journals = run.journals()
    index = run.open_index()
    generation = 0
    while not run.is_over:
        began = time.monotonic()
        names = []
        for journal in journals:
            for name, version in journal.update().unchanged_state(began, began).items():
                if version is not None or draws.random() < 0.05:
                    names.append(name)
        chosen = draws.sample(sorted(names), min(12, len(names)))
        min_generation = max(generation, *(journal.generation(began) for journal in journals))
        generation = stored_generation(index)
        if generation < min_generation:
            run.report_error(f"reader {number}: generation {generation} after {min_generation}")
        states = read_states(index, chosen, draws)
        ended = time.monotonic()
        expected: State = {}
        for journal in journals:
            expected |= journal.update().unchanged_state(began, ended)
        for state in states:
            compared = state.keys() & expected.keys()
            compare_states(
                run, f"reader {number}", {name: state[name] for name in compared}, expected
            )
            run.count("items compared", len(compared))
        run.count("searches", len(states) - 1)


def read_states(index: Index, names: list[str], draws: random.Random) -> list[State]:
    """Return the versions of items by look-up and by several searches."""
    states = [stored_versions(index, names)]
    for name in names[:3]:
        hits = index.search(make_item(name, 0)["text"], where=[f"name={name}"], k=5)
        states.append({name: None} | hit_versions(hits))
    hits = index.search(" ".join(draws.sample(WORDS, 3)), k=50)
    return [*states, hit_versions(hits)]


def hit_versions(hits: Hits) -> State:
    """Return the versions of hits, without the first item of the index, which has no writer."""
    return {hit.id: (hit.fields or {}).get("version") for hit in hits if hit.id != "first"}


def compare_states(run: Run, where: str, state: State, expected: State) -> None:
    """Report the items that differ from the expected versions."""
    for name, version in state.items():
        if version != expected[name]:
            run.report_error(f"{where}: {name} is {version}, expected {expected[name]}")


@contextlib.contextmanager
def inject_fault(fault: str | None) -> Iterator[None]:
    """Remove the writers' lock, or make readers keep their first state."""

    class NoLock:
        def __init__(self, path: object) -> None:
            pass

        def acquire(self, **_: object) -> None:
            pass

        release = acquire

    read_heads = index_module._read_heads  # noqa: SLF001
    first_heads: dict[tuple[str, str], tuple[bytes, bytes]] = {}

    def read_first_heads(manifests: tuple[str, str]) -> tuple[bytes, bytes]:
        return first_heads.setdefault(manifests, read_heads(manifests))

    with contextlib.ExitStack() as stack:
        if fault == "lock":
            stack.enter_context(patch.object(writer_module, "FileLock", NoLock))
        if fault == "stale":
            stack.enter_context(patch.object(index_module, "_read_heads", read_first_heads))
        yield


Job = Callable[[Run, int], None]


def run_job(run: Run, job: Job, number: int, fault: str | None) -> None:
    """Run a writer or a reader; report an exception as an error."""
    try:
        with inject_fault(fault):
            job(run, number)
    except Exception as error:  # noqa: BLE001
        report_exception(run, f"{job.__name__} {number}", error)


def report_exception(run: Run, where: str, error: Exception) -> None:
    run.report_error(f"{where}: {type(error).__name__}: {error}"[:500])


class Processes:
    """The running writers and readers."""

    def __init__(self, run: Run, fault: str | None) -> None:
        self._run = run
        self._fault = fault
        self._draws = random.Random(5)
        self._context = multiprocessing.get_context("fork")
        self._writers = [self._start(run_writer, number) for number in range(NUM_WRITERS)]
        self._readers = [self._start(run_reader, number) for number in range(NUM_READERS)]
        self.num_killed = 0

    def _start(self, job: Job, number: int) -> BaseProcess:
        is_faulty = (job is run_writer) is (self._fault == "lock")
        arguments = (self._run, job, number, self._fault if is_faulty else None)
        process = self._context.Process(target=run_job, args=arguments)
        process.start()
        return process

    def kill_writer(self) -> None:
        """Wait for a random time, kill a writer, and start its successor."""
        time.sleep(self._draws.uniform(*KILL_SECONDS))
        number = self._draws.randrange(NUM_WRITERS)
        writer = self._writers[number]
        writer.kill()
        writer.join()
        self.num_killed += writer.exitcode == -signal.SIGKILL
        self._writers[number] = self._start(run_writer, number)

    def end(self) -> None:
        """End all processes."""
        self._run.end()
        for process in [*self._writers, *self._readers]:
            process.join()


def check_end(run: Run) -> int:
    """Compare the index with the journals, and verify its files; return the number of items."""
    index = run.open_index()
    expected: State = {}
    for journal in run.journals():
        finish_killed_change(run, journal.update(), index)
        expected |= journal.current_state()
    compare_states(run, "at the end", stored_versions(index, list(expected)), expected)
    num_items = sum(version is not None for version in expected.values())
    if len(index) != num_items + 1:
        run.report_error(f"at the end: {len(index)} items, expected {num_items + 1}")
    index.check()
    return num_items


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--changes", type=int, default=1)
    parser.add_argument("--fault", choices=("lock", "stale"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a forked process would wait for threads that it does not have
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), Genius.open(arguments.model))
        Index.create(run.index_folder, [make_item("first", 0)], model=run.model)
        began = time.monotonic()
        processes = Processes(run, arguments.fault)
        while not run.errors():
            is_late = time.monotonic() - began > arguments.seconds
            if is_late and run.counts()["changes"] >= arguments.changes:
                break
            processes.kill_writer()
        seconds = time.monotonic() - began
        processes.end()
        num_items = 0
        try:
            num_items = check_end(run)
        except Exception as error:  # noqa: BLE001
            report_exception(run, "at the end", error)
        counts = run.counts()
        errors = run.errors()
    print(
        f"{seconds:.0f} s, {processes.num_killed} writers killed, {num_items} items at the end, "
        f"{len(errors)} wrong"
    )
    print(", ".join(f"{name}: {number:,}" for name, number in sorted(counts.items())))
    for line in errors[:MAX_PRINTED_ERRORS]:
        print(line)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
