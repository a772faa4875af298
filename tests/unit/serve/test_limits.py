"""Bodies that never end, and bodies that are given back."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request

from genius_search.serve import limits
from genius_search.serve.guard import STREAM_PATH, BodyLimits, Problem

SCOPE = {"type": "http", "headers": [(b"content-type", b"application/json")]}


async def read_all(scope, receive, send):
    await Request(scope, receive).body()


async def ignore(message):
    pass


async def nobody():
    raise AssertionError


def test_a_body_that_stops_coming_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.01)
    sent = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive():
        if not sent:
            await asyncio.sleep(60)
        return sent.pop()

    with pytest.raises(Problem, match=r"0\.01 seconds") as raised:
        asyncio.run(BodyLimits(read_all)(SCOPE, receive, ignore))
    assert raised.value.status_code == 408


def test_what_was_held_for_a_request_is_given_back_however_it_ends(monkeypatch):
    monkeypatch.setattr(limits, "BODIES_BYTES", 100)
    limited = BodyLimits(read_all)

    async def receive():
        return {"type": "http.request", "body": b"x" * 60, "more_body": False}

    async def endless():
        return {"type": "http.request", "body": b"x" * 60, "more_body": True}

    async def scenario():
        for _ in range(5):
            await limited(SCOPE, receive, ignore)
            with pytest.raises(Problem, match="429"):
                await limited(SCOPE, endless, ignore)

    asyncio.run(scenario())


def test_a_stream_may_go_on_but_a_body_that_only_says_how_long_it_is_may_not():
    async def nothing(scope, receive, send):
        pass

    headers = [(b"content-length", str(limits.BODY_BYTES + 1).encode())]
    stream = {"type": "http", "headers": headers, "path": STREAM_PATH}
    asyncio.run(BodyLimits(nothing)(stream, nobody, ignore))
    with pytest.raises(Problem, match="413"):
        asyncio.run(BodyLimits(nothing)({"type": "http", "headers": headers}, nobody, ignore))
