"""Routes of the HTTP API."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from collections.abc import Awaitable
from typing import Annotated, Any, Final, NamedTuple, TypeVar, cast

from fastapi import APIRouter, Depends, Path, Query, Request, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from PIL import Image
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, PlainTextResponse, Response

from genius_search.config import SearchConfig
from genius_search.data.images import image_type
from genius_search.errors import BadImage
from genius_search.index.index import Index
from genius_search.index.query import default_settings
from genius_search.index.requests import SearchPart, SearchRequest
from genius_search.serve import limits, schemas
from genius_search.serve.adding import Acknowledgements, acknowledge, add
from genius_search.serve.bodies import JsonRoute
from genius_search.serve.describe import describe_index, describe_settings
from genius_search.serve.engine import Engine
from genius_search.serve.guard import STREAM_PATH, STREAM_TYPE, TITLES, Problem, Redact
from genius_search.serve.pictures import Pictures, decode_base64
from genius_search.serve.schemas import THUMBNAIL, ItemSummary

Result = TypeVar("Result")
Shown = TypeVar("Shown", bound=BaseModel)

NEIGHBOURS: Final = 12
"""Maximum number of items shown that share codes with an explained item."""


class Service(NamedTuple):
    """State shared by the routes."""

    engine: Engine
    pictures: Pictures
    redact: Redact

    def resolve(self, name: str | None) -> str:
        """Return the name of an index: the given one, or that of the only index.

        Raises
        ------
        Problem
            No index has this name, or there are several and none was given.
        """
        names = list(self.engine.indexes)
        known = ", ".join(names[:20])
        if name is None and len(names) > 1:
            raise Problem(422, f"index: required here; it is one of {known}")
        if name is not None and name not in names:
            raise Problem(404, f"there is no index {name[:80]!r}; there is {known}")
        return name or names[0]


def get_service(request: Request) -> Service:
    """Return the service of an application."""
    return cast("Service", request.app.state.service)


ServiceDep = Annotated[Service, Depends(get_service)]


def get_index(
    service: ServiceDep,
    index: Annotated[schemas.IndexName | None, Query(description="Required if there are several.")] = None,
) -> str:
    """Return the name of the index in a request's query string."""
    return service.resolve(index)


IndexDep = Annotated[str, Depends(get_index)]
IdQuery = Annotated[str, Query(alias="id", min_length=1, max_length=limits.ID_CHARACTERS)]
Offset = Annotated[int, Query(ge=0, le=10**9)]
Limit = Annotated[int, Query(ge=1, le=limits.GROUPS)]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Document the errors of a route."""
    return {status: {"description": TITLES[status], "model": schemas.ProblemDetails} for status in statuses}


# The middleware checks the keys; this documents them in the OpenAPI description.
KEYS: Final = [
    Security(HTTPBearer(auto_error=False)),
    Security(APIKeyHeader(name="X-API-Key", auto_error=False)),
]
router = APIRouter(
    route_class=JsonRoute, dependencies=KEYS, responses=problems(400, 401, 403, 404, 422, 429, 500, 503)
)
open_router = APIRouter()


async def cancel_on_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """Wait for a result, and cancel it if the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watch.cancel()
        task.cancel()


def show(kind: type[Shown], found: object, index: str) -> Shown:
    """Convert a result of the Python API to a response; image paths become URLs of this server."""
    return kind.model_validate(found, context=index)


@router.post("/v1/search", responses=problems(408, 413, 415, 504))
async def search(request: Request, service: ServiceDep, body: schemas.SearchBody) -> schemas.SearchResult:
    """Find the best items for a query."""
    name = service.resolve(body.index)
    index = service.engine.indexes[name]
    config = search_config(index, body)
    query = await search_request(request, service.pictures, body)
    hits, timing = await cancel_on_disconnect(request, service.engine.search(name, query, config))
    return schemas.SearchResult(
        request_id=request.state.request_id,
        index=name,
        took_ms=timing,
        settings=describe_settings(index, config, query.beam, query.k),
        good_match=index.good_match(hits),
        hits=[show(schemas.Hit, hit, name) for hit in hits],
    )


def search_config(index: Index, body: schemas.SearchBody) -> SearchConfig:
    """Return the settings of an index, overridden by those of a request.

    Raises
    ------
    Problem
        A setting is impossible or would have no effect.
    """
    snapshot = index.cached_snapshot  # opening a new state would block the event loop
    manifest = snapshot.manifest
    usual = default_settings(index.model, snapshot)
    config = dataclasses.replace(
        usual,
        rerank=usual.rerank if body.rerank is None else body.rerank,
        router=usual.router if body.router is None else body.router,
        candidates=usual.candidates if body.candidates is None else body.candidates,
    )
    if config.rerank == "embeddings" and manifest.embeddings == "none":
        raise Problem(422, "rerank: this index stores no embeddings; use codes or none")
    if body.candidates and config.rerank == "none":
        raise Problem(422, "candidates: needs re-ranking; set rerank to codes or embeddings")
    if body.router == "geometry" and config.rerank == "none":
        raise Problem(422, "router: geometry needs re-ranking; set rerank to codes or embeddings")
    if body.router == "generator" and not index.model.has_generator:
        raise Problem(422, "router: this index has no generator; leave router out")
    return config


