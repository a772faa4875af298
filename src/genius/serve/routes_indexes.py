"""Indexes over HTTP, and how the server is."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request
from starlette.responses import Response

from genius.index import Index
from genius.serve.problems import Problem
from genius.serve.schemas import Health, IndexBody, IndexesAnswer
from genius.serve.service import Here, Service, can_write, may_read, problems, send
from genius.serve.showing import show_index

router = APIRouter(tags=["indexes"])


@router.get(
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


@router.get(
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


@router.get("/healthz", summary="Is the server alive?", response_model=Health, tags=["server"])
async def healthz() -> Response:
    """It is, if it answers."""
    return send(Health(status="ok"))


@router.get(
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


@router.get(
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
