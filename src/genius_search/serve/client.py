"""The service from Python: what HTTP says, as dataclasses and exceptions.

It needs httpx and nothing else: no PyTorch, no FastAPI, no model.
"""

from __future__ import annotations

import base64
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import httpx

from genius_search.errors import GeniusError, NetworkNeeded


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


__all__ = ["Client", "Part", "ServiceProblem", "Upload"]

ModalityName: TypeAlias = Literal["image", "text", "image-text"]
Picture: TypeAlias = str | Path | bytes
"""A file of a picture, or its contents."""

BATCH_ITEMS: Final = 256
BATCH_BYTES: Final = 8 << 20
"""Items go in requests of at most so many, and so many bytes."""
ATTEMPTS: Final = 6
LONGEST_WAIT_SECONDS: Final = 60.0
"""Between two attempts, whatever the service asks for."""
_TRY_AGAIN: Final = frozenset({429, 503})


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A text, a picture, both, or an item of the index, and how much it counts."""

    text: str | None = None
    image: Picture | None = None
    item: str | None = None
    weight: float = 1.0
    """Negative: away from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """An item to be added; it needs a text, a picture, or both."""

    id: str | None = None
    """Left out: made from its contents."""
    text: str | None = None
    image: Picture | None = None
    fields: Mapping[str, Any] | None = None


