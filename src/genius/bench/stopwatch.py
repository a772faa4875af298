"""Where the time of a search goes, part by part, without a line about it in the search."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from genius.search.decoding import Decoding, DecodingState


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

    def __init__(self, state: DecodingState, watch: Stopwatch) -> None:
        self.inner = state
        self._watch = watch
        self._select = watch.timed("decoder: select", state.select)

    @property
    def level(self) -> int:
        return self.inner.level

    def select(self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]) -> _State:
        return _State(self._select(queries, rows), self._watch)


class _Step(NamedTuple):
    hidden: Tensor
    state: _State


class WatchedDecoder:
    """A decoder that a stopwatch looks at; it decodes the same.

    Parameters
    ----------
    decoder
        that decodes.
    watch
        counts its parts as ``decoder: …``.
    """

    def __init__(self, decoder: Decoding, watch: Stopwatch) -> None:
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

    def advance(self, state: DecodingState, codes: Int64[Tensor, "rows tokens"]) -> _Step:
        """Read codes."""
        step = self._advance(state.inner if isinstance(state, _State) else state, codes)
        return _Step(step.hidden, _State(step.state, self._watch))

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
