"""Request and response bodies of the HTTP API, and errors as problem details (RFC 9457).

Fields have the same names as in the Python API. Requests beyond the limits are refused before they
cost much. Errors that a client can correct are explained in the response; errors of the server are
logged with the id of the request, and hidden from clients.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

import numpy as np
from fastapi.exceptions import RequestValidationError
from jaxtyping import Shaped
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response

from genius_search.border import as_id
from genius_search.config import Rerank, Router
from genius_search.errors import BadData, DeadlinePassed, GeniusError, UsageError
from genius_search.index.hits import CutOff, SearchHit
from genius_search.index.snapshot import UnknownItem
from genius_search.index.writer import HeldByAnother, NotWritable
from genius_search.records import Modality, composed
from genius_search.writing import DISK_FULL

JSON_BYTES: Final = 4 << 20
"""Maximum size of JSON that adds items, as a body or as the part ``json`` of a multipart body."""
JSON_VALUES: Final = 128 << 10
"""Maximum number of values in such JSON, counted by its commas. Parsing takes time for each value,
and blocks all Python threads."""
SEARCH_BYTES: Final = 1 << 20
"""Maximum size of other JSON."""
SEARCH_VALUES: Final = 32 << 10
"""Maximum number of values in other JSON. The limits are lower, because clients with a read key can
send such JSON."""
SEARCH_MEMBERS: Final = 8 << 10
"""Maximum number of colons and opening brackets in other JSON. An unknown field or a nested list
takes four times as long as a number, so that vectors may have more numbers than this."""
BODY_BYTES: Final = 32 << 20
"""Maximum size of a multipart body."""
PICTURE_PIXELS: Final = 25_000_000
"""Maximum number of pixels of a decoded picture. A JPEG may have more, since large JPEGs are
decoded at down to an eighth of their width and height."""
FIELDS_BYTES: Final = 64 << 10
"""Maximum size of the fields of an item as JSON."""
MAX_HTTP_HITS: Final = 1_000
"""Maximum number of hits of a request, including skipped ones if there is a query."""
QUICK_HITS: Final = 100
"""Number of hits and beams up to which a search counts as quick. The generator stores a state for
each beam."""
MAX_ITEMS: Final = 1_000
"""Maximum number of items that one request adds."""
MAX_QUERY_PARTS: Final = 16
"""Maximum number of parts of a query."""
MAX_FACETS: Final = 20
"""Maximum number of fields whose values a search counts."""
MAX_SEARCHES: Final = 100
"""Maximum number of searches in one request."""
DEADLINE_MS: Final = 60_000
"""Maximum and default deadline of a search, in milliseconds."""
EXPECTED_VECTOR: Final = "expected a list of numbers, or base64 of float32"
THUMBNAIL: Final = 256
"""Default length of the longer side of a thumbnail, in pixels."""


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
        description="Name of the part of multipart/form-data that contains the picture. URLs are "
        "not fetched.",
    ),
]
Condition = Annotated[str, Field(max_length=2_000), AfterValidator(composed)]


def read_vector(value: str | list[float]) -> Shaped[np.ndarray, " dim"]:
    """Return the numbers of a JSON list, or of base64 of little-endian float32."""
    if isinstance(value, str):
        try:
            data = base64.b64decode(value, validate=True)
        except ValueError:
            raise _vector_error(EXPECTED_VECTOR) from None
        if len(data) % 4:
            raise _vector_error(f"expected 4 bytes for each number in base64, got {len(data)}")
        vector = np.frombuffer(data, dtype="<f4")
    else:
        vector = np.asarray(value, dtype=np.float64)
    if not np.isfinite(vector).all():
        raise _vector_error("a number is not finite")
    return vector


def _vector_error(problem: str) -> PydanticCustomError:
    return PydanticCustomError("vector", "{problem}", {"problem": problem})


class _VectorSchema:
    """How pydantic reads and documents a vector."""

    @staticmethod
    def __get_pydantic_core_schema__(*_: Any) -> CoreSchema:
        numbers = core_schema.list_schema(core_schema.float_schema())
        either = core_schema.union_schema(
            [numbers, core_schema.str_schema()],
            mode="left_to_right",
            custom_error_type="vector",
            custom_error_message=EXPECTED_VECTOR,
        )
        return core_schema.no_info_after_validator_function(read_vector, either)

    @staticmethod
    def __get_pydantic_json_schema__(*_: Any) -> dict[str, Any]:
        return {
            "anyOf": [
                {"type": "array", "items": {"type": "number"}},
                {"type": "string", "contentEncoding": "base64"},
            ],
            "description": "Numbers of the index's encoder: a list, or base64 of little-endian "
            "float32.",
        }


Vector = Annotated[np.ndarray, _VectorSchema]


class RequestBody(BaseModel):
    """Base class of request bodies. Unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SearchPart(RequestBody):
    """A weighted part of a query: a text, a picture or both; an item of the index; or a vector."""

    text: Text | None = None
    image: Picture | None = None
    vector: Vector | None = None
    id: ItemId | None = Field(None, description="An item of the index, instead of text and image.")
    weight: float = Field(1.0, ge=-100, le=100, description="Negative: less like this part.")