class Client:
    """A service at an address.

    What is asked too much of tells when to come back, and is asked again then. One client may be shared by
    threads.

    >>> with Client("http://localhost:8000") as client:  # doctest: +SKIP
    ...     client.add([Upload(id="kite", text="a red kite", image="kite.jpg", fields={"price": 12})])
    ...     for hit in client.search("a kite", where=["price<20"]).hits:
    ...         print(hit.id, hit.score)

    Parameters
    ----------
    key
        an API key, where the service asks for one.
    index
        the index that is meant, where the service has several.
    timeout_seconds
        for one attempt.
    """

    def __init__(
        self, url: str, key: str | None = None, *, index: str | None = None, timeout_seconds: float = 60.0
    ) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._index = index
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_seconds)

    def __enter__(self) -> Client:  # noqa: PYI034  beartype knows no Self here
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def search(
        self,
        text: str | None = None,
        *,
        image: Picture | None = None,
        parts: Sequence[Part] = (),
        instruction: str | None = None,
        modality: ModalityName | None = None,
        k: int = 10,
        beam: int | None = None,
        rerank: Literal["none", "codes", "embeddings"] | None = None,
        candidates: int | None = None,
        where: Sequence[str] = (),
        match: str | None = None,
        deadline_ms: int | None = None,
    ) -> Searched:
        """The best items for a text, a picture, both, or several parts; parameters as ``POST /v1/search``."""
        asked = self._query(
            text,
            image,
            parts,
            instruction=instruction,
            modality=modality,
            k=k,
            beam=beam,
            rerank=rerank,
            candidates=candidates,
            where=list(where) or None,
            match=match,
            deadline_ms=deadline_ms,
        )
        return made(Searched, self._ask("POST", "/v1/search", json=asked))

    def add(self, items: Iterable[Upload]) -> Added:
        """Add items, or replace those with the same id; in as many requests as their size asks for.

        What was acknowledged before an error stays added: adding the same again does no harm.

        Raises
        ------
        ServiceProblem
            no item of one of the requests could be used, among others.
        """
        answers = [
            self._ask("POST", "/v1/items", params=self._named, json={"items": batch})
            for batch in _batches(items)
        ]
        return Added(
            added=sum(answer["added"] for answer in answers),
            replaced=sum(answer["replaced"] for answer in answers),
            unchanged=sum(answer["unchanged"] for answer in answers),
            left_out=[made(LeftOut, one) for answer in answers for one in answer["left_out"]],
            ids=[one for answer in answers for one in answer["ids"]],
        )

    def delete(self, ids: Sequence[str]) -> Deleted:
        """Delete items; no search finds them any more."""
        return made(
            Deleted, self._ask("POST", "/v1/items/delete", params=self._named, json={"ids": list(ids)})
        )

    def get(self, item_id: str) -> Item:
        """An item.

        Raises
        ------
        ServiceProblem
            it is not there: status 404.
        """
        return made(Item, self._ask("GET", "/v1/items", params={**self._named, "id": item_id}))

    def explain(
        self,
        item_id: str,
        text: str | None = None,
        *,
        image: Picture | None = None,
        parts: Sequence[Part] = (),
        instruction: str | None = None,
        modality: ModalityName | None = None,
        where: Sequence[str] = (),
        match: str | None = None,
        beam: int | None = None,
    ) -> Explained:
        """Why a search finds an item, or does not: its ID level by level."""
        asked = self._query(
            text,
            image,
            parts,
            id=item_id,
            instruction=instruction,
            modality=modality,
            where=list(where) or None,
            match=match,
            beam=beam,
        )
        return made(Explained, self._ask("POST", "/v1/explain", json=asked))

    def codes(self, prefix: Sequence[int] = ()) -> Codes:
        """What lies below a prefix of IDs; of all items without one."""
        told = {**self._named, "prefix": ",".join(map(str, prefix))}
        return made(Codes, self._ask("GET", "/v1/codes", params=told))

    def indexes(self) -> list[str]:
        """Names of the indexes."""
        return [index["name"] for index in self._ask("GET", "/v1/indexes")["indexes"]]

    @property
    def _named(self) -> dict[str, str]:
        return {} if self._index is None else {"index": self._index}

    def _query(
        self, text: str | None, image: Picture | None, parts: Sequence[Part], **rest: object
    ) -> dict[str, Any]:
        """What is looked for, as JSON."""
        told = {"text": text, "image": _base64(image), "parts": [_told(part) for part in parts] or None}
        return _given({**self._named, **told, **rest})

    def _ask(self, method: str, path: str, **what: Any) -> Any:
        """The answer as JSON; asked again while the service says that it is busy.

        Raises
        ------
        ServiceProblem
            the service answers with an error.
        NetworkNeeded
            it does not answer at all.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                response = self._http.request(method, path, **what)
            except httpx.TransportError as error:
                raise NetworkNeeded(
                    f"{self._http.base_url} does not answer ({type(error).__name__}: {error}); is `genius "
                    "serve` running there?"
                ) from None
            if response.is_success:
                return response.json()
            wait = _wait_seconds(response)
            if wait is None or attempt == ATTEMPTS:
                break
            time.sleep(wait)
        raise ServiceProblem(response.status_code, _problem(response))


def _told(part: Part | Upload) -> dict[str, Any]:
    """As JSON, without what was left out."""
    told = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return _given({**told, "image": _base64(part.image)})


def _given(told: Mapping[str, Any]) -> dict[str, Any]:
    """Without what was left out."""
    return {name: value for name, value in told.items() if value is not None}


def _base64(picture: Picture | None) -> str | None:
    if picture is None:
        return None
    data = picture if isinstance(picture, bytes) else Path(picture).read_bytes()
    return base64.b64encode(data).decode()


def _batches(items: Iterable[Upload]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    size = 0
    for item in items:
        told = _told(item)
        here = len(told.get("image", "")) + len(told.get("text", ""))
        if batch and (len(batch) >= BATCH_ITEMS or size + here > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(told)
        size += here
    if batch:
        yield batch


def _wait_seconds(response: httpx.Response) -> float | None:
    """How long the service asks to wait; None where waiting does not help."""
    asked = response.headers.get("Retry-After", "")
    if response.status_code not in _TRY_AGAIN or not asked.isdecimal():
        return None
    return min(float(asked), LONGEST_WAIT_SECONDS)


def _problem(response: httpx.Response) -> Mapping[str, Any]:
    """What the service says is wrong; something between here and there may say it in other words."""
    try:
        body = response.json()
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    return {"title": response.reason_phrase, "detail": response.text[:500]}
