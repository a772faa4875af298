"""Errors as problem details (RFC 9457).

Errors that a client can correct are explained in full. Server errors are logged with the request's id, and
their details are hidden from the client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from genius_search.errors import BadData, DeadlinePassed, GeniusError, UsageError
from genius_search.index.snapshot import UnknownItem
from genius_search.index.writer import DISK_FULL, HeldByAnother, NotWritable
from genius_search.search.tree import UnknownPrefix
from genius_search.serve.schemas import MAX_ERRORS

MEDIA_TYPE: Final = "application/problem+json"
TITLES: Final = {
    400: "Unreadable request",
    401: "Key needed",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    408: "Too slow",
    411: "Length needed",
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

MANY_ERRORS: Final = 1_000
"""Listing more takes long."""

Redact = Callable[[str], str]
log = logging.getLogger("genius_search.serve")


class Problem(HTTPException):
    """An error response; ``extra`` are further members of the problem details."""

    def __init__(
        self, status: int, detail: str, *, retry_after_seconds: int | None = None, **extra: object
    ) -> None:
        headers = None if retry_after_seconds is None else {"Retry-After": str(retry_after_seconds)}
        super().__init__(status, detail, headers)
        self.extra = extra


def respond(error: BaseException, request_id: str, redact: Redact) -> JSONResponse:
    """Return the response to an error; unexpected errors are logged and hidden."""
    problem = _problem_of(error)
    if problem is None or isinstance(error, NotWritable | OSError):
        log.error("request %s failed", request_id, exc_info=error)
    problem = problem or Problem(500, HIDDEN)
    title = TITLES.get(problem.status_code, "Refused")
    body = {
        "type": f"urn:genius:{title.lower().replace(' ', '-')}",
        "title": title,
        "status": problem.status_code,
        "detail": _utf8(redact(problem.detail)),
        "request_id": request_id,
        **problem.extra,
    }
    headers = dict(problem.headers or {})
    if problem.status_code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, problem.status_code, headers=headers, media_type=MEDIA_TYPE)


def _problem_of(error: BaseException) -> Problem | None:  # noqa: PLR0911  one for each kind
    match error:
        case Problem():
            return error
        case HTTPException():
            return Problem(error.status_code, str(error.detail))
        case RequestValidationError():
            return _invalid_fields([{**one, "loc": one["loc"][1:]} for one in error.errors()])
        case ValidationError() if error.error_count() > MANY_ERRORS:
            return Problem(422, f"the body has {error.error_count():,} invalid fields or values")
        case ValidationError():
            return _invalid_fields(
                error.errors(include_url=False, include_input=False, include_context=False)
            )
        case HeldByAnother():
            return Problem(429, str(error), retry_after_seconds=10)
        case NotWritable():
            return Problem(503, "this index cannot be changed: the server may not write to its folder")
        case OSError() if error.errno in DISK_FULL:
            return Problem(
                507, "the server's disk is full; nothing was changed, try again when there is room"
            )
        case GeniusError():
            status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), None)
            return None if status is None else Problem(status, str(error))
        case _:
            return None


def _invalid_fields(errors: Sequence[Any]) -> Problem:
    """Return a problem that lists the invalid fields, without their values."""
    fields = [
        {
            "field": _utf8(".".join(str(part) for part in error["loc"])[:200]),
            "problem": _utf8(str(error["msg"])[:300]),
        }
        for error in errors[:MAX_ERRORS]
    ]
    name, problem = fields[0].values()
    return Problem(422, f"{name}: {problem}" if name else problem, errors=fields)


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
