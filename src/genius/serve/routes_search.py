"""Search over HTTP."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from genius.asking import SearchPart, SearchRequest
from genius.config import USUAL_SEARCH, SearchConfig
from genius.data.records import Modality
from genius.index import Index
from genius.search.filters import Filter
from genius.serve.pictures import Pictures, from_base64
from genius.serve.problems import Problem
from genius.serve.reading import read, unless_gone
from genius.serve.schemas import SearchAnswer, SearchBody, Took
from genius.serve.service import Here, may_read, problems, send
from genius.serve.showing import show_hit, show_settings

router = APIRouter(prefix="/v1", dependencies=[Depends(may_read)], tags=["search"])


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


@router.post(
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
    state = index.seen.state  # others wait meanwhile, and how it is searched hardly ever changes
    usual = USUAL_SEARCH if state.tuned is None else state.tuned.search
    config = dataclasses.replace(
        usual,
        rerank=usual.rerank if body.rerank is None else body.rerank,
        leaves=usual.leaves if body.leaves is None else body.leaves,
    )
    if config.rerank == "embeddings" and state.facts.embeddings == "none":
        raise Problem(422, "rerank: this index stores no embeddings; rerank by codes, or not at all")
    if body.leaves and config.rerank == "none":
        raise Problem(422, "leaves: something has to order them; rerank by codes or embeddings")
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
            item_id=part.item,
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
        only=only,
        k=body.k,
        beam=body.beam,
    )
