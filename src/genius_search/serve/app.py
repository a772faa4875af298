"""The web application: the routes of the HTTP API, the page, and the middleware."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import pathlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, TypeVar, cast

from anyio.to_thread import current_default_thread_limiter
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from genius_search import __version__
from genius_search.data.images import (
    encode_jpeg,
    image_type,
    is_raw_photo,
    is_video_file,
    open_image,
    read_raw_preview,
)
from genius_search.data.video import open_frame, video_type
from genius_search.errors import BadImage, GeniusError
from genius_search.index.index import Index, current_state
from genius_search.serve import items, schemas
from genius_search.serve.body import read_body
from genius_search.serve.describe import (
    describe_index,
    describe_item,
    sample_items,
    written,
)
from genius_search.serve.guard import Guard
from genius_search.serve.metrics import Metrics
from genius_search.serve.queries import read_query
from genius_search.serve.reference import write_reference
from genius_search.serve.schemas import (
    PROBLEM_TYPE,
    THUMBNAIL,
    Problem,
    RequestBody,
    log,
    respond,
)
from genius_search.serve.search import SearchRoute
from genius_search.serve.service import MAX_CHANGE_WAIT_SECONDS, Served, Service, find_picture
from genius_search.serve.workers import ChangeForwarder, Worker, accept_changes

Body = TypeVar("Body", bound=RequestBody)

PAGE: Final = pathlib.Path(__file__).parent / "page"
"""The folder of the web page."""
MAX_MOMENT: Final = 1e6
"""Maximum second of a video that a thumbnail shows."""
UNREADABLE_PICTURE: Final = "the picture of this item is missing or cannot be read"


def get_service(request: Request) -> Service:
    """Return the service of an application."""
    return cast("Service", request.app.state.service)


def get_search_route(request: Request) -> SearchRoute:
    """Return the route of searches of an application."""
    return cast("SearchRoute", request.app.state.search_route)


async def find_index(
    request: Request,
    index: Annotated[
        schemas.IndexName | None, Query(description="Required if there are several indexes.")
    ] = None,
) -> Served:
    """Return the index with a name, or the only index; raise :class:`Problem` otherwise."""
    return get_service(request).find_index(index)


NamedIndex = Annotated[Served, Depends(find_index)]
WhereQuery = Annotated[
    Sequence[schemas.Condition],
    Query(max_length=50, description="Conditions on fields; all must hold."),
]
MatchQuery = Annotated[schemas.Condition | None, Query(description="Words that the text contains.")]
IdQuery = Annotated[str, Query(alias="id", min_length=1, max_length=500)]


def document_body(body_type: type[RequestBody]) -> dict[str, Any]:
    """Return the OpenAPI description of a body, which routes read themselves."""
    schema = {"$ref": f"#/components/schemas/{body_type.__name__}"}
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
    "/v1/search",
    response_model=schemas.SearchResult | schemas.SearchResults,
    openapi_extra=document_body(schemas.SearchBody),
)
async def search(request: Request) -> Response:
    """Search for the best items: one search, or several in one batch."""
    # The application answers with the same route before a request arrives here.
    answer = await get_search_route(request).answer(request.scope["state"])
    return Response(answer, media_type="application/json")


@router.get("/v1/search", response_model=schemas.SearchResult)
async def search_by_address(
    request: Request,
    parameters: Annotated[schemas.SearchParameters, Query()],
) -> Response:
    """Search with the parameters of an address, for `curl` and browsers."""
    fields = cast("BaseModel", parameters).model_dump(exclude_unset=True)
    body = schemas.SearchBody(**fields)
    answer = await get_search_route(request).search(body, {}, request.scope["state"])
    return Response(answer, media_type="application/json")


async def read_route_body(
    request: Request, body_type: type[Body]
) -> tuple[Body, Mapping[str, memoryview]]:
    """Return the body that the guard has read; see :func:`read_body`."""
    state = request.state
    parsers = get_service(request).parsers
    return await read_body(state.content_type, state.body, body_type, parsers)


@router.post("/v1/explain", openapi_extra=document_body(schemas.ExplainBody))
async def explain(request: Request) -> Response:
    """Explain the rank of an item: the rank of each code of its ID, and the alternatives.

    The response has the fields of `genius_search.index.explain.Explanation`.
    """
    body, pictures = await read_route_body(request, schemas.ExplainBody)
    served = await find_index(request, body.index)
    deadline = request.state.began + body.deadline_ms / 1000

    def work() -> bytes:
        query = read_query(body, pictures, deadline, served.index)
        explanation = served.index.explain(body.id, query.request, config=query.config)
        result = {
            field.name: getattr(explanation, field.name)
            for field in dataclasses.fields(explanation)
        }
        result["item"] = describe_item(explanation.item, served.name)
        return written({"request_id": request.state.request_id, "index": served.name, **result})

    result = await get_service(request).slow.run(work, deadline=deadline)
    return Response(result, media_type="application/json")


@router.post("/v1/feedback", status_code=204, openapi_extra=document_body(schemas.ExplainBody))
async def learn(request: Request) -> None:
    """Learn that an item was chosen for a search, so that it ranks higher in similar searches.

    Only the query of the search is used. When the response arrives, the choice is on the disk and
    in effect.
    """
    body, pictures = await read_route_body(request, schemas.ExplainBody)

    def work(index: Index) -> list[str]:
        request = read_query(body, pictures, math.inf, index).request
        names = ("text", "image", "vector", "parts", "instruction")
        choice = {"chosen": body.id, **{name: getattr(request, name) for name in names}}
        return index.learn_many([choice], wait_seconds=MAX_CHANGE_WAIT_SECONDS)

    served = await find_index(request, body.index)
    if await get_service(request).change(served.name, work):
        raise Problem(404, f"item {body.id[:80]!r} is not in the index")


@router.delete("/v1/feedback")
async def forget(
    request: Request,
    served: NamedIndex,
    item_id: IdQuery,
    text: Annotated[schemas.Text | None, Query(description="Only choices for this query.")] = None,
) -> dict[str, int]:
    """Delete the learned choices of an item. When the response arrives, they no longer raise it."""
    forgotten = await get_service(request).change(
        served.name,
        lambda index: index.forget(chosen=item_id, text=text, wait_seconds=MAX_CHANGE_WAIT_SECONDS),
    )
    return {"forgotten": forgotten}


@router.get("/v1/items/examples")
def get_examples(served: NamedIndex) -> Response:
    """Return a few items as examples of the contents of the index."""
    examples = sample_items(current_state(served.index).snapshot)
    body = {"items": [describe_item(item, served.name) for item in examples]}
    return Response(written(body), media_type="application/json")


@router.get("/v1/items", response_model=schemas.Item)
def get_item(served: NamedIndex, item_id: IdQuery) -> Response:
    """Return an item with its fields and codes."""
    snapshot = current_state(served.index).snapshot
    location = snapshot.locate(item_id)
    item = snapshot.item_at(location)
    codes = snapshot.id_at(location)[: served.index.model.num_levels].tolist()
    lines = [line._asdict() for line in item.picture_text]
    details = {"fields": item.fields, "codes": codes, "picture_text": lines}
    body = describe_item(item, served.name) | details
    return Response(written(body), media_type="application/json")


def picture_of(request: Request, served: Served, item_id: str) -> pathlib.Path:
    """Return the file of an item's picture; raise :class:`Problem` if it may not be sent."""
    snapshot = current_state(served.index).snapshot
    item = snapshot.item_at(snapshot.locate(item_id))
    return find_picture(item, served.index.folder, get_service(request).roots)


