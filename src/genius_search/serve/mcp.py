"""Tools for agents (Model Context Protocol) that search and change indexes."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.utilities.types import Image
from mcp.types import ToolAnnotations
from pydantic import BeforeValidator, Field

from genius_search import __version__
from genius_search.border import as_id, as_path
from genius_search.data.images import encode_jpeg
from genius_search.data.video import open_still
from genius_search.errors import GeniusError, UsageError, plural
from genius_search.index.hits import SearchHit
from genius_search.index.index import Index
from genius_search.index.pool import NewItem
from genius_search.index.request import SearchPart
from genius_search.index.roots import is_same_picture

MAX_PICTURE_SIDE: Final = 768
"""Maximum length of the longer side of a picture for an agent, in pixels."""
MAX_ANSWER_CHARACTERS: Final = 80_000
"""Length of the texts and fields of all hits, about 20,000 tokens; each has an equal share."""
MAX_HIT_CHARACTERS: Final = 1_500
"""Maximum length of the text of a hit."""
MAX_PAGE_CHARACTERS: Final = 8_000
"""Maximum length of a page of the text of an item."""
MAX_FIELDS: Final = 20
"""Maximum number of fields of an item, and of values of a facet."""
MAX_VALUE_CHARACTERS: Final = 300
"""Maximum length of the value of a field."""
MAX_AGENT_FACETS: Final = 5
"""Maximum number of fields whose values are counted at once."""

Hits: TypeAlias = list[dict[str, Any]]
Picture = Annotated[
    str | None, Field(description="Path of a picture on this machine, or data:image/jpeg;base64,…")
]
Conditions = Annotated[
    tuple[str, ...],
    Field(description="Conditions that must all hold: 'price<20', 'taken=2024-05'"),
]
Words = Annotated[
    str | None,
    Field(description='Words that texts must contain: beach OR sea -people "a phrase" begin*'),
]
Order = Annotated[
    str | None, Field(description="Field to sort the good matches by: 'price', or '-price'.")
]
Group = Annotated[
    str | None, Field(description="Return one hit for each value of this field, or each 'content'.")
]
Facets = Annotated[
    tuple[str, ...], Field(max_length=MAX_AGENT_FACETS, description="Fields whose values to count.")
]
PageNumber = Annotated[int, Field(ge=1, description="Page of a long text.")]
Count = Annotated[int, Field(ge=1, le=100, description="Number of hits.")]
ItemId = Annotated[str, BeforeValidator(as_id)]
Name = Annotated[str | None, Field(description="Name of the index; required if there are several.")]


class Tools:
    """The tools, as methods. Their docstrings are the descriptions that agents read."""

    def __init__(self, indexes: Mapping[str, Index]) -> None:
        self._indexes = indexes

    def search(
        self,
        text: str | None = None,
        image: Picture = None,
        where: Conditions = (),
        match: Words = None,
        modality: Literal["image", "text", "image-text"] | None = None,
        k: Count = 10,
        order_by: Order = None,
        group_by: Group = None,
        index: Name = None,
    ) -> Hits:
        """Search for pictures and texts with a text, a picture, or both.

        With conditions only, the newest items are listed. Texts and fields are cut; read_item
        returns more.
        """
        options: dict[str, Any] = {"where": where, "match": match, "modality": modality, "k": k}
        options |= {"order_by": order_by, "group_by": group_by}
        hits = self._find_index(index).search(text, image=_read_picture(image), **options)
        described = _describe_hits(hits)
        for facts, num_others in zip(described, hits.more_in_group, strict=False):
            facts["more_in_group"] = num_others
        return described

    def count(
        self,
        where: Conditions = (),
        match: Words = None,
        facets: Facets = (),
        index: Name = None,
    ) -> dict[str, Any]:
        """Count the items that meet conditions, and the most frequent values of their fields."""
        opened_index = self._find_index(index)
        counts: dict[str, Any] = {"items": opened_index.count(where, match=match)}
        if facets:
            hits = opened_index.search(where=where, match=match, facets=facets, k=1)
            counts["facets"] = {
                name: [[_cut(value), count] for value, count in values[:MAX_FIELDS]]
                for name, values in hits.facets.items()
            }
        return counts

    def similar(
        self, id: ItemId, text: str | None = None, k: Count = 10, index: Name = None
    ) -> Hits:
        """Find items that are similar to an item; a text describes how they should differ from it.

        The item itself is a hit, too.
        """
        return _describe_hits(self._find_index(index).search(text, parts=[SearchPart(id=id)], k=k))

    def read_item(
        self, id: ItemId, page: PageNumber = 1, index: Name = None
    ) -> list[dict[str, Any] | Image]:
        """Return a page of the text, the fields and the picture of an item."""
        item = self._find_index(index).get(id)
        facts: dict[str, Any] = {
            name: getattr(item, name) for name in ("id", "modality", "text", "image")
        }
        if item.text is not None and len(item.text) > MAX_PAGE_CHARACTERS:
            start = (page - 1) * MAX_PAGE_CHARACTERS
            facts["text"] = item.text[start : start + MAX_PAGE_CHARACTERS]
            facts |= {"page": page, "pages": -(-len(item.text) // MAX_PAGE_CHARACTERS)}
        facts |= _describe_fields(item.fields, MAX_PAGE_CHARACTERS)
        # An index from someone else may name a private file, but does not know its hash.
        if page > 1 or item.image is None or not is_same_picture(item, Path(item.image)):
            return [facts]
        picture = open_still(Path(item.image), shortest_side=MAX_PICTURE_SIDE)
        picture.thumbnail((MAX_PICTURE_SIDE, MAX_PICTURE_SIDE))
        return [facts, Image(data=encode_jpeg(picture, quality=85), format="jpeg")]

    def add(
        self,
        id: ItemId,
        text: str | None = None,
        image: Picture = None,
        fields: dict[str, Any] | None = None,
        index: Name = None,
    ) -> str:
        """Add a text, a picture or both as an item; it replaces the item with the same id."""
        new_item = NewItem(id, text, _read_picture(image), fields)
        summary = self._find_index(index).add([new_item], wait_seconds=10.0)
        counters = ("replaced", "added", "unchanged")
        outcome = next((name for name in counters if getattr(summary, name)), "left out")
        return f"{outcome} {'; '.join(left_out.reason for left_out in summary.left_out)}"

    def update(
        self,
        id: ItemId,
        fields: dict[str, Any] | None = None,
        text: str | None = None,
        index: Name = None,
    ) -> str:
        """Change fields or the text of an item; null removes a field, and other fields stay."""
        opened_index = self._find_index(index)
        result = opened_index.update(id, fields=fields, text=text, wait_seconds=10.0)
        if result.missing:
            raise UsageError(f"there is no item {id!r} in this index")
        reasons = "; ".join(left_out.reason for left_out in result.left_out)
        return f"{'updated' if result.updated else 'unchanged'} {reasons}".rstrip()

    def _find_index(self, name: str | None) -> Index:
        indexes = self._indexes
        if name not in indexes and (name is not None or len(indexes) > 1):
            raise UsageError(f"index is {name!r}, expected one of {', '.join(indexes)}")
        return next(iter(indexes.values())) if name is None else indexes[name]


def make_server(indexes: Mapping[str, Index], *, allow_add: bool = False) -> MCPServer:
    """Create a server with tools that read and, if allowed, tools that change items."""
    sizes = ", ".join(f"{name} ({plural(len(index), 'item')})" for name, index in indexes.items())
    about = f"Search the user's pictures and texts. Indexes: {sizes}."
    server: MCPServer = MCPServer(
        "genius", instructions=about, version=__version__, log_level="WARNING"
    )
    tools = Tools(indexes)
    reading = (tools.search, tools.similar, tools.count, tools.read_item)
    changing = (tools.add, tools.update)
    for tool in (*reading, *changing) if allow_add else reading:
        hints = ToolAnnotations(read_only_hint=tool in reading, open_world_hint=False)
        server.add_tool(_explain_errors()(tool), annotations=hints, structured_output=False)
    return server


@contextlib.contextmanager
def _explain_errors() -> Iterator[None]:
    """Pass errors that a user can fix on to the agent."""
    try:
        yield
    except GeniusError as error:
        raise ToolError(str(error)) from error


def _read_picture(picture: str | None) -> Path | bytes | None:
    """Return the path of a picture, or the contents of a data URL."""
    if picture is None:
        return None
    if not picture.startswith("data:"):
        return as_path(picture)
    try:
        return base64.b64decode(picture.partition(",")[2], validate=True)
    except ValueError as error:
        raise UsageError(f"the picture is not encoded in base64: {error}") from None


def _describe_hits(hits: Sequence[SearchHit]) -> Hits:
    """Return hits for an agent; of many hits, texts and fields are shorter."""
    max_characters = MAX_ANSWER_CHARACTERS // max(1, len(hits))
    return [_describe_hit(hit, max_characters) for hit in hits]


def _describe_hit(hit: SearchHit, max_characters: int) -> dict[str, Any]:
    """Return a hit for an agent, with the beginning of its text."""
    max_text = min(MAX_HIT_CHARACTERS, max_characters // 2)
    text = (hit.passage or hit.text or "")[:max_text]
    facts = {
        "id": hit.id,
        "score": round(hit.score, 4),
        "probability": hit.probability,
        "text": text,
    }
    if hit.moment is not None:
        facts["moment"] = hit.moment  # second of a video
    return {**facts, **_describe_fields(hit.fields, max_characters - max_text)}


def _describe_fields(fields: Mapping[str, Any], max_characters: int) -> dict[str, Any]:
    """Return the first fields of an item that fit, with the beginnings of long values."""
    shown: dict[str, Any] = {}
    for name, value in [*fields.items()][:MAX_FIELDS]:
        beginning = _cut(value)
        size = len(f"{name}{beginning}")
        if size <= max_characters:
            shown[name] = beginning
            max_characters -= size
    described: dict[str, Any] = {"fields": shown}
    if len(fields) > len(shown):
        described["more_fields"] = len(fields) - len(shown)
    return described


def _cut(value: Any) -> Any:
    """Return a value, or the beginning of its JSON if that is long."""
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    is_short = len(written) <= MAX_VALUE_CHARACTERS
    return value if is_short else f"{written[:MAX_VALUE_CHARACTERS]}…"
