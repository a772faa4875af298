"""Middleware for every request: authorisation, and limits of size, time and number.

The HTTP server limits the heads of requests, idle connections and the number of connections
(:mod:`genius_search.serve.server`).
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genius_search.errors import ArtifactMismatch, BadData
from genius_search.serve.keys import KeyFile
from genius_search.serve.metrics import Metrics
from genius_search.serve.schemas import (
    BODY_BYTES,
    JSON_BYTES,
    SEARCH_BYTES,
    Problem,
    Redact,
    respond,
)

LOCAL_HOST: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
METHODS: Final = ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH")
"""Known methods. Others are refused, since each would become a label of the metrics."""
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS: Final = re.compile(r"/|/healthz|/docs|/openapi\.json|/assets/[^/]*")
"""Paths that need no key, and do not count as requests of a client."""
READING_POSTS: Final = frozenset({"/v1/search", "/v1/explain"})
"""Paths whose POST requests only read. All other unsafe requests need a write key."""
ITEMS_PATH: Final = "/v1/items"
PICTURE_PATHS: Final = READING_POSTS | {ITEMS_PATH, "/v1/feedback"}
"""Paths that accept multipart/form-data with pictures."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; "
    "media-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "private, no-cache",
}
"""Headers of every response. The page may load resources from this server only."""
HEADER_NAMES: Final = frozenset(name.lower().encode() for name in HEADERS)
RESPONSE_HEADERS: Final = [
    (name.lower().encode(), value.encode()) for name, value in HEADERS.items()
]
MAX_CLIENT_REQUESTS: Final = 128
"""Maximum number of concurrent requests of a client. If there are more, its slowest transfer is
cancelled."""
MAX_KEPT: Final = 1_024
"""Maximum number of connections that are kept open for further requests."""
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


