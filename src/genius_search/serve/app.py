"""The application: routes of the HTTP API, the page, and the middleware around them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Annotated, Any, Final, TypeVar, cast

from anyio.to_thread import current_default_thread_limiter
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry
from prometheus_fastapi_instrumentator import Instrumentator
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from genius_search import __version__
from genius_search.data.images import encode_jpeg, image_type, open_image
from genius_search.errors import BadImage, GeniusError
from genius_search.index.index import Index, current_state
from genius_search.serve import schemas
from genius_search.serve.describe import (
    address_of,
    describe_index,
    describe_settings,
    show,
    some_items,
    written,
)
from genius_search.serve.guard import Guard
from genius_search.serve.schemas import (
    JSON_BYTES,
    MAX_ITEMS,
    PROBLEM_TYPE,
    SEARCH_BYTES,
    THUMBNAIL,
    Problem,
    RequestBody,
    log,
    respond,
)
from genius_search.serve.service import (
    PATIENCE_SECONDS,
    Service,
    find_picture,
    search_config,
    search_request,
)

Body = TypeVar("Body", bound=RequestBody)

PAGE: Final = pathlib.Path(__file__).parent / "page"
SMALL_BYTES: Final = 16 << 10
"""Bodies up to this size are parsed at once, larger ones in a thread."""
ANSWER_BYTES: Final = 8 << 20
"""Size of the hits of one answer."""
PART_NAME: Final = re.compile(
    rb'^content-disposition:.*?;[ \t]*name="?([^";\r\n]+)', re.IGNORECASE | re.MULTILINE
)
GONE: Final = "the picture of this item is gone or cannot be read"


@dataclasses.dataclass(frozen=True)
class Served:
    """An index, and its name here."""

    name: str
    index: Index


def get_service(request: Request) -> Service:
    """Return the service of an application."""
    return cast("Service", request.app.state.service)


async def find_index(
    request: Request,
    index: Annotated[
        schemas.IndexName | None, Query(description="Required if there are several.")
    ] = None,
) -> Served:
    """Return an index by its name, or the only one; raise :class:`Problem` if none is meant."""
    indexes = get_service(request).indexes
    known = ", ".join(list(indexes)[:20])
    if index is None and len(indexes) > 1:
        raise Problem(422, f"index: required here; it is one of {known}")
    if index is not None and index not in indexes:
        raise Problem(404, f"there is no index {index[:80]!r}; there is {known}")
    name = index or next(iter(indexes))
    return Served(name, indexes[name])


NamedIndex = Annotated[Served, Depends(find_index)]
IdQuery = Annotated[str, Query(alias="id", min_length=1, max_length=500)]


async def read_body(request: Request, kind: type[Body]) -> tuple[Body, Mapping[str, memoryview]]:
    """Return the body of a request, and the parts of multipart/form-data beside its part ``json``."""
    content_type, body = request.headers.get("content-type", ""), await request.body()

    def parse() -> tuple[Body, Mapping[str, memoryview]]:
        if content_type.lower().startswith("application/json"):
            return read_json(kind, body), {}
        parts = split_parts(content_type, body)
        most = JSON_BYTES if kind is schemas.NewItems else SEARCH_BYTES
        source = parts.pop("json", memoryview(b"{}"))
        if len(source) > most:
            raise Problem(413, f"json: this part has more than {most:,} bytes; send less at once")
        return read_json(kind, bytes(source)), parts

    return parse() if len(body) <= SMALL_BYTES else await get_service(request).parsers.run(parse)


def read_json(kind: type[Body], source: bytes) -> Body:
    """Read a body of JSON; raise :class:`ValidationError` if it is not of this kind."""
    try:
        return kind.model_validate_json(source)
    except ValidationError as error:
        if error.error_count() > 1 or error.errors()[0]["type"] != "json_invalid":
            raise
        try:
            value = json.loads(source)
        except (ValueError, RecursionError):
            raise error from None
        # Python reads half a character (a lone surrogate), and the model says where it is.
        kind.model_validate(value, strict=False)
        raise


def split_parts(content_type: str, body: bytes) -> dict[str, memoryview]:
    """Split a body of multipart/form-data into its parts, by name (RFC 7578).

    By hand, because libraries go through hostile bodies byte by byte in Python.

    Raises
    ------
    Problem
        It has another form, or too many parts.
    """
    boundary = re.search(r'boundary="?([^";,\s]{1,70})', content_type, re.IGNORECASE)
    if boundary is None:
        raise Problem(400, "multipart/form-data needs a boundary")
    edge = b"\r\n--" + boundary[1].encode("ascii", "replace")
    marks: list[int] = []
    mark = -2 if body.startswith(edge[2:]) else body.find(edge)
    while mark != -1:
        if len(marks) == MAX_ITEMS + 2:
            raise Problem(400, f"multipart/form-data has at most {MAX_ITEMS + 1:,} parts")
        marks.append(mark)
        mark = body.find(edge, mark + len(edge))
    parts: dict[str, memoryview] = {}
    for mark, following in pairwise(marks):
        start = mark + len(edge)
        end = body.find(b"\r\n\r\n", start, following)
        name = PART_NAME.search(body, start, min(end, start + 2_000))
        if end < 0 or name is None:
            raise Problem(400, "a part of multipart/form-data has no name")
        parts[name[1].decode("utf-8", "replace")] = memoryview(body)[end + 4 : following]
    return parts


def takes(kind: type[RequestBody]) -> dict[str, Any]:
    """Document the body of a route."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    form = {
        "type": "object",
        "properties": {"json": schema},
        "additionalProperties": {"format": "binary", "type": "string"},
    }
    content = {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}


ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "default": {
        "description": "An error.",
        "content": {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}},
    }
}
router = APIRouter(responses=ERRORS)


