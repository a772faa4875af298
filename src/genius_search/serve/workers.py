"""Several processes that answer requests on one port. The first one makes all changes.

Each worker opens the indexes itself, so that all share the mapped files in memory. The system
distributes connections among them (``SO_REUSEPORT``). A worker other than the first checks a
change, and forwards it to the first one through a Unix socket::

    client --HTTP--> worker 2 --Unix socket--> worker 1 --> index
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from genius_search.serve.schemas import Problem, log

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

RESTART_PAUSE_SECONDS: Final = 1.0
"""Pause before a worker that ended is started again."""
START_SECONDS: Final = 5.0
"""How long a change waits for the first worker to start."""
METRICS_FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Variable with the folder in which prometheus_client collects the numbers of all workers."""
NO_FIRST_WORKER: Final = "the first worker, which makes all changes, does not answer; retry later"


class Worker(NamedTuple):
    """One of several processes that answer requests."""

    number: int
    """0 for the first one."""
    folder: Path
    """A folder that all workers of a service share."""

    @property
    def socket(self) -> Path:
        """Path of the Unix socket of the first worker."""
        return self.folder / "changes"


def start_workers(count: int) -> Worker:
    """Fork the workers, and return in each of them; the calling process only looks after them.

    It ends when the first worker ends, or on SIGTERM and SIGINT. Any other worker that ends is
    started again.
    """
    folder = Path(tempfile.mkdtemp(prefix="genius-"))  # only this user can read it
    os.environ[METRICS_FOLDER] = str(folder)
    numbers: dict[int, int] = {}  # process id -> number of the worker
    is_stopping = False

    def stop(*_: object) -> None:
        nonlocal is_stopping
        is_stopping = True
        for pid in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    pending = list(range(count))
    status = 0
    while pending or numbers:
        for number in pending:
            pid = os.fork()
            if not pid:
                for signal_number, handler in handlers.items():
                    signal.signal(signal_number, handler)
                _end_with_parent()
                return Worker(number, folder)
            numbers[pid] = number
        pid, wait_status = os.wait()
        number = numbers.pop(pid)
        pending = []
        if number == 0:
            status = os.waitstatus_to_exitcode(wait_status)
            stop()
        elif not is_stopping:
            log.error("worker %d ended and is started again", number + 1)
            time.sleep(RESTART_PAUSE_SECONDS)
            pending = [number]
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(status if status >= 0 else 128 - status)


def _end_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends, even if that is killed; on Linux only."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


class ChangeForwarder:
    """An ASGI application that lets the first worker answer, and returns its response."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Forward a request, whose body the guard has read."""
        state = scope["state"]
        head = {
            "method": scope["method"],
            "path": scope["path"],
            "query_string": scope["query_string"].decode("latin-1"),
            "state": {name: value for name, value in state.items() if name != "body"},
        }
        try:
            reader, writer = await self._connect()
            try:
                await _write_frame(writer, head, state["body"])
                answer, body = await _read_frame(reader)
            finally:
                writer.close()
        except (OSError, EOFError):
            raise Problem(503, NO_FIRST_WORKER) from None
        headers = [
            (name.encode("latin-1"), text.encode("latin-1")) for name, text in answer["headers"]
        ]
        await send({"type": "http.response.start", "status": answer["status"], "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first worker, which may not have started yet."""
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                return await asyncio.open_unix_connection(self._socket)
            except OSError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def accept_changes(app: ASGIApp, worker: Worker | None) -> Any:
    """Answer the changes that other workers forward, if this is the first of several workers."""
    if worker is None or worker.number:
        yield
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            await _answer_change(app, reader, writer)
        writer.close()

    server = await asyncio.start_unix_server(answer, worker.socket)
    async with server:
        yield


async def _answer_change(
    app: ASGIApp, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer a change that another worker has checked."""
    head, body = await _read_frame(reader)
    scope = {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "method": head["method"],
        "path": head["path"],
        "raw_path": head["path"].encode(),
        "query_string": head["query_string"].encode("latin-1"),
        "headers": [(b"content-type", head["state"]["content_type"].encode("latin-1"))],
        "state": head["state"] | {"body": body},
    }
    answer: dict[str, Any] = {"status": 500, "headers": []}
    content = bytearray()

    async def collect(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer["status"] = message["status"]
            answer["headers"] = [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in message["headers"]
            ]
        content.extend(message.get("body", b""))

    async def no_message() -> Message:
        return {"type": "http.disconnect"}

    await app(scope, no_message, collect)
    await _write_frame(writer, answer, bytes(content))


async def _write_frame(writer: asyncio.StreamWriter, head: dict[str, Any], body: bytes) -> None:
    """Send a JSON object and bytes, after a line with their lengths."""
    encoded = json.dumps(head).encode()
    writer.write(b"%d %d\n" % (len(encoded), len(body)) + encoded + body)
    await writer.drain()


async def _read_frame(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """Receive a JSON object and bytes."""
    line = await reader.readline()
    if not line:
        raise EOFError("the other worker closed the connection")
    head_length, body_length = map(int, line.split())
    head = json.loads(await reader.readexactly(head_length))
    return head, await reader.readexactly(body_length)
