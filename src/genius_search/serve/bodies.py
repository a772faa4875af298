"""Limits of request bodies: size, time between chunks, and number of values in JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, Final

import anyio
import anyio.to_thread
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genius_search.serve import limits
from genius_search.serve.guard import ITEMS_PATH, READING_POSTS, STREAM_PATH, Problem

PICTURE_PATHS: Final = READING_POSTS | {ITEMS_PATH}
"""Their bodies may contain pictures."""
LARGE_BYTES: Final = 64 << 10
"""JSON up to this size takes a millisecond or two, and is parsed at once."""
PARSERS: Final = anyio.CapacityLimiter(2)
"""Threads that parse JSON. More would not be faster, but keep Python from the searches."""


class BodyLimits:
    """Middleware that limits the size of a body, the size of all bodies, and the time between chunks.

    Starlette's limit covers only the first of these. Of a stream, only what is in memory counts: its reader
    says how much that is with ``request.state.hold``. What a body is decoded to counts as well
    (``request.state.hold_more``).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._bytes = 0
        """Total size of the bodies in memory."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request, refusing a body that exceeds the limits."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope.get("path")
        is_stream = path == STREAM_PATH
        most = limits.BODY_BYTES if path in PICTURE_PATHS else limits.SMALL_BODY_BYTES
        announced = Headers(scope=scope).get("content-length", "0")
        if not is_stream and announced.isdigit() and int(announced[:20]) > most:
            raise _too_large(most)
        held = 0
        is_complete = False

        def hold(size: int) -> None:
            nonlocal held
            self._bytes += size - held
            held = size

        def hold_more(size: int) -> None:
            hold(held + size)
            if self._bytes > limits.BODIES_BYTES:
                raise Problem(429, "too much is being sent at once; try again", headers={"Retry-After": "1"})

        async def limited() -> Message:
            nonlocal is_complete
            if is_complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), limits.BODY_SECONDS)
            except TimeoutError:
                raise Problem(
                    408, f"nothing arrived for {limits.BODY_SECONDS:g} seconds; send the body faster"
                ) from None
            is_complete = not message.get("more_body", False)
            size = len(message.get("body", b""))
            if held + size > most and not is_stream:
                raise _too_large(most)
            hold_more(size)
            return message

        scope.setdefault("state", {}).update(hold=hold, hold_more=hold_more)
        try:
            await self._app(scope, limited, send)
        finally:
            hold(0)


def _too_large(most: int) -> Problem:
    return Problem(
        413, f"the body has more than {most:,} bytes; send less at once, or items to {STREAM_PATH}"
    )


class JsonRoute(APIRoute):
    """A route that parses JSON only if it has not too many values, and in a thread if it is large."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler of requests."""
        handle = super().get_route_handler()

        async def limited(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return limited


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        most = limits.ITEMS_VALUES if self.url.path == ITEMS_PATH else limits.VALUES
        if len(body) <= LARGE_BYTES:
            return parse_json(body, most)
        return await anyio.to_thread.run_sync(parse_json, body, most, limiter=PARSERS)


def parse_json(body: bytes, most_values: int) -> Any:
    """Parse JSON with a limited number of values.

    Values are counted before they are made, because many small ones take far more memory and time than the
    body has bytes.

    Raises
    ------
    Problem
        There are more values.
    """
    check_values(body, most_values)
    return json.loads(body)


def check_values(body: bytes, most: int) -> None:
    """Raise :class:`Problem` if there are more than so many values in a JSON text, which may be invalid."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') <= 4 * most:  # a name and a text for each value
        outside = b"".join(unescaped.split(b'"')[::2])
        if sum(map(outside.count, (b",", b"[", b"{"))) <= most:
            return
    raise Problem(413, f"the body has more than {most:,} values; send less at once")
