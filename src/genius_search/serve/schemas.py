"""Request and response bodies of the HTTP API.

Field names are those of the Python API. Anything beyond the limits is refused before it costs much.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    WrapValidator,
)

from genius_search.records import Modality

JSON_BYTES: Final = 256 << 10
"""Size of JSON that adds items, in a body of its own or as the part ``json`` of one with pictures."""
SEARCH_BYTES: Final = 64 << 10
"""Size of any other JSON, which keys that may only read can send: parsing stops all of Python."""
BODY_BYTES: Final = 32 << 20
"""Size of a multipart body."""
PICTURE_BYTES: Final = 16 << 20
PICTURE_PIXELS: Final = 25_000_000
"""Pixels of a decoded picture. Large JPEGs are decoded at an eighth of their size, so they may have more."""
FIELDS_BYTES: Final = 64 << 10
"""Size of an item's fields as JSON."""
FIELDS_DEPTH: Final = 16
"""Nesting depth of lists and objects in fields."""
MAX_HITS: Final = 1_000
MAX_ITEMS: Final = 1_000
"""Items added by one request."""
MAX_PARTS: Final = 16
DEADLINE_MS: Final = 60_000
"""Longest time for a search, also if it has no deadline of its own."""
THUMBNAIL: Final = 256
"""Default length of a thumbnail's longer side in pixels."""
MAX_ERRORS: Final = 20
"""Invalid fields named in one response."""


Text = Annotated[str, Field(max_length=10_000)]
ItemId = Annotated[str, Field(min_length=1, max_length=500)]
IndexName = Annotated[str, Field(max_length=200)]
Picture = Annotated[
    str,
    Field(
        max_length=100,
        description="Name of the part of multipart/form-data that is the picture. URLs are not fetched.",
    ),
]
PictureAddress = Annotated[str | None, Field(description="Address of its picture on this server.")]
Condition = Annotated[str, Field(max_length=2_000)]
Rerank = Literal["none", "codes", "embeddings"]
Router = Literal["generator", "geometry"]


