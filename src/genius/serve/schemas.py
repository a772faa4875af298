"""What is asked and answered over HTTP, as JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from genius.serve import limits

ModalityName = Literal["image", "text", "image-text"]
Rerank = Literal["none", "codes", "embeddings"]
Became = Literal["added", "replaced", "unchanged", "left out"]

Text = Annotated[str, Field(max_length=limits.TEXT_CHARACTERS)]
ItemId = Annotated[str, Field(min_length=1, max_length=limits.ID_CHARACTERS)]
Picture = Annotated[str, Field(max_length=limits.PICTURE_CHARACTERS)]
Condition = Annotated[str, Field(max_length=limits.CONDITION_CHARACTERS)]


class Asked(BaseModel):
    """What comes in: a field that is not known is a mistake, and is said to be one."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class PartBody(Asked):
    """A text, a picture, both, or an item of the index, and how much it counts."""

    text: Text | None = None
    image: Picture | None = Field(None, description="Base64, or a data: URL. Other URLs are not fetched.")
    item: ItemId | None = Field(None, description="An item of the index, in place of text and image.")
    weight: float = Field(1.0, ge=-limits.WEIGHT, le=limits.WEIGHT, description="Negative: away from it.")


class SearchBody(Asked):
    """What is looked for."""

    index: str | None = Field(None, max_length=200, description="Its name; needed where there are several.")
    text: Text | None = Field(None, examples=["a striped green umbrella"])
    image: Picture | None = Field(None, description="Base64, or a data: URL. Other URLs are not fetched.")
    parts: list[PartBody] = Field(
        [],
        max_length=limits.PARTS,
        description="Their weighted sum is looked for: an item and a text for 'this, but red', an item alone "
        "for 'more like this'. text and image beside it are one more part of weight 1.",
    )
    instruction: Text | None = Field(None, description="What is wanted, in words.")
    modality: ModalityName | None = Field(None, description="Find only such items.")
    k: int = Field(10, ge=1, le=limits.HITS)
    beam: int | None = Field(None, ge=1, le=limits.BEAM, description="IDs kept at each level.")
    rerank: Rerank | None = Field(None, description="What orders the hits.")
    leaves: int | None = Field(
        None,
        ge=0,
        le=limits.LEAVES,
        description="With a re-ranking: stop decoding at so many IDs; 0: do not.",
    )
    where: list[Condition] = Field(
        [], max_length=limits.CONDITIONS, examples=[["price<20", "colour in red,blue"]]
    )
    match: Condition | None = Field(None, description="Words that the items' texts contain.")
    deadline_ms: int | None = Field(
        None, ge=1, le=limits.DEADLINE_MS, description="Answer by then, or not at all."
    )


class ExplainBody(SearchBody):
    """A search, and the item that is to be explained."""

    id: ItemId


class Took(BaseModel):
    """Milliseconds."""

    queue: float
    encode: float
    search: float
    total: float


class SettingsUsed(BaseModel):
    """How it was searched."""

    beam: int
    leaves: int
    rerank: Rerank


class ItemBody(BaseModel):
    """An item as it is known here."""

    id: str
    modality: ModalityName
    text: str | None
    image: str | None = Field(description="Where its picture is, on this server.")
    fields: dict[str, JsonValue]
    codes: list[int] = Field(description="Its ID: the modality's code, then one a level.")


class HitBody(ItemBody):
    """An item that was found."""

    rank: int
    score: float
    probability: float | None = Field(description="That it is a match, where the model is calibrated.")
    log_probabilities: list[float] = Field(description="Of the codes that the generator wrote.")


class SearchAnswer(BaseModel):
    """What was found, best first."""

    request_id: str
    index: str
    took_ms: Took
    settings: SettingsUsed
    good_match: bool | None = Field(description="Whether anything found is likely what was meant.")
    hits: list[HitBody]


class ExampleBody(BaseModel):
    """An item, in short."""

    id: str
    modality: ModalityName
    text: str | None
    image: str | None = Field(description="Where its picture is, on this server.")


class SiblingBody(BaseModel):
    """A code that might have come instead."""

    code: int
    log_probability: float
    probability: float = Field(description="Among the codes that exist there and may be found.")
    items: int
    examples: list[ExampleBody]


class LevelBody(BaseModel):
    """What the generator says of one code of an item's ID."""

    level: int
    name: str
    code: int
    log_probability: float = Field(description="What it adds to the score of a beam.")
    probability: float = Field(description="Among the codes that exist there and may be found.")
    rank_among_siblings: int = Field(description="From 1.")
    num_siblings: int = Field(description="With itself.")
    items_below: int = Field(description="Items that share the ID up to here.")
    kept: bool | None = Field(description="Whether the beam kept it; null: it was not decoded so far.")
    siblings: list[SiblingBody] = Field(description="The most probable, perhaps with itself.")