async def search_request(request: Request, pictures: Pictures, body: schemas.SearchBody) -> SearchRequest:
    """Convert the body of a search, decoding its images."""

    async def decode(image: str | None) -> Image.Image | None:
        if image is None:
            return None
        decoded = await pictures.decode(decode_base64(image))
        request.state.hold_more(4 * decoded.width * decoded.height)
        return decoded

    parts = [
        SearchPart(text=part.text, image=await decode(part.image), id=part.id, weight=part.weight)
        for part in body.parts
    ]
    query = SearchRequest(
        text=body.text,
        image=await decode(body.image),
        parts=tuple(parts),
        combine=body.combine,
        instruction=body.instruction,
        modality=body.modality,
        where=body.where,
        match=body.match,
        hybrid=body.hybrid,
        k=body.k,
        beam=body.beam,
        deadline=request.state.began + body.deadline_ms / 1000,
    )
    if any(condition.column == "image" for condition in query.filter.conditions):
        raise Problem(422, "where: the image of an item is a path on the server and cannot be compared")
    return query


@router.post("/v1/explain", responses=problems(408, 413, 415, 504))
async def explain(request: Request, service: ServiceDep, body: schemas.ExplainBody) -> schemas.Explanation:
    """Follow the ID of an item level by level: the probability of each code, and its alternatives."""
    name = service.resolve(body.index)
    config = search_config(service.engine.indexes[name], body)
    query = await search_request(request, service.pictures, body)

    def look_up(index: Index) -> schemas.Explanation:
        explanation = index.explain_request(body.id, query, config=config)
        shared = [level.level for level in explanation.levels if level.items > 1]
        prefix = explanation.codes[: shared[-1] + 1] if shared else ()
        near = index.tree(prefix, examples=NEIGHBOURS + 1, most_children=0).examples
        shown = show(schemas.Explanation, explanation, name)
        shown.neighbours = [show(ItemSummary, item, name) for item in near if item.id != body.id][:NEIGHBOURS]
        return shown

    shown = await cancel_on_disconnect(request, service.engine.read(name, look_up, deadline=query.deadline))
    return shown.model_copy(update={"request_id": request.state.request_id, "index": name})


@router.get("/v1/codes")
async def codes(
    service: ServiceDep,
    name: IndexDep,
    prefix: Annotated[
        str,
        Query(
            max_length=500,
            pattern=r"^( *[0-9]{1,5} *(, *[0-9]{1,5} *)*)?$",
            examples=["1,17"],
            description="Codes, separated by commas; empty: all items.",
        ),
    ] = "",
) -> schemas.CodeNode:
    """Count the items, list the codes that follow, and say how evenly they divide the items."""
    wanted = [int(code) for code in prefix.split(",")] if prefix else []

    def look_up(index: Index) -> schemas.CodeNode:
        node = show(schemas.CodeNode, index.tree(wanted), name)
        more = index.tree(wanted, examples=NEIGHBOURS, most_children=0).examples
        node.examples = [show(ItemSummary, item, name) for item in more]
        node.entropy = node.entropy if node.num_children else None
        return node

    return await service.engine.read(name, look_up)


@router.get("/v1/codes/collisions")
async def collisions(
    service: ServiceDep, name: IndexDep, offset: Offset = 0, limit: Limit = 20
) -> schemas.SharedPage:
    """List groups, largest first."""
    page = await service.engine.read(name, lambda index: index.collisions(offset=offset, limit=limit))
    return show(schemas.SharedPage, page, name)


@router.get("/v1/codes/duplicates")
async def duplicates(
    service: ServiceDep,
    name: IndexDep,
    levels: Annotated[int, Query(ge=0, le=64, description="How many of the last codes may differ.")] = 1,
    offset: Offset = 0,
    limit: Limit = 20,
) -> schemas.SharedPage:
    """List groups, largest first: often the same thing twice."""
    page = await service.engine.read(
        name, lambda index: index.near_duplicates(levels, offset=offset, limit=limit)
    )
    return show(schemas.SharedPage, page, name)


@router.get("/v1/items")
async def get_item(service: ServiceDep, name: IndexDep, item_id: IdQuery) -> schemas.Item:
    """Return an item with its fields and codes."""

    def look_up(index: Index) -> schemas.Item:
        snapshot = index.snapshot
        location = snapshot.locate(item_id)
        item = snapshot.item_at(location)
        codes = snapshot.id_at(location)[: index.model.num_levels].tolist()
        return show(schemas.Item, {**item._asdict(), "fields": item.fields, "codes": codes}, name)

    return await service.engine.read(name, look_up)


