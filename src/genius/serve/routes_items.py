"""Items over HTTP: what is there, its picture, adding and deleting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from genius.index import Index
from genius.search.items import Item
from genius.serve import limits
from genius.serve.problems import Problem
from genius.serve.reading import form_of, read_json, wrong_type
from genius.serve.schemas import AddedAnswer, DeletedAnswer, IdsBody, ItemBody, NewItemsBody
from genius.serve.service import Here, IndexName, may_read, may_write, problems, send
from genius.serve.showing import THUMBNAIL, show_item
from genius.serve.streaming import Acknowledged
from genius.serve.uploads import add, items_of_form, numbered

router = APIRouter(prefix="/v1/items", tags=["items"])

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


@router.get(
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
        state = opened.opened
        place = state.place_of(item_id)
        levels = opened.model.quantizer.num_levels
        return state.item_at(place), state.id_at(place)[:levels].tolist()

    item, codes = await here.engine.read(name, look)
    return send(show_item(name, item, codes))


@router.get(
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
        state = opened.opened
        return state.item_at(state.place_of(item_id))

    item = await here.engine.read(name, look)
    if item.image is None:
        raise Problem(404, f"item {item_id[:80]!r} has no picture")
    drawn = await here.pictures.thumbnail(Path(item.image), size)
    headers = {"ETag": drawn.tag, "Cache-Control": "private, no-cache"}
    if drawn.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(drawn.data, media_type="image/jpeg", headers=headers)


@router.post(
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


@router.post(
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


@router.delete(
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