class ExplainAnswer(BaseModel):
    """Why a search finds an item, or does not."""

    request_id: str
    index: str
    id: str
    codes: list[int]
    is_allowed: bool = Field(description="Whether modality and conditions let it be found.")
    rank: int | None = Field(description="Among all that the search looked at; null: it was not reached.")
    score: float | None
    touched: int = Field(description="Items that the search looked at.")
    beam: int
    lost_at: int | None = Field(description="The level at which the beam dropped it.")
    kept_by_beam: int | None = Field(description="A beam that keeps it, where this one does not.")
    levels: list[LevelBody]
    shares_prefix: list[ExampleBody] = Field(description="Other items that share the most of its codes.")


class CodeChildBody(BaseModel):
    """A code that continues a prefix."""

    code: int
    items: int
    share: float = Field(description="Of the items below the prefix.")
    examples: list[ExampleBody]


class CodeNodeBody(BaseModel):
    """A prefix of IDs, and what lies below it."""

    prefix: list[int]
    level: int = Field(description="Codes in the prefix.")
    items: int
    share: float = Field(description="Of all items.")
    entropy: float | None = Field(description="Bits that the next code says of the items here.")
    branches: int = Field(description="Codes that continue it.")
    children: list[CodeChildBody] = Field(description="Those of most items first.")
    examples: list[ExampleBody]
    truncated: bool = Field(description="Whether there are more children than are listed.")


class SharedGroupBody(BaseModel):
    """Items whose IDs begin with the same codes."""

    codes: list[int]
    count: int
    items: list[ExampleBody] = Field(description="All of them, unless there are many.")


class SharedAnswer(BaseModel):
    """Groups of items that share codes, largest first."""

    total: int = Field(description="Groups there are.")
    items: int = Field(description="Items in all of them.")
    groups: list[SharedGroupBody]


class NewItemBody(Asked):
    """An item to be added; it needs a text, an image, or both."""

    id: ItemId | None = Field(None, description="Left out: made from its contents.")
    text: Text | None = None
    image: Picture | None = Field(None, description="Base64, or a data: URL. Other URLs are not fetched.")
    fields: dict[str, JsonValue] | None = Field(None, description="What to filter by.")


class NewItemsBody(Asked):
    """Items to be added."""

    items: list[NewItemBody] = Field(min_length=1, max_length=limits.ITEMS)


class LeftOutBody(BaseModel):
    """An item that could not be used."""

    id: str
    reason: str


class AddedAnswer(BaseModel):
    """What became of items that were to be added; those that are not left out are on the disk and found."""

    added: int
    replaced: int
    unchanged: int
    left_out: list[LeftOutBody]
    ids: list[str] = Field(description="Of all of them, in the order in which they came.")


class IdsBody(Asked):
    """Items to be deleted."""

    ids: list[ItemId] = Field(min_length=1, max_length=limits.IDS)


class DeletedAnswer(BaseModel):
    """What was deleted."""

    deleted: int
    missing: list[str] = Field(description="Ids that were not there.")


class FieldBody(BaseModel):
    """A field that items have, as far as a sample of them tells."""

    name: str = Field(description="As a condition spells it.", examples=["price", "product.colour"])
    kind: Literal["number", "text", "truth", "list"]
    examples: list[JsonValue]


class InstructionBody(BaseModel):
    """An instruction that the model was trained with."""

    text: str
    modality: ModalityName = Field(description="What it asks for.")
    query: ModalityName = Field(description="What it is asked with.")


class IndexBody(BaseModel):
    """An index."""

    name: str
    items: int
    modalities: dict[ModalityName, int]
    levels: list[int] = Field(description="How many codes there are at each level of an ID.")
    fields: list[FieldBody]
    instructions: list[InstructionBody]
    stores_embeddings: bool = Field(description="Whether hits can be re-ranked by embeddings.")
    calibrated: bool = Field(description="Whether hits come with a probability.")
    writable: bool = Field(description="Whether you may add and delete items.")
    settings: SettingsUsed = Field(description="How it is searched unless one says otherwise.")


class IndexesAnswer(BaseModel):
    """The indexes of this server."""

    indexes: list[IndexBody]


class Health(BaseModel):
    """How the server is."""

    status: Literal["ok"]
