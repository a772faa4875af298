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
from collections.abc import Iterator
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genius_search.errors import ArtifactMismatch, BadData
from genius_search.serve.keys import Keys
from genius_search.serve.problems import Problem, Redact, respond
from genius_search.serve.schemas import BODY_BYTES, JSON_BYTES, SEARCH_BYTES

LOCAL_HOST: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
METHODS: Final = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"})
"""Others are refused here: a label of the metrics would take any."""
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS: Final = re.compile(r"/|/healthz|/readyz|/openapi\.json|/assets/[^/]*")
"""Answered without a key."""
READING_POSTS: Final = frozenset({"/v1/search", "/v1/explain"})
"""POST requests that only read; all other unsafe requests need a key with the scope write."""
ITEMS_PATH: Final = "/v1/items"
PICTURE_PATHS: Final = READING_POSTS | {ITEMS_PATH}
"""Their bodies may be multipart/form-data, with pictures."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
"""Default headers of every response."""
BODY_SECONDS: Final = 30.0
"""Longest time from the head of a request to the end of its body."""
WAITING: Final = 100
"""Bodies and answers that may be on their way from or to a client; of more, the first begun is given up."""
BODIES_BYTES: Final = 64 << 20
"""Total size of the bodies in memory; of more, the one that began to arrive first is given up."""
REQUESTS: Final = 128
"""Requests of a client that are worked on at the same time."""
UNREAD_BYTES: Final = 32 << 20
"""Total size of the answers that clients have not read; of more, the first begun is given up."""
ANSWER_SECONDS: Final = 60.0
"""Longest time that a client may take to read an answer."""
PIECE_BYTES: Final = 64 << 10
"""Answers are sent in pieces of this size, each as soon as the client has read those before it."""
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class GivenUp(Exception):
    """An answer that is not read any further; no error handler may answer this, as the response has begun."""


class Guard:
    """Outermost middleware: request ids, origin and key, limits, security headers, errors.

    A client is an API key, or an address if there are none.

    Parameters
    ----------
    keys
        API keys. Without them, every client on this machine is accepted, but requests must use the host name
        ``localhost``, so that web pages cannot reach the server under their own names (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, *, keys: Keys | None, redact: Redact) -> None:
        self._app = app
        self._keys = keys
        self._redact = redact
        self._arriving: dict[asyncio.Timeout, str] = {}
        """The clock and the client of each body on its way, in the order of their beginning."""
        self._leaving: dict[asyncio.Timeout, str] = {}
        """The same of answers."""
        self._bytes = 0
        """Total size of the bodies in memory."""
        self._unread = 0
        """Total size of the answers that are being sent."""
        self._requests: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        scope["extensions"] = {}  # such as sending files past the limits of answers
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id, "began": time.monotonic(), "may_write": self._keys is None}
        has_begun = False
        start: Message | None = None
        client = ""

        async def answer(message: Message) -> None:
            nonlocal has_begun, start
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                start = message  # sent together with the first of the body, as an error may take its place
                return
            if start is not None and not has_begun:
                has_begun = True
                await send(start)
            await self._send_in_pieces(client, message, send)

        try:
            _check_form(scope, headers)
            self._check_origin(scope["method"], headers)
            client = self._check_key(scope, headers)
            body = await self._read_body(client, headers, receive)
            with self._count(scope["path"], client, len(body)):
                await self._app(scope, _replay(body, receive), answer)
        except Exception as error:
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
        if self._keys is None or OPEN_PATHS.fullmatch(path):
            return address
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        try:
            key = self._keys.find(given) if given else None
        except BadData as error:  # a server error, whose message contains a path
            raise ArtifactMismatch(str(error)) from None
        if key is None:
            raise Problem(
                401, "an API key is needed: send it as Authorization: Bearer KEY, or as X-API-Key: KEY"
            )
        scope["state"]["may_write"] = key.scope == "write"
        if not (key.scope == "write" or method in SAFE_METHODS or path in READING_POSTS):
            raise Problem(403, "this API key may only read; use one created with --scope write")
        return f"key {key.name}"

    async def _read_body(self, client: str, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body, within the time for it."""
        if not _length(headers):
            return b""
        clock = asyncio.timeout(BODY_SECONDS)
        chunks: list[bytes] = []
        try:
            async with clock:
                self._let_wait(self._arriving, client, clock)
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise Problem(400, "the connection was closed before the end of the body")
                    chunks.append(message.get("body", b""))
                    self._bytes += len(chunks[-1])
                    if self._bytes > BODIES_BYTES:
                        _give_up(self._arriving)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            if clock not in self._arriving:
                raise _too_much() from None
            raise Problem(408, f"the body did not arrive within {BODY_SECONDS:g} seconds") from None
        finally:
            self._bytes -= sum(map(len, chunks))
            self._arriving.pop(clock, None)

    async def _send_in_pieces(self, client: str, message: Message, send: Send) -> None:
        """Send a message as fast as the client reads, within the time for it."""
        body = message.get("body", b"")
        clock = asyncio.timeout(ANSWER_SECONDS)
        self._unread += len(body)
        try:
            async with clock:
                self._let_wait(self._leaving, client, clock)
                if self._unread > UNREAD_BYTES:
                    _give_up(self._leaving)
                start = 0
                while len(body) - start > PIECE_BYTES:
                    piece = body[start : start + PIECE_BYTES]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    start += PIECE_BYTES
                await send({**message, "body": body[start:]} if start else message)
        except TimeoutError:
            raise GivenUp(f"the answer was not read within {ANSWER_SECONDS:g} seconds") from None
        finally:
            self._unread -= len(body)
            self._leaving.pop(clock, None)

    def _let_wait(self, waiting: dict[asyncio.Timeout, str], client: str, clock: asyncio.Timeout) -> None:
        waiting[clock] = client
        if sum(one == client for one in waiting.values()) > WAITING:
            _give_up(waiting, client)

    @contextlib.contextmanager
    def _count(self, path: str, client: str, num_bytes: int) -> Iterator[None]:
        """Count a request and the bytes of its body while it is worked on."""
        is_large = num_bytes > JSON_BYTES  # small ones come through
        has_too_many = self._requests[client] >= REQUESTS and not OPEN_PATHS.fullmatch(path)
        if has_too_many or (is_large and self._bytes + num_bytes > BODIES_BYTES):
            raise _too_much()
        self._requests[client] += 1
        self._bytes += num_bytes
        try:
            yield
        finally:
            self._bytes -= num_bytes
            self._requests[client] -= 1
            if not self._requests[client]:
                del self._requests[client]


def _give_up(waiting: dict[asyncio.Timeout, str], client: str | None = None) -> None:
    """Let the time be over for what began first, of a client or of all."""
    clock = next((clock for clock, one in waiting.items() if client in (None, one)), None)
    if clock is not None:
        del waiting[clock]
        clock.reschedule(asyncio.get_running_loop().time())


def _too_much() -> Problem:
    return Problem(429, "too much is sent or asked at once; try again", retry_after_seconds=1)


def _check_form(scope: Scope, headers: Headers) -> None:
    """Raise :class:`Problem` for a request whose method, type or length is refused unread."""
    method, path = scope["method"], scope["path"]
    if method not in METHODS:
        raise Problem(405, "this method is not known here")
    if "transfer-encoding" in headers:
        raise Problem(411, "a body needs a Content-Length; it cannot be sent in chunks")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    has_pictures = kind == "multipart/form-data" and path in PICTURE_PATHS
    if method == "POST" and kind != "application/json" and not has_pictures:
        also = ", or multipart/form-data with pictures" if path in PICTURE_PATHS else ""
        raise Problem(415, f"expected a body with Content-Type: application/json{also}")
    most = BODY_BYTES if has_pictures else JSON_BYTES if path == ITEMS_PATH else SEARCH_BYTES
    if _length(headers) > most:
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
