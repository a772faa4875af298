"""How much may be sent, how long it may take, and who goes first."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from genius_search.errors import DeadlinePassed
from genius_search.index.query import SnapshotSearcher
from genius_search.serve import guard, service
from genius_search.serve.guard import Guard
from genius_search.serve.schemas import (
    JSON_VALUES,
    SEARCH_BYTES,
    SEARCH_MEMBERS,
    SEARCH_VALUES,
    Problem,
)
from genius_search.serve.service import Threads

from .conftest import form, picture
from .test_guard import JSON, is_problem


class Client:
    """A connection to an application that returns the length of what it is sent."""

    def __init__(self, limited, chunks=(), size=1_000, address="10.0.0.1"):
        self.chunks = asyncio.Queue()
        for chunk in chunks:
            self.send(chunk)
        self.status = 0
        head = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/search",
            "client": (address, 1),
            "headers": [*head, (b"content-length", str(size).encode())],
        }
        self.done = asyncio.ensure_future(limited(scope, self.chunks.get, self.answer))

    def send(self, chunk: bytes, *, more: bool = True) -> None:
        self.chunks.put_nowait({"type": "http.request", "body": chunk, "more_body": more})

    async def answer(self, message):
        self.status = message.get("status", self.status)


async def read(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def limited(app=read) -> Guard:
    return Guard(app, keys=None, redact=str)


def test_a_body_has_a_time_however_often_a_byte_of_it_comes(monkeypatch):
    monkeypatch.setattr(guard, "MAX_BODY_SECONDS", 0.3)

    async def scenario():
        slow = Client(limited(), [b"{"])
        began = time.monotonic()
        while not slow.done.done() and time.monotonic() - began < 20:
            slow.send(b" ")
            await asyncio.sleep(0.02)
        assert slow.status == 408

    asyncio.run(scenario())


def test_of_too_many_requests_of_a_client_the_slowest_is_given_up_and_others_have_theirs(
    monkeypatch,
):
    monkeypatch.setattr(guard, "MAX_CLIENT_REQUESTS", 3)

    async def scenario():
        app = limited()
        other = Client(app, [b"{"], address="10.0.0.2")
        slow = [Client(app, [b"{"]) for _ in range(5)]
        await asyncio.wait([one.done for one in slow[:2]])
        assert [one.status for one in slow] == [429, 429, 0, 0, 0]
        quick = Client(app)
        quick.send(b"{}", more=False)
        other.send(b"}", more=False)
        await asyncio.gather(quick.done, other.done)
        assert (quick.status, other.status) == (200, 200)
        for one in slow:
            one.done.cancel()

    asyncio.run(scenario())


def test_if_all_requests_of_a_client_are_worked_on_the_next_is_refused(monkeypatch):
    monkeypatch.setattr(guard, "MAX_CLIENT_REQUESTS", 2)
    may_end = asyncio.Event()

    async def wait(scope, receive, send):
        await may_end.wait()
        await read(scope, receive, send)

    async def scenario():
        app = limited(wait)
        clients = [Client(app, size=0) for _ in range(3)]
        await clients[2].done
        may_end.set()
        await asyncio.gather(*(one.done for one in clients))
        assert [one.status for one in clients] == [200, 200, 429]

    asyncio.run(scenario())


def test_of_bodies_that_fill_the_memory_the_first_is_given_up_and_all_is_given_back(monkeypatch):
    monkeypatch.setattr(guard, "MAX_BODIES_BYTES", 100)

    async def scenario():
        app = limited()
        for _ in range(3):
            first, second = Client(app, [b"x" * 60]), Client(app, [b"x" * 60])
            await first.done
            assert (first.status, second.status) == (429, 0)
            second.send(b"", more=False)
            await second.done
            assert second.status == 200

    asyncio.run(scenario())


class Lazy(Client):
    """A client that reads the beginning of an answer."""

    async def answer(self, message):
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)


async def large(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(2 * guard.PIECE_BYTES)})


@pytest.mark.parametrize(
    ("name", "limit", "error"),
    [
        ("MAX_RESPONSE_SECONDS", 0.1, TimeoutError),
        ("MAX_CLIENT_REQUESTS", 2, Problem),
        ("MAX_UNREAD_BYTES", 5 * guard.PIECE_BYTES, Problem),
    ],
)
def test_an_answer_that_is_not_read_is_given_up_and_the_first_of_too_many(
    monkeypatch, name, limit, error
):
    monkeypatch.setattr(guard, name, limit)

    async def scenario():
        app = limited(large)
        lazy = [Lazy(app, size=0) for _ in range(4)]
        for one in lazy[:2]:
            with pytest.raises(error):
                await one.done
        quick = Client(app, size=0)
        await quick.done
        assert quick.status == 200
        for one in lazy:
            one.done.cancel()

    asyncio.run(scenario())


def test_too_large_a_body_is_refused_unread_and_one_in_chunks_too(client):
    text = json.dumps({"text": "x" * SEARCH_BYTES}).encode()
    is_problem(client.post("/v1/search", content=text, headers=JSON), 413)
    is_problem(
        client.post("/v1/search", content=b"x", headers={**JSON, "Content-Length": "99999999999"}),
        413,
    )
    is_problem(
        client.post("/v1/search", content=b"x", headers={**JSON, "Content-Length": "-1"}), 400
    )
    is_problem(client.post("/v1/search", **form({"text": "x" * SEARCH_BYTES}, p=picture())), 413)
    is_problem(client.post("/v1/search", content=iter([b"{}"]), headers=JSON), 400)
    assert client.post("/v1/search", json={"text": "x"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        "{" + ",".join(f'"{n}":0' for n in range(6_500)) + "}",
        "[" + "[]," * 21_000 + "0]",
        "[" * 60_000,
        '{"items": [{"text": "x", "fields": {"a": ' + "[" * 5_000 + "]" * 5_000 + "}}]}",
    ],
    ids=["members", "lists", "deep", "deep field"],
)
def test_json_that_is_small_and_has_many_values_is_refused(client, body):
    too_large = 413 if sum(map(body.count, ":[{")) > SEARCH_MEMBERS else 422
    for path, status in (("/v1/search", too_large), ("/v1/explain", too_large), ("/v1/items", 422)):
        is_problem(client.post(path, content=body, headers=JSON), status)


def test_threads_run_so_much_at_once_and_what_waits_too_long_not_at_all(monkeypatch):
    monkeypatch.setattr(service, "MAX_WAITING", 3)
    may_end = threading.Event()
    ran = []

    async def scenario():
        threads = Threads(1)
        busy = asyncio.ensure_future(threads.run(lambda: may_end.wait(60)))
        await asyncio.sleep(0.05)
        late = asyncio.ensure_future(
            threads.run(lambda: ran.append("late"), deadline=time.monotonic() + 0.1)
        )
        waiting = asyncio.ensure_future(threads.run(lambda: ran.append("waiting")))
        await asyncio.sleep(0)
        with pytest.raises(Problem, match="429"):
            await threads.run(lambda: ran.append("too many"))
        with pytest.raises(DeadlinePassed):
            await late
        gone = asyncio.ensure_future(threads.run(lambda: ran.append("gone")))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        may_end.set()
        await asyncio.gather(busy, waiting)
        assert ran == ["waiting"]

    asyncio.run(scenario())


def test_a_thread_is_free_only_when_its_work_is_done():
    may_end = threading.Event()

    async def scenario():
        threads = Threads(1)
        with pytest.raises(DeadlinePassed):
            await threads.run(lambda: may_end.wait(60), deadline=time.monotonic() + 0.05)
        with pytest.raises(DeadlinePassed):
            await threads.run(lambda: 1, deadline=time.monotonic() + 0.05)
        may_end.set()
        assert await threads.run(lambda: 2) == 2

    asyncio.run(scenario())


def test_a_panic_of_a_library_fails_one_request(client, monkeypatch):
    class Panic(BaseException):
        pass

    def panic(*_, **__):
        raise Panic("in a library")

    index = client.app.state.service.indexes["things"]
    with monkeypatch.context() as patch:
        patch.setattr(SnapshotSearcher, "search", panic)
        for method in ("explain", "add"):
            patch.setattr(index, method, panic)
        patch.setattr("genius_search.serve.app.sample_items", panic)
        for _ in range(5):
            is_problem(client.post("/v1/search", json={"text": "x"}), 500)
            is_problem(client.post("/v1/explain", json={"text": "x", "id": "1:1"}), 500)
            is_problem(client.post("/v1/items", json={"items": [{"text": "x"}]}), 500)
            is_problem(client.get("/v1/items/examples"), 500)
    assert client.post("/v1/search", json={"text": "x"}).status_code == 200


def test_json_of_more_values_than_allowed_is_refused_before_it_is_parsed(client):
    search = json.dumps({"vector": [0] * (SEARCH_VALUES + 2)}).encode()
    assert (
        "commas"
        in is_problem(client.post("/v1/search", content=search, headers=JSON), 413)["detail"]
    )
    for members in ({str(n): 0 for n in range(SEARCH_MEMBERS)}, {"": [[]] * SEARCH_MEMBERS}):
        content = json.dumps(members).encode()
        refused = is_problem(client.post("/v1/search", content=content, headers=JSON), 413)
        assert "brackets" in refused["detail"]
    items = json.dumps({"items": [{"fields": {"a": [0] * (JSON_VALUES + 2)}}]}).encode()
    assert (
        "commas" in is_problem(client.post("/v1/items", content=items, headers=JSON), 413)["detail"]
    )