@router.post(
    "/v1/search", response_model=schemas.SearchResult, openapi_extra=takes(schemas.SearchBody)
)
async def search(request: Request) -> Response:
    """Find the best items for a query."""
    body, pictures = await read_body(request, schemas.SearchBody)
    served, began = await find_index(request, body.index), request.state.began
    name, index = served.name, served.index
    deadline = began + body.deadline_ms / 1000

    def work() -> bytes:
        started = time.monotonic()
        query, config = search_request(body, pictures, deadline), search_config(index, body)
        hits = index.search(query, config=config)
        took = {"queue": 1000 * (started - began), "search": 1000 * (time.monotonic() - started)}
        shown, size = [], 0
        for hit in hits:
            fields = hit.fields
            if body.fields is not None:
                fields = {key: fields[key] for key in body.fields if key in fields}
            shown.append(
                written(dataclasses.replace(hit, fields=fields, image=address_of(hit, name)))
            )
            size += len(shown[-1])
            if size > ANSWER_BYTES:
                raise Problem(
                    413,
                    f"these hits have more than {ANSWER_BYTES:,} bytes; ask for a smaller k, or with fields "
                    "for those that you need",
                )
        head = {
            "request_id": request.state.request_id,
            "index": name,
            "took_ms": took,
            "settings": describe_settings(index, config, query.beam, query.k + query.offset),
            "good_match": hits.good_match,
        }
        return to_json(head)[:-1] + b',"hits":[' + b",".join(shown) + b"]}"

    found = await get_service(request).threads_for(body, pictures).run(work, deadline=deadline)
    return Response(found, media_type="application/json")


@router.post("/v1/explain", openapi_extra=takes(schemas.ExplainBody))
async def explain(request: Request) -> Response:
    """Follow the ID of an item level by level: the rank of each code, and its alternatives.

    The fields are those of `genius_search.index.explain.Explanation`.
    """
    body, pictures = await read_body(request, schemas.ExplainBody)
    served = await find_index(request, body.index)
    deadline = request.state.began + body.deadline_ms / 1000

    def work() -> bytes:
        query, config = search_request(body, pictures, deadline), search_config(served.index, body)
        explanation = served.index.explain(body.id, query, config=config)
        shown = {
            one.name: getattr(explanation, one.name) for one in dataclasses.fields(explanation)
        }
        shown["item"] = show(explanation.item, served.name)
        return written({"request_id": request.state.request_id, "index": served.name, **shown})

    explained = await get_service(request).slow.run(work, deadline=deadline)
    return Response(explained, media_type="application/json")


