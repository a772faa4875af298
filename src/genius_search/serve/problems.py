"""What goes wrong, as RFC 9457 has it: one JSON form for every error, and nothing of the server's inside.

A person's mistake is said in full, for that is how errors teach; what the server has to answer for is logged
here under the request's id and not told.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from genius_search.errors import BadData, GeniusError, UsageError
from genius_search.index.snapshot import UnknownItem
from genius_search.search.tree import UnknownPrefix

__all__ = ["DeadlinePassed", "DiskFull", "Draining", "Overloaded", "Refused"]


class Refused(GeniusError):
    """A request that was understood, and is not answered now."""


class Overloaded(Refused):
    """More is asked than can be answered; says when to ask again."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DeadlinePassed(Refused):
    """The time that was allowed for an answer is over."""


class Draining(Refused):
    """The service is shutting down: it finishes what it has and takes nothing new."""


class DiskFull(Refused):
    """There is no room for a change, so nothing has changed."""


MEDIA_TYPE: Final = "application/problem+json"
HIDDEN: Final = "something went wrong here; the server's log tells more under this request_id"
PROBLEMS_SHOWN: Final = 20
"""Wrong fields of a request that are named."""

_STATUS: Final[Mapping[type[GeniusError], int]] = {
    UnknownItem: 404,
    UnknownPrefix: 404,
    UsageError: 422,
    BadData: 422,
    Overloaded: 429,
    Draining: 503,
    DeadlinePassed: 504,
    DiskFull: 507,
}
"""Errors that a request can do something about."""

_TITLES: Final = {
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

log = logging.getLogger("genius_search.serve")


class Problem(GeniusError):
    """A request that cannot be answered as it is."""

    def __init__(
        self, status: int, detail: str, *, headers: Mapping[str, str] | None = None, **more: object
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = dict(headers or {})
        self.more = more


class WrongField(BaseModel):
    """A field of the request and what is wrong with it."""

    field: str
    problem: str


class ProblemBody(BaseModel):
    """An error (RFC 9457)."""

    type: str = Field(description="What kind of error it is.", examples=["urn:genius:not-found"])
    title: str
    status: int
    detail: str = Field(description="What was given, what was expected, what to do.")
    request_id: str = Field(description="Also in the header X-Request-ID, and in the server's log.")
    errors: list[WrongField] | None = Field(None, description="Fields of the request that are wrong.")
    left_out: list[dict[str, Any]] | None = Field(None, description="Items that could not be used.")


class Redactor:
    """Takes names of folders out of what is told to others."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = sorted(names.items(), key=lambda pair: -len(pair[0]))  # the longer contain the shorter

    def __call__(self, text: str) -> str:
        """The text with names in place of folders."""
        for folder, name in self._names:
            text = text.replace(folder, name)
        return text


def respond(error: Exception, request_id: str, redact: Redactor) -> JSONResponse:
    """The response to an error; what is the server's own fault is logged and not told."""
    problem = _problem_of(error)
    if problem is None:
        log.error("request %s failed", request_id, exc_info=error)
        problem = Problem(500, HIDDEN)
    title = _TITLES.get(problem.status, "Refused")
    body = {
        "type": f"urn:genius:{title.lower().replace(' ', '-')}",
        "title": title,
        "status": problem.status,
        "detail": redact(str(problem)).encode("utf-8", "replace").decode(),
        "request_id": request_id,
        **problem.more,
    }
    return JSONResponse(body, problem.status, headers=problem.headers, media_type=MEDIA_TYPE)


def _problem_of(error: Exception) -> Problem | None:
    """What can be told of an error; None: nothing."""
    match error:
        case Problem():
            return error
        case Overloaded():
            seconds = max(1, math.ceil(error.retry_after_seconds))
            return Problem(429, str(error), headers={"Retry-After": str(seconds)})
        case RequestValidationError():
            return _wrong_fields(error.errors())
        case HTTPException():
            return Problem(error.status_code, str(error.detail), headers=error.headers)
        case GeniusError():
            status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), None)
            return None if status is None else Problem(status, str(error))
        case _:
            return None


def _wrong_fields(errors: Sequence[Any]) -> Problem:
    """Every field that is wrong, by its place, without what was given for it."""
    told = [
        {
            "field": ".".join(str(part) for part in one["loc"])[:200].encode("utf-8", "replace").decode(),
            "problem": str(one["msg"])[:300].encode("utf-8", "replace").decode(),
        }
        for one in errors[:PROBLEMS_SHOWN]
    ]
    first = told[0] if told else {"field": "", "problem": "it is not valid"}
    where = f"{first['field']}: " if first["field"] else ""
    return Problem(422, f"{where}{first['problem']}", errors=told)
