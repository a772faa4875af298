"""Progress of long tasks: the number of finished steps and the latest measures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """A receiver of progress reports.

    The command line draws a bar, tests record the calls, and :class:`Silent` ignores them.
    """

    def begin(self, stage: str, total: int) -> None:
        """Start a stage of ``total`` steps."""

    def advance(self, done: int, measures: Mapping[str, float]) -> None:
        """Report the number of finished steps and the latest measures."""

    def say(self, message: str) -> None:
        """Show a one-line message."""


class Silent:
    """A receiver that ignores all reports."""

    def begin(self, stage: str, total: int) -> None:
        """Do nothing."""

    def advance(self, done: int, measures: Mapping[str, float]) -> None:
        """Do nothing."""

    def say(self, message: str) -> None:
        """Do nothing."""
