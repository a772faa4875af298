"""Items over HTTP: what is there, its picture, adding and deleting."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from genius_search.config import USUAL_SEARCH, SearchConfig
from genius_search.index.explain import CodeNode, Explanation, LevelStep, SharedPage
from genius_search.index.filters import Filter
from genius_search.index.index import Index
from genius_search.index.items import Item
from genius_search.index.query import SearchPart, SearchRequest
from genius_search.records import Modality
from genius_search.serve import limits
from genius_search.serve.problems import Problem
from genius_search.serve.reading import (
    Acknowledged,
    Here,
    IndexName,
    Pictures,
    Service,
    add,
    can_write,
    form_of,
    from_base64,
    items_of_form,
    may_read,
    may_write,
    numbered,
    problems,
    read,
    read_json,
    send,
    unless_gone,
    wrong_type,
)
from genius_search.serve.schemas import (
    THUMBNAIL,
    AddedAnswer,
    CodeChildBody,
    CodeNodeBody,
    DeletedAnswer,
    ExplainAnswer,
    ExplainBody,
    Health,
    IdsBody,
    IndexBody,
    IndexesAnswer,
    ItemBody,
    LevelBody,
    NewItemsBody,
    SearchAnswer,
    SearchBody,
    SharedAnswer,
    SharedGroupBody,
    SiblingBody,
    Took,
    show_example,
    show_hit,
    show_index,
    show_item,
    show_settings,
)

search_router = APIRouter(prefix="/v1", dependencies=[Depends(may_read)], tags=["search"])


def body_of(schema: str) -> dict[str, Any]:
    """How a route's documentation says that its body is JSON, or a form with the same fields."""
    reference = {"$ref": f"#/components/schemas/{schema}"}
    return {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": reference},
                "multipart/form-data": {"schema": {"$ref": f"#/components/schemas/{schema}Form"}},
            },
        }
    }


@search_router.post(
    "/search",
    summary="Search with a text, a picture, or several parts",
    response_model=SearchAnswer,
    responses=problems(404, 408, 413, 415, 504),
    openapi_extra=body_of("SearchBody"),
)
async def search(request: Request, here: Here) -> Response:
    """The best items for what is looked for; as JSON, or as a form with the picture as a file."""
    began = time.monotonic()
    body, image = await read(request, SearchBody)
    name = here.resolve(body.index)
    config = config_of(here.engine.indexes[name], body)
    asked = await request_of(here.pictures, body, image)
    deadline = None if body.deadline_ms is None else began + body.deadline_ms / 1000
    answered = await unless_gone(request, here.engine.search(name, asked, config, deadline=deadline))
    took = answered.took
    return send(
        SearchAnswer(
            request_id=request.state.request_id,
            index=name,
            took_ms=Took(
                queue=took.queue_ms, encode=took.encode_ms, search=took.search_ms, total=took.total_ms
            ),
            settings=show_settings(config, asked.beam, asked.k),
            good_match=here.engine.indexes[name].good_match(answered.hits),
            hits=[show_hit(name, hit) for hit in answered.hits],
        )
    )


def config_of(index: Index, body: SearchBody) -> SearchConfig:
    """The index's own settings, less what was asked for otherwise.

    Raises
    ------
    Problem
        what was asked for would change nothing, or cannot be.
    """
    manifest = index.cached_snapshot.manifest  # do not wait for a new one: settings hardly ever change
    usual = USUAL_SEARCH if manifest.tuned is None else manifest.tuned.search
    config = dataclasses.replace(
        usual,
        rerank=usual.rerank if body.rerank is None else body.rerank,
        candidates=usual.candidates if body.candidates is None else body.candidates,
    )
    if config.rerank == "embeddings" and manifest.embeddings == "none":
        raise Problem(422, "rerank: this index stores no embeddings; rerank by codes, or not at all")
    if body.candidates and config.rerank == "none":
        raise Problem(422, "candidates: something has to order them; rerank by codes or embeddings")
    return config


