"""Indexes as tools of agents, by the Model Context Protocol: search, similar, read_item, add."""

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

SIDE: Final = 768
"""Longer side of an item's picture, in pixels."""

Hits: TypeAlias = list[dict[str, Any]]
Picture = Annotated[
    str | None, Field(description="A picture's path here, or data:image/jpeg;base64,…")
]
Conditions = Annotated[
    tuple[str, ...], Field(description="'price<20', 'taken=2024-05'; all must hold")
]
Words = Annotated[str | None, Field(description='In texts: beach OR sea -people "a phrase" begin*')]
Count = Annotated[int, Field(ge=1, le=100, description="Number of hits.")]
ItemId = Annotated[str, BeforeValidator(as_id)]
Name = Annotated[
    str | None, Field(description="An index by its name; needed if there are several.")
]


class Tools:
    """What agents can do with indexes, which are known by names."""

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
        """Find pictures and texts by words, by a picture, or both. Conditions alone list the newest."""
        options: dict[str, Any] = {"where": where, "match": match, "modality": modality, "k": k}
        return [*map(_describe, self._find(index).search(text, image=_read(image), **options))]

    def similar(
        self, id: ItemId, text: str | None = None, k: Count = 10, index: Name = None
    ) -> Hits:
        """Find items like one of the index (and itself), or with a text, such items changed as it says."""
        return [*map(_describe, self._find(index).search(text, parts=[SearchPart(id=id)], k=k))]

    def read_item(self, id: ItemId, index: Name = None) -> list[dict[str, Any] | Image]:
        """Return all of an item's text and fields, and its picture."""
        item = self._find(index).get(id)
        facts = {
            name: getattr(item, name) for name in ("id", "modality", "text", "image", "fields")
        }
        # Somebody else's index may name a private file, but does not have the hash of its contents.
        if item.image is None or not is_same_picture(item, Path(item.image)):
            return [facts]
        picture = open_image(Path(item.image), shortest_side=SIDE)
        picture.thumbnail((SIDE, SIDE))
        return [facts, Image(data=encode_jpeg(picture, quality=85), format="jpeg")]

    def add(
        self,
        id: ItemId,
        text: str | None = None,
        image: Picture = None,
        fields: dict[str, Any] | None = None,
        index: Name = None,
    ) -> str:
        """Add a text, a picture or both; it replaces the item with the same id."""
        done = self._find(index).add([NewItem(id, text, _read(image), fields)], wait_seconds=10.0)
        status = next(
            (one for one in ("replaced", "added", "unchanged") if getattr(done, one)), "left out"
        )
        return f"{status} {'; '.join(one.reason for one in done.left_out)}"

    def _find(self, name: str | None) -> Index:
        known = self._indexes
        if name not in known and (name is not None or len(known) > 1):
            raise UsageError(f"index is {name!r}, expected one of {', '.join(known)}")
        return next(iter(known.values())) if name is None else known[name]


def make_server(indexes: Mapping[str, Index], *, allow_add: bool = False) -> MCPServer:
    """Return a server of tools over indexes by name, among them `add` if that is allowed."""
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
    """Tell the agent of errors that it can mend."""
    try:
        yield
    except GeniusError as error:
        raise ToolError(str(error)) from error


def _read(picture: str | None) -> Path | bytes | None:
    if picture is None or not picture.startswith("data:"):
        return None if picture is None else as_path(picture)
    try:
        return base64.b64decode(picture.partition(",")[2], validate=True)
    except ValueError as error:
        raise UsageError(f"the picture is not base64: {error}") from None


def _describe(hit: SearchHit) -> dict[str, Any]:
    """Return what an agent needs of a hit, with a part of its text; reading the item gives all."""
    text = (hit.passage or hit.text or "")[:1_500]
    facts = {
        "id": hit.id,
        "score": round(hit.score, 4),
        "probability": hit.probability,
        "text": text,
    }
    return {**facts, "fields": hit.fields}
