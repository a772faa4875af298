"""What a stage tells whoever watches: how far it is, and what it measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Receives progress; the command line draws it, a test records it, a library user may ignore it."""

    def begin(self, stage: str, total: int) -> None:
        """A stage of so many steps starts."""
        ...

    def advance(self, done: int, measures: Mapping[str, float]) -> None:
        """So many steps are done; the latest measures."""
        ...

    def say(self, message: str) -> None:
        """A line worth reading."""
        ...


class Silent:
    """Tells nobody."""

    def begin(self, stage: str, total: int) -> None:
        """Ignore it."""

    def advance(self, done: int, measures: Mapping[str, float]) -> None:
        """Ignore it."""

    def say(self, message: str) -> None:
        """Ignore it."""
