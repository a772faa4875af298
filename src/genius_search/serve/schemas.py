"""Request and response bodies of the HTTP API, and its errors as problem details (RFC 9457).

Field names are those of the Python API. Anything beyond the limits is refused before it costs much. Errors
that a client can correct are explained; those of the server are logged with the request's id, and hidden.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Final, Literal, TypeAlias

from fastapi.exceptions import RequestValidationError
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
)
from starlette.exceptions import HTTPException
from starlette.responses import Response

from genius_search.border import as_id
from genius_search.config import Rerank, Router
from genius_search.errors import BadData, DeadlinePassed, GeniusError, UsageError
from genius_search.index.request import SearchHit
from genius_search.index.snapshot import UnknownItem
from genius_search.index.writer import HeldByAnother, NotWritable
from genius_search.records import Modality, composed
from genius_search.writing import DISK_FULL

JSON_BYTES: Final = 256 << 10
"""Size of JSON that adds items, in a body of its own or as the part ``json`` of one with pictures."""
SEARCH_BYTES: Final = 64 << 10
"""Size of any other JSON, which keys that may only read can send: parsing stops all of Python."""
BODY_BYTES: Final = 32 << 20
"""Size of a multipart body."""
PICTURE_PIXELS: Final = 25_000_000
"""Pixels of a decoded picture. Large JPEGs are decoded at an eighth of their size, so they may have more."""
FIELDS_BYTES: Final = 64 << 10
"""Size of an item's fields as JSON."""
MAX_HITS: Final = 1_000
QUICK_HITS: Final = 100
"""Hits or beams, whose states the generator keeps, up to which a search is quick."""
MAX_ITEMS: Final = 1_000
"""Items added by one request."""
MAX_PARTS: Final = 16
DEADLINE_MS: Final = 60_000
"""Longest time for a search, also if it has no deadline of its own."""
THUMBNAIL: Final = 256
"""Default length of a thumbnail's longer side in pixels."""


Text = Annotated[str, Field(max_length=10_000)]
ItemId = Annotated[
    str,
    Field(min_length=1, max_length=500),
    BeforeValidator(as_id, json_schema_input_type=str | int),
]
IndexName = Annotated[str, Field(max_length=200)]
Picture = Annotated[
    str,
    Field(
        max_length=100,
        description="Name of the part of multipart/form-data that is the picture. URLs are not fetched.",
    ),
]
Condition = Annotated[str, Field(max_length=2_000), AfterValidator(composed)]


