"""Middleware around every request: who may ask, how much may be sent, and how long that may take.

Heads of requests, idle connections and their number are granian's business
(:mod:`genius_search.serve.server`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genius_search.errors import ArtifactMismatch, BadData
from genius_search.serve.keys import find_key
from genius_search.serve.schemas import (
    BODY_BYTES,
    JSON_BYTES,
    SEARCH_BYTES,
    Problem,
    Redact,
    respond,
)

LOCAL_HOST: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
METHODS: Final = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"})
"""Others are refused here: a label of the metrics would take any."""
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS: Final = re.compile(r"/|/healthz|/openapi\.json|/assets/[^/]*")
"""Read without a key, and by any number of requests at once."""
READING_POSTS: Final = frozenset({"/v1/search", "/v1/explain"})
"""POST requests that only read; all other unsafe requests need a key with the scope write."""
ITEMS_PATH: Final = "/v1/items"
PICTURE_PATHS: Final = READING_POSTS | {ITEMS_PATH, "/v1/feedback"}
"""Their bodies may be multipart/form-data, with pictures."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "private, no-cache",
}
"""Headers of every response; the page may use nothing but its own server."""
REQUESTS: Final = 128
"""Requests of a client at the same time; of more, the slowest to arrive or to be read is given up."""
BODY_SECONDS: Final = 30.0
"""Longest time from the head of a request to the end of its body."""
BODIES_BYTES: Final = 64 << 20
"""Total size of the bodies in memory; of more, the one that began to arrive first is given up."""
ANSWER_SECONDS: Final = 60.0
"""Longest time that a client may take to read an answer."""
UNREAD_BYTES: Final = 32 << 20
"""Total size of the answers that clients have not read; of more, the first begun is given up."""
PIECE_BYTES: Final = 64 << 10
"""Answers are sent in pieces of this size, each as soon as the client has read those before it."""
TOO_MUCH: Final = "too much is sent or asked at once; try again"


class Transfers:
    """Bodies on their way from clients, or answers on their way to them: each has a time, all have a size.

    Of too many, the first begun is given up: it is the slowest.
    """

    def __init__(self, seconds: float, most_bytes: int) -> None:
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._clients: dict[asyncio.Timeout, str] = {}
        """The client of each, in the order of their beginning."""
        self.bytes = 0

    @contextlib.asynccontextmanager
    async def begin(self, client: str) -> AsyncIterator[None]:
        """Give a transfer its time.

        Raises
        ------
        TimeoutError
            The time is over.
        Problem
            The transfer was given up.
        """
        clock = asyncio.timeout(self._seconds)
        try:
            async with clock:
                self._clients[clock] = client
                yield
        except TimeoutError:
            if clock in self._clients:
                raise
            raise Problem(429, TOO_MUCH) from None
        finally:
            self._clients.pop(clock, None)

    def hold(self, num_bytes: int) -> None:
        """Count bytes in memory."""
        self.bytes += num_bytes
        if self.bytes > self._most_bytes:
            self.give_up()

    def give_up(self, client: str | None = None) -> bool:
        """Let the time be over for the first transfer, of a client or of all; return whether there is one."""
        clock = next((clock for clock, its in self._clients.items() if client in (None, its)), None)
        if clock is not None:
            del self._clients[clock]
            clock.reschedule(asyncio.get_running_loop().time())
        return clock is not None


