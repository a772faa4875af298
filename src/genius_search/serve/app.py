"""The application: routes of the HTTP API, the page, and the middleware around them."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from email.message import Message
from itertools import islice, pairwise
from typing import Annotated, Any, Final, TypeVar, cast

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry
from prometheus_fastapi_instrumentator import Instrumentator
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse, JSONResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from genius_search import __version__
from genius_search.data.images import image_type
from genius_search.errors import BadImage, GeniusError
from genius_search.index.index import Index
from genius_search.serve import schemas
from genius_search.serve.describe import describe_index, show
from genius_search.serve.guard import Guard
from genius_search.serve.keys import Keys
from genius_search.serve.pictures import draw_thumbnail
from genius_search.serve.problems import MEDIA_TYPE, TITLES, Problem, respond
from genius_search.serve.schemas import JSON_BYTES, MAX_ITEMS, SEARCH_BYTES, THUMBNAIL, RequestBody
from genius_search.serve.service import Service

Result = TypeVar("Result")
Body = TypeVar("Body", bound=RequestBody)

PAGE: Final = pathlib.Path(__file__).parent / "page"
PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    # A new version is seen at once; an unchanged file costs a few bytes.
    "Cache-Control": "no-cache",
}
SMALL_BYTES: Final = 16 << 10
"""Bodies up to this size are parsed at once, larger ones in a thread."""
NEIGHBOURS: Final = 12
"""Maximum number of items shown that share codes with an explained item."""
BODIES: Final = (schemas.SearchBody, schemas.ExplainBody, schemas.NewItems)


class Page(StaticFiles):
    """Static files of the web page, with headers that restrict it to its own server."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file of the page."""
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


def get_service(request: Request) -> Service:
    """Return the service of an application."""
    return cast("Service", request.app.state.service)


def resolve(request: Request, name: str | None) -> str:
    """Return the name of an index: the given one, or that of the only index.

    Raises
    ------
    Problem
        No index has this name, or there are several and none was given.
    """
    names = list(get_service(request).indexes)
    known = ", ".join(names[:20])
    if name is None and len(names) > 1:
        raise Problem(422, f"index: required here; it is one of {known}")
    if name is not None and name not in names:
        raise Problem(404, f"there is no index {name[:80]!r}; there is {known}")
    return name or names[0]


async def read_body(request: Request, kind: type[Body]) -> tuple[Body, Mapping[str, memoryview]]:
    """Return the body of a request, and the parts of multipart/form-data beside its part ``json``."""
    content_type, body = request.headers.get("content-type", ""), await request.body()
    if len(body) <= SMALL_BYTES:
        return _parse(content_type, body, kind)
    return await get_service(request).parsers.run(lambda: _parse(content_type, body, kind))


def _parse(content_type: str, body: bytes, kind: type[Body]) -> tuple[Body, Mapping[str, memoryview]]:
    if content_type.lower().startswith("application/json"):
        return kind.model_validate_json(body), {}
    parts = split_parts(content_type, body)
    most = JSON_BYTES if kind is schemas.NewItems else SEARCH_BYTES
    source = bytes(parts.pop("json", memoryview(b"{}"))[: most + 1])
    if len(source) > most:
        raise Problem(413, f"json: this part has more than {most:,} bytes; send less at once")
    return kind.model_validate_json(source), parts


def split_parts(content_type: str, body: bytes) -> dict[str, memoryview]:
    """Split a body of multipart/form-data into its parts, by name (RFC 7578).

    By hand, because libraries go through hostile bodies byte by byte in Python.

    Raises
    ------
    Problem
        It has another form, or too many parts.
    """
    head = Message()
    head["Content-Type"] = content_type
    boundary = re.escape(head.get_boundary("").encode("ascii", "replace"))
    marks = list(islice(re.finditer(rb"(?:\A|\r\n)--" + boundary, body), MAX_ITEMS + 3))
    if not boundary or len(marks) > MAX_ITEMS + 2:
        raise Problem(400, f"multipart/form-data needs a boundary, and has at most {MAX_ITEMS + 1:,} parts")
    parts: dict[str, memoryview] = {}
    for mark, following in pairwise(marks):
        end = body.find(b"\r\n\r\n", mark.end(), following.start())
        part = Message()
        for line in body[mark.end() : min(end, mark.end() + 2_000)].decode("utf-8", "replace").split("\r\n"):
            field, _, value = line.partition(":")
            if field.lower() == "content-disposition":
                part[field] = value.strip()
        name = part.get_param("name", header="Content-Disposition")
        if end < 0 or not isinstance(name, str):
            raise Problem(400, "a part of multipart/form-data has no name")
        parts[name] = memoryview(body)[end + 4 : following.start()]
    return parts


