"""Reads what was sent: JSON or a form, into a form that is checked."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect

from genius.serve import limits
from genius.serve.pictures import too_large
from genius.serve.problems import Problem

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")

FORM_FIELDS: Final = 200
FORM_TEXT_BYTES: Final = 1 << 20
"""Of a field of a form that is no file."""
_MANY: Final = frozenset({"where"})
_NESTED: Final = frozenset({"parts", "fields"})


class Sent(NamedTuple):
    """What was sent as one thing."""

    body: dict[str, Any]
    image: bytes | None
    """A picture that came as a file."""


async def read(request: Request, kind: type[Body]) -> tuple[Body, bytes | None]:
    """A body as JSON or as a form with the same fields; the picture that came as a file.

    Raises
    ------
    Problem
        it is neither.
    RequestValidationError
        a field is wrong.
    """
    match limits.kind_of(request.headers):
        case "application/json":
            return await read_json(request, kind), None
        case "multipart/form-data":
            async with form_of(request) as form:
                sent = await fields_of_form(form)
                return validated(kind, sent.body), sent.image
        case _:
            raise wrong_type("application/json or multipart/form-data")


async def read_json(request: Request, kind: type[Body]) -> Body:
    """A body that can be JSON only."""
    if limits.kind_of(request.headers) != "application/json":
        raise wrong_type("application/json")
    try:
        return kind.model_validate_json(await request.body(), strict=True)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None


def validated(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """The fields of a form, checked."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None


def wrong_type(expected: str) -> Problem:
    """The body is of a kind that is not read here."""
    return Problem(415, f"the body's Content-Type is none that is read here; expected {expected}")


@contextlib.asynccontextmanager
async def form_of(request: Request) -> AsyncIterator[FormData]:
    """The fields of a form; its files are closed afterwards."""
    form = await request.form(max_files=limits.ITEMS, max_fields=FORM_FIELDS, max_part_size=FORM_TEXT_BYTES)
    try:
        yield form
    finally:
        await form.close()


async def fields_of_form(form: FormData) -> Sent:
    """The fields of a form as those of a JSON body; texts that are JSON inside are read."""
    body: dict[str, Any] = {}
    image = None
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name != "image" or image is not None:
                raise Problem(422, f"{name[:80]}: one file is expected, and it is called image")
            image = await bytes_of(value)
        elif name in _MANY:
            body.setdefault(name, []).append(value)
        elif name in body:
            raise Problem(422, f"{name[:80]}: it is there twice")
        elif value:  # an empty field of a page's form is one that was not filled in
            body[name] = _inner(name, value) if name in _NESTED else value
    return Sent(body, image)


async def bytes_of(file: UploadFile) -> bytes:
    """The contents of a file that was sent."""
    if (file.size or 0) > limits.PICTURE_BYTES:
        raise too_large()
    return await file.read()


def _inner(name: str, value: str) -> object:
    try:
        return json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Problem(422, f"{name}: it is not JSON") from None


def _refuse(_: str) -> None:
    raise ValueError


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for an answer, for as long as somebody waits for it."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watch.cancel()
        task.cancel()


async def _gone(receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
