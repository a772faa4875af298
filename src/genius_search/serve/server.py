"""The HTTP server: granian, embedded in this process."""

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

MAX_HEAD_SECONDS: Final = 10
"""Maximum time for the head of a request to arrive, after the connection was accepted or after the
previous response. So it is also the maximum idle time of a connection that is kept open."""
MAX_HEAD_BYTES: Final = 64 << 10
"""Maximum size of the head of a request. An endless head takes up to 80 kB of memory."""
MAX_IDLE_SECONDS: Final = 60
"""Maximum time for the first bytes to arrive on a connection. Until then, the operating system
holds the connection, and the server does not see it."""
MAX_UNACKNOWLEDGED_SECONDS: Final = 20
"""Maximum time for which a client may acknowledge no data of a response. The operating system then
closes the connection."""
MAX_CONNECTIONS: Final = 4_096
BACKLOG: Final = 2_048
"""Maximum number of connections that the operating system accepts ahead of the server."""
ALLOCATOR: Final = {-3: 128 << 10, -8: 2}
"""Options of glibc's ``mallopt``: return freed blocks above 128 KiB to the system
(``M_MMAP_THRESHOLD``, which would grow otherwise), and limit the heaps of threads to two
(``M_ARENA_MAX``)."""
MAX_DRAIN_SECONDS: Final = 30
"""Maximum time to finish accepted requests before the process ends."""


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket with a port on which several workers can listen; raise like `listen`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((host, port))
    return reserved


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket that accepts connections. They are answered once :func:`serve` is called.

    Parameters
    ----------
    shared
        Other workers may listen on the same port, which :func:`reserve` has reserved.

    Raises
    ------
    OSError
        The port is in use, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux only; connections inherit the options
        milliseconds = 1000 * MAX_UNACKNOWLEDGED_SECONDS
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, MAX_IDLE_SECONDS)
    bound.setblocking(False)
    return bound


class _BoundServer(Server):  # type: ignore[misc]  # without types
    """A server for a socket that is already bound."""

    def __init__(self, app: Any, bound: socket.socket) -> None:
        # Raise the soft limit of open files to the hard limit; half of them are for connections.
        _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
        super().__init__(
            app,
            interface=Interfaces.ASGI,
            http=HTTPModes.http1,
            websockets=False,
            backlog=BACKLOG,
            backpressure=max_files // 2 if 0 < max_files < 2 * MAX_CONNECTIONS else MAX_CONNECTIONS,
            http1_settings=HTTP1Settings(
                header_read_timeout=1000 * MAX_HEAD_SECONDS,
                keep_alive=True,
                max_buffer_size=MAX_HEAD_BYTES,
            ),
            log_enabled=False,
        )
        self._bound = bound

    def _init_shared_socket(self) -> None:
        self._shd = SocketHolder(self._bound.detach(), False, BACKLOG)  # the holder closes it


def serve(app: Any, bound: socket.socket) -> NoReturn:
    """Serve an ASGI application until SIGTERM or SIGINT, then finish its requests and exit."""

    async def run() -> None:
        server = _BoundServer(app, bound)

        def stop() -> None:
            signal.alarm(MAX_DRAIN_SECONDS)  # ends the process if requests take longer
            server.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        await server.serve()

    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        for option, value in ALLOCATOR.items():
            ctypes.CDLL("libc.so.6").mallopt(option, value)
    asyncio.run(run())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Python's normal exit frees objects that granian's threads still use, which can crash.
    os._exit(0)
