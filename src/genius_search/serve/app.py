"""The application: routes, the page, and the middleware around them."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from genius_search import __version__
from genius_search.serve import routes
from genius_search.serve.bodies import BodyLimits
from genius_search.serve.engine import Engine
from genius_search.serve.guard import MEDIA_TYPE, Guard, respond
from genius_search.serve.keys import Keys
from genius_search.serve.pictures import Pictures

PAGE: Final = Path(__file__).parent / "page"
PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    # A new version is seen at once; an unchanged file costs a few bytes.
    "Cache-Control": "no-cache",
}


class Page(StaticFiles):
    """Static files of the web page, with headers that restrict it to its own server."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file of the page."""
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


def build_api() -> FastAPI:
    """Build the routes, without an engine."""
    app = FastAPI(
        title="GENIUS",
        version=__version__,
        summary="Generative multimodal search over your own items.",
        lifespan=_lifespan,
        docs_url=None,  # their scripts would come from other sites
        redoc_url=None,
    )
    app.include_router(routes.router)
    app.include_router(routes.open_router)
    page = Page(directory=PAGE)
    app.mount("/assets", GZipMiddleware(page))

    @app.get("/", include_in_schema=False)
    async def start(request: Request) -> Response:
        return await page.get_response("index.html", request.scope)

    app.openapi = functools.cache(lambda: _openapi(app))  # type: ignore[method-assign]  # FastAPI's way
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description, with the media type of errors corrected."""
    schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    for operations in schema["paths"].values():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if status >= "400":
                    (content,) = response["content"].values()
                    response["content"] = {MEDIA_TYPE: content}
    return schema


def create_app(engine: Engine, *, keys: Keys | None = None) -> FastAPI:
    """Build the application; it starts and stops the engine.

    Parameters
    ----------
    keys
        API keys. Without them, only requests from this machine are accepted.
    """
    folders = {
        str(place): name
        for name, index in engine.indexes.items()
        for folder in (index.folder, index.model.folder)
        for place in (folder, folder.resolve())
    }

    def redact(text: str) -> str:
        """Replace paths of folders on this server by the names of their indexes."""
        for folder in sorted(folders, key=len, reverse=True):  # longer ones contain shorter ones
            text = text.replace(folder, folders[folder])
        return text

    async def refuse(request: Request, error: Exception) -> Response:
        return respond(error, request.state.request_id, redact)

    app = build_api()
    app.state.service = routes.Service(engine, Pictures(), redact)
    app.add_exception_handler(HTTPException, refuse)
    app.add_exception_handler(RequestValidationError, refuse)
    app.add_middleware(BodyLimits)
    app.add_middleware(Guard, keys=keys, redact=redact, metrics=engine.metrics)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    engine: Engine = app.state.service.engine
    await engine.start()
    yield
    await engine.stop()
