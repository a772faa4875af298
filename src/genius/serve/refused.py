"""What a busy or closing service says instead of an answer."""

from __future__ import annotations

from genius.errors import GeniusError

__all__ = ["DeadlinePassed", "DiskFull", "Draining", "Overloaded", "Refused"]


class Refused(GeniusError):
    """A request that was understood, and is not answered now."""


class Overloaded(Refused):
    """More is asked than can be answered; says when to ask again."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DeadlinePassed(Refused):
    """The time that was allowed for an answer is over."""


class Draining(Refused):
    """The service is shutting down: it finishes what it has and takes nothing new."""


class DiskFull(Refused):
    """There is no room for a change, so nothing has changed."""
