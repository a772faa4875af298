"""Middleware for every request: authorisation, and limits of size, time and number.

The HTTP server limits the heads of requests, idle connections and the number of connections
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
"""Known methods. Others are refused, since each would become a label of the metrics."""
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS: Final = re.compile(r"/|/healthz|/openapi\.json|/assets/[^/]*")
"""Paths that need no key, and do not count as requests of a client."""
READING_POSTS: Final = frozenset({"/v1/search", "/v1/explain"})
"""Paths whose POST requests only read. All other unsafe requests need a write key."""
ITEMS_PATH: Final = "/v1/items"
PICTURE_PATHS: Final = READING_POSTS | {ITEMS_PATH, "/v1/feedback"}
"""Paths that accept multipart/form-data with pictures."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "private, no-cache",
}
"""Headers of every response. The page may load resources from this server only."""
MAX_CLIENT_REQUESTS: Final = 128
"""Maximum number of concurrent requests of a client. If there are more, its slowest transfer is
cancelled."""
MAX_BODY_SECONDS: Final = 30.0
"""Maximum time from the head of a request to the end of its body."""
MAX_BODIES_BYTES: Final = 64 << 20
"""Maximum total size of request bodies in memory. If they are larger, the oldest transfer is
cancelled."""
MAX_RESPONSE_SECONDS: Final = 60.0
"""Maximum time for a client to read a response."""
MAX_UNREAD_BYTES: Final = 32 << 20
"""Maximum total size of responses that clients have not read. If they are larger, the oldest
transfer is cancelled."""
PIECE_BYTES: Final = 64 << 10
"""Size of the pieces of a response. The next piece is sent when the client has read the previous
one."""
TOO_MANY: Final = "too many requests at once; retry later"


class Transfers:
    """Transfers in one direction: bodies from clients, or responses to them.

    Each transfer has a time limit, and all together have a size limit. If the size limit is
    exceeded, the oldest transfer is cancelled, since it is the slowest.
    """

    def __init__(self, seconds: float, max_bytes: int) -> None:
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._clients: dict[asyncio.Timeout, str] = {}
        """Timeout of each transfer -> its client, oldest first."""
        self.bytes = 0
        """Total size of the transfers in memory."""

    @contextlib.asynccontextmanager
    async def begin(self, client: str) -> AsyncIterator[None]:
        """Run a transfer with the time limit.

        Raises
        ------
        TimeoutError
            The time limit has passed.
        Problem
            The transfer was cancelled (status 429).
        """
        timeout = asyncio.timeout(self._seconds)
        try:
            async with timeout:
                self._clients[timeout] = client
                yield
        except TimeoutError:
            if timeout in self._clients:
                raise
            raise Problem(429, TOO_MANY) from None  # cancel_oldest() has removed it
        finally:
            self._clients.pop(timeout, None)

    def hold(self, num_bytes: int) -> None:
        """Count bytes in memory, and cancel the oldest transfer if there are too many."""
        self.bytes += num_bytes
        if self.bytes > self._max_bytes:
            self.cancel_oldest()

    def cancel_oldest(self, client: str | None = None) -> bool:
        """Cancel the oldest transfer, of a client or of all, and return whether there was one."""
        for timeout, its_client in self._clients.items():
            if client in (None, its_client):
                del self._clients[timeout]
                timeout.reschedule(asyncio.get_running_loop().time())
                return True
        return False


