"""Connections that send nothing, too little or too much, and never read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from genius_search.serve import limits
from genius_search.serve.server import Server, Throttle, server_config

REQUEST = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
LONG = 50_000_000


class App:
    """Answers ``/`` at once, ``/slow`` when it may, ``/long`` with many bytes."""

    def __init__(self) -> None:
        self.uploads = threading.Event()
        self.began = threading.Event()
        self.may_answer = threading.Event()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "POST":
            self.uploads.set()
        while (await receive()).get("more_body"):
            pass
        body = b"x" * (LONG if scope["path"] == "/long" else 2)
        if scope["path"] == "/slow":
            self.began.set()
            await asyncio.to_thread(self.may_answer.wait)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def app() -> App:
    return App()


Connect = Callable[[bytes], socket.socket]


@pytest.fixture
def connect(app) -> Iterator[Connect]:
    """Opens connections to a running server, and sends something."""
    bound = socket.create_server(("127.0.0.1", 0))
    config = server_config(app)
    config.lifespan = "off"
    server = Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server._serve([bound])))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    opened = []

    def connect(sent: bytes) -> socket.socket:
        opened.append(socket.create_connection(bound.getsockname(), timeout=20))
        opened[-1].sendall(sent)
        return opened[-1]

    yield connect
    app.may_answer.set()
    for one in opened:
        one.close()
    server.should_exit = True
    thread.join()


def read_all(connection: socket.socket) -> bytes:
    """Everything that arrives until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            found += part
    return found


def answer(connection: socket.socket) -> bytes:
    return connection.recv(1000).partition(b"\r\n")[0]


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: local"])
def test_a_request_that_does_not_arrive_is_not_waited_for(connect, monkeypatch, sent):
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.0)
    assert read_all(connect(sent)) == b""


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(connect, monkeypatch):
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.5)
    slow = connect(b"GET / HTTP/1.1\r\nX: ")
    with pytest.raises(ConnectionError):  # noqa: PT012  until the server closes
        while True:
            slow.sendall(b"x")
            time.sleep(0.05)


def test_a_client_that_does_not_read_is_not_waited_for(connect, monkeypatch):
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.5)
    lazy = connect(REQUEST % b"long")
    time.sleep(3)
    assert len(read_all(lazy)) < LONG
    assert answer(connect(REQUEST % b"")) == b"HTTP/1.1 200 OK"


def test_idle_connections_make_room_for_others_and_requests_are_finished(connect, app, monkeypatch):
    monkeypatch.setattr(limits, "CONNECTIONS", 4)
    slow = connect(REQUEST % b"slow")
    assert app.began.wait(20)
    uploading = connect(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx")
    assert app.uploads.wait(20)
    idle = [connect(b"GET /") for _ in range(10)]
    assert answer(connect(REQUEST % b"")) == b"HTTP/1.1 200 OK"
    assert [read_all(one) for one in idle[:8]] == [b""] * 8
    uploading.sendall(b"x" * 8)
    assert answer(uploading) == b"HTTP/1.1 200 OK"
    app.may_answer.set()
    assert answer(slow) == b"HTTP/1.1 200 OK"


def test_a_line_is_logged_once_in_a_while(caplog):
    logger = logging.getLogger("genius_search.test_throttle")
    logger.addFilter(Throttle())
    for number in range(100):
        logger.warning("number %d", number)
    logger.warning("another line")
    assert [record.getMessage() for record in caplog.records] == ["number 0", "another line"]


def test_the_loop_is_that_of_python_also_where_another_is_installed():
    """Connections limit what they read by an attribute that transports of uvloop do not have."""
    assert server_config(None).loop == "asyncio"


def test_a_connection_is_kept_as_long_as_the_head_of_a_request_may_take(app):
    """If it were closed after uvicorn's five seconds, a slow client would send its next request in vain."""
    assert server_config(app).timeout_keep_alive == limits.HEAD_SECONDS
