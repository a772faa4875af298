"""What the service says, as dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from genius.errors import GeniusError


class ServiceProblem(GeniusError):
    """What the service says instead of an answer (RFC 9457); the message is its detail."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        self.status = status
        self.title = str(body.get("title", ""))
        self.detail = str(body.get("detail", ""))
        self.request_id = str(body.get("request_id", ""))
        """In the service's log."""
        self.body = dict(body)
        super().__init__(f"{status} {self.title}: {self.detail}")


@dataclass(frozen=True, slots=True)
class Took:
    """Where the time of a search went, in milliseconds."""

    queue: float
    encode: float
    search: float
    total: float


@dataclass(frozen=True, slots=True)
class Item:
    """An item as the service knows it."""

    id: str
    modality: str
    text: str | None
    image: str | None
    """Path of its picture on the service."""
    fields: dict[str, Any]
    codes: list[int]


@dataclass(frozen=True, slots=True)
class Hit(Item):
    """An item that was found."""

    rank: int
    score: float
    probability: float | None
    log_probabilities: list[float]


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search found, best first."""

    request_id: str
    index: str
    took_ms: Took
    good_match: bool | None
    """Whether anything found is likely what was meant; None where the index is not calibrated."""
    hits: list[Hit]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An item that could not be used."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Added:
    """What became of items that were to be added; those not left out are on the disk and found."""

    added: int
    replaced: int
    unchanged: int
    left_out: list[LeftOut]
    ids: list[str]
    """Of all of them, in the order given."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """What deleting did."""

    deleted: int
    missing: list[str]


@dataclass(frozen=True, slots=True)
class Example:
    """An item, in short."""

    id: str
    modality: str
    text: str | None
    image: str | None


@dataclass(frozen=True, slots=True)
class Sibling:
    """A code that might have come instead."""

    code: int
    log_probability: float
    probability: float
    """Among the codes that exist there and may be found."""
    items: int
    examples: list[Example]


@dataclass(frozen=True, slots=True)
class Level:
    """What the generator says of one code of an item's ID."""

    level: int
    name: str
    code: int
    log_probability: float
    probability: float
    """Among the codes that exist there and may be found."""
    rank_among_siblings: int
    """From 1."""
    num_siblings: int
    """With itself."""
    items_below: int
    """Items that share the ID up to here."""
    kept: bool | None
    """Whether the beam kept it; None: it was not decoded so far."""
    siblings: list[Sibling]
    """The most probable."""


@dataclass(frozen=True, slots=True)
class Explained:
    """Why a search finds an item, or does not."""

    id: str
    codes: list[int]
    is_allowed: bool
    """Whether modality and conditions let it be found."""
    rank: int | None
    """Among all that the search looked at; None: it was not reached."""
    score: float | None
    touched: int
    """Items that the search looked at."""
    beam: int
    lost_at: int | None
    """The level at which the beam dropped it."""
    kept_by_beam: int | None
    """A beam that keeps it, where this one does not."""
    levels: list[Level]
    shares_prefix: list[Example]
    """Other items that share the most of its codes."""


@dataclass(frozen=True, slots=True)
class Child:
    """A code that continues a prefix."""

    code: int
    items: int
    share: float
    """Of the items below the prefix."""
    examples: list[Example]


@dataclass(frozen=True, slots=True)
class Codes:
    """A prefix of IDs, and what lies below it."""

    prefix: list[int]
    level: int
    """Codes in the prefix."""
    items: int
    share: float
    """Of all items."""
    entropy: float | None
    """Bits that the next code says of the items here."""
    branches: int
    """Codes that continue it."""
    children: list[Child]
    """Those of most items first."""
    examples: list[Example]
    truncated: bool
    """Whether there are more children than are listed."""


Made = TypeVar("Made")


def made(kind: type[Made], body: Mapping[str, Any]) -> Made:
    """A dataclass from JSON, with those inside it; what a newer service says beside is passed over."""
    return kind(**{name: _value(hint, body[name]) for name, hint in _hints(kind).items()})  # type: ignore[arg-type]


def _value(hint: Any, told: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return made(hint, told)  # type: ignore[arg-type]
    if get_origin(hint) is list and dataclasses.is_dataclass(get_args(hint)[0]):
        return [made(get_args(hint)[0], one) for one in told]
    return told


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
