"""Items, hits and indexes as they are told to others: no path of this machine, nothing that is no JSON."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, get_args
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from genius_search.config import SearchConfig
from genius_search.index.filters import COLUMNS
from genius_search.index.index import Index
from genius_search.index.items import Item
from genius_search.index.query import SearchHit
from genius_search.index.snapshot import Snapshot
from genius_search.records import Modality
from genius_search.serve import limits

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
    candidates: int | None = Field(
        None,
        ge=0,
        le=limits.CANDIDATES,
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
    candidates: int
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


THUMBNAIL: Final = 256
"""Pixels of the longer side, unless one says otherwise."""
SAMPLE: Final = 500
"""About so many items of each segment are looked at to see which fields there are."""
FIELDS: Final = 100
EXAMPLES: Final = 5
EXAMPLE_CHARACTERS: Final = 80

Kind = Literal["number", "text", "truth", "list"]

_PLAIN: Final = re.compile(r"[^\s.=!<>~\"',]+")


def name_of(modality: Modality) -> ModalityName:
    """``image-text`` and the like."""
    return get_args(ModalityName)[get_args(ModalityName).index(modality.value)]  # type: ignore[no-any-return]


def picture_url(index: str, item_id: str) -> str:
    """Where the picture of an item is to be had."""
    return f"/v1/items/picture?{urlencode({'index': index, 'id': item_id, 'size': THUMBNAIL})}"


def show_hit(index: str, hit: SearchHit) -> HitBody:
    """A hit as it is told."""
    return HitBody(
        rank=hit.rank,
        id=hit.id,
        score=hit.score,
        probability=hit.probability,
        modality=name_of(hit.modality),
        text=hit.text,
        image=None if hit.image is None else picture_url(index, hit.id),
        fields=clean(hit.fields),
        codes=list(hit.codes),
        log_probabilities=list(hit.log_probabilities),
    )


def show_item(index: str, item: Item, codes: Sequence[int]) -> ItemBody:
    """An item as it is told."""
    return ItemBody(
        id=item.id,
        modality=name_of(item.modality),
        text=item.text,
        image=None if item.image is None else picture_url(index, item.id),
        fields=clean(item.fields),
        codes=list(codes),
    )


def show_example(index: str, item: Item) -> ExampleBody:
    """An item in short."""
    return ExampleBody(
        id=item.id,
        modality=name_of(item.modality),
        text=item.text,
        image=None if item.image is None else picture_url(index, item.id),
    )


def show_index(name: str, index: Index, *, writable: bool) -> IndexBody:
    """An index as it is told."""
    opened, model = index.snapshot, index.model
    counts = opened.count_by_modality()
    return IndexBody(
        name=name,
        items=opened.num_alive,
        modalities={name_of(modality): counts[modality] for modality in Modality if modality in counts},
        levels=list(model.quantizer.sizes),
        fields=_fields(opened),
        instructions=[
            InstructionBody(
                text=known.text,
                modality=name_of(Modality.parse(known.candidate)),
                query=name_of(Modality.parse(known.query)),
            )
            for known in model.instructions
        ],
        stores_embeddings=opened.manifest.embeddings != "none",
        calibrated=index.calibration is not None,
        writable=writable,
        settings=show_settings(index.settings, None, 1),
    )


def show_settings(config: SearchConfig, beam: int | None, k: int) -> SettingsUsed:
    """How it was searched."""
    return SettingsUsed(beam=max(beam or config.beam, k), candidates=config.candidates, rerank=config.rerank)


def clean(value: Any, depth: int = 2 * limits.FIELDS_DEPTH) -> Any:
    """What came with an item, as JSON that everybody reads: finite, whole characters, not too deep."""
    match value:
        case dict():
            return {clean(name): clean(inner, depth - 1) for name, inner in value.items()} if depth else None
        case list():
            return [clean(inner, depth - 1) for inner in value] if depth else None
        case str():
            return value if value.isascii() else value.encode("utf-8", "replace").decode()
        case float():
            return value if math.isfinite(value) else None
        case _:
            return value


def _fields(opened: Snapshot) -> list[FieldBody]:
    """What a sample of the items has for fields, the frequent ones first."""
    kinds: dict[str, list[Kind]] = defaultdict(list)
    examples: dict[str, dict[str, Any]] = defaultdict(dict)
    for item in _sample(opened):
        for name, value in _flat(clean(item.fields)):
            kind = _kind(value)
            if kind is None:
                continue
            kinds[name].append(kind)
            few = examples[name]
            if kind != "list" and len(few) < EXAMPLES and len(str(value)) <= EXAMPLE_CHARACTERS:
                few.setdefault(str(value), value)
    names = sorted(kinds, key=lambda name: -len(kinds[name]))[:FIELDS]
    return [
        FieldBody(
            name=name, kind=Counter(kinds[name]).most_common(1)[0][0], examples=[*examples[name].values()]
        )
        for name in names
    ]


def _flat(fields: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Fields by the names that conditions have for them: inner ones after a dot, odd ones in quotes."""
    for name, value in fields.items():
        if '"' in name and "'" in name:
            continue  # no condition can name it
        quote = "'" if '"' in name else '"'
        is_own = not above and name in COLUMNS
        spelt = above + (name if _PLAIN.fullmatch(name) and not is_own else f"{quote}{name}{quote}")
        if isinstance(value, dict):
            yield from _flat(value, f"{spelt}.")
        else:
            yield spelt, value


def _sample(opened: Snapshot) -> Iterator[Item]:
    """Items from all over each segment."""
    for segment in opened.segments:
        count = segment.table.num_items
        yield from segment.items.get(range(0, count, max(1, count // SAMPLE)))


def _kind(value: object) -> Kind | None:
    match value:
        case bool():
            return "truth"
        case int() | float():
            return "number"
        case str():
            return "text"
        case list():
            return "list"
        case _:
            return None