async def find_picture(service: Service, name: str, item_id: str) -> pathlib.Path:
    """Return where the picture of an item is; raise :class:`Problem` if it has none."""

    def look_up(index: Index) -> str | None:
        snapshot = index.snapshot
        return snapshot.item_at(snapshot.locate(item_id)).image

    image = await service.engine.read(name, look_up)
    if image is None:
        raise Problem(404, f"item {item_id[:80]!r} has no picture")
    return pathlib.Path(image)


class JpegResponse(Response):
    """A picture."""

    media_type = "image/jpeg"


@router.get(
    "/v1/items/picture",
    response_class=JpegResponse,
    responses={304: {"description": "Unchanged (If-None-Match)."}},
)
async def get_picture(
    request: Request,
    service: ServiceDep,
    name: IndexDep,
    item_id: IdQuery,
    size: Annotated[int, Query(ge=16, le=limits.THUMBNAIL_PIXELS)] = THUMBNAIL,
) -> Response:
    """Draw the picture anew, without EXIF or anything else of the file."""
    path = await find_picture(service, name, item_id)
    known = request.headers.get("if-none-match", "")
    tag, jpeg = await service.pictures.thumbnail(path, size, known)
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if not jpeg:
        return Response(status_code=304, headers=headers)
    return JpegResponse(jpeg, headers=headers)


@router.get("/v1/items/original", response_class=FileResponse)
async def get_original(service: ServiceDep, name: IndexDep, item_id: IdQuery) -> Response:
    """Return the file of a picture as it is, with all that its EXIF data say."""
    path = await find_picture(service, name, item_id)
    try:
        kind = await service.engine.read(name, lambda _: image_type(path))
    except BadImage:
        raise Problem(404, "the picture of this item is gone or cannot be read") from None
    return FileResponse(
        path,
        media_type=kind,
        filename=pathlib.PurePosixPath(item_id).name,
        content_disposition_type="inline",
        headers={"Cache-Control": "private, no-cache"},
    )


@router.post("/v1/items", responses=problems(408, 413, 415, 507))
async def add_items(service: ServiceDep, name: IndexDep, body: schemas.NewItems) -> schemas.Added:
    """Add items; one whose id is known replaces the other. On return they are on the disk and searchable."""
    added = await add(service.engine, service.pictures, name, body.items)
    if len(added.left_out) == len(body.items):
        first = added.left_out[0]
        raise Problem(
            422,
            f"no item could be used; the first, {first.id[:80]!r}: {first.reason}",
            left_out=[item.model_dump() for item in added.left_out],
        )
    return added


@router.post(
    STREAM_PATH,
    response_class=Acknowledgements,
    responses=problems(408, 415),
    openapi_extra={
        "requestBody": {"required": True, "content": {STREAM_TYPE: {"schema": {"type": "string"}}}}
    },
)
async def stream_items(request: Request, service: ServiceDep, name: IndexDep) -> Response:
    """Add the items of a stream (a NewItem per line); each batch is acknowledged by a line (Added).

    An error that ends the stream is its last line (ProblemDetails).
    """
    engine, pictures, redact = service
    return Acknowledgements(acknowledge(request, engine, pictures, name, redact))


@router.post("/v1/items/delete", responses=problems(408, 413, 415, 507))
async def delete_items(service: ServiceDep, name: IndexDep, body: schemas.ItemIds) -> schemas.Deleted:
    """Delete items; on return no search finds them."""
    return show(schemas.Deleted, await service.engine.delete(name, body.ids), name)


@router.delete("/v1/items", responses=problems(507))
async def delete_item(service: ServiceDep, name: IndexDep, item_id: IdQuery) -> schemas.Deleted:
    """Delete an item; on return no search finds it."""
    deleted = await service.engine.delete(name, [item_id])
    if deleted.missing:
        raise Problem(404, f"there is no item {item_id[:80]!r} in this index")
    return show(schemas.Deleted, deleted, name)


@router.get("/v1/indexes")
async def get_indexes(request: Request, service: ServiceDep) -> schemas.Indexes:
    """Describe every index as far as a search needs it."""
    names = service.engine.indexes
    return schemas.Indexes(indexes=[await _describe(request, service, name) for name in names])


@router.get("/v1/indexes/{name}")
async def get_one_index(
    request: Request, service: ServiceDep, name: Annotated[schemas.IndexName, Path()]
) -> schemas.IndexInfo:
    """Describe an index as far as a search needs it."""
    return await _describe(request, service, service.resolve(name))


async def _describe(request: Request, service: Service, name: str) -> schemas.IndexInfo:
    may_write = request.state.may_write
    return await service.engine.read(name, lambda index: describe_index(name, index, writable=may_write))


@open_router.get("/healthz")
async def healthz() -> schemas.Health:
    """Respond with 200 while the process is alive."""
    return schemas.Health()


@open_router.get("/readyz", responses=problems(503))
async def readyz(service: ServiceDep) -> schemas.Health:
    """Respond with 503 while the server starts or shuts down."""
    if not service.engine.is_ready:
        raise Problem(503, "the server is starting or shutting down")
    return schemas.Health()


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: ServiceDep) -> Response:
    """Return latencies by stage, batches, beams, queues and errors."""
    return Response(generate_latest(service.engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)