@router.get("/v1/items/picture", response_class=Response)
def get_picture(
    request: Request,
    served: NamedIndex,
    item_id: IdQuery,
    size: Annotated[
        int, Query(ge=16, le=1_024, description="Maximum length of the longer side in pixels.")
    ] = THUMBNAIL,
    moment: Annotated[
        float | None, Query(ge=0, le=MAX_MOMENT, description="Second of a video.")
    ] = None,
) -> Response:
    """Return a re-encoded thumbnail, without EXIF or other data of the file.

    That of a video is the indexed frame nearest to `moment`.
    """
    path = picture_of(request, served, item_id)
    try:
        status = path.stat()
        version = (str(path), status.st_size, status.st_mtime_ns, size, moment)
        headers = {"ETag": f'"{hashlib.sha256(repr(version).encode()).hexdigest()[:32]}"'}
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        jpeg = draw_thumbnail(*version)
    except (OSError, BadImage):
        raise Problem(404, UNREADABLE_PICTURE) from None
    return Response(jpeg, headers=headers, media_type="image/jpeg")


@functools.lru_cache(512)
def draw_thumbnail(
    path: str, _bytes: int, _mtime_ns: int, size: int, moment: float | None
) -> bytes:
    """Return a picture as JPEG, with a longer side of at most ``size`` pixels.

    Size and time of the file are arguments only so that a changed file is not taken from the cache.
    """
    file = pathlib.Path(path)
    is_video = is_video_file(file)
    picture = open_frame(file, moment) if is_video else open_image(file, shortest_side=size)
    picture.thumbnail((size, size))
    return encode_jpeg(picture, quality=85)


