"""The page: a handful of plain files inside the package, served as they are.

No build step and nothing from elsewhere: the content security policy lets the browser load and call this
server only. Files are read once, by the names found in the package, so no path of a request reaches the disk.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Final, NamedTuple

from fastapi import APIRouter, HTTPException, Request, Response

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
    folder = resources.files("genius.serve").joinpath("page")
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
