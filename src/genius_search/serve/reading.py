"""Items as a stream of lines, with a line of acknowledgement for each batch."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import io
import json
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, NamedTuple, TypeVar, cast

from fastapi import Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from PIL import Image
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from genius_search.data.images import open_image, read_image
from genius_search.embed import SHORTEST_SIDE
from genius_search.errors import ArtifactMismatch, BadData, BadImage
from genius_search.index.adding import NewItem
from genius_search.serve import limits
from genius_search.serve.engine import Engine
from genius_search.serve.keys import Keys
from genius_search.serve.problems import MEDIA_TYPE, Overloaded, Problem, Redactor, respond
from genius_search.serve.schemas import AddedAnswer, LeftOutBody, NewItemBody

T = TypeVar("T")

THREADS: Final = 2
"""Pictures that are decoded at a time: each may take 100 MB."""
WAITING: Final = 256
CACHE_BYTES: Final = 64 << 20
"""Of thumbnails."""
QUALITY: Final = 85
_DATA_URL: Final = re.compile(r"data:[\w.+-]*/?[\w.+-]*(;[\w.+=-]+)*;base64,", re.ASCII | re.IGNORECASE)
_OTHER_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.ASCII | re.IGNORECASE)


class Thumbnail(NamedTuple):
    """A small JPEG."""

    data: bytes
    tag: str
    """Its ETag."""


class Pictures:
    """Decodes and draws, a few pictures at a time, beside the event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="pictures")
        self._waiting = 0
        self._cache: OrderedDict[tuple[Path, int, int, int], Thumbnail] = OrderedDict()
        self._cached_bytes = 0

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def decode(self, data: bytes) -> Image.Image:
        """A picture that somebody sent, no larger than an encoder wants it.

        Raises
        ------
        BadImage
            it is none, or it would have too many pixels.
        """
        return await self._run(lambda: _decode(data))

    async def thumbnail(self, path: Path, size: int) -> Thumbnail:
        """A picture of the index; its longer side is ``size`` at most.

        Raises
        ------
        Problem
            it cannot be read any more.
        """
        try:
            status = await self._run(path.stat)
        except OSError:
            raise _gone() from None
        key = (path, status.st_size, status.st_mtime_ns, size)
        found = self._cache.get(key)
        if found is None:
            found = await self._run(lambda: _draw(path, size))
            self._keep(key, found)
        self._cache.move_to_end(key)
        return found

    def _keep(self, key: tuple[Path, int, int, int], found: Thumbnail) -> None:
        if key not in self._cache:
            self._cache[key] = found
            self._cached_bytes += len(found.data)
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= len(self._cache.popitem(last=False)[1].data)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._waiting >= WAITING:
            raise Overloaded("too many pictures are being read; try again", retry_after_seconds=1.0)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1


def from_base64(text: str) -> bytes:
    """The bytes of a picture in base64, or in a data: URL.

    Raises
    ------
    Problem
        it is neither, or too large.
    """
    url = _DATA_URL.match(text[:200])
    if url is None and _OTHER_URL.match(text[:200]):
        raise Problem(
            422, "image: URLs are not fetched; send the picture itself, in base64 or as a data: URL"
        )
    try:
        data = base64.b64decode(text[url.end() if url else 0 :], validate=True)
    except (binascii.Error, ValueError):
        raise Problem(
            422, "image: it is not base64; send the picture's bytes in base64, or use multipart"
        ) from None
    if len(data) > limits.PICTURE_BYTES:
        raise too_large()
    return data


def too_large() -> Problem:
    """A picture has too many bytes."""
    return Problem(413, f"image: it has more than {limits.PICTURE_BYTES:,} bytes; send a smaller one")


def _decode(data: bytes) -> Image.Image:
    return read_image(data, name="image", max_pixels=limits.PICTURE_PIXELS, shortest_side=SHORTEST_SIDE)


