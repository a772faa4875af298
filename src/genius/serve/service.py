"""What the routes share: the engine, the pictures, who may call, and which index is meant."""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple, cast

from fastapi import Depends, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from genius.errors import ArtifactMismatch, BadData
from genius.serve.engine import Engine
from genius.serve.keys import Keys
from genius.serve.pictures import Pictures
from genius.serve.problems import MEDIA_TYPE, Problem, Redactor


class Service(NamedTuple):
    """Everything that answers."""

    engine: Engine
    pictures: Pictures
    keys: Keys | None
    """Without, whoever can reach it may do everything."""
    redact: Redactor

    def resolve(self, name: str | None) -> str:
        """The index that is meant.

        Raises
        ------
        Problem
            there is none of this name, or several and none was named.
        """
        names = list(self.engine.indexes)
        if name is None and len(names) == 1:
            return names[0]
        told = ", ".join(names[:20])
        if name is None:
            raise Problem(422, f"index: name one of {told}")
        if name not in self.engine.indexes:
            raise Problem(404, f"there is no index {name[:80]!r} here; there is {told}")
        return name


def service_of(request: Request) -> Service:
    """The service that a request came to."""
    return cast("Service", request.app.state.service)


Here = Annotated[Service, Depends(service_of)]
IndexName = Annotated[str | None, Query(max_length=200, description="Needed where there are several.")]


def may_read(request: Request, here: Here) -> None:
    """Let those read who may.

    Raises
    ------
    Problem
        a key is needed, and none or a wrong one was given.
    """
    can_write(request, here)


def may_write(request: Request, here: Here) -> None:
    """Let those change an index who may; raises as :func:`may_read`, and for a key that may only read."""
    if not can_write(request, here):
        raise Problem(403, "this API key may read and not write; use one that was made with --scope write")


def can_write(request: Request, here: Service) -> bool:
    """Whether whoever asks may change an index; raises as :func:`may_read`."""
    if here.keys is None:
        return True
    kind, _, bearer = request.headers.get("authorization", "").partition(" ")
    given = bearer.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
    try:
        key = here.keys.find(given) if given else None
    except BadData as error:  # the server's fault, and names its file
        raise ArtifactMismatch(str(error)) from None
    if key is None:
        raise Problem(
            401,
            "an API key is needed: send it as Authorization: Bearer KEY, or as X-API-Key: KEY",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return key.may_write


def send(body: BaseModel) -> Response:
    """A body as JSON."""
    return Response(body.model_dump_json(), media_type="application/json")


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route's documentation says of its errors; every route may have those of the first line."""
    said = {400, 401, 403, 422, 429, 500, 503, *statuses}
    schema = {"$ref": "#/components/schemas/ProblemBody"}
    return {
        status: {"description": _MEANING[status], "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in sorted(said)
    }


_MEANING: Final = {
    400: "The request cannot be read.",
    401: "An API key is needed.",
    403: "The key may not do this, or the request came from another site's page.",
    404: "There is no such index, item or picture.",
    408: "The body came too slowly.",
    413: "The body, or a picture in it, is too large.",
    415: "The body is of a kind that is not read here.",
    422: "The request is understood and cannot be done as it is.",
    429: "Too much is asked at once; the header Retry-After says when to ask again.",
    500: "An error of the server; its log tells more under the request_id.",
    503: "The server is starting or shutting down.",
    504: "The deadline has passed.",
    507: "The server's disk is full; nothing was changed.",
}
