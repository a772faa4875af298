"""Middleware around every request, and the conversion of errors to problem details (RFC 9457).

Errors that a client can correct are explained in full. Server errors are logged with the request's id, and
their details are hidden from the client.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genius_search.errors import ArtifactMismatch, BadData, DeadlinePassed, GeniusError, UsageError
from genius_search.index.snapshot import UnknownItem
from genius_search.search.tree import UnknownPrefix
from genius_search.serve.engine import Overloaded, Refused
from genius_search.serve.keys import Keys
from genius_search.serve.metrics import METHODS, Metrics
from genius_search.serve.schemas import MAX_ERRORS

ITEMS_PATH: Final = "/v1/items"
STREAM_PATH: Final = "/v1/items/stream"
STREAM_TYPE: Final = "application/x-ndjson"
LOCAL_HOST: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS: Final = re.compile(r"/|/healthz|/readyz|/openapi\.json|/assets/[^/]*")
"""Answered without a key."""
READING_POSTS: Final = frozenset({"/v1/search", "/v1/explain"})
"""POST requests that only read; all other unsafe requests need a key with the scope write."""
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
MEDIA_TYPE: Final = "application/problem+json"
TITLES: Final = {
    400: "Unreadable request",
    401: "Key needed",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    408: "Too slow",
    413: "Too large",
    415: "Wrong media type",
    422: "Invalid request",
    429: "Overloaded",
    500: "Server error",
    503: "Unavailable",
    504: "Deadline passed",
    507: "Disk full",
}
"""Kinds of errors; programs may rely on them."""
STATUS: Final[Mapping[type[GeniusError], int]] = {
    DeadlinePassed: 504,
    UnknownItem: 404,
    UnknownPrefix: 404,
    UsageError: 422,
    BadData: 422,
}
"""Errors of the Python API that a client can correct."""
HIDDEN: Final = "the server failed; its log has the details under this request_id"
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")

Redact = Callable[[str], str]
log = logging.getLogger("genius_search.serve")


class Problem(HTTPException):
    """An error response; ``extra`` are further members of the problem details."""

    def __init__(
        self, status: int, detail: str, *, headers: Mapping[str, str] | None = None, **extra: object
    ) -> None:
        super().__init__(status, detail, headers)
        self.extra = extra


def respond(error: Exception, request_id: str, redact: Redact) -> JSONResponse:
    """Return the response to an error; unexpected errors are logged and hidden."""
    problem = _problem_of(error)
    if problem is None:
        log.error("request %s failed", request_id, exc_info=error)
        problem = Problem(500, HIDDEN)
    title = TITLES.get(problem.status_code, "Refused")
    body = {
        "type": f"urn:genius:{title.lower().replace(' ', '-')}",
        "title": title,
        "status": problem.status_code,
        "detail": _utf8(redact(problem.detail)),
        "request_id": request_id,
        **problem.extra,
    }
    return JSONResponse(body, problem.status_code, headers=problem.headers, media_type=MEDIA_TYPE)


def _problem_of(error: Exception) -> Problem | None:  # noqa: PLR0911  one for each kind
    match error:
        case Problem():
            return error
        case HTTPException():
            return Problem(error.status_code, str(error.detail), headers=error.headers)
        case RequestValidationError():
            return _invalid_fields(error.errors())
        case Overloaded():
            seconds = str(max(1, math.ceil(error.retry_after_seconds)))
            return Problem(429, str(error), headers={"Retry-After": seconds})
        case Refused():
            return Problem(error.status, str(error))
        case GeniusError():
            status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), None)
            return None if status is None else Problem(status, str(error))
        case _:
            return None


def _invalid_fields(errors: Sequence[Any]) -> Problem:
    """Return a problem that lists the invalid fields, without their values."""
    fields = [
        {
            "field": _utf8(".".join(str(part) for part in error["loc"][1:])[:200]),
            "problem": _utf8(str(error["msg"])[:300]),
        }
        for error in errors[:MAX_ERRORS]
    ]
    name, problem = fields[0].values()
    return Problem(422, f"{name}: {problem}" if name else problem, errors=fields)


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


class Guard:
    """Outermost middleware: request ids, origin and key checks, security headers, errors, metrics.

    Parameters
    ----------
    keys
        API keys. Without them, every client on this machine is accepted, but requests must use the host name
        ``localhost``, so that web pages cannot reach the server under their own names (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, *, keys: Keys | None, redact: Redact, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._redact = redact
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id, "began": began}
        status = 0

        async def guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                response_headers = MutableHeaders(scope=message)
                response_headers["X-Request-ID"] = request_id
                for name, value in HEADERS.items():
                    response_headers.setdefault(name, value)
            await send(message)

        try:
            self._check_origin(scope["method"], headers)
            state["may_write"] = self._check_key(scope["method"], scope["path"], headers)
            _check_media_type(scope["method"], scope["path"], headers)
            await self._app(scope, receive, guarded)
        except ClientDisconnect:
            status = status or 499  # only for the metrics: the client has gone
        except Exception as error:
            if status:
                raise  # the response has begun: the connection must break
            await respond(error, request_id, self._redact)(scope, receive, guarded)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._metrics.requests.labels(route, method, str(status)).inc()
            self._metrics.request_seconds.labels(route).observe(time.monotonic() - began)

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

    def _check_key(self, method: str, path: str, headers: Headers) -> bool:
        """Check the API key before the body is read; return whether the client may write."""
        if self._keys is None:
            return True
        if OPEN_PATHS.fullmatch(path):
            return False
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        try:
            key = self._keys.find(given) if given else None
        except BadData as error:  # a server error, whose message contains a path
            raise ArtifactMismatch(str(error)) from None
        if key is None:
            raise Problem(
                401,
                "an API key is needed: send it as Authorization: Bearer KEY, or as X-API-Key: KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )
        may_write = key.scope == "write"
        if not (may_write or method in SAFE_METHODS or path in READING_POSTS):
            raise Problem(403, "this API key may only read; use one created with --scope write")
        return may_write


def _check_media_type(method: str, path: str, headers: Headers) -> None:
    expected = STREAM_TYPE if path == STREAM_PATH else "application/json"
    if method == "POST" and headers.get("content-type", "").partition(";")[0].strip().lower() != expected:
        raise Problem(415, f"expected a body with Content-Type: {expected}")