def _draw(path: Path, size: int) -> Thumbnail:
    try:
        picture = open_image(path, shortest_side=size)
    except BadImage:
        raise _gone() from None
    picture.thumbnail((size, size))
    kept = io.BytesIO()
    picture.save(kept, "JPEG", quality=QUALITY, optimize=True)
    data = kept.getvalue()
    return Thumbnail(data, f'"{hashlib.sha256(data).hexdigest()[:32]}"')


def _gone() -> Problem:
    return Problem(404, "the picture of this item is not there any more, or cannot be read")


class Service(NamedTuple):
    """Everything that answers."""

    engine: Engine
    pictures: Pictures
    keys: Keys | None
    """Without, whoever can reach it may do everything."""
    redact: Redactor

    def resolve(self, name: str | None) -> str:
        """The index that is meant.

        Raises
        ------
        Problem
            there is none of this name, or several and none was named.
        """
        names = list(self.engine.indexes)
        if name is None and len(names) == 1:
            return names[0]
        told = ", ".join(names[:20])
        if name is None:
            raise Problem(422, f"index: name one of {told}")
        if name not in self.engine.indexes:
            raise Problem(404, f"there is no index {name[:80]!r} here; there is {told}")
        return name


def service_of(request: Request) -> Service:
    """The service that a request came to."""
    return cast("Service", request.app.state.service)


Here = Annotated[Service, Depends(service_of)]
IndexName = Annotated[str | None, Query(max_length=200, description="Needed where there are several.")]


def may_read(request: Request, here: Here) -> None:
    """Let those read who may.

    Raises
    ------
    Problem
        a key is needed, and none or a wrong one was given.
    """
    can_write(request, here)


def may_write(request: Request, here: Here) -> None:
    """Let those change an index who may; raises as :func:`may_read`, and for a key that may only read."""
    if not can_write(request, here):
        raise Problem(403, "this API key may read and not write; use one that was made with --scope write")


