"""What a figure was measured on: never who or where, only what."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from genius_search.errors import UsageError
from genius_search.lab.baselines.dense import use_threads
from genius_search.search import beam, rank
from genius_search.search.beam import BeamSearch, Frontier
from genius_search.search.decoder import Decoder, DecoderState, DecoderStep
from genius_search.search.rank import CodeRanker
from genius_search.search.table import IdTable


class Watched(NamedTuple):
    """A function whose time is counted."""

    owner: Any
    """Module or class that it is looked up in."""
    name: str
    part: str
    """What its time is counted as."""


class Stopwatch:
    """Adds up the CPU time of named parts; a part inside another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._inside: list[int] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, watched."""

        def run(*given: Any, **named: Any) -> Any:
            self._inside.append(0)
            began = time.process_time_ns()
            try:
                return function(*given, **named)
            finally:
                took = time.process_time_ns() - began
                own = took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took
                self.seconds[part] = self.seconds.get(part, 0.0) + own / 1e9
                self.calls[part] = self.calls.get(part, 0) + 1

        return run

    def clear(self) -> None:
        """Forget what was counted."""
        self.seconds.clear()
        self.calls.clear()

    @contextlib.contextmanager
    def watching(self, functions: Sequence[Watched]) -> Iterator[None]:
        """Watch these functions for a while."""
        before = [(watched, watched.owner.__dict__[watched.name]) for watched in functions]
        for watched, function in before:
            setattr(watched.owner, watched.name, self.timed(watched.part, function))
        try:
            yield
        finally:
            for watched, function in before:
                setattr(watched.owner, watched.name, function)


class _State:
    """A decoder's state, watched."""

    def __init__(self, state: DecoderState, watch: Stopwatch) -> None:
        self.inner = state
        self._watch = watch
        self._select = watch.timed("decoder: select", state.select)

    @property
    def level(self) -> int:
        return self.inner.level

    def select(self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]) -> _State:
        return _State(self._select(queries, rows), self._watch)


class WatchedDecoder:
    """A decoder that a stopwatch looks at; it decodes the same.

    Parameters
    ----------
    decoder
        that decodes.
    watch
        counts its parts as ``decoder: …``.
    """

    def __init__(self, decoder: Decoder, watch: Stopwatch) -> None:
        self._decoder = decoder
        self._watch = watch
        self._start = watch.timed("decoder: start", decoder.start)
        self._advance = watch.timed("decoder: advance", decoder.advance)
        self._logits = watch.timed("decoder: head", decoder.logits)
        self._log_probabilities = watch.timed("decoder: head", decoder.log_probabilities)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Codes at each level."""
        return self._decoder.sizes

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._decoder.device

    def start(self, queries: Float[Tensor, "queries dim"]) -> _State:
        """The state before any code."""
        return _State(self._start(queries), self._watch)

    def advance(self, state: DecoderState, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes."""
        step = self._advance(state.inner if isinstance(state, _State) else state, codes)
        return DecoderStep(step.hidden, _State(step.state, self._watch))

    def logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Of one level's codes."""
        logits: Tensor = self._logits(hidden, level)
        return logits

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Of one level's codes, normalised."""
        values: Tensor = self._log_probabilities(hidden, level, scores)
        return values


TURN: Final = 20
"""Queries that a variant answers before it is another's turn: one at a time, each would find the caches
full of what the others left."""


class Timed(NamedTuple):
    """What a variant took."""

    cpu_ms: float
    """CPU-milliseconds, the median of the rounds."""
    wall_ms: float
    """Milliseconds, the median of the rounds."""
    rounds_cpu_ms: tuple[float, ...]


class Latency(NamedTuple):
    """What single queries took."""

    cpu_ms: float
    """CPU-milliseconds of a query, the median."""
    mean_cpu_ms: float
    p50_ms: float
    """Half of the queries had their answer after so many milliseconds of wall time."""
    p99_ms: float
    """99 of 100 had; with fewer than 100 queries nearly the slowest."""
    queries: int


def one_thread() -> None:
    """Compute with one thread from now on, in the whole process."""
    torch.set_num_threads(1)
    if importlib.util.find_spec("faiss") is not None:
        use_threads(1)


def interleaved(
    variants: Mapping[str, Callable[[], object]], *, rounds: int, per: int = 1
) -> dict[str, Timed]:
    """Time variants in turns, after one turn each that does not count.

    Parameters
    ----------
    per
        what a call's time is divided by: queries in a batch.
    """
    _check(rounds, "rounds")
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    wall: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, call in variants.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            call()
            if turn:
                cpu[name].append(1000 * (time.process_time() - began_cpu) / per)
                wall[name].append(1000 * (time.perf_counter() - began) / per)
    return {
        name: Timed(float(np.median(cpu[name])), float(np.median(wall[name])), tuple(cpu[name]))
        for name in variants
    }


def latencies(variants: Mapping[str, Callable[[int], object]], num_queries: int) -> dict[str, Latency]:
    """Time each query by itself, in turns of :data:`TURN`; each turn's first call does not count."""
    _check(num_queries, "queries")
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    wall: dict[str, list[float]] = {name: [] for name in variants}
    for start in range(0, num_queries, TURN):
        for name, answer in variants.items():
            answer(start)
            for query in range(start, min(start + TURN, num_queries)):
                began, began_cpu = time.perf_counter_ns(), time.process_time_ns()
                answer(query)
                cpu[name].append((time.process_time_ns() - began_cpu) / 1e6)
                wall[name].append((time.perf_counter_ns() - began) / 1e6)
    return {name: _latency(cpu[name], wall[name]) for name in variants}