class Search(RequestBody):
    """A search. Without a query, it lists matching items, newest first."""

    text: Text | None = Field(None, examples=["a striped green umbrella"])
    image: Picture | None = None
    vector: Vector | None = None
    parts: list[SearchPart] = Field(
        [],
        max_length=MAX_QUERY_PARTS,
        description="Parts of the query, whose weighted sum is searched for: an item and a text "
        "for 'this, but red', an item alone for 'more like this'. text and image form a further "
        "part of weight 1, and vector another.",
    )
    combine: Literal["sum", "any"] = Field(
        "sum", description="any: search for each part separately, and interleave the hits."
    )
    instruction: Text | None = Field(None, description="Description of the results to find.")
    modality: Modality | None = Field(None, description="Find only items of this modality.")
    where: list[Condition] = Field(
        [],
        max_length=50,
        description="Conditions on fields; all must hold.",
        examples=[["price<20", "colour in red,blue"]],
    )
    match: Condition | None = Field(
        None, description='Words that the text contains: beach OR sea -people "a phrase" begin*.'
    )
    hybrid: bool = Field(
        True,
        description="Raise items whose text or file name contains words of the query, and pin "
        "items whose code the query names, such as IMG_2034.",
    )
    k: int = Field(10, ge=1, le=MAX_HTTP_HITS, description="Number of hits.")
    fields: list[Condition] | None = Field(
        None,
        max_length=100,
        description="Names of the fields to return with each hit; an empty list for none. Default: "
        "all fields.",
    )
    offset: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Number of hits to skip, for further pages. With a query, k and offset "
        f"together are at most {MAX_HTTP_HITS:,}.",
    )
    order_by: Condition | None = Field(
        None,
        description="Field to sort by, after a minus sign descending. Without a query, all items "
        "that meet the conditions are sorted, with one the hits above a cut-off.",
        examples=["-price"],
    )
    facets: list[Condition] = Field(
        [],
        max_length=MAX_FACETS,
        description="Fields whose values to count among all items that meet the conditions. "
        "price:0,10,50 counts ranges of numbers, price:ranges automatic ones, taken:month months.",
    )
    group_by: Condition | None = Field(
        None,
        description="Return one hit for each value of this field, for each content (content), or "
        "for near-duplicates (near).",
    )
    beam: int | None = Field(
        None,
        ge=1,
        le=1_000,
        description="Number of partial IDs to follow at each level; has no effect in an index of "
        "cells.",
    )
    rerank: Rerank | None = Field(
        None,
        description="How to rank candidates: by codes, by embeddings, or in the order of the "
        f"generator (none), which is limited to {QUICK_HITS} hits and beams.",
    )
    router: Router | None = Field(
        None,
        description="With re-ranking: how to find candidates, with the generator or by the "
        "distance between codes and query (geometry).",
    )


class OneSearch(Search):
    """A search of an index."""

    index: IndexName | None = Field(None, description="Required if the server has several indexes.")
    deadline_ms: int = Field(
        DEADLINE_MS,
        ge=1,
        le=DEADLINE_MS,
        description="Deadline of the search in milliseconds, after which the response is 504.",
    )


class SearchBody(OneSearch):
    """A search, or several."""

    searches: list[Search] | None = Field(
        None,
        min_length=1,
        max_length=MAX_SEARCHES,
        description="Searches to run in one batch, instead of one search. k and offset of all "
        f"together are at most {MAX_HTTP_HITS:,}.",
    )

    @model_validator(mode="after")
    def _check_searches(self) -> Self:
        """Refuse a query besides several searches."""
        misplaced = self.model_fields_set - {"searches", "index", "deadline_ms"}
        if self.searches is not None and misplaced:
            raise PydanticCustomError(
                "searches", "searches: write {name} in each search", {"name": min(misplaced)}
            )
        return self


