"""The HTTP server: granian, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.net import SocketHolder
from granian.server.embed import Server

HEAD_SECONDS: Final = 10
"""Longest time until the head of a request has arrived, the wait for a next request included."""
UNREAD_SECONDS: Final = 20
"""Longest time for which a client may acknowledge nothing of a response; the system closes the connection."""
CONNECTIONS: Final = 8_192
BACKLOG: Final = 2_048
"""Connections that the system accepts before the server does."""
DRAIN_SECONDS: Final = 30
"""Longest time that the end of the process waits for accepted requests."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; raise :class:`OSError` if it is taken or elsewhere."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_SECONDS)
        bound.bind((host, port))
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


class _BoundServer(Server):  # type: ignore[misc]  # without types
    """A server that listens on a socket that is bound already."""

    def __init__(self, app: Any, bound: socket.socket) -> None:
        super().__init__(
            app,
            interface=Interfaces.ASGI,
            http=HTTPModes.http1,
            websockets=False,
            backlog=BACKLOG,
            backpressure=min(CONNECTIONS, max_files() // 2),
            http1_settings=HTTP1Settings(header_read_timeout=1000 * HEAD_SECONDS),
            log_enabled=False,
        )
        self._bound = bound

    def _init_shared_socket(self) -> None:
        self._shd = SocketHolder(self._bound.detach(), False, BACKLOG)  # which closes it


def max_files() -> int:
    """Return how many files this process may open, after asking for as many as are allowed."""
    try:
        import resource  # noqa: PLC0415  not on Windows
    except ImportError:
        return 2 * CONNECTIONS
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return 2 * CONNECTIONS if most == resource.RLIM_INFINITY else most


def serve(app: Any, bound: socket.socket, announce: Callable[[], None]) -> NoReturn:
    """Serve an ASGI application until the process is told to end, and end it when all requests are answered.

    Parameters
    ----------
    announce
        called when clients can connect.
    """

    async def run() -> None:
        server = _BoundServer(app, bound)

        def end() -> None:
            if hasattr(signal, "alarm"):
                signal.alarm(DRAIN_SECONDS)  # ends the process
            server.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError):  # Windows
                asyncio.get_running_loop().add_signal_handler(number, end)
        bound.listen(BACKLOG)
        announce()
        await server.serve()

    asyncio.run(run())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # Python would take objects from granian's threads, which can abort