@router.post("/v1/feedback", status_code=204, openapi_extra=takes(schemas.ExplainBody))
async def learn(request: Request) -> None:
    """Remember that an item was chosen for a search, so that similar searches find it earlier.

    Only the query of the search counts. On return it is on the disk and in effect.
    """
    body, pictures = await read_body(request, schemas.ExplainBody)

    def work(index: Index) -> list[str]:
        query = search_request(body, pictures, math.inf)
        names = ("text", "image", "parts", "instruction")
        choice = {"chosen": body.id, **{name: getattr(query, name) for name in names}}
        return index.learn_many([choice], wait_seconds=PATIENCE_SECONDS)

    served = await find_index(request, body.index)
    if await get_service(request).change(served.name, work):
        raise Problem(404, f"the index has no item {body.id[:80]!r}")


@router.delete("/v1/feedback")
async def forget(
    request: Request,
    served: NamedIndex,
    item_id: IdQuery,
    text: Annotated[schemas.Text | None, Query(description="Only choices for this query.")] = None,
) -> dict[str, int]:
    """Forget the choices of an item; on return they no longer raise it."""
    forgotten = await get_service(request).change(
        served.name,
        lambda index: index.forget(chosen=item_id, text=text, wait_seconds=PATIENCE_SECONDS),
    )
    return {"forgotten": forgotten}


@router.get("/v1/items/examples")
def get_examples(served: NamedIndex) -> Response:
    """Return some of the items, as an impression of the index."""
    items = {
        "items": [
            show(item, served.name) for item in some_items(current_state(served.index).snapshot)
        ]
    }
    return Response(written(items), media_type="application/json")


@router.get("/v1/items", response_model=schemas.Item)
def get_item(served: NamedIndex, item_id: IdQuery) -> Response:
    """Return an item with its fields and codes."""
    snapshot = current_state(served.index).snapshot
    location = snapshot.locate(item_id)
    item = snapshot.item_at(location)
    codes = snapshot.id_at(location)[: served.index.model.num_levels].tolist()
    item_with_codes = show(item, served.name) | {"fields": item.fields, "codes": codes}
    return Response(written(item_with_codes), media_type="application/json")


def picture_of(request: Request, served: Served, item_id: str) -> pathlib.Path:
    """Return where the picture of an item is; raise :class:`Problem` if none may be handed out."""
    snapshot = current_state(served.index).snapshot
    item = snapshot.item_at(snapshot.locate(item_id))
    return find_picture(item, served.index.folder, get_service(request).roots)


@router.get("/v1/items/picture", response_class=Response)
def get_picture(
    request: Request,
    served: NamedIndex,
    item_id: IdQuery,
    size: Annotated[int, Query(ge=16, le=1_024, description="Its longer side.")] = THUMBNAIL,
) -> Response:
    """Draw the picture anew, without EXIF or anything else of the file."""
    path = picture_of(request, served, item_id)
    try:
        status = path.stat()
        version = (str(path), status.st_size, status.st_mtime_ns, size)
        headers = {"ETag": f'"{hashlib.sha256(repr(version).encode()).hexdigest()[:32]}"'}
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        jpeg = draw_thumbnail(*version)
    except (OSError, BadImage):
        raise Problem(404, GONE) from None
    return Response(jpeg, headers=headers, media_type="image/jpeg")


@functools.lru_cache(512)
def draw_thumbnail(path: str, _bytes: int, _mtime_ns: int, size: int) -> bytes:
    """Return a picture as JPEG, at most ``size`` pixels on its longer side."""
    picture = open_image(pathlib.Path(path), shortest_side=size)
    picture.thumbnail((size, size))
    return encode_jpeg(picture, quality=85)


@router.get("/v1/items/original", response_class=FileResponse)
def get_original(request: Request, served: NamedIndex, item_id: IdQuery) -> Response:
    """Return the file of a picture as it is, with all that its EXIF data say."""
    path = picture_of(request, served, item_id)
    try:
        kind = image_type(path)
    except BadImage:
        raise Problem(404, GONE) from None
    name = pathlib.PurePosixPath(item_id).name
    return FileResponse(path, media_type=kind, filename=name, content_disposition_type="inline")