def can_write(request: Request, here: Service) -> bool:
    """Whether whoever asks may change an index; raises as :func:`may_read`."""
    if here.keys is None:
        return True
    kind, _, bearer = request.headers.get("authorization", "").partition(" ")
    given = bearer.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
    try:
        key = here.keys.find(given) if given else None
    except BadData as error:  # the server's fault, and names its file
        raise ArtifactMismatch(str(error)) from None
    if key is None:
        raise Problem(
            401,
            "an API key is needed: send it as Authorization: Bearer KEY, or as X-API-Key: KEY",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return key.may_write


def send(body: BaseModel) -> Response:
    """A body as JSON."""
    return Response(body.model_dump_json(), media_type="application/json")


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route's documentation says of its errors; every route may have those of the first line."""
    said = {400, 401, 403, 422, 429, 500, 503, *statuses}
    schema = {"$ref": "#/components/schemas/ProblemBody"}
    return {
        status: {"description": _MEANING[status], "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in sorted(said)
    }


_MEANING: Final = {
    400: "The request cannot be read.",
    401: "An API key is needed.",
    403: "The key may not do this, or the request came from another site's page.",
    404: "There is no such index, item or picture.",
    408: "The body came too slowly.",
    413: "The body, or a picture in it, is too large.",
    415: "The body is of a kind that is not read here.",
    422: "The request is understood and cannot be done as it is.",
    429: "Too much is asked at once; the header Retry-After says when to ask again.",
    500: "An error of the server; its log tells more under the request_id.",
    503: "The server is starting or shutting down.",
    504: "The deadline has passed.",
    507: "The server's disk is full; nothing was changed.",
}


Body = TypeVar("Body", bound=BaseModel)
READING_T = TypeVar("T")

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


async def unless_gone(request: Request, work: Awaitable[READING_T]) -> READING_T:
    """Wait for an answer, for as long as somebody waits for it."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_reading_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watch.cancel()
        task.cancel()


async def _reading_gone(receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_TEXTS: Final = frozenset({".txt", ".md"})
FILES: Final = "files"
"""The field of a form whose files are an item each."""


class SentItem(NamedTuple):
    """An item as it came; ``problem`` says why it cannot be used."""

    name: str
    """Its id, or where it stood."""
    body: NewItemBody | None
    image: bytes | None = None
    """A picture that came as a file."""
    problem: str | None = None


def numbered(bodies: Iterable[NewItemBody]) -> list[SentItem]:
    """Items of one body."""
    return [SentItem(body.id or f"item {number}", body) for number, body in enumerate(bodies, start=1)]


async def items_of_form(form: FormData) -> list[SentItem]:
    """Files of a form: each of ``files`` is an item by its name, or the form is one item as JSON has it.

    Raises
    ------
    Problem
        it is neither.
    """
    files = form.getlist(FILES)
    if not files:
        sent = await fields_of_form(form)
        body = validated(NewItemBody, sent.body)
        return [SentItem(body.id or "item 1", body, sent.image)]
    if len(files) != len(form.multi_items()) or not all(isinstance(file, UploadFile) for file in files):
        raise Problem(422, "a form has files, each of which is an item, or the fields of one item; not both")
    return [await _of_file(file) for file in files if isinstance(file, UploadFile)]


async def _of_file(file: UploadFile) -> SentItem:
    """A picture or a text by the name of its file; folders of whoever sends it are nobody's business."""
    name = PurePosixPath((file.filename or "").replace("\\", "/")).name[-limits.ID_CHARACTERS :]
    if not name:
        return SentItem("a file", None, problem="it has no name")
    if PurePosixPath(name).suffix.lower() not in _TEXTS:
        if (file.size or 0) > limits.PICTURE_BYTES:
            return SentItem(name, None, problem=f"it has more than {limits.PICTURE_BYTES:,} bytes")
        return _checked(name, {"id": name}, await bytes_of(file))
    if (file.size or 0) > 4 * limits.TEXT_CHARACTERS:
        return SentItem(name, None, problem=f"it has more than {limits.TEXT_CHARACTERS:,} characters")
    try:
        text = (await file.read()).decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return SentItem(name, None, problem="it is not a UTF-8 text")
    return _checked(name, {"id": name, "text": text}, None)


def _checked(name: str, fields: dict[str, Any], image: bytes | None) -> SentItem:
    try:
        return SentItem(name, NewItemBody.model_validate(fields), image)
    except ValidationError as error:
        return SentItem(name, None, problem=str(error.errors()[0]["msg"]))


async def add(here: Service, index: str, sent: Sequence[SentItem]) -> AddedAnswer:
    """Add items; what cannot be used is left out, each with its reason, and the others are added."""
    reasons: dict[int, LeftOutBody] = {}
    new: dict[int, NewItem] = {}
    for place, one in enumerate(sent):
        try:
            new[place] = await _new_item(here, one)
        except (Problem, BadImage) as error:
            reason = error.reason if isinstance(error, BadImage) else str(error)
            reasons[place] = LeftOutBody(id=one.name, reason=reason)
    counts = {"added": 0, "replaced": 0, "unchanged": 0}
    if new:
        outcomes = await here.engine.add(index, list(new.values()))
        for place, outcome in zip(new, outcomes, strict=True):
            if outcome.status == "left out":
                reasons[place] = LeftOutBody(id=outcome.id, reason=outcome.reason or "")
            else:
                counts[outcome.status] += 1
    return AddedAnswer(
        **counts,
        left_out=[reasons[place] for place in sorted(reasons)],
        ids=[new[place].id if place in new else one.name for place, one in enumerate(sent)],
    )


async def _new_item(here: Service, sent: SentItem) -> NewItem:
    """An item whose picture can be decoded, and whose fields are not too many."""
    body = sent.body
    if body is None:
        raise Problem(422, sent.problem or "it cannot be used")
    image = sent.image if body.image is None else from_base64(body.image)
    if image is not None:
        await here.pictures.decode(image)
    if body.fields is not None:
        _check_fields(body.fields)
    return NewItem(body.id or _own_id(body, image), body.text, image, body.fields)


def _check_fields(fields: dict[str, Any]) -> None:
    if _depth(fields) > limits.FIELDS_DEPTH:
        raise Problem(422, f"fields: they are nested more than {limits.FIELDS_DEPTH} deep")
    if len(json.dumps(fields)) > limits.FIELDS_BYTES:
        raise Problem(422, f"fields: they have more than {limits.FIELDS_BYTES:,} bytes")


def _depth(value: object) -> int:
    """How many lists and objects are inside each other; no more are looked at than are allowed."""
    level: list[object] = [value]
    for depth in range(limits.FIELDS_DEPTH + 2):
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        if not inner:
            return depth
        level = inner
    return limits.FIELDS_DEPTH + 1


def _own_id(body: NewItemBody, image: bytes | None) -> str:
    """An id for an item that has none, so that sending it twice adds it once."""
    digest = hashlib.sha256(image or b"")
    digest.update(json.dumps([body.text, body.fields], sort_keys=True).encode())
    return digest.hexdigest()[:24]


BATCH_ITEMS: Final = 256
BATCH_BYTES: Final = 8 << 20
"""A batch is added when it has so many items, or so many bytes."""
ATTEMPTS: Final = 30
"""How often a batch is offered to an index that is busy."""


class Acknowledged(Response):
    """Reads lines while it writes acknowledgements, so that a stream may be longer than any memory."""

    media_type = limits.STREAM

    def __init__(self, request: Request, here: Service, index: str) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._request = request
        self._here = here
        self._index = index

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  request has it
        """Read, add, acknowledge, until there are no lines any more."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for batch in _batches(self._request.stream()):
                added = await self._add(batch)
                line = added.model_dump_json().encode() + b"\n"
                await send({"type": "http.response.body", "body": line, "more_body": True})
        except ClientDisconnect:
            raise
        except Exception as error:  # noqa: BLE001  half an answer is out; the last line says what is wrong
            problem = respond(error, self._request.state.request_id, self._here.redact)
            await send({"type": "http.response.body", "body": bytes(problem.body) + b"\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _add(self, batch: list[SentItem]) -> AddedAnswer:
        """Add a batch; whoever streams waits for the index, and need not ask again."""
        for _ in range(ATTEMPTS):
            try:
                return await add(self._here, self._index, batch)
            except Overloaded as busy:
                await asyncio.sleep(busy.retry_after_seconds)
        return await add(self._here, self._index, batch)


async def _batches(stream: AsyncIterator[bytes]) -> AsyncIterator[list[SentItem]]:
    """Items of a stream, some at a time."""
    batch: list[SentItem] = []
    size = number = 0
    async for line in _lines(stream):
        number += 1
        if not line.strip():
            continue
        batch.append(_item(line, f"line {number}"))
        size += len(line)
        if len(batch) >= BATCH_ITEMS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


async def _lines(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines of a stream; of one that is too long only the beginning, which is no JSON."""
    begun = bytearray()
    async for part in stream:
        *ends, rest = part.split(b"\n")
        for end in ends:
            yield bytes(begun + end)
            begun.clear()
        begun += rest[: max(0, limits.LINE_BYTES - len(begun))]
    if begun:
        yield bytes(begun)


def _item(line: bytes, name: str) -> SentItem:
    if len(line) >= limits.LINE_BYTES:
        return SentItem(name, None, problem=f"the line has more than {limits.LINE_BYTES:,} bytes")
    try:
        body = NewItemBody.model_validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return SentItem(name, None, problem=f"{f'{where}: ' if where else ''}{first['msg']}"[:300])
    return SentItem(body.id or name, body)
