"""What every request passes: its id, who may ask, from where, and what browsers may do with the answer."""

from __future__ import annotations

import re
import secrets
import time
from typing import Final, Protocol, runtime_checkable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genius_search.serve.problems import Problem, Redactor, respond


@runtime_checkable
class Observe(Protocol):
    """Is told of each response."""

    def __call__(self, *, route: str, method: str, status: int, seconds: float) -> None:
        """Note it."""


LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
"""Of every response that does not say otherwise."""
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class Guard:
    """Outermost of the application: nothing gets past it without an id, and no error without a form.

    Parameters
    ----------
    local_only
        nobody needs a key: then only those are answered who call this machine by its own name, so that no
        web page can reach it under a name of its own (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, *, local_only: bool, redact: Redactor, observe: Observe) -> None:
        self._app = app
        self._local_only = local_only
        self._redact = redact
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = MutableHeaders(scope=message)
                sent["X-Request-ID"] = request_id
                for name, value in HEADERS.items():
                    sent.setdefault(name, value)
            await send(message)

        try:
            self._check_origin(scope["method"], headers)
            await self._app(scope, receive, guarded)
        except ClientDisconnect:
            status = status or 499  # nobody is there to read it; the number is for the metrics
        except Exception as error:
            if status:
                raise  # half an answer is out: the connection has to break
            await respond(error, request_id, self._redact)(scope, receive, guarded)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.perf_counter() - began
            self._observe(route=route, method=scope["method"], status=status, seconds=seconds)

    def _check_origin(self, method: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._local_only and _name_of(f"//{host}") not in LOCAL_HOSTS:
            raise Problem(
                403,
                "this server answers on its own machine only, as localhost or 127.0.0.1; start it with API "
                "keys (--keys FILE) to be called by other names",
            )
        if method in SAFE_METHODS:
            return
        origin = headers.get("origin")
        if (origin is not None and origin.partition("://")[2] != host) or headers.get("sec-fetch-site") in (
            "cross-site",
            "same-site",
        ):
            raise Problem(403, "another site's page may not ask this server for anything")


def _name_of(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