@router.post("/v1/items", openapi_extra=takes(schemas.NewItems))
async def add_items(request: Request, served: NamedIndex) -> schemas.Added:
    """Add items; one whose id is known replaces the other. On return they are on the disk and searchable."""
    body, pictures = await read_body(request, schemas.NewItems)
    added = await get_service(request).add(served.name, body.items, pictures)
    if not added.added + added.replaced + added.unchanged:
        first = added.left_out[0]
        raise Problem(
            422,
            f"no item could be used; the first, {first.id[:80]!r}: {first.reason}",
            left_out=added.left_out,
        )
    return added


@router.delete("/v1/items")
async def delete_items(
    request: Request,
    served: NamedIndex,
    ids: Annotated[list[schemas.ItemId], Query(alias="id", min_length=1, max_length=1_000)],
) -> schemas.Deleted:
    """Delete items; on return no search finds them."""
    deleted = await get_service(request).change(
        served.name, lambda index: index.delete(ids, wait_seconds=PATIENCE_SECONDS)
    )
    return schemas.Deleted(deleted=deleted.deleted, missing=deleted.missing)


@router.get("/v1/indexes")
def get_indexes(request: Request) -> schemas.Indexes:
    """Describe every index as far as a search needs it."""
    described, damaged = [], []
    for name, index in get_service(request).indexes.items():
        try:
            described.append(describe_index(name, index, writable=request.state.may_write))
        except Exception:  # noqa: BLE001  whatever a file of somebody else leads to
            log.exception("%s could not be described", name)
            damaged.append(name)
    return schemas.Indexes(indexes=described, damaged=damaged)


@router.get("/healthz")
async def healthz(request: Request) -> dict[str, str]:
    """Respond with 200 while requests are answered; the status is ``damaged`` if files of an index are."""
    is_damaged = any(watch.damage for watch in get_service(request).watches)
    return {"status": "damaged" if is_damaged else "ok"}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description, with errors, keys, and the bodies that routes read by themselves."""
    schema = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes
    )
    bodies = (schemas.SearchBody, schemas.ExplainBody, schemas.NewItems, schemas.ProblemDetails)
    template = "#/components/schemas/{model}"
    _, models = models_json_schema([(body, "validation") for body in bodies], ref_template=template)
    schema["components"]["schemas"] |= models["$defs"]
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}, {}]
    return schema


@asynccontextmanager
async def limit_look_ups(_: FastAPI) -> AsyncIterator[None]:
    """Let few of the routes that are no coroutines run at once; they run in threads."""
    current_default_thread_limiter().total_tokens = 2
    yield


def create_app(service: Service, *, keys: pathlib.Path | None = None) -> FastAPI:
    """Build the application of a service.

    Parameters
    ----------
    keys
        File of API keys. Without one, only requests from this machine are accepted.
    """
    app = FastAPI(
        title="GENIUS",
        version=__version__,
        summary="Generative multimodal search over your own items.",
        docs_url=None,  # their scripts would come from other sites
        redoc_url=None,
        lifespan=limit_look_ups,
        routes=router.routes,
    )
    app.state.service = service
    page = StaticFiles(directory=PAGE)
    app.mount("/assets", GZipMiddleware(page))

    @app.get("/", include_in_schema=False)
    async def start(request: Request) -> Response:
        return await page.get_response("index.html", request.scope)

    Instrumentator(should_group_status_codes=False, registry=CollectorRegistry()).instrument(
        app
    ).expose(app)
    app.openapi = functools.cache(lambda: _openapi(app))  # type: ignore[method-assign]  # FastAPI's way

    def redact(text: str) -> str:
        """Replace paths of folders on this server by the names of their indexes."""
        for name, index in service.indexes.items():
            for folder in (index.folder, index.model.folder):
                text = text.replace(str(folder.resolve()), name).replace(str(folder), name)
        return text

    async def refuse(request: Request, error: Exception) -> Response:
        return respond(error, request.state.request_id, redact)

    for kind in (HTTPException, RequestValidationError, ValidationError, GeniusError, OSError):
        app.add_exception_handler(kind, refuse)
    app.add_middleware(Guard, keys=keys, redact=redact)
    return app
