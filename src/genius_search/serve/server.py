"""The HTTP server: granian, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from typing import Any, Final, NoReturn

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.net import SocketHolder
from granian.server.embed import Server

HEAD_SECONDS: Final = 5
"""Longest time until the head of a request has arrived."""
HEAD_BYTES: Final = 64 << 10
"""Size of the head of a request; one that never ends takes up to 80 kB of memory."""
IDLE_SECONDS: Final = 60
"""How long the system keeps a connection on which nothing has arrived; the server does not see it."""
UNREAD_SECONDS: Final = 20
"""Longest time for which a client may acknowledge nothing of a response; the system closes the connection."""
CONNECTIONS: Final = 4_096
BACKLOG: Final = 2_048
"""Connections that the system accepts before the server does."""
ALLOCATOR: Final = {-3: 128 << 10, -8: 2}
"""Options of glibc's ``mallopt``: larger blocks go back to the system as soon as they are free
(``M_MMAP_THRESHOLD``, which otherwise grows), and threads share two heaps (``M_ARENA_MAX``)."""
DRAIN_SECONDS: Final = 30
"""Longest time that the end of the process waits for accepted requests."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections; raise :class:`OSError` if the address is taken or elsewhere.

    They are answered once :func:`serve` is called.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.create_server((host, port), family=family, backlog=BACKLOG)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit them
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_SECONDS)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, IDLE_SECONDS)
    bound.setblocking(False)
    return bound


class _BoundServer(Server):  # type: ignore[misc]  # without types
    """A server that listens on a socket that is bound already."""

    def __init__(self, app: Any, bound: socket.socket) -> None:
        _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
        super().__init__(
            app,
            interface=Interfaces.ASGI,
            http=HTTPModes.http1,
            websockets=False,
            backlog=BACKLOG,
            backpressure=max_files // 2 if 0 < max_files < 2 * CONNECTIONS else CONNECTIONS,
            http1_settings=HTTP1Settings(
                header_read_timeout=1000 * HEAD_SECONDS,
                keep_alive=False,
                max_buffer_size=HEAD_BYTES,
            ),
            log_enabled=False,
        )
        self._bound = bound

    def _init_shared_socket(self) -> None:
        self._shd = SocketHolder(self._bound.detach(), False, BACKLOG)  # which closes it


def serve(app: Any, bound: socket.socket) -> NoReturn:
    """Serve an ASGI application until the process is told to end, and end it when requests are answered."""

    async def run() -> None:
        server = _BoundServer(app, bound)

        def end() -> None:
            signal.alarm(DRAIN_SECONDS)  # ends the process
            server.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, end)
        await server.serve()

    with contextlib.suppress(OSError, AttributeError):  # there is another C library
        for option, value in ALLOCATOR.items():
            ctypes.CDLL("libc.so.6").mallopt(option, value)
    asyncio.run(run())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # Python would take objects from granian's threads, which can abort