class Guard:
    """Outermost middleware: request ids, origin and key, limits, security headers, errors.

    A client is an API key, or an address if there are none.

    Parameters
    ----------
    keys
        File of API keys. Without one, every client on this machine is accepted, but requests must use the
        host name ``localhost``, so that web pages cannot reach the server under their own names (DNS
        rebinding).
    """

    def __init__(self, app: ASGIApp, *, keys: Path | None, redact: Redact) -> None:
        self._app = app
        self._keys = keys
        self._redact = redact
        self._bodies = Transfers(BODY_SECONDS, BODIES_BYTES)
        self._answers = Transfers(ANSWER_SECONDS, UNREAD_BYTES)
        self._requests: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = secrets.token_hex(8)
        scope["extensions"] = {}  # such as sending files past the limits of answers
        state = scope.setdefault("state", {})
        state |= {
            "request_id": request_id,
            "began": time.monotonic(),
            "may_write": self._keys is None,
        }
        has_begun = False
        client = ""

        async def answer(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                headers.update(HEADERS)
            await self._send_in_pieces(client, message, send)

        try:
            _check_form(scope, headers)
            self._check_origin(scope["method"], headers)
            client = self._check_key(scope, headers)
            with self._count(client, has_limit=not _is_open(scope)):
                body = await self._read_body(client, headers, receive)
                try:
                    await self._app(scope, _replay(body, receive), answer)
                finally:
                    self._bodies.bytes -= len(body)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ) as error:  # of any class: libraries in Rust panic with one of their own
            if has_begun:
                raise  # the connection must break
            await respond(error, request_id, self._redact)(scope, receive, answer)

    def _check_origin(self, method: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._keys is None and not LOCAL_HOST.fullmatch(host):
            raise Problem(
                403,
                "this server answers only its own machine, as localhost or 127.0.0.1; start it with API keys "
                "(--keys FILE) to be reached by other names",
            )
        origin = headers.get("origin")
        is_foreign = origin is not None and origin.partition("://")[2] != host
        if method not in SAFE_METHODS and (
            is_foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site")
        ):
            raise Problem(403, "pages of other sites may not use this server")

    def _check_key(self, scope: Scope, headers: Headers) -> str:
        """Check the API key before the body is read; return the name of the client."""
        method, path = scope["method"], scope["path"]
        address = str((scope.get("client") or ("",))[0])
        if self._keys is None or _is_open(scope):
            return address
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        try:
            key = find_key(self._keys, given) if given else None
        except BadData as error:  # a server error, whose message contains a path
            raise ArtifactMismatch(str(error)) from None
        if key is None:
            raise Problem(
                401,
                "a known API key is needed: send it as Authorization: Bearer KEY, or as X-API-Key: KEY",
            )
        scope["state"]["may_write"] = key.scope == "write"
        if not (key.scope == "write" or method in SAFE_METHODS or path in READING_POSTS):
            raise Problem(
                403, "this API key may only read; use one whose line in the file of keys says write"
            )
        return f"key {key.name}"

    @contextlib.contextmanager
    def _count(self, client: str, *, has_limit: bool) -> Iterator[None]:
        """Count a request of a client until it is answered."""
        has_too_many = has_limit and self._requests[client] >= REQUESTS
        if has_too_many and not (self._bodies.give_up(client) or self._answers.give_up(client)):
            raise Problem(429, TOO_MUCH)
        self._requests[client] += 1
        try:
            yield
        finally:
            self._requests[client] -= 1
            if not self._requests[client]:
                del self._requests[client]

    async def _read_body(self, client: str, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body, within the time for it."""
        if not _length(headers):
            return b""
        body = bytearray()
        is_whole = False
        try:
            async with self._bodies.begin(client):
                while not is_whole:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise Problem(400, "the connection was closed before the end of the body")
                    body += message.get("body", b"")
                    self._bodies.hold(len(message.get("body", b"")))
                    is_whole = not message.get("more_body", False)
        except TimeoutError:
            raise Problem(408, f"the body did not arrive within {BODY_SECONDS:g} seconds") from None
        finally:
            if not is_whole:
                self._bodies.bytes -= len(body)
        return bytes(body)

    async def _send_in_pieces(self, client: str, message: Message, send: Send) -> None:
        """Send a message as fast as the client reads, within the time for it."""
        if message["type"] != "http.response.body":
            await send(message)
            return
        body, has_more = message.get("body", b""), message.get("more_body", False)
        try:
            async with self._answers.begin(client):
                self._answers.hold(len(body))
                for start in range(0, len(body) or 1, PIECE_BYTES):
                    piece, end = body[start : start + PIECE_BYTES], start + PIECE_BYTES
                    more = has_more or end < len(body)
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            self._answers.bytes -= len(body)


def _is_open(scope: Scope) -> bool:
    return scope["method"] in SAFE_METHODS and bool(OPEN_PATHS.fullmatch(scope["path"]))


def _check_form(scope: Scope, headers: Headers) -> None:
    """Raise :class:`Problem` for a request whose method, type or length is refused unread."""
    method, path = scope["method"], scope["path"]
    if method not in METHODS:
        raise Problem(405, "this method is not known here")
    if "transfer-encoding" in headers:
        # A Content-Length beside it cannot be seen: hyper removes it, and closes the connection afterwards.
        raise Problem(
            400, "a body needs a Content-Length and no Transfer-Encoding; chunks are not read"
        )
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    has_pictures = kind == "multipart/form-data" and path in PICTURE_PATHS
    if method == "POST" and kind != "application/json" and not has_pictures:
        also = ", or multipart/form-data with pictures" if path in PICTURE_PATHS else ""
        raise Problem(415, f"expected a body with Content-Type: application/json{also}")
    most = BODY_BYTES if has_pictures else JSON_BYTES if path == ITEMS_PATH else SEARCH_BYTES
    if _length(headers) > (0 if method in SAFE_METHODS else most):
        raise Problem(413, f"the body has more than {most:,} bytes; send less at once")


def _length(headers: Headers) -> int:
    announced = headers.get("content-length", "0")
    if not announced.isdecimal():
        raise Problem(400, "Content-Length is not a number")
    return int(announced[:20])


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a channel that has the whole body in its first message."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message
