"""Request and response bodies of the HTTP API, shared by the service and its client.

Field names are those of the Python API, and responses are validated from its objects (``from_attributes``).
The validation context is the name of the index, which turns image paths into URLs of this server.
"""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    WrapValidator,
)

from genius_search.records import Modality
from genius_search.serve import limits

THUMBNAIL: Final = 256
"""Default length of a thumbnail's longer side in pixels."""
PICTURE_PATH: Final = "/v1/items/picture"
MAX_ERRORS: Final = 20
"""Invalid fields named in one response."""


def _encode_picture(picture: object) -> object:
    """Encode an image given as bytes or a file in base64, for JSON."""
    if isinstance(picture, Path):
        picture = picture.read_bytes()
    return base64.b64encode(picture).decode() if isinstance(picture, bytes) else picture


def _link_picture(path: str | None, info: Any) -> str | None:  # a ValidationInfo, which beartype cannot check
    if path is None or info.context is None:
        return path
    query = urlencode({"index": info.context, "id": info.data["id"], "size": THUMBNAIL})
    return f"{PICTURE_PATH}?{query}"


def clean_json(value: Any, depth: int = 2 * limits.FIELDS_DEPTH) -> Any:
    """Make a stored value valid JSON: finite numbers, valid Unicode, bounded depth."""
    match value:
        case dict() | list() if not depth:
            return None
        case dict():
            return {clean_json(key): clean_json(inner, depth - 1) for key, inner in value.items()}
        case list():
            return [clean_json(inner, depth - 1) for inner in value]
        case str():
            return value.encode("utf-8", "replace").decode()
        case float():
            return value if math.isfinite(value) else None
        case _:
            return value


Text = Annotated[str, Field(max_length=limits.TEXT_CHARACTERS)]
ItemId = Annotated[str, Field(min_length=1, max_length=limits.ID_CHARACTERS)]
IndexName = Annotated[str, Field(max_length=limits.INDEX_CHARACTERS)]
Picture = Annotated[
    str,
    Field(
        max_length=limits.PICTURE_CHARACTERS,
        description="Base64, or a data: URL. Other URLs are not fetched.",
    ),
    BeforeValidator(_encode_picture),
]
PictureAddress = Annotated[
    str | None, Field(description="Address of its picture on this server."), AfterValidator(_link_picture)
]
Condition = Annotated[str, Field(max_length=limits.CONDITION_CHARACTERS)]
Fields = Annotated[dict[str, JsonValue], BeforeValidator(clean_json)]
FoundModality = Annotated[Modality, Field(strict=False)]
Rerank = Literal["none", "codes", "embeddings"]
Router = Literal["generator", "geometry"]


class RequestBody(BaseModel):
    """Base of request bodies; unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ResponseBody(BaseModel):
    """Base of response bodies; clients ignore fields added by a newer service."""

    model_config = ConfigDict(from_attributes=True)


class SearchPart(RequestBody):
    """A text, a picture, both, or an item of the index, with a weight."""

    text: Text | None = None
    image: Picture | None = None
    id: ItemId | None = Field(None, description="An item of the index, instead of text and image.")
    weight: float = Field(
        1.0, ge=-limits.WEIGHT, le=limits.WEIGHT, description="Negative: less like this part."
    )


class SearchBody(RequestBody):
    """A search."""

    index: IndexName | None = Field(None, description="Required if the server has several indexes.")
    text: Text | None = Field(None, examples=["a striped green umbrella"])
    image: Picture | None = None
    parts: list[SearchPart] = Field(
        [],
        max_length=limits.PARTS,
        description="The query is their weighted sum: an item and a text for 'this, but red', an item alone "
        "for 'more like this'. text and image form one more part of weight 1.",
    )
    combine: Literal["sum", "any"] = Field(
        "sum", description="any: search for each part by itself and interleave the hits."
    )
    instruction: Text | None = Field(None, description="Description of the wanted results.")
    modality: FoundModality | None = Field(None, description="Find only items of this modality.")
    where: list[Condition] = Field(
        [],
        max_length=limits.CONDITIONS,
        description="Conditions on fields; all must hold.",
        examples=[["price<20", "colour in red,blue"]],
    )
    match: Condition | None = Field(None, description="Words that the text of an item contains.")
    hybrid: bool = Field(
        True,
        description="Raise items whose text or file name has rare words of the query, and put those first "
        "that have its words with digits.",
    )
    k: int = Field(10, ge=1, le=limits.HITS, description="Number of hits.")
    beam: int | None = Field(None, ge=1, le=limits.BEAM, description="IDs kept at each level.")
    rerank: Rerank | None = Field(None, description="What orders the hits.")
    router: Router | None = Field(
        None, description="With re-ranking: what finds candidates, the generator or the distance of codes."
    )
    candidates: int | None = Field(
        None,
        ge=0,
        le=limits.CANDIDATES,
        description="With re-ranking: stop decoding at this many IDs; 0: decode all levels.",
    )
    deadline_ms: int = Field(
        limits.DEADLINE_MS,
        ge=1,
        le=limits.DEADLINE_MS,
        description="Deadline; if it passes, the response is 504.",
    )


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
        shown = name[: limits.ID_CHARACTERS] if isinstance(name, str) else ""
        return LeftOut(id=shown, reason=explain_invalid(error))


class NewItems(RequestBody):
    """Items to add."""

    # An invalid item is read as LeftOut, so that the others can be added.
    items: list[Annotated[NewItem, WrapValidator(_leave_out_invalid)]] = Field(
        min_length=1, max_length=limits.ITEMS
    )


class ItemIds(RequestBody):
    """Items to delete."""

    ids: list[ItemId] = Field(min_length=1, max_length=limits.IDS)


class Timing(ResponseBody):
    """Duration of a search by stage, in milliseconds."""

    queue: float
    encode: float = Field(description="Of the whole batch.")
    search: float = Field(description="Of the whole batch.")
    total: float


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

    fields: Fields
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


PROBABILITY: Final = "Probability among the allowed codes after this prefix; null if distances led."


class Sibling(ResponseBody):
    """An alternative to an item's code."""

    code: int
    log_probability: float | None
    probability: float | None = Field(description=PROBABILITY)
    items: int
    examples: list[ItemSummary]