async def request_of(pictures: Pictures, body: SearchBody, image: bytes | None) -> SearchRequest:
    """A request with its pictures decoded."""
    only = Filter.parse(body.where, body.match)
    if any(condition.column == "image" for condition in only.conditions):
        raise Problem(422, "where: an item's image cannot be compared with anything here")
    if body.image is not None:
        image = from_base64(body.image)
    parts = [
        SearchPart(
            text=part.text,
            image=None if part.image is None else await pictures.decode(from_base64(part.image)),
            id=part.item,
            weight=part.weight,
        )
        for part in body.parts
    ]
    return SearchRequest(
        text=body.text,
        image=None if image is None else await pictures.decode(image),
        parts=tuple(parts),
        instruction=body.instruction,
        modality=None if body.modality is None else Modality.parse(body.modality),
        where=only,
        k=body.k,
        beam=body.beam,
    )


codes_router = APIRouter(prefix="/v1", dependencies=[Depends(may_read)], tags=["codes"])

NEIGHBOURS: Final = 12
"""Items that are shown of those that share codes with one."""

Offset = Annotated[int, Query(ge=0, le=10**9)]
Limit = Annotated[int, Query(ge=1, le=limits.GROUPS)]


@codes_router.post(
    "/explain",
    summary="Why a search finds an item, or does not",
    response_model=ExplainAnswer,
    responses=problems(404, 408, 413, 415),
    openapi_extra=body_of("ExplainBody"),
)
async def explain(request: Request, here: Here) -> Response:
    """The way of the item's ID through the levels: each code's probability, and what else was there."""
    body, image = await read(request, ExplainBody)
    name = here.resolve(body.index)
    config = config_of(here.engine.indexes[name], body)
    asked = await request_of(here.pictures, body, image)

    def look(index: Index) -> tuple[Explanation, list[Item]]:
        explained = index.explain_request(body.id, asked, config=config)
        shared = [level.level for level in explained.levels if level.items > 1]
        prefix = explained.codes[: shared[-1] + 1] if shared else ()
        near = index.tree(prefix, examples=NEIGHBOURS + 1, most_children=0).examples
        return explained, [item for item in near if item.id != body.id][:NEIGHBOURS]

    explained, near = await unless_gone(request, here.engine.read(name, look))
    return send(
        ExplainAnswer(
            request_id=request.state.request_id,
            index=name,
            id=body.id,
            codes=list(explained.codes),
            is_allowed=explained.is_allowed,
            rank=explained.rank,
            score=explained.score,
            touched=explained.touched,
            beam=explained.beam,
            lost_at=explained.lost_at,
            kept_by_beam=explained.kept_by_beam,
            levels=[_level(name, level) for level in explained.levels],
            shares_prefix=[show_example(name, item) for item in near],
        )
    )


@codes_router.get(
    "/codes",
    summary="A prefix of IDs, and what lies below it",
    response_model=CodeNodeBody,
    responses=problems(404),
)
async def codes(
    here: Here,
    index: IndexName = None,
    prefix: Annotated[str, Query(max_length=500, examples=["1,17"], description="Codes; empty: all.")] = "",
) -> Response:
    """How many items, which codes follow, and how evenly they divide the items."""
    name = here.resolve(index)
    wanted = _codes(prefix)
    node = await here.engine.read(
        name, lambda opened: (opened.tree(wanted), opened.tree(wanted, examples=NEIGHBOURS, most_children=0))
    )
    return send(_node(name, *node))


@codes_router.get(
    "/codes/collisions",
    summary="Items that share their whole ID",
    response_model=SharedAnswer,
    responses=problems(404),
)
async def collisions(here: Here, index: IndexName = None, offset: Offset = 0, limit: Limit = 20) -> Response:
    """Groups, largest first."""
    name = here.resolve(index)
    page = await here.engine.read(name, lambda opened: opened.collisions(offset=offset, limit=limit))
    return send(_page(name, page))


@codes_router.get(
    "/codes/duplicates",
    summary="Items that share all but the last codes of their IDs",
    response_model=SharedAnswer,
    responses=problems(404),
)
async def duplicates(
    here: Here,
    index: IndexName = None,
    levels: Annotated[int, Query(ge=0, le=64, description="So many of the last codes may differ.")] = 1,
    offset: Offset = 0,
    limit: Limit = 20,
) -> Response:
    """Groups, largest first: often the same thing twice."""
    name = here.resolve(index)
    page = await here.engine.read(
        name, lambda opened: opened.near_duplicates(levels, offset=offset, limit=limit)
    )
    return send(_page(name, page))


def _codes(prefix: str) -> list[int]:
    """``1,17`` as numbers."""
    parts = [part.strip() for part in prefix.split(",")] if prefix.strip() else []
    if not all(part.isascii() and part.isdigit() and len(part) <= 5 for part in parts):
        raise Problem(422, "prefix: expected codes as whole numbers with commas between, as 1,17,203")
    return [int(part) for part in parts]