@router.get("/v1/items/original", response_class=FileResponse)
def get_original(request: Request, served: NamedIndex, item_id: IdQuery) -> Response:
    """Return the original file of a picture, including its EXIF data, or of a video.

    Of a raw photo it is the preview. A request with the header `Range` gets a part of the file, as
    players need it to seek.
    """
    path = picture_of(request, served, item_id)
    try:
        if is_raw_photo(path):
            return Response(read_raw_preview(path), media_type="image/jpeg")
        media_type = video_type(path) or image_type(path)
    except BadImage:
        raise Problem(404, UNREADABLE_PICTURE) from None
    name = pathlib.PurePosixPath(item_id).name
    return FileResponse(
        path, media_type=media_type, filename=name, content_disposition_type="inline"
    )


@router.post("/v1/items", openapi_extra=document_body(schemas.NewItems))
async def add_items(request: Request, served: NamedIndex) -> schemas.Added:
    """Add items; an item replaces the item with the same id.

    When the response arrives, the items are on the disk and searchable.
    """
    body, pictures = await read_route_body(request, schemas.NewItems)
    added = await get_service(request).add(served.name, body.items, pictures)
    if not added.added + added.replaced + added.unchanged:
        first = added.left_out[0]
        raise Problem(
            422,
            f"no item could be used; the first is {first.id[:80]!r}: {first.reason}",
            left_out=added.left_out,
        )
    return added


@router.patch("/v1/items", openapi_extra=document_body(items.Updates))
async def update_items(request: Request, served: NamedIndex) -> items.Updated:
    """Change fields and texts of items without their vectors, in one step.

    When the response arrives, the changes are on the disk and searchable.
    """
    body, _ = await read_route_body(request, items.Updates)
    return await get_service(request).change(
        served.name, lambda index: items.update(index, body.updates)
    )


@router.delete("/v1/items")
async def delete_items(
    request: Request,
    served: NamedIndex,
    ids: Annotated[list[schemas.ItemId], Query(alias="id", max_length=1_000)] = [],  # noqa: B006
    where: WhereQuery = (),
) -> schemas.Deleted:
    """Delete items by their ids, or all items that meet conditions.

    When the response arrives, searches no longer find them.
    """
    conditions = items.read_filter(where)
    deleted = await get_service(request).change(
        served.name,
        lambda index: index.delete(
            ids or None, where=conditions, wait_seconds=MAX_CHANGE_WAIT_SECONDS
        ),
    )
    return schemas.Deleted(deleted=deleted.deleted, missing=deleted.missing)


@router.get("/v1/items/count")
def count_items(
    served: NamedIndex, where: WhereQuery = (), match: MatchQuery = None
) -> items.ItemCount:
    """Count the items that meet conditions."""
    return items.count(served.index, items.read_filter(where, match))


