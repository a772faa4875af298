"""Tools for agents (Model Context Protocol) that search and change indexes."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.utilities.types import Image
from mcp.types import ToolAnnotations
from pydantic import BeforeValidator, Field

from genius_search import __version__
from genius_search.border import as_id, as_path
from genius_search.data.images import encode_jpeg, open_image
from genius_search.errors import GeniusError, UsageError, plural
from genius_search.index.index import Index
from genius_search.index.pool import NewItem
from genius_search.index.request import SearchHit, SearchPart
from genius_search.index.roots import is_same_picture

MAX_PICTURE_SIDE: Final = 768
"""Maximum length of the longer side of a picture for an agent, in pixels."""

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
        index: Name = None,
    ) -> Hits:
        """Search for pictures and texts with a text, a picture, or both.

        With conditions only, the newest items are listed.
        """
        options: dict[str, Any] = {"where": where, "match": match, "modality": modality, "k": k}
        return [
            *map(
                _describe_hit,
                self._find_index(index).search(text, image=_read_picture(image), **options),
            )
        ]

    def similar(
        self, id: ItemId, text: str | None = None, k: Count = 10, index: Name = None
    ) -> Hits:
        """Find items that are similar to an item; a text describes how they should differ from it.

        The item itself is a hit, too.
        """
        return [
            *map(
                _describe_hit, self._find_index(index).search(text, parts=[SearchPart(id=id)], k=k)
            )
        ]

    def read_item(self, id: ItemId, index: Name = None) -> list[dict[str, Any] | Image]:
        """Return the complete text, the fields and the picture of an item."""
        item = self._find_index(index).get(id)
        facts = {
            name: getattr(item, name) for name in ("id", "modality", "text", "image", "fields")
        }
        # An index from someone else may name a private file, but does not know its hash.
        if item.image is None or not is_same_picture(item, Path(item.image)):
            return [facts]
        picture = open_image(Path(item.image), shortest_side=MAX_PICTURE_SIDE)
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

    def _find_index(self, name: str | None) -> Index:
        indexes = self._indexes
        if name not in indexes and (name is not None or len(indexes) > 1):
            raise UsageError(f"index is {name!r}, expected one of {', '.join(indexes)}")
        return next(iter(indexes.values())) if name is None else indexes[name]


def make_server(indexes: Mapping[str, Index], *, allow_add: bool = False) -> MCPServer:
    """Create a server with the tools search, similar, read_item and, if allowed, add."""
    sizes = ", ".join(f"{name} ({plural(len(index), 'item')})" for name, index in indexes.items())
    about = f"Search the user's pictures and texts. Indexes: {sizes}."
    server: MCPServer = MCPServer(
        "genius", instructions=about, version=__version__, log_level="WARNING"
    )
    tools = Tools(indexes)
    for tool in (tools.search, tools.similar, tools.read_item, tools.add)[: 4 if allow_add else 3]:
        hints = ToolAnnotations(read_only_hint=tool != tools.add, open_world_hint=False)
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


def _describe_hit(hit: SearchHit) -> dict[str, Any]:
    """Return a hit for an agent, with the beginning of its text."""
    text = (hit.passage or hit.text or "")[:1_500]
    facts = {
        "id": hit.id,
        "score": round(hit.score, 4),
        "probability": hit.probability,
        "text": text,
    }
    return {**facts, "fields": hit.fields}