def _level(index: str, level: LevelStep) -> LevelBody:
    return LevelBody(
        level=level.level,
        name=level.name,
        code=level.code,
        log_probability=level.log_probability,
        probability=level.probability,
        rank_among_siblings=level.rank,
        num_siblings=level.num_siblings,
        items_below=level.items,
        kept=level.is_kept,
        siblings=[
            SiblingBody(
                code=one.code,
                log_probability=one.log_probability,
                probability=one.probability,
                items=one.items,
                examples=[show_example(index, item) for item in one.examples],
            )
            for one in level.siblings
        ],
    )


def _node(index: str, node: CodeNode, with_examples: CodeNode) -> CodeNodeBody:
    return CodeNodeBody(
        prefix=list(node.prefix),
        level=node.level,
        items=node.items,
        share=node.share,
        entropy=node.entropy if node.num_children else None,
        branches=node.num_children,
        children=[
            CodeChildBody(
                code=child.code,
                items=child.items,
                share=child.share,
                examples=[show_example(index, item) for item in child.examples],
            )
            for child in node.children
        ],
        examples=[show_example(index, item) for item in with_examples.examples],
        truncated=node.truncated,
    )


def _page(index: str, page: SharedPage) -> SharedAnswer:
    return SharedAnswer(
        total=page.total,
        items=page.items,
        groups=[
            SharedGroupBody(
                codes=list(group.codes),
                count=group.items,
                items=[show_example(index, item) for item in group.examples],
            )
            for group in page.groups
        ],
    )


indexes_router = APIRouter(tags=["indexes"])


@indexes_router.get(
    "/v1/indexes",
    summary="The indexes",
    response_model=IndexesAnswer,
    responses=problems(),
    dependencies=[Depends(may_read)],
)
async def get_indexes(request: Request, here: Here) -> Response:
    """Each with what one needs to know to search it."""
    writable = can_write(request, here)
    return send(
        IndexesAnswer(indexes=[await _look(here, name, writable=writable) for name in here.engine.indexes])
    )


@indexes_router.get(
    "/v1/indexes/{name}",
    summary="An index",
    response_model=IndexBody,
    responses=problems(404),
    dependencies=[Depends(may_read)],
)
async def get_index(request: Request, here: Here, name: Annotated[str, Path(max_length=200)]) -> Response:
    """What one needs to know to search it."""
    return send(await _look(here, here.resolve(name), writable=can_write(request, here)))


async def _look(here: Service, name: str, *, writable: bool) -> IndexBody:
    def look(index: Index) -> IndexBody:
        return show_index(name, index, writable=writable)

    return await here.engine.read(name, look)


@indexes_router.get("/healthz", summary="Is the server alive?", response_model=Health, tags=["server"])
async def healthz() -> Response:
    """It is, if it answers."""
    return send(Health(status="ok"))


@indexes_router.get(
    "/readyz",
    summary="Does the server answer searches?",
    response_model=Health,
    responses={503: problems()[503]},
    tags=["server"],
)
async def readyz(here: Here) -> Response:
    """Not while it starts or shuts down."""
    if not here.engine.is_ready:
        raise Problem(503, "the server is starting or shutting down")
    return send(Health(status="ok"))


@indexes_router.get(
    "/metrics",
    summary="Measures, for Prometheus",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        **{status: said for status, said in problems().items() if status in (401, 403, 500)},
    },
    dependencies=[Depends(may_read)],
    tags=["server"],
)
async def metrics(here: Here) -> Response:
    """Latency by stage, beam, queues, errors."""
    measured = here.engine.metrics
    return Response(measured.render(), media_type=measured.content_type)


items_router = APIRouter(prefix="/v1/items", tags=["items"])

ItemName = Annotated[str, Query(alias="id", min_length=1, max_length=limits.ID_CHARACTERS)]

_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/NewItemsBody"}},
            "application/x-ndjson": {
                "schema": {"type": "string", "description": "A NewItemBody a line, for as long as you like."}
            },
            "multipart/form-data": {"schema": {"$ref": "#/components/schemas/NewItemForm"}},
        },
    }
}