IndexQuery = Annotated[
    schemas.IndexName | None, Query(alias="index", description="Required if there are several.")
]
IdQuery = Annotated[str, Query(alias="id", min_length=1, max_length=500)]
Offset = Annotated[int, Query(ge=0, le=10**9)]
Limit = Annotated[int, Query(ge=1, le=100)]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Document the errors of a route."""
    return {status: {"description": TITLES[status], "model": schemas.ProblemDetails} for status in statuses}


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


BODY: Final = problems(408, 411, 413, 415)
router = APIRouter(responses=problems(400, 401, 403, 404, 422, 429, 500, 503))


@router.post(
    "/v1/search",
    response_model=schemas.SearchResult,
    responses=BODY | problems(504),
    openapi_extra=takes(schemas.SearchBody),
)
async def search(request: Request) -> Response:
    """Find the best items for a query."""
    body, pictures = await read_body(request, schemas.SearchBody)
    state = request.state
    name = resolve(request, body.index)
    found = await get_service(request).search(name, body, pictures, state.request_id, state.began)
    return Response(found, media_type="application/json")


@router.post("/v1/explain", responses=BODY | problems(504), openapi_extra=takes(schemas.ExplainBody))
async def explain(request: Request) -> dict[str, Any]:
    """Follow the ID of an item level by level: the rank of each code, and its alternatives.

    The fields are those of `genius_search.index.explain.Explanation`, and `neighbours`.
    """
    body, pictures = await read_body(request, schemas.ExplainBody)
    name = resolve(request, body.index)
    explained = await get_service(request).explain(name, body, pictures, request.state.began, NEIGHBOURS)
    return {"request_id": request.state.request_id, "index": name, **explained}


async def look_up(request: Request, index: str | None, read: Callable[[Index, str], Result]) -> Result:
    """Return what a function reads of an index, in a thread."""
    name, service = resolve(request, index), get_service(request)
    return await service.look_ups.run(lambda: read(service.indexes[name], name))


@router.get("/v1/codes")
async def codes(
    request: Request,
    index: IndexQuery = None,
    prefix: Annotated[
        str,
        Query(
            max_length=500,
            pattern=r"^( *[0-9]{1,5} *(, *[0-9]{1,5} *)*)?$",
            examples=["1,17"],
            description="Codes, separated by commas; empty: all items.",
        ),
    ] = "",
) -> dict[str, Any]:
    """Count the items, list the codes that follow, and say how evenly they divide the items."""
    wanted = [int(code) for code in prefix.split(",")] if prefix else []

    def read(index: Index, name: str) -> dict[str, Any]:
        node: dict[str, Any] = show(index.tree(wanted), name)
        node["examples"] = show(index.tree(wanted, examples=NEIGHBOURS, most_children=0).examples, name)
        return node

    return await look_up(request, index, read)


@router.get("/v1/codes/duplicates")
async def duplicates(
    request: Request,
    index: IndexQuery = None,
    levels: Annotated[int, Query(ge=0, le=64, description="How many of the last codes may differ.")] = 0,
    offset: Offset = 0,
    limit: Limit = 20,
) -> dict[str, Any]:
    """List groups of items that share their ID, or all but its last codes, largest first."""
    return await look_up(
        request,
        index,
        lambda index, name: show(index.near_duplicates(levels, offset=offset, limit=limit), name),
    )


@router.get("/v1/items", response_model=schemas.Item)
async def get_item(request: Request, item_id: IdQuery, index: IndexQuery = None) -> dict[str, Any]:
    """Return an item with its fields and codes."""

    def read(index: Index, name: str) -> dict[str, Any]:
        snapshot = index.snapshot
        location = snapshot.locate(item_id)
        item = snapshot.item_at(location)
        codes = snapshot.id_at(location)[: index.model.num_levels].tolist()
        return {**show(item, name), "fields": show(item.fields, name), "codes": codes}

    return await look_up(request, index, read)


def find_picture(index: Index, item_id: str) -> pathlib.Path:
    """Return where the picture of an item is; raise :class:`Problem` if it has none."""
    image = index.snapshot.item_at(index.snapshot.locate(item_id)).image
    if image is None:
        raise Problem(404, f"item {item_id[:80]!r} has no picture")
    return pathlib.Path(image)


@router.get(
    "/v1/items/picture",
    response_class=Response,
    responses={
        200: {"content": {"image/jpeg": {}}, "description": "The picture."},
        304: {"description": "Unchanged (If-None-Match)."},
    },
)
async def get_picture(
    request: Request,
    item_id: IdQuery,
    index: IndexQuery = None,
    size: Annotated[int, Query(ge=16, le=1_024)] = THUMBNAIL,
) -> Response:
    """Draw the picture anew, without EXIF or anything else of the file."""
    known = request.headers.get("if-none-match", "")
    tag, jpeg = await look_up(
        request, index, lambda index, _: draw_thumbnail(find_picture(index, item_id), size, known)
    )
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if not jpeg:
        return Response(status_code=304, headers=headers)
    return Response(jpeg, headers=headers, media_type="image/jpeg")


@router.get("/v1/items/original", response_class=FileResponse)
async def get_original(request: Request, item_id: IdQuery, index: IndexQuery = None) -> Response:
    """Return the file of a picture as it is, with all that its EXIF data say."""

    def read(index: Index, _: str) -> tuple[pathlib.Path, str]:
        path = find_picture(index, item_id)
        try:
            return path, image_type(path)
        except BadImage:
            raise Problem(404, "the picture of this item is gone or cannot be read") from None

    path, kind = await look_up(request, index, read)
    return FileResponse(
        path,
        media_type=kind,
        filename=pathlib.PurePosixPath(item_id).name,
        content_disposition_type="inline",
        headers={"Cache-Control": "private, no-cache"},
    )


@router.post("/v1/items", responses=BODY | problems(507), openapi_extra=takes(schemas.NewItems))
async def add_items(request: Request, index: IndexQuery = None) -> schemas.Added:
    """Add items; one whose id is known replaces the other. On return they are on the disk and searchable."""
    name = resolve(request, index)
    body, pictures = await read_body(request, schemas.NewItems)
    added = await get_service(request).add(name, body.items, pictures)
    if len(added.left_out) == len(body.items):
        first = added.left_out[0]
        raise Problem(
            422,
            f"no item could be used; the first, {first.id[:80]!r}: {first.reason}",
            left_out=[item.model_dump() for item in added.left_out],
        )
    return added


@router.delete("/v1/items", responses=problems(507))
async def delete_items(
    request: Request,
    ids: Annotated[list[schemas.ItemId], Query(alias="id", min_length=1, max_length=1_000)],
    index: IndexQuery = None,
) -> schemas.Deleted:
    """Delete items; on return no search finds them."""
    deleted = await get_service(request).delete(resolve(request, index), ids)
    return schemas.Deleted(**deleted._asdict())


@router.get("/v1/indexes")
async def get_indexes(request: Request) -> schemas.Indexes:
    """Describe every index as far as a search needs it."""
    may_write = request.state.may_write

    def read(index: Index, name: str) -> schemas.IndexInfo:
        return describe_index(name, index, writable=may_write)

    names = get_service(request).indexes
    return schemas.Indexes(indexes=[await look_up(request, name, read) for name in names])


@router.get("/healthz")
async def healthz() -> schemas.Health:
    """Respond with 200 while the process is alive."""
    return schemas.Health()


@router.get("/readyz")
async def readyz(request: Request) -> schemas.Health:
    """Respond with 503 while the server starts or shuts down."""
    if not get_service(request).is_ready:
        raise Problem(503, "the server is starting or shutting down")
    return schemas.Health()


def build_api() -> FastAPI:
    """Build the routes, without a service."""
    app = FastAPI(
        title="GENIUS",
        version=__version__,
        summary="Generative multimodal search over your own items.",
        lifespan=_lifespan,
        docs_url=None,  # their scripts would come from other sites
        redoc_url=None,
    )
    app.include_router(router)
    page = Page(directory=PAGE)
    app.mount("/assets", GZipMiddleware(page))

    @app.get("/", include_in_schema=False)
    async def start(request: Request) -> Response:
        return await page.get_response("index.html", request.scope)

    Instrumentator(should_group_status_codes=False, registry=CollectorRegistry()).instrument(app).expose(app)
    app.openapi = functools.cache(lambda: _openapi(app))  # type: ignore[method-assign]  # FastAPI's way
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description, with bodies, keys, and the media type of errors."""
    schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    for operations in schema["paths"].values():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if status >= "400":
                    response["content"] = {MEDIA_TYPE: next(iter(response["content"].values()))}
    template = "#/components/schemas/{model}"
    _, bodies = models_json_schema([(body, "validation") for body in BODIES], ref_template=template)
    schema["components"]["schemas"] |= bodies["$defs"]
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}, {}]
    return schema


def create_app(service: Service, *, keys: Keys | None = None) -> FastAPI:
    """Build the application; it starts and stops the service.

    Parameters
    ----------
    keys
        API keys. Without them, only requests from this machine are accepted.
    """
    folders = {
        str(place): name
        for name, index in service.indexes.items()
        for folder in (index.folder, index.model.folder)
        for place in (folder, folder.resolve())
    }

    def redact(text: str) -> str:
        """Replace paths of folders on this server by the names of their indexes."""
        for folder in sorted(folders, key=len, reverse=True):  # longer ones contain shorter ones
            text = text.replace(folder, folders[folder])
        return text

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        return respond(error, request.state.request_id, redact)

    app = build_api()
    app.state.service = service
    for kind in (HTTPException, RequestValidationError, ValidationError, GeniusError, OSError):
        app.add_exception_handler(kind, refuse)
    app.add_middleware(Guard, keys=keys, redact=redact)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    await service.start()
    yield
    await service.stop()