def _latency(cpu: list[float], wall: list[float]) -> Latency:
    median, slowest = np.percentile(wall, (50, 99))
    return Latency(float(np.median(cpu)), float(np.mean(cpu)), float(median), float(slowest), len(cpu))


def _check(count: int, what: str) -> None:
    if count < 1:
        raise UsageError(f"{what} is {count}; nothing can be measured without one")


CONSTRAINT: Final = ("children", "leaves")
"""Parts that keep to IDs that exist."""
WATCHED: Final = (
    Watched(beam, "children_in_parts", "children"),
    Watched(beam, "count_ids", "leaves"),
    Watched(beam, "choose_best", "best"),
    Watched(beam, "gather", "scores picked"),
    Watched(Frontier, "extend", "beams grown"),
    Watched(Frontier, "take", "beams taken"),
    Watched(BeamSearch, "__init__", "set-up"),
    Watched(BeamSearch, "run", "the loop over levels"),
    Watched(BeamSearch, "_begin", "root"),
    Watched(BeamSearch, "_children", "children"),
    Watched(BeamSearch, "_log_probabilities", "scores picked"),
    Watched(BeamSearch, "_count", "leaves"),
    Watched(BeamSearch, "_finish", "beams finished"),
    Watched(BeamSearch, "_beams", "beams returned"),
    Watched(IdTable, "children", "children"),
    Watched(IdTable, "buckets", "items of leaves"),
    Watched(rank, "_ids_under", "rows of leaves"),
    Watched(CodeRanker, "scores", "look-ups"),
    Watched(rank, "_table_rows", "IDs of leaves"),
    Watched(rank, "_items_of", "items of leaves"),
    Watched(rank, "topk", "ordering"),
)


@dataclass(frozen=True, kw_only=True)
class ProfileRow:
    """One part of a search."""

    part: str
    calls: float
    """A query, on average."""
    cpu_us: float
    """CPU-microseconds a query; parts inside it not included, but for watching them."""
    share: float
    """Of all."""


def profile(
    plain: Callable[[int], object],
    watched: Callable[[int], object],
    watch: Stopwatch,
    num_queries: int,
) -> list[ProfileRow]:
    """The parts of a search, the largest first; then the whole, watched and not.

    Parameters
    ----------
    plain, watched
        answer one query; the second with a decoder that ``watch`` looks at.
    """
    unwatched = latencies({"plain": plain}, num_queries)["plain"]
    with watch.watching(WATCHED):
        watched(0)
        watch.clear()
        began = time.process_time()
        for query in range(num_queries):
            watched(query)
        whole = time.process_time() - began
    parts = [
        ProfileRow(
            part=part,
            calls=watch.calls[part] / num_queries,
            cpu_us=1e6 * seconds / num_queries,
            share=seconds / whole,
        )
        for part, seconds in watch.seconds.items()
    ]
    rest = whole - sum(watch.seconds.values())
    parts.append(
        ProfileRow(part="everything between", calls=1.0, cpu_us=1e6 * rest / num_queries, share=rest / whole)
    )
    parts.sort(key=lambda row: -row.cpu_us)
    parts.append(ProfileRow(part="all, watched", calls=1.0, cpu_us=1e6 * whole / num_queries, share=1.0))
    plain_us = 1000 * unwatched.mean_cpu_ms
    parts.append(
        ProfileRow(
            part="all, not watched", calls=1.0, cpu_us=plain_us, share=plain_us / (1e6 * whole / num_queries)
        )
    )
    return parts


STATUS_FILE: Final = Path("/proc/self/status")
MEMORY_FILE: Final = Path("/proc/meminfo")


def total_bytes() -> int | None:
    """Memory of the machine; None where the system does not say, here and below."""
    return _field(MEMORY_FILE, "MemTotal")


def available_bytes() -> int | None:
    """Memory that can be taken without swapping; None where the system does not say."""
    return _field(MEMORY_FILE, "MemAvailable")


def peak_bytes() -> int | None:
    """The most memory this process ever had, mapped files that it read included."""
    return _field(STATUS_FILE, "VmHWM")


def resident_bytes() -> int | None:
    """The memory this process has now."""
    return _field(STATUS_FILE, "VmRSS")


def _field(file: Path, name: str) -> int | None:
    """A size in one of the system's files of ``name: number kB``."""
    if not file.exists():
        return None
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None


CPU_FILE: Final = Path("/proc/cpuinfo")
PACKAGES: Final = ("torch", "numpy", "faiss-cpu", "transformers")


@dataclass(frozen=True, kw_only=True)
class About:
    """Stands beside every figure."""

    machine: str
    """Model of the processor, cores and memory, threads used, versions."""
    date: str
    command: str
    """That measured it; of folders only the last name."""
    seed: int


def about(command: str, *, seed: int) -> About:
    """Here and now."""
    return About(
        machine=describe(),
        date=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        command=command,
        seed=seed,
    )


def describe() -> str:
    """The machine in one line."""
    memory = total_bytes()
    size = f", {memory / 2**30:.0f} GiB" if memory else ""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    return (
        f"{_processor()}, {os.cpu_count()} cores{size}; threads used: {torch.get_num_threads()}; "
        f"Python {platform.python_version()}, {', '.join(versions)}"
    )


def _processor() -> str:
    if CPU_FILE.exists():
        for line in CPU_FILE.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
