"""The server as it is started: its start, its end, and connections of slow clients."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, sys
from genius_search.serve import guard, server
server.MAX_HEAD_SECONDS = server.MAX_IDLE_SECONDS = 1
guard.MAX_KEPT = 2
server.MAX_UNACKNOWLEDGED_SECONDS = 1

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    if scope["path"] != "/":
        print("begun", flush=True)
    if scope["path"] == "/slow":
        await asyncio.sleep(0.5)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(500 if scope["path"] == "/long" else 0):
        await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
    await send({"type": "http.response.body", "body": b"over"})

bound = server.listen("127.0.0.1", 0)
print(bound.getsockname()[1], flush=True)
server.serve(guard.Guard(app, keys=None, redact=str), bound)
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, int(process.stdout.readline())
        process.kill()


def connect(port: int, sent: bytes) -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", port), timeout=20)
    opened.sendall(sent)
    return opened


def ask(port: int, path: str) -> socket.socket:
    return connect(port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


def wait_for_files(process: subprocess.Popen[str], is_right: Callable[[int], bool]) -> int:
    """Wait until a process has the right number of open files; return it."""
    until = time.monotonic() + 30
    while not is_right(number := len(list(Path(f"/proc/{process.pid}/fd").iterdir()))):
        assert time.monotonic() < until
        time.sleep(0.05)
    return number


def is_closed_after_answer(connection: http.client.HTTPConnection) -> bool:
    """Send a request on an open connection, and return whether the server then closes it."""
    connection.request("GET", "/", headers={"Host": "localhost"})
    answer = connection.getresponse()
    assert answer.read() == b"over"
    return answer.will_close


@contextlib.contextmanager
def connections(port: int, count: int) -> Iterator[list[http.client.HTTPConnection]]:
    opened = [http.client.HTTPConnection("127.0.0.1", port, timeout=20) for _ in range(count)]
    yield opened
    for connection in opened:
        connection.close()


def test_a_connection_serves_several_requests_until_it_is_idle(server):
    _, port = server
    with connections(port, 1) as [connection]:
        for _ in range(3):
            assert not is_closed_after_answer(connection)
        assert connection.sock.recv(100) == b""  # closed after MAX_HEAD_SECONDS


def test_of_too_many_connections_the_one_with_the_oldest_request_is_closed(server):
    _, port = server
    with connections(port, 3) as (first, second, third):
        for connection in (first, second, third, second):
            assert not is_closed_after_answer(connection)
        assert is_closed_after_answer(first)
        assert not is_closed_after_answer(third)


def test_idle_connections_do_not_delay_the_end(server):
    process, port = server
    with connections(port, 1) as [connection]:
        assert not is_closed_after_answer(connection)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_head_that_does_not_arrive_is_not_waited_for(server):
    _, port = server
    with contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(connect(port, sent))
            for sent in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: local")
        ]
        for connection in slow:
            assert connection.recv(100)[9:12] in (b"", b"408")


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux")
def test_a_client_that_does_not_read_is_not_waited_for(server):
    process, port = server
    with ask(port, "/") as first:
        assert first.recv(100)[9:12] == b"200"
    before = wait_for_files(process, bool)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(ask(port, "/long"))
        assert [process.stdout.readline() for _ in range(5)] == ["begun\n"] * 5
        wait_for_files(process, lambda number: number <= before)
        with ask(port, "/") as other:
            assert other.recv(100)[9:12] == b"200"


def test_requests_are_finished_before_the_end_whoever_is_connected(server):
    process, port = server
    with connect(port, b""), ask(port, "/slow") as slow:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        with slow.makefile("rb") as answer:
            assert answer.read().startswith(b"HTTP/1.1 200")
        assert process.wait(20) == 0