class LevelStep(ResponseBody):
    """One code of an item's ID among those that the search could choose instead."""

    level: int
    name: str
    code: int
    log_probability: float | None = Field(description="Contribution to the score of a beam.")
    probability: float | None = Field(description=PROBABILITY)
    rank: int = Field(description="Rank among its siblings, from 1: by probability, or by distance.")
    num_siblings: int = Field(description="Including itself.")
    items: int = Field(description="Items that share the ID up to here.")
    siblings: list[Sibling] = Field(description="The most probable, or nearest, perhaps including itself.")


class Explanation(ResponseBody):
    """Why a search finds an item, or does not."""

    request_id: str = ""
    index: str = ""
    item: ItemSummary
    codes: list[int]
    is_allowed: bool = Field(description="Whether modality and conditions allow the item.")
    rank: int | None = Field(description="Rank among all items under the beams; null if not reached.")
    score: float | None
    touched: int = Field(description="Number of items under the beams.")
    beam: int
    levels: list[LevelStep]
    neighbours: list[ItemSummary] = Field([], description="Other items that share most of its codes.")


class CodeChild(ResponseBody):
    """A code that continues a prefix."""

    code: int
    items: int
    share: float = Field(description="Share of the items below the prefix.")
    examples: list[ItemSummary]


class CodeNode(ResponseBody):
    """A prefix of IDs, and what lies below it."""

    prefix: list[int]
    level: int = Field(description="Length of the prefix.")
    items: int
    share: float = Field(description="Of all items.")
    entropy: float | None = Field(description="Entropy of the next code in bits.")
    num_children: int = Field(description="Codes that continue it.")
    children: list[CodeChild] = Field(description="The largest first.")
    examples: list[ItemSummary]
    truncated: bool = Field(description="True if not all children are listed.")


class SharedGroup(ResponseBody):
    """Items whose IDs begin with the same codes."""

    codes: list[int]
    items: int
    examples: list[ItemSummary] = Field(description="All of them, unless there are many.")


class SharedPage(ResponseBody):
    """Groups of items that share codes, largest first."""

    total: int = Field(description="Number of groups.")
    items: int = Field(description="Items in all of them.")
    groups: list[SharedGroup]


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


class InvalidField(ResponseBody):
    """A field of the request and what is wrong with it."""

    field: str
    problem: str


class ProblemDetails(ResponseBody):
    """An error (RFC 9457)."""

    type: str = Field(description="Kind of error.", examples=["urn:genius:not-found"])
    title: str
    status: int
    detail: str = Field(description="What was given, what was expected, what to do.")
    request_id: str = Field(description="Also in the header X-Request-ID and in the server's log.")
    errors: list[InvalidField] | None = Field(None, description="Fields of the request that are invalid.")
    left_out: list[LeftOut] | None = Field(None, description="Items that could not be used.")
