"""The application: routes, and what every request passes before it gets to one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from genius import __version__
from genius.errors import GeniusError
from genius.serve import routes_codes, routes_indexes, routes_items, routes_search
from genius.serve.engine import Engine
from genius.serve.guard import Guard
from genius.serve.keys import Keys
from genius.serve.limits import LimitBodies
from genius.serve.openapi import describe_api
from genius.serve.page import page_router
from genius.serve.pictures import Pictures
from genius.serve.problems import Redactor, respond
from genius.serve.service import Service

ROUTERS: Final = (routes_search.router, routes_items.router, routes_codes.router, routes_indexes.router)


def api() -> FastAPI:
    """The routes, with nothing behind them yet."""
    app = FastAPI(
        title="GENIUS",
        version=__version__,
        summary="Generative multimodal search over your own items.",
        lifespan=_lifespan,
        docs_url=None,  # their pages would come from elsewhere
        redoc_url=None,
    )
    for router in ROUTERS:
        app.include_router(router)
    app.include_router(page_router())
    describe_api(app)
    return app


def create_app(engine: Engine, *, keys: Keys | None = None) -> FastAPI:
    """The service over an engine, which starts and stops with it.

    Parameters
    ----------
    keys
        who may call; without, everybody on this machine, and nobody else.
    """
    app = api()
    redact = Redactor(
        {
            str(place): name
            for name, index in engine.indexes.items()
            for folder in (index.folder, index.model.folder)
            for place in (folder, folder.resolve())
        }
    )
    app.state.service = Service(engine, Pictures(), keys, redact)

    async def refuse(request: Request, error: Exception) -> Response:
        return respond(error, request.state.request_id, redact)

    for kind in (GeniusError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, refuse)
    app.add_middleware(LimitBodies)
    app.add_middleware(Guard, local_only=keys is None, redact=redact, observe=engine.metrics.request)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    here: Service = app.state.service
    await here.engine.start()
    yield
    await here.engine.stop()
    here.pictures.close()