SIMPLE_FIELDS: Final = (
    "text",
    "where",
    "match",
    "modality",
    "hybrid",
    "k",
    "offset",
    "fields",
    "order_by",
    "facets",
    "group_by",
    "index",
    "deadline_ms",
)
"""Fields of a search that an address may have as parameters."""
SearchParameters: Final = create_model(
    "SearchParameters",
    __config__=ConfigDict(extra="forbid"),
    __doc__="A search as the parameters of an address.",
    **{
        name: (OneSearch.model_fields[name].annotation, OneSearch.model_fields[name])
        for name in SIMPLE_FIELDS
    },
)  # type: ignore[call-overload]


class ExplainBody(OneSearch):
    """A search and an item: the one to explain, or the one that was chosen."""

    id: ItemId


def refuse_surrogates(fields: object) -> object:
    """Raise an error for lone surrogates, which pydantic accepts in nested JSON only."""
    json.dumps(fields, ensure_ascii=False).encode()
    return fields


class NewItem(RequestBody):
    """An item to add. It needs a text, an image or both, or a vector."""

    id: ItemId | None = Field(None, description="Default: a hash of the contents.")
    text: Text | None = None
    image: Picture | None = None
    vector: Vector | None = None
    modality: Modality | None = Field(
        None, description="Modality of an item with a vector. Default: text."
    )
    fields: Annotated[dict[str, JsonValue] | None, AfterValidator(refuse_surrogates)] = Field(
        None, description="Fields to filter by."
    )


class NewItems(RequestBody):
    """Items to add."""

    items: list[NewItem] = Field(min_length=1, max_length=MAX_ITEMS)


class Timing(BaseModel):
    """Duration of a search in milliseconds."""

    queue: float = Field(description="Time until a thread was free.")
    search: float = Field(description="Time of the search itself.")


class SearchSettings(BaseModel):
    """Settings of a search."""

    beam: int
    candidates: int
    rerank: Rerank
    router: Router


class PictureLine(BaseModel):
    """A line of text in a picture."""

    words: str
    box: list[float] = Field(
        description="Left, top, right and bottom edge, as shares of the picture's width and height."
    )


class Item(BaseModel):
    """An item."""

    id: str
    modality: Modality
    text: str | None
    image: str | None = Field(description="Path of its picture on this server.")
    fields: dict[str, JsonValue]
    codes: list[int] = Field(description="Its ID: the code of its modality, then a code per level.")
    picture_text: list[PictureLine] = Field(
        description="Lines of text in its picture; empty if there are none, or were not read."
    )


class FacetValue(BaseModel):
    """A value of a field, and the number of items that have it."""

    value: JsonValue
    items: int


class SearchHits(BaseModel):
    """Hits of a search, best first."""

    settings: SearchSettings
    good_match: bool | None = Field(
        description="Whether the first hit is probably right; null if unknown."
    )
    facets: dict[str, list[FacetValue]] | None = Field(
        None, description="Up to 100 values of each counted field, the most frequent first."
    )
    more_in_group: list[int] | None = Field(
        None, description="With group_by: the number of other items in the group of each hit."
    )
    cut_off: CutOff | None = Field(
        None, description="With a query and order_by: which hits were sorted."
    )
    hits: list[SearchHit] = Field(
        description="The hits. `image` is the path of the picture on this server."
    )


class SearchResult(SearchHits):
    """The hits of one search, best first."""

    request_id: str
    index: str
    took_ms: Timing


class SearchResults(BaseModel):
    """The hits of each of the searches."""

    request_id: str
    index: str
    took_ms: Timing
    results: list[SearchHits]


class LeftOut(BaseModel):
    """An item that could not be used."""

    id: str
    reason: str


class Added(BaseModel):
    """Result of adding items. Items that were not left out are on the disk and searchable."""

    added: int
    replaced: int
    unchanged: int
    left_out: list[LeftOut]
    ids: list[str] = Field(description="Ids of all items, in the order of the request.")


class Deleted(BaseModel):
    """Result of deleting items."""

    deleted: int
    missing: list[str] = Field(description="Ids that the index does not have.")


class IndexInfo(BaseModel):
    """Description of an index."""

    name: str
    items: int
    modalities: dict[Modality, int]
    levels: list[int] = Field(description="Number of codes at each level of an ID.")
    fields: list[str] = Field(
        description="Names of the items' fields, as in conditions.", examples=["price"]
    )
    instructions: list[str] = Field(description="Instructions that the model was trained with.")
    reads_images: bool = Field(description="Whether queries and items can have images.")
    encoder: str = Field(
        description="The encoder of texts and images, or vectors:N for an index of vectors.",
        examples=["text:wordllama"],
    )
    dim: int = Field(description="Number of numbers in a vector of a query or an item.")
    stores_embeddings: bool = Field(description="Whether hits can be re-ranked by embeddings.")
    calibrated: bool = Field(description="Whether hits have a probability.")
    writable: bool = Field(
        description="Whether your key allows changes, and the server can write to the index."
    )
    settings: SearchSettings = Field(description="Default settings of a search.")