class Transfer:
    """The context of a transfer; see :meth:`Transfers.begin`."""

    __slots__ = ("_client", "_clients", "_timeout")

    def __init__(
        self, clients: dict[asyncio.Timeout, str], client: str, timeout: asyncio.Timeout
    ) -> None:
        self._clients = clients
        self._client = client
        self._timeout = timeout

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._clients[self._timeout] = self._client

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        was_cancelled = self._clients.pop(self._timeout, None) is None  # by cancel_oldest()
        try:
            await self._timeout.__aexit__(error_type, error, traceback)
        except TimeoutError:
            if was_cancelled:
                raise Problem(429, TOO_MANY) from None
            raise


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

    def begin(self, client: str) -> Transfer:
        """Return a context that runs a transfer with the time limit.

        Raises
        ------
        TimeoutError
            The time limit has passed.
        Problem
            The transfer was cancelled (status 429).
        """
        return Transfer(self._clients, client, asyncio.timeout(self._seconds))

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
    metrics
        counts the requests.
    routes
        applications for a method and a path, in place of ``app``.
    forwarder
        an application for all changes, if another worker makes them.
    methods
        path -> its methods.
    prefix
        the path of this service at a proxy, such as ``/search``, which the proxy may remove.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Path | None,
        redact: Redact,
        metrics: Metrics | None = None,
        routes: Mapping[tuple[str, str], ASGIApp] = MappingProxyType({}),
        forwarder: ASGIApp | None = None,
        methods: Mapping[str, Sequence[str]] = MappingProxyType({}),
        prefix: str = "",
    ) -> None:
        self._app = app
        self._keys = None if keys is None else KeyFile(keys)
        self._redact = redact
        self._metrics = metrics
        self._routes = routes
        self._forwarder = forwarder
        self._methods = methods
        self._prefix = f"{prefix}/" if prefix else ""
        self._bodies = Transfers(MAX_BODY_SECONDS, MAX_BODIES_BYTES)
        self._responses = Transfers(MAX_RESPONSE_SECONDS, MAX_UNREAD_BYTES)
        self._requests: Counter[str] = Counter()
        self._kept: OrderedDict[tuple[str, int], None] = OrderedDict()
        """Address and port of connections that are kept open, the most recent request last."""
        self._dropped: set[tuple[str, int]] = set()
        """Connections to close after their next response."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "body" in scope.get("state", ()):  # another worker has checked the request
            await self._answer_checked(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":  # like GET, without the body
            scope = {**scope, "method": "GET"}
            send = _without_body(send)
        if self._prefix and f"{scope['path']}/".startswith(self._prefix):
            path = scope["path"][len(self._prefix) - 1 :]
            if not path:  # relative addresses of the page need the slash
                headers = {"Location": self._prefix}
                await Response(status_code=308, headers=headers)(scope, receive, send)
                return
            scope = {**scope, "path": path}
        await self._process(scope, method, receive, send)

    async def _process(self, scope: Scope, method: str, receive: Receive, send: Send) -> None:
        """Check a request, let the application answer, and count it by its ``method``."""
        # The first of several headers with the same name counts, hence reversed.
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
        request_id = secrets.token_hex(8)
        scope["extensions"] = {}  # one of them would send files without the limits of responses
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["began"] = began = time.monotonic()
        state["may_write"] = self._keys is None
        state["content_type"] = headers.get("content-type", "")
        client = ""
        status = 0

        async def send_limited(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(message, request_id, scope)
            await self._send_in_pieces(client, message, send)

        try:
            self._check_method(scope)
            _check_form(scope, headers)
            self._check_origin(scope["method"], headers)
            client = self._check_key(scope, headers)
            self._admit(client, has_limit=not _is_open(scope))
            try:
                await self._answer(scope, headers, client, receive, send_limited)
            finally:
                self._requests[client] -= 1
                if not self._requests[client]:
                    del self._requests[client]
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of libraries in Rust are not Exceptions
            if status:
                raise  # closes the connection, so that the client notices
            await respond(error, request_id, self._redact)(scope, receive, send_limited)
        finally:
            if self._metrics is not None and status:
                seconds = time.monotonic() - began
                label = method if method in METHODS else "other"
                self._metrics.count(scope["path"], label, status, seconds)

    async def _answer(
        self,
        scope: Scope,
        headers: Mapping[str, str],
        client: str,
        receive: Receive,
        send: Send,
    ) -> None:
        """Read the body, and let the application answer."""
        body = await self._read_body(client, headers, receive)
        scope["state"]["body"] = body
        app = self._routes.get((scope["method"], scope["path"]), self._app)
        if self._forwarder is not None and _is_change(scope):
            app = self._forwarder
        try:
            await app(scope, _replay(body, receive), send)
        finally:
            self._bodies.bytes -= len(body)

    async def _answer_checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a change that another worker has checked and forwarded, errors included."""
        state = scope["state"]
        try:
            await self._app(scope, _replay(state["body"], receive), send)
        except Exception as error:  # noqa: BLE001  the worker answers with it
            await respond(error, state["request_id"], self._redact)(scope, receive, send)

    def _add_headers(self, message: Message, request_id: str, scope: Scope) -> None:
        """Add the headers of every response."""
        headers = [
            (name, value) for name, value in message["headers"] if name.lower() not in HEADER_NAMES
        ]
        headers.append((b"x-request-id", request_id.encode()))
        headers += RESPONSE_HEADERS
        if not self._keep_connection(scope):
            headers.append((b"connection", b"close"))
        message["headers"] = headers

    def _keep_connection(self, scope: Scope) -> bool:
        """Return whether a connection may serve further requests.

        The connections with the most recent requests are kept, so the slowest ones go first. A
        connection that is not kept is closed after its next response.
        """
        address = scope.get("client")
        if address is None:
            return True
        connection = tuple(address)  # ASGI allows a list
        if connection in self._dropped:
            self._dropped.discard(connection)
            return False
        self._kept[connection] = None
        self._kept.move_to_end(connection)
        if len(self._kept) > MAX_KEPT:
            slowest, _ = self._kept.popitem(last=False)
            if len(self._dropped) >= MAX_KEPT:  # most of them are closed
                self._dropped.clear()
            self._dropped.add(slowest)
        return True

    def _check_method(self, scope: Scope) -> None:
        """Refuse methods that a path does not have."""
        allowed = self._methods.get(scope["path"], METHODS)
        if scope["method"] not in allowed:
            raise Problem(
                405,
                f"this path does not accept {scope['method'][:20]}, only {', '.join(allowed)}",
                {"Allow": ", ".join(allowed)},
            )

    def _check_origin(self, method: str, headers: Mapping[str, str]) -> None:
        """Refuse other host names, and changes that a page of another site requests."""
        host = headers.get("host", "")
        if self._keys is None and not LOCAL_HOST.fullmatch(host):
            raise Problem(
                403,
                "without API keys, this server can only be reached as localhost or 127.0.0.1; "
                "start it with --keys FILE to use other names",
            )
        origin = headers.get("origin")
        is_foreign = origin not in (None, f"http://{host}", f"https://{host}")
        if method not in SAFE_METHODS and (
            is_foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site")
        ):
            raise Problem(403, "web pages of other sites may not use this server")

    def _check_key(self, scope: Scope, headers: Mapping[str, str]) -> str:
        """Check the API key, before the body is read, and return the name of the client."""
        address = str((scope.get("client") or ("",))[0])
        if self._keys is None or _is_open(scope):
            return address
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        secret = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        try:
            key = self._keys.find(secret) if secret else None
        except BadData as error:  # an error of the server; its message, with a path, is hidden
            raise ArtifactMismatch(str(error)) from None
        if key is None:
            raise Problem(
                401,
                "a valid API key is required; send it as Authorization: Bearer KEY, or as "
                "X-API-Key: KEY",
            )
        scope["state"]["may_write"] = key.scope == "write"
        if key.scope != "write" and _is_change(scope):
            raise Problem(
                403, "this API key may only read; use a key that is listed as a write key"
            )
        return f"key {key.name}"

    def _admit(self, client: str, *, has_limit: bool) -> None:
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

    async def _read_body(self, client: str, headers: Mapping[str, str], receive: Receive) -> bytes:
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
        if len(body) <= PIECE_BYTES and not has_more:  # sending it waits for nobody
            await send(message)
            return
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


def _without_body(send: Send) -> Send:
    """Return a function that sends the head of a response, and no body."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            if message.get("more_body", False):
                return
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    return send_head


def _is_change(scope: Scope) -> bool:
    """Return whether a request may change an index."""
    return scope["method"] not in SAFE_METHODS and scope["path"] not in READING_POSTS


def _is_open(scope: Scope) -> bool:
    """Return whether a request needs no key and is not counted."""
    return scope["method"] in SAFE_METHODS and bool(OPEN_PATHS.fullmatch(scope["path"]))


def _check_form(scope: Scope, headers: Mapping[str, str]) -> None:
    """Raise :class:`Problem` if the method, type or length of a request is not accepted."""
    method = scope["method"]
    path = scope["path"]
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
    length = _content_length(headers)
    if method in SAFE_METHODS and length:
        raise Problem(413, f"a body was sent with {method}; send none, or POST it")
    if length > max_bytes:
        raise Problem(413, f"the body has more than {max_bytes:,} bytes; send less per request")


def _content_length(headers: Mapping[str, str]) -> int:
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