@items_router.get(
    "",
    summary="An item",
    response_model=ItemBody,
    responses=problems(404),
    dependencies=[Depends(may_read)],
)
async def get_item(here: Here, item_id: ItemName, index: IndexName = None) -> Response:
    """What is known of an item."""
    name = here.resolve(index)

    def look(opened: Index) -> tuple[Item, list[int]]:
        state = opened.snapshot
        place = state.place_of(item_id)
        levels = opened.model.quantizer.num_levels
        return state.item_at(place), state.id_at(place)[:levels].tolist()

    item, codes = await here.engine.read(name, look)
    return send(show_item(name, item, codes))


@items_router.get(
    "/picture",
    summary="The picture of an item, as a small JPEG",
    response_class=Response,
    responses={
        200: {"content": {"image/jpeg": {"schema": {"type": "string", "format": "binary"}}}},
        304: {"description": "It is what you have (If-None-Match)."},
        **problems(404),
    },
    dependencies=[Depends(may_read)],
)
async def get_picture(
    request: Request,
    here: Here,
    item_id: ItemName,
    index: IndexName = None,
    size: Annotated[int, Query(ge=16, le=limits.THUMBNAIL_PIXELS)] = THUMBNAIL,
) -> Response:
    """Drawn anew: no EXIF, nothing else of the file."""
    name = here.resolve(index)

    def look(opened: Index) -> Item:
        state = opened.snapshot
        return state.item_at(state.place_of(item_id))

    item = await here.engine.read(name, look)
    if item.image is None:
        raise Problem(404, f"item {item_id[:80]!r} has no picture")
    drawn = await here.pictures.thumbnail(pathlib.Path(item.image), size)
    headers = {"ETag": drawn.tag, "Cache-Control": "private, no-cache"}
    if drawn.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(drawn.data, media_type="image/jpeg", headers=headers)


@items_router.post(
    "",
    summary="Add or replace items",
    response_model=AddedAnswer,
    responses={
        200: {
            "content": {
                "application/x-ndjson": {
                    "schema": {"type": "string", "description": "For a stream: an AddedAnswer a batch."}
                }
            }
        },
        **problems(404, 408, 413, 415, 507),
    },
    openapi_extra=_BODY,
    dependencies=[Depends(may_write)],
)
async def add_items(request: Request, here: Here, index: IndexName = None) -> Response:
    """As JSON, as a stream of lines (each batch of which is acknowledged by a line), or as files of a form.

    An item whose id is known takes the other's place. What is acknowledged is on the disk, and the next
    search finds it.
    """
    name = here.resolve(index)
    match limits.kind_of(request.headers):
        case "application/json":
            body = await read_json(request, NewItemsBody)
            added = await add(here, name, numbered(body.items))
        case limits.STREAM:
            return Acknowledged(request, here, name)
        case "multipart/form-data":
            async with form_of(request) as form:
                added = await add(here, name, await items_of_form(form))
        case _:
            raise wrong_type("application/json, application/x-ndjson or multipart/form-data")
    if added.left_out and not (added.added or added.replaced or added.unchanged):
        first = added.left_out[0]
        raise Problem(
            422,
            f"no item could be used; the first, {first.id[:80]!r}: {first.reason}",
            left_out=[one.model_dump() for one in added.left_out],
        )
    return send(added)


@items_router.post(
    "/delete",
    summary="Delete items",
    response_model=DeletedAnswer,
    responses=problems(404, 408, 413, 415, 507),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/IdsBody"}}},
        }
    },
    dependencies=[Depends(may_write)],
)
async def delete_items(request: Request, here: Here, index: IndexName = None) -> Response:
    """No search finds them any more."""
    name = here.resolve(index)
    body = await read_json(request, IdsBody)
    deleted = await here.engine.delete(name, body.ids)
    return send(DeletedAnswer(deleted=deleted.deleted, missing=deleted.missing))


@items_router.delete(
    "",
    summary="Delete an item",
    response_model=DeletedAnswer,
    responses=problems(404, 507),
    dependencies=[Depends(may_write)],
)
async def delete_item(here: Here, item_id: ItemName, index: IndexName = None) -> Response:
    """No search finds it any more."""
    name = here.resolve(index)
    deleted = await here.engine.delete(name, [item_id])
    if deleted.missing:
        raise Problem(404, f"there is no item {item_id[:80]!r} in this index")
    return send(DeletedAnswer(deleted=deleted.deleted, missing=deleted.missing))