class Indexes(BaseModel):
    """The indexes of this server."""

    indexes: list[IndexInfo]
    damaged: list[str] = Field(
        description="Names of indexes that cannot be read; the log of the server says why."
    )


class FieldError(BaseModel):
    """An invalid field of a request."""

    field: str
    problem: str


class ProblemDetails(BaseModel):
    """An error (RFC 9457), classified by its status."""

    title: str
    status: int
    detail: str = Field(description="The problem, and how to solve it.")
    request_id: str = Field(
        description="Id of the request, also in the header X-Request-ID and in the server's log."
    )
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
"""Errors of the Python API that are not errors of the server -> HTTP status."""

LATE: Final = (
    "no result before the deadline; set a later deadline, or retry when the service is less busy"
)
Redact: TypeAlias = Callable[[str], str]
"""A function that removes private paths from a message."""

log = logging.getLogger("genius_search.serve")


class Problem(HTTPException):
    """An error response. ``more`` are further members of :class:`ProblemDetails`."""

    def __init__(
        self, status: int, detail: str, headers: dict[str, str] | None = None, **more: object
    ) -> None:
        super().__init__(status, detail, headers)
        self.more = more


def respond(error: BaseException, request_id: str, redact: Redact) -> Response:
    """Return the response to an error. Unexpected errors are logged, and hidden from the client."""
    problem = _problem_of(error)
    if problem is None or isinstance(error, NotWritable | OSError):
        # The message of a GeniusError needs no traceback.
        trace = None if isinstance(error, GeniusError) else error
        log.error("request %s failed: %s", request_id, error, exc_info=trace)
    problem = problem or Problem(
        500, "the server failed; see its log for the details under this request_id"
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
        # Of a malformed request, client and proxy may disagree where it ends.
        400: {"Connection": "close"},
        401: {"WWW-Authenticate": "Bearer"},
        429: {"Retry-After": "1"},
    }.get(status, {}) | dict(problem.headers or {})
    # Lone surrogates, copied from the request, cannot be encoded and are replaced.
    body = json.dumps(details.model_dump(exclude_none=True), ensure_ascii=False).encode(
        "utf-8", "replace"
    )
    return Response(body, status, headers, PROBLEM_TYPE)


def status_of(error: GeniusError) -> int | None:
    """Return the status of an error that a client can correct; None for errors of the server."""
    return next((STATUS[base] for base in type(error).__mro__ if base in STATUS), None)


def _problem_of(error: BaseException) -> Problem | None:
    match error:
        case Problem():
            return error
        case HTTPException():
            return Problem(error.status_code, error.detail, dict(error.headers or {}))
        case RequestValidationError() | ValidationError():
            fields = _invalid_fields(error)
            detail = f"{fields[0].field}: {fields[0].problem}".removeprefix(": ")
            return Problem(422, detail, errors=fields)
        case OSError() if error.errno in DISK_FULL:
            return Problem(
                507, "the server's disk is full; nothing was changed, retry when space is available"
            )
        case GeniusError():
            status = status_of(error)
            return None if status is None else Problem(status, str(error))
        case _:
            return None


def _invalid_fields(error: RequestValidationError | ValidationError) -> list[FieldError]:
    """Return the invalid fields, without their values. More than 20 errors are only counted."""
    if isinstance(error, ValidationError):
        if error.error_count() > 20:  # listing thousands of errors would take seconds
            problem = f"there are {error.error_count():,} invalid fields or values"
            return [FieldError(field="", problem=problem)]
        errors = [
            (details["loc"], details["msg"])
            for details in error.errors(include_url=False, include_input=False)
        ]
    else:
        # The first element of the location is "query" or "body".
        errors = [(details["loc"][1:], details["msg"]) for details in error.errors()]
    return [
        FieldError(field=spell_location(location)[:200], problem=message[:300])
        for location, message in errors
    ]


def spell_location(location: Sequence[int | str]) -> str:
    """Return the path of a field in JSON.

    >>> spell_location(["searches", 2, "vector"])
    'searches[2].vector'
    """
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")
