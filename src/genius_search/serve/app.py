"""The application: routes, and what every request passes before it gets to one."""

from __future__ import annotations

import copy
import gzip
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette import exceptions, responses

from genius_search import __version__
from genius_search.errors import GeniusError
from genius_search.serve import routes
from genius_search.serve.engine import Engine
from genius_search.serve.guard import Guard
from genius_search.serve.keys import Keys
from genius_search.serve.limits import LimitBodies
from genius_search.serve.problems import ProblemBody, Redactor, respond
from genius_search.serve.reading import Pictures, Service
from genius_search.serve.schemas import ExplainBody, IdsBody, NewItemBody, NewItemsBody, SearchBody

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
_HEADERS: Final = MappingProxyType(
    {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        # A new version is seen at once; one that did not change costs a few bytes.
        "Cache-Control": "no-cache",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
    }
)
_TYPES: Final[Mapping[str, str]] = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_START: Final = "index.html"


class PageFile(NamedTuple):
    """One file of the page, ready to be sent."""

    content: bytes
    compressed: bytes
    media_type: str
    tag: str
    """Its ETag: changes with the content."""


@cache
def page_files() -> Mapping[str, PageFile]:
    """The files of the page by name."""
    folder = resources.files("genius_search.serve").joinpath("page")
    return MappingProxyType({entry.name: _read(entry.name, entry.read_bytes()) for entry in folder.iterdir()})


def page_router() -> APIRouter:
    """Serve the page at ``/`` and what it consists of under ``/assets``; no key is needed for either."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def start(request: Request) -> Response:
        return _answer(request, _START)

    @router.get("/assets/{name}")
    async def asset(request: Request, name: str) -> Response:
        if name == _START or name not in page_files():
            raise HTTPException(404, "the page has no such file")
        return _answer(request, name)

    return router


def _read(name: str, content: bytes) -> PageFile:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return PageFile(content, gzip.compress(content, mtime=0), _TYPES[name.rpartition(".")[2]], tag)


def _answer(request: Request, name: str) -> Response:
    file = page_files()[name]
    headers = {**_HEADERS, "ETag": file.tag}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            file.compressed, media_type=file.media_type, headers={**headers, "Content-Encoding": "gzip"}
        )
    return Response(file.content, media_type=file.media_type, headers=headers)


_SENT: Final[tuple[type[BaseModel], ...]] = (
    SearchBody,
    ExplainBody,
    NewItemBody,
    NewItemsBody,
    IdsBody,
)
"""Bodies that routes read themselves, because they come in several forms."""
_FILE: Final = {"type": "string", "format": "binary"}
_OPEN: Final = ("/healthz", "/readyz")


def describe_api(app: FastAPI) -> None:
    """Let the application tell what it can, completely."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it


def _described(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes, openapi_version="3.1.0"
    )
    components = schema.setdefault("components", {})
    known = components.setdefault("schemas", {})
    template = "#/components/schemas/{model}"
    _, sent = models_json_schema([(kind, "validation") for kind in _SENT], ref_template=template)
    _, told = models_json_schema([(ProblemBody, "serialization")], ref_template=template)
    known.update(sent["$defs"])
    known.update(told["$defs"])
    for name in ("SearchBody", "ExplainBody"):
        known[f"{name}Form"] = _as_form(known[name])
    known["NewItemForm"] = _form_of_items(known["NewItemBody"])
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            if path not in _OPEN:
                operation["security"] = [{"bearer": []}, {"key": []}, {}]
    return schema


def _as_form(body: dict[str, Any]) -> dict[str, Any]:
    """The same fields as a form: the picture is a file, and what is nested is JSON in a text."""
    form = copy.deepcopy(body)
    form["properties"]["image"] = _FILE
    form["properties"]["parts"] = {"type": "string", "description": "As in JSON."}
    form["title"] += "Form"
    return form


def _form_of_items(body: dict[str, Any]) -> dict[str, Any]:
    """Files that are an item each, or the fields of one item."""
    one = copy.deepcopy(body)
    one["properties"]["image"] = _FILE
    one["properties"]["fields"] = {"type": "string", "description": "A JSON object."}
    one["title"] = "NewItemForm"
    one["properties"]["files"] = {
        "type": "array",
        "items": _FILE,
        "description": "In place of the other fields: each file is an item by its name, picture or text.",
    }
    return one


ROUTERS: Final = (routes.search_router, routes.items_router, routes.codes_router, routes.indexes_router)


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

    async def refuse(request: Request, error: Exception) -> responses.Response:
        return respond(error, request.state.request_id, redact)

    for kind in (GeniusError, exceptions.HTTPException, RequestValidationError):
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