class RequestBody(BaseModel):
    """Base of request bodies; unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SearchPart(RequestBody):
    """A text, a picture, both, or an item of the index, with a weight."""

    text: Text | None = None
    image: Picture | None = None
    id: ItemId | None = Field(None, description="An item of the index, instead of text and image.")
    weight: float = Field(1.0, ge=-100, le=100, description="Negative: less like this part.")


class SearchBody(RequestBody):
    """A search; without a query, items that conditions or a modality allow, what was added last first."""

    index: IndexName | None = Field(None, description="Required if the server has several indexes.")
    text: Text | None = Field(None, examples=["a striped green umbrella"])
    image: Picture | None = None
    parts: list[SearchPart] = Field(
        [],
        max_length=MAX_PARTS,
        description="The query is their weighted sum: an item and a text for 'this, but red', an item alone "
        "for 'more like this'. text and image form one more part of weight 1.",
    )
    combine: Literal["sum", "any"] = Field(
        "sum", description="any: search for each part by itself and interleave the hits."
    )
    instruction: Text | None = Field(None, description="Description of the wanted results.")
    modality: Modality | None = Field(None, description="Find only items of this modality.")
    where: list[Condition] = Field(
        [],
        max_length=50,
        description="Conditions on fields; all must hold.",
        examples=[["price<20", "colour in red,blue"]],
    )
    match: Condition | None = Field(
        None, description='Words that texts contain: beach OR sea -people "a phrase" begin*.'
    )
    hybrid: bool = Field(
        True,
        description="Raise items whose text or file name has words of the query, and put those first "
        "that have its codes, such as IMG_2034.",
    )
    k: int = Field(10, ge=1, le=MAX_HITS, description="Number of hits.")
    fields: list[Condition] | None = Field(
        None,
        max_length=100,
        description="Fields that hits come with. Left out: all; an empty list: none.",
    )
    offset: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description=f"Number of hits to skip, for later pages; with a query, at most {MAX_HITS:,} with k.",
    )
    beam: int | None = Field(None, ge=1, le=1_000, description="IDs kept at each level.")
    rerank: Rerank | None = Field(
        None, description=f"What orders the hits. With none, at most {QUICK_HITS} hits and beams."
    )
    router: Router | None = Field(
        None,
        description="With re-ranking: what finds candidates, the generator or the distance of codes.",
    )
    candidates: int | None = Field(
        None,
        ge=0,
        le=100_000,
        description="With re-ranking: stop decoding at this many IDs; 0: decode all levels.",
    )
    deadline_ms: int = Field(
        DEADLINE_MS,
        ge=1,
        le=DEADLINE_MS,
        description="Deadline; if it passes, the response is 504.",
    )


class ExplainBody(SearchBody):
    """A search, and an item whose rank is to be explained."""

    id: ItemId


def _whole_characters(fields: object) -> object:
    """Raise an error for half a character (a lone surrogate), as pydantic does for every other text."""
    json.dumps(fields, ensure_ascii=False).encode()
    return fields


class NewItem(RequestBody):
    """An item to add. It needs a text, an image, or both."""

    id: ItemId | None = Field(None, description="Left out: derived from the contents.")
    text: Text | None = None
    image: Picture | None = None
    fields: Annotated[dict[str, JsonValue] | None, AfterValidator(_whole_characters)] = Field(
        None, description="Fields to filter by."
    )


class NewItems(RequestBody):
    """Items to add."""

    items: list[NewItem] = Field(min_length=1, max_length=MAX_ITEMS)


class Timing(BaseModel):
    """Duration of a search in milliseconds."""

    queue: float = Field(description="Until a thread was free.")
    search: float


class SearchSettings(BaseModel):
    """Settings of a search."""

    beam: int
    candidates: int
    rerank: Rerank
    router: Router


class Item(BaseModel):
    """An item."""

    id: str
    modality: Modality
    text: str | None
    image: str | None = Field(description="Address of its picture on this server.")
    fields: dict[str, JsonValue]
    codes: list[int] = Field(description="Its ID: the code of its modality, then one per level.")


class SearchResult(BaseModel):
    """Hits of a search, best first."""

    request_id: str
    index: str
    took_ms: Timing
    settings: SearchSettings
    good_match: bool | None = Field(
        description="Whether the first hit likely matches; null if unknown."
    )
    hits: list[SearchHit] = Field(
        description="`image` is the address of the picture on this server."
    )


class LeftOut(BaseModel):
    """An item that could not be used."""

    id: str
    reason: str


class Added(BaseModel):
    """Outcome of adding items. Those not left out are on the disk and searchable."""

    added: int
    replaced: int
    unchanged: int
    left_out: list[LeftOut]
    ids: list[str] = Field(description="Ids of all items, in the order given.")


class Deleted(BaseModel):
    """Outcome of deleting items."""

    deleted: int
    missing: list[str] = Field(description="Ids that the index does not have.")


class IndexInfo(BaseModel):
    """Description of an index for clients."""

    name: str
    items: int
    modalities: dict[Modality, int]
    levels: list[int] = Field(description="Number of codes at each level of an ID.")
    fields: list[str] = Field(description="Names as conditions write them.", examples=["price"])
    instructions: list[str] = Field(description="Those that the model was trained with.")
    reads_images: bool = Field(description="Whether queries and items can have images.")
    stores_embeddings: bool = Field(description="Whether hits can be re-ranked by embeddings.")
    calibrated: bool = Field(description="Whether hits come with a probability.")
    writable: bool = Field(description="Whether you may add and delete items.")
    settings: SearchSettings = Field(description="Defaults of a search.")


class Indexes(BaseModel):
    """The indexes of this server."""

    indexes: list[IndexInfo]
    damaged: list[str] = Field(
        description="Names of those that cannot be read; the server's log says why."
    )


class FieldError(BaseModel):
    """An invalid field of a request."""

    field: str
    problem: str


class ProblemDetails(BaseModel):
    """An error (RFC 9457); its kind is the status."""

    title: str
    status: int
    detail: str = Field(description="What was given, what was expected, what to do.")
    request_id: str = Field(description="Also in the header X-Request-ID and in the server's log.")
    errors: list[FieldError] | None = Field(
        None, description="Fields of the request that are invalid."
    )
    left_out: list[LeftOut] | None = Field(None, description="Items that could not be used.")


PROBLEM_TYPE: Final = "application/problem+json"
STATUS: Final[Mapping[type[GeniusError], int]] = {
    DeadlinePassed: 504,
    UnknownItem: 404,
    HeldByAnother: 429,
    NotWritable: 503,
    UsageError: 422,
    BadData: 422,
}
"""Errors of the Python API that a client can do something about."""

Redact: TypeAlias = Callable[[str], str]
"""Removes from a message what clients must not see."""

log = logging.getLogger("genius_search.serve")


class Problem(HTTPException):
    """An error response; ``more`` are further members of :class:`ProblemDetails`."""

    def __init__(self, status: int, detail: str, **more: object) -> None:
        super().__init__(status, detail)
        self.more = more


def respond(error: BaseException, request_id: str, redact: Redact) -> Response:
    """Return the response to an error; unexpected errors are logged and hidden."""
    problem = _problem_of(error)
    if problem is None or isinstance(error, NotWritable | OSError):
        trace = None if isinstance(error, GeniusError) else error  # its message says all
        log.error("request %s failed: %s", request_id, error, exc_info=trace)
    problem = problem or Problem(
        500, "the server failed; its log has the details under this request_id"
    )
    status = problem.status_code
    details = ProblemDetails(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=redact(problem.detail),
        request_id=request_id,
        **problem.more,  # type: ignore[arg-type]
    )
    headers = {
        400: {"Connection": "close"},  # where this request ends may be understood in two ways
        401: {"WWW-Authenticate": "Bearer"},
        429: {"Retry-After": "1"},
    }.get(status)
    # Lone surrogates of a request cannot be encoded.
    body = json.dumps(details.model_dump(exclude_none=True), ensure_ascii=False).encode(
        "utf-8", "replace"
    )
    return Response(body, status, headers, PROBLEM_TYPE)


def _problem_of(error: BaseException) -> Problem | None:
    match error:
        case Problem():
            return error
        case HTTPException():
            return Problem(error.status_code, error.detail)
        case RequestValidationError() | ValidationError():
            fields = _invalid_fields(error)
            detail = f"{fields[0].field}: {fields[0].problem}".removeprefix(": ")
            return Problem(422, detail, errors=fields)
        case OSError() if error.errno in DISK_FULL:
            return Problem(
                507, "the server's disk is full; nothing was changed, try again when there is room"
            )
        case GeniusError():
            status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), None)
            return None if status is None else Problem(status, str(error))
        case _:
            return None


def _invalid_fields(error: RequestValidationError | ValidationError) -> list[FieldError]:
    """Return what is wrong with which fields, without their values; of very many errors only their number."""
    if isinstance(error, ValidationError):
        if error.error_count() > 20:  # listing all would take seconds
            problem = f"there are {error.error_count():,} invalid fields or values"
            return [FieldError(field="", problem=problem)]
        errors = [
            (one["loc"], one["msg"]) for one in error.errors(include_url=False, include_input=False)
        ]
    else:
        errors = [(one["loc"][1:], one["msg"]) for one in error.errors()]
    return [
        FieldError(field=".".join(map(str, place))[:200], problem=message[:300])
        for place, message in errors
    ]
