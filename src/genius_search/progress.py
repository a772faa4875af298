"""Progress of long tasks: how far they are, and what they measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Receiver of progress: the command line draws it, tests record it, :class:`Silent` ignores it."""

    def begin(self, stage: str, total: int) -> None:
        """Start a stage of ``total`` steps."""

    def advance(self, done: int, measures: Mapping[str, float]) -> None:
        """Report the number of finished steps and the latest measures."""

    def say(self, message: str) -> None:
        """Show a message of one line."""


class Silent:
    """Ignores all progress."""

    def begin(self, stage: str, total: int) -> None:
        """Ignore it."""

    def advance(self, done: int, measures: Mapping[str, float]) -> None:
        """Ignore it."""

    def say(self, message: str) -> None:
        """Ignore it."""
