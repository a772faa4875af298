"""The HTTP server: uvicorn, with limits on connections, on the time that clients take, and on its log."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import time
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from genius_search.serve import limits
from genius_search.serve.engine import DRAIN_SECONDS

BACKLOG: Final = 128
"""Connections that the system accepts before the server does; all of them may come at once."""
READ_BYTES: Final = 64 << 10
"""Read from a connection at a time; several times as much is held for each."""
LOG_SECONDS: Final = 10.0
"""What clients can cause is logged at most this often."""
KEPT_BYTES: Final = 4 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Settings of glibc's ``mallopt``."""


class Connection(H11Protocol):
    """A connection that is closed when its client is too slow, or when there are too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its base
        """Close the connection that has waited longest for its client, if there are too many."""
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's, which says nothing of it
        self.since = time.monotonic()
        self._unsent = 0
        if len(self.connections) > max_connections():
            waiting = [one for one in self.connections if isinstance(one, Connection) and one.waits]
            min(waiting, key=lambda one: (one.has_request, one.since), default=self).abort()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.since = time.monotonic()
        super().on_response_complete()

    @property
    def has_request(self) -> bool:
        """Whether the head of a request has arrived, and its response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waits(self) -> bool:
        """Whether it waits for the client to send a request or to read a response."""
        return not self.has_request or self.cycle.more_body or self.flow.write_paused

    def close_if_late(self) -> None:
        """Close it if for too long no head of a request arrived, or nothing of a response was read."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self.since = unsent, time.monotonic()
        if (unsent or not self.has_request) and time.monotonic() - self.since > limits.HEAD_SECONDS:
            self.abort()

    def abort(self) -> None:
        """Close it at once, whatever is still to be sent."""
        self.connections.discard(self)
        self.transport.abort()


class Server(uvicorn.Server):
    """A server that closes connections of slow clients."""

    async def on_tick(self, counter: int) -> bool:
        """Look at every connection once a second."""
        if counter % 10 == 0:
            for one in list(self.server_state.connections):
                if isinstance(one, Connection):
                    one.close_if_late()
        return await super().on_tick(counter)


class Throttle(logging.Filter):
    """Lets each line of the code log once in :data:`LOG_SECONDS`."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line has not logged for a while."""
        line = record.pathname, record.lineno
        if record.created < self._logged.get(line, 0.0) + LOG_SECONDS:
            return False
        self._logged[line] = record.created
        return True


def max_connections() -> int:
    """Return how many connections may be open: at most half of the files that this process may open."""
    files = os.sysconf("SC_OPEN_MAX") if hasattr(os, "sysconf") else 2 * limits.CONNECTIONS
    return min(limits.CONNECTIONS, files // 2)


def return_freed_memory() -> None:
    """Let glibc return freed blocks to the system at once if they are as large as those of pictures.

    By default it learns to keep blocks of up to 32 MB, for each thread that ever decoded a picture.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2 * KEPT_BYTES)


def server_config(app: Any) -> uvicorn.Config:
    """Return the settings of a server of an application."""
    config = uvicorn.Config(
        app,
        http=Connection,
        loop="asyncio",  # connections use its transports; uvloop's, if installed, have no such limits
        backlog=BACKLOG,
        timeout_keep_alive=int(limits.HEAD_SECONDS),  # a client that closes earlier never sends in vain
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=int(DRAIN_SECONDS),
    )
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(Throttle())
    return config