class Guard:
    """The outermost middleware: request ids, origin and key, limits, security headers, errors.

    Clients are distinguished by their API keys, or by their addresses if the server has no keys.

    Parameters
    ----------
    keys
        the file of API keys. Without it, every client on this machine is accepted, but requests
        must use the host name ``localhost``. Otherwise, a web page could let its host name resolve
        to 127.0.0.1 and read the responses (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, *, keys: Path | None, redact: Redact) -> None:
        self._app = app
        self._keys = keys
        self._redact = redact
        self._bodies = Transfers(MAX_BODY_SECONDS, MAX_BODIES_BYTES)
        self._responses = Transfers(MAX_RESPONSE_SECONDS, MAX_UNREAD_BYTES)
        self._requests: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = secrets.token_hex(8)
        scope["extensions"] = {}  # one of them would send files without the limits of responses
        state = scope.setdefault("state", {})
        state |= {
            "request_id": request_id,
            "began": time.monotonic(),
            "may_write": self._keys is None,
        }
        has_started = False
        client = ""

        async def send_limited(message: Message) -> None:
            nonlocal has_started
            has_started = True
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
                    await self._app(scope, _replay(body, receive), send_limited)
                finally:
                    self._bodies.bytes -= len(body)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of libraries in Rust are not Exceptions
            if has_started:
                raise  # closes the connection, so that the client notices
            await respond(error, request_id, self._redact)(scope, receive, send_limited)

    def _check_origin(self, method: str, headers: Headers) -> None:
        """Refuse other host names, and changes that a page of another site requests."""
        host = headers.get("host", "")
        if self._keys is None and not LOCAL_HOST.fullmatch(host):
            raise Problem(
                403,
                "without API keys, this server can only be reached as localhost or 127.0.0.1; "
                "start it with --keys FILE to use other names",
            )
        origin = headers.get("origin")
        is_foreign = origin is not None and origin.partition("://")[2] != host
        if method not in SAFE_METHODS and (
            is_foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site")
        ):
            raise Problem(403, "web pages of other sites may not use this server")

    def _check_key(self, scope: Scope, headers: Headers) -> str:
        """Check the API key, before the body is read, and return the name of the client."""
        method, path = scope["method"], scope["path"]
        address = str((scope.get("client") or ("",))[0])
        if self._keys is None or _is_open(scope):
            return address
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        secret = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        try:
            key = find_key(self._keys, secret) if secret else None
        except BadData as error:  # an error of the server; its message, with a path, is hidden
            raise ArtifactMismatch(str(error)) from None
        if key is None:
            raise Problem(
                401,
                "a valid API key is required; send it as Authorization: Bearer KEY, or as "
                "X-API-Key: KEY",
            )
        scope["state"]["may_write"] = key.scope == "write"
        if not (key.scope == "write" or method in SAFE_METHODS or path in READING_POSTS):
            raise Problem(
                403, "this API key may only read; use a key that is listed as a write key"
            )
        return f"key {key.name}"

    @contextlib.contextmanager
    def _count(self, client: str, *, has_limit: bool) -> Iterator[None]:
        """Count a request of a client until its response has been sent.

        A client with too many requests loses its slowest transfer, or the new request if there is
        none.
        """
        has_too_many = has_limit and self._requests[client] >= MAX_CLIENT_REQUESTS
        if has_too_many and not (
            self._bodies.cancel_oldest(client) or self._responses.cancel_oldest(client)
        ):
            raise Problem(429, TOO_MANY)
        self._requests[client] += 1
        try:
            yield
        finally:
            self._requests[client] -= 1
            if not self._requests[client]:
                del self._requests[client]

    async def _read_body(self, client: str, headers: Headers, receive: Receive) -> bytes:
        """Read the whole body within the time limit."""
        if not _content_length(headers):
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
            raise Problem(
                408, f"the body did not arrive within {MAX_BODY_SECONDS:g} seconds"
            ) from None
        finally:
            if not is_whole:
                self._bodies.bytes -= len(body)
        return bytes(body)

    async def _send_in_pieces(self, client: str, message: Message, send: Send) -> None:
        """Send a message as fast as the client reads it, within the time limit."""
        if message["type"] != "http.response.body":
            await send(message)
            return
        body = message.get("body", b"")
        has_more = message.get("more_body", False)
        try:
            async with self._responses.begin(client):
                self._responses.hold(len(body))
                for start in range(0, len(body) or 1, PIECE_BYTES):
                    end = start + PIECE_BYTES
                    more = has_more or end < len(body)
                    piece = body[start:end]
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            self._responses.bytes -= len(body)


def _is_open(scope: Scope) -> bool:
    """Return whether a request needs no key and is not counted."""
    return scope["method"] in SAFE_METHODS and bool(OPEN_PATHS.fullmatch(scope["path"]))


def _check_form(scope: Scope, headers: Headers) -> None:
    """Raise :class:`Problem` if the method, type or length of a request is not accepted."""
    method = scope["method"]
    path = scope["path"]
    if method not in METHODS:
        raise Problem(405, "unknown method")
    if "transfer-encoding" in headers:
        # Two lengths could be used to smuggle a second request past a proxy. If a Content-Length
        # was sent, too, hyper has removed it, and closes the connection after this request.
        raise Problem(
            400, "chunked bodies are not supported; send Content-Length, not Transfer-Encoding"
        )
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    has_pictures = content_type == "multipart/form-data" and path in PICTURE_PATHS
    if method == "POST" and content_type != "application/json" and not has_pictures:
        alternative = ", or multipart/form-data with pictures" if path in PICTURE_PATHS else ""
        raise Problem(415, f"expected a body with Content-Type: application/json{alternative}")
    max_bytes = SEARCH_BYTES
    if has_pictures:
        max_bytes = BODY_BYTES
    elif path == ITEMS_PATH:
        max_bytes = JSON_BYTES
    if _content_length(headers) > (0 if method in SAFE_METHODS else max_bytes):
        raise Problem(413, f"the body has more than {max_bytes:,} bytes; send less per request")


def _content_length(headers: Headers) -> int:
    length = headers.get("content-length", "0")
    if not length.isdecimal():
        raise Problem(400, "Content-Length is not a number")
    return int(length[:20])  # converting thousands of digits would take long


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives the whole body as its first message."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message