class RequestBody(BaseModel):
    """Base of request bodies; unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ResponseBody(BaseModel):
    """Base of response bodies."""


class SearchPart(RequestBody):
    """A text, a picture, both, or an item of the index, with a weight."""

    text: Text | None = None
    image: Picture | None = None
    id: ItemId | None = Field(None, description="An item of the index, instead of text and image.")
    weight: float = Field(1.0, ge=-100, le=100, description="Negative: less like this part.")


class SearchBody(RequestBody):
    """A search."""

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
    match: Condition | None = Field(None, description="Words that the text of an item contains.")
    hybrid: bool = Field(
        True,
        description="Raise items whose text or file name has rare words of the query, and put those first "
        "that have its words with digits.",
    )
    k: int = Field(10, ge=1, le=MAX_HITS, description="Number of hits.")
    beam: int | None = Field(None, ge=1, le=1_000, description="IDs kept at each level.")
    rerank: Rerank | None = Field(None, description="What orders the hits.")
    router: Router | None = Field(
        None, description="With re-ranking: what finds candidates, the generator or the distance of codes."
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

    def picture_names(self) -> set[str]:
        """Return the names of all pictures."""
        return {image for image in (self.image, *(part.image for part in self.parts)) if image is not None}


class ExplainBody(SearchBody):
    """A search, and an item whose rank is to be explained."""

    id: ItemId


class NewItem(RequestBody):
    """An item to add. It needs a text, an image, or both."""

    id: ItemId | None = Field(None, description="Left out: derived from the contents.")
    text: Text | None = None
    image: Picture | None = None
    fields: dict[str, JsonValue] | None = Field(None, description="Fields to filter by.")


def explain_invalid(error: ValidationError) -> str:
    """Return what is wrong with an item, in a sentence."""
    if error.error_count() > MAX_ERRORS:  # listing all would take seconds
        return f"it has {error.error_count():,} invalid fields or values"
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    return f"{name}: {first['msg']}"[:300].removeprefix(": ")


def _leave_out_invalid(value: Any, read: Any) -> Any:  # a ValidatorFunctionWrapHandler, unknown to beartype
    try:
        return read(value)
    except ValidationError as error:
        name = value.get("id") if isinstance(value, dict) else None
        shown = name[:500] if isinstance(name, str) else ""
        return LeftOut(id=shown, reason=explain_invalid(error))


class NewItems(RequestBody):
    """Items to add."""

    # An invalid item is read as LeftOut, so that the others can be added.
    items: list[Annotated[NewItem, WrapValidator(_leave_out_invalid)]] = Field(
        min_length=1, max_length=MAX_ITEMS
    )


class Timing(ResponseBody):
    """Duration of a search in milliseconds."""

    queue: float = Field(description="Until a thread was free.")
    search: float


class SearchSettings(ResponseBody):
    """Settings of a search."""

    beam: int
    candidates: int
    rerank: Rerank
    router: Router


class ItemSummary(ResponseBody):
    """An item without its fields."""

    id: str
    modality: Modality
    text: str | None
    image: PictureAddress


class Item(ItemSummary):
    """An item."""

    fields: dict[str, JsonValue]
    codes: list[int] = Field(description="Its ID: the code of its modality, then one per level.")


class Hit(Item):
    """An item that was found."""

    rank: int
    score: float
    log_probabilities: list[float] = Field(
        description="Log-probability of each code that the generator decoded; empty if distances led."
    )
    probability: float | None = Field(
        description="Probability that it matches; null if the index is not calibrated."
    )


class SearchResult(ResponseBody):
    """Hits of a search, best first."""

    request_id: str
    index: str
    took_ms: Timing
    settings: SearchSettings
    good_match: bool | None = Field(description="Whether the first hit likely matches; null if unknown.")
    hits: list[Hit]


class LeftOut(ResponseBody):
    """An item that could not be used."""

    id: str
    reason: str


class Added(ResponseBody):
    """Outcome of adding items. Those not left out are on the disk and searchable."""

    added: int
    replaced: int
    unchanged: int
    left_out: list[LeftOut]
    ids: list[str] = Field(description="Ids of all items, in the order given.")


class Deleted(ResponseBody):
    """Outcome of deleting items."""

    deleted: int
    missing: list[str] = Field(description="Ids that the index does not have.")


class FieldInfo(ResponseBody):
    """A field of the items, found in a sample of them."""

    name: str = Field(description="Name as written in a condition.", examples=["price", "product.colour"])
    kind: Literal["number", "text", "truth", "list"]
    examples: list[JsonValue]


class Instruction(ResponseBody):
    """An instruction that the model was trained with."""

    text: str
    modality: Modality = Field(description="Modality of the wanted items.")
    query: Modality = Field(description="Modality of the queries it was trained with.")


class IndexInfo(ResponseBody):
    """Description of an index for clients."""

    name: str
    items: int
    modalities: dict[Modality, int]
    levels: list[int] = Field(description="Number of codes at each level of an ID.")
    fields: list[FieldInfo]
    instructions: list[Instruction]
    reads_images: bool = Field(description="Whether queries and items can have images.")
    stores_embeddings: bool = Field(description="Whether hits can be re-ranked by embeddings.")
    calibrated: bool = Field(description="Whether hits come with a probability.")
    writable: bool = Field(description="Whether you may add and delete items.")
    settings: SearchSettings = Field(description="Defaults of a search.")


class Indexes(ResponseBody):
    """The indexes of this server."""

    indexes: list[IndexInfo]


class Health(ResponseBody):
    """State of the server."""

    status: Literal["ok"] = "ok"


class ProblemDetails(ResponseBody):
    """An error (RFC 9457)."""

    type: str = Field(description="Kind of error.", examples=["urn:genius:not-found"])
    title: str
    status: int
    detail: str = Field(description="What was given, what was expected, what to do.")
    request_id: str = Field(description="Also in the header X-Request-ID and in the server's log.")
    errors: list[dict[str, str]] | None = Field(
        None, description="Fields of the request that are invalid: field and problem."
    )
    left_out: list[LeftOut] | None = Field(None, description="Items that could not be used.")