@router.get("/v1/items/scroll", response_model=items.ItemsPage)
def scroll(
    served: NamedIndex,
    where: WhereQuery = (),
    match: MatchQuery = None,
    cursor: Annotated[str | None, Query(max_length=500, description="Of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=items.MAX_PAGE)] = 100,
) -> Response:
    """Return a page of the items in the order of their ids, and the cursor of the next page.

    Each item that exists from the first page to the last is returned exactly once.
    """
    conditions = items.read_filter(where, match)
    page = items.write_page(served.index, served.name, conditions, cursor, limit)
    return Response(page, media_type="application/json")


@router.get("/v1/items/vectors")
def get_vectors(
    served: NamedIndex,
    ids: Annotated[list[schemas.ItemId], Query(alias="id", min_length=1, max_length=100)],
) -> items.Vectors:
    """Return the stored vectors of items, in the order of the ids."""
    return items.Vectors(vectors=served.index.get_vectors(ids).tolist())


@router.get("/v1/indexes")
def get_indexes(request: Request) -> schemas.Indexes:
    """Describe all indexes, and name the indexes that cannot be read."""
    described, damaged = [], []
    for name, index in get_service(request).indexes.items():
        try:
            described.append(describe_index(name, index, writable=request.state.may_write))
        except Exception:  # noqa: BLE001  a damaged or hostile file can raise anything
            log.exception("%s could not be described", name)
            damaged.append(name)
    return schemas.Indexes(indexes=described, damaged=damaged)


@router.get("/healthz")
async def healthz(request: Request) -> dict[str, str]:
    """Return 200 while the server answers, with the status ``damaged`` if files are damaged."""
    is_damaged = any(watch.damage for watch in get_service(request).watches)
    return {"status": "damaged" if is_damaged else "ok"}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description, with errors, keys, and the bodies of requests."""
    schema = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes
    )
    bodies = (
        schemas.SearchBody,
        schemas.ExplainBody,
        schemas.NewItems,
        items.Updates,
        schemas.ProblemDetails,
    )
    template = "#/components/schemas/{model}"
    _, models = models_json_schema([(body, "validation") for body in bodies], ref_template=template)
    schema["components"]["schemas"] |= models["$defs"]
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}, {}]
    return schema


def _methods_by_path(app: FastAPI) -> dict[str, list[str]]:
    """Return the methods of each path; HEAD is allowed wherever GET is."""
    methods: dict[str, set[str]] = {}
    for route in app.routes:
        if isinstance(route, Route):
            methods.setdefault(route.path, set()).update(route.methods or ())
    return {
        path: sorted(names | ({"HEAD"} if "GET" in names else set()))
        for path, names in methods.items()
    }


@asynccontextmanager
async def run_app(app: FastAPI) -> AsyncIterator[None]:
    """Check files, accept forwarded changes, and limit the threads of plain routes to two."""
    current_default_thread_limiter().total_tokens = 2
    service: Service = app.state.service
    with service.watch_files():
        async with accept_changes(app, app.state.worker):
            yield


def _add_pages(app: FastAPI, page: StaticFiles) -> Metrics:
    """Add the page, the reference and the metrics, which are not part of the API."""

    @app.get("/", include_in_schema=False)
    async def start(request: Request) -> Response:
        return await page.get_response("index.html", request.scope)

    @app.get("/docs", include_in_schema=False)
    async def write_docs() -> Response:
        return Response(write_reference(app.openapi()), media_type="text/html")

    metrics = Metrics(path for route in app.routes if (path := getattr(route, "path", None)))

    @app.get("/metrics", include_in_schema=False)
    async def write_metrics() -> Response:
        return Response(metrics.write(), media_type=CONTENT_TYPE_LATEST)

    return metrics


def create_app(
    service: Service,
    *,
    keys: pathlib.Path | None = None,
    worker: Worker | None = None,
    prefix: str = "",
) -> FastAPI:
    """Create the web application of a service.

    Parameters
    ----------
    keys
        the file of API keys. Without it, only requests from this machine are accepted.
    worker
        this process, if it is one of several workers.
    prefix
        the path of the service at a proxy, such as ``/search``.
    """
    app = FastAPI(
        title="GENIUS",
        version=__version__,
        summary="Generative multimodal search over your own items.",
        docs_url=None,  # their scripts would come from other sites
        redoc_url=None,
        lifespan=run_app,
        routes=router.routes,
    )
    app.state.service = service
    app.state.worker = worker
    app.state.search_route = SearchRoute(service)
    page = StaticFiles(directory=PAGE)
    app.mount("/assets", GZipMiddleware(page))

    metrics = _add_pages(app, page)
    # FastAPI documents this replacement of the method.
    app.openapi = functools.cache(lambda: _openapi(app))  # type: ignore[method-assign]

    def redact(text: str) -> str:
        """Replace paths of folders on this server by the names of their indexes."""
        for name, index in service.indexes.items():
            for folder in (index.folder, index.model.folder):
                text = text.replace(str(folder.resolve()), name).replace(str(folder), name)
        return text

    async def refuse(request: Request, error: Exception) -> Response:
        return respond(error, request.state.request_id, redact)

    for error_type in (
        HTTPException,
        RequestValidationError,
        ValidationError,
        GeniusError,
        OSError,
    ):
        app.add_exception_handler(error_type, refuse)
    routes = {("POST", "/v1/search"): app.state.search_route}
    forwarder = ChangeForwarder(worker.socket) if worker is not None and worker.number else None
    app.add_middleware(
        Guard,
        keys=keys,
        redact=redact,
        metrics=metrics,
        routes=routes,
        forwarder=forwarder,
        methods=_methods_by_path(app),
        prefix=prefix,
    )
    return app
