"""Client of the service. It needs httpx and pydantic, but neither PyTorch nor FastAPI."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias

import httpx

from genius_search.errors import GeniusError, NetworkNeeded
from genius_search.serve.schemas import (
    Added,
    CodeNode,
    Deleted,
    Explanation,
    Item,
    NewItem,
    Rerank,
    Router,
    SearchPart,
    SearchResult,
)

__all__ = ["Client", "NewItem", "SearchPart", "ServiceProblem"]

Picture: TypeAlias = str | Path | bytes
"""A file, or its contents."""

BATCH_ITEMS: Final = 256
BATCH_BYTES: Final = 8 << 20
"""Limits of one request to add items."""
ATTEMPTS: Final = 6
MAX_WAIT_SECONDS: Final = 60.0
"""Longest wait between two attempts, even if the service asks for more."""


class ServiceProblem(GeniusError):
    """An error response of the service (RFC 9457)."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        self.status = status
        self.title = str(body.get("title", ""))
        self.detail = str(body.get("detail", ""))
        self.request_id = str(body.get("request_id", ""))
        """Id of the request in the service's log."""
        self.body = dict(body)
        super().__init__(f"{status} {self.title}: {self.detail}")


class Client:
    """Client of a service; safe to share between threads.

    If the service is busy, the client waits as long as the response says and tries again.

    >>> with Client("http://localhost:8000") as client:  # doctest: +SKIP
    ...     client.add([NewItem(id="kite", text="a red kite", image=Path("kite.jpg"), fields={"price": 12})])
    ...     for hit in client.search("a kite", where=["price<20"]).hits:
    ...         print(hit.id, hit.score)

    Parameters
    ----------
    key
        an API key, if the service requires one.
    index
        name of the index, if the service has several.
    timeout_seconds
        time-out of one attempt.
    """

    def __init__(
        self, url: str, key: str | None = None, *, index: str | None = None, timeout_seconds: float = 60.0
    ) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._index = {} if index is None else {"index": index}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_seconds)

    def __enter__(self) -> Client:  # noqa: PYI034  beartype does not know Self here
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
        parts: Sequence[SearchPart] = (),
        combine: Literal["sum", "any"] | None = None,
        instruction: str | None = None,
        modality: str | None = None,
        where: Sequence[str] = (),
        match: str | None = None,
        hybrid: bool | None = None,
        k: int = 10,
        beam: int | None = None,
        rerank: Rerank | None = None,
        router: Router | None = None,
        candidates: int | None = None,
        deadline_ms: int | None = None,
    ) -> SearchResult:
        """Search; the parameters are those of :class:`genius_search.serve.schemas.SearchBody`."""
        query = self._query(
            text, image, parts, where, combine=combine, instruction=instruction, modality=modality,
            match=match, hybrid=hybrid, k=k, beam=beam, rerank=rerank, router=router,
            candidates=candidates, deadline_ms=deadline_ms,
        )  # fmt: skip
        return SearchResult.model_validate_json(self._request("POST", "/v1/search", json=query))

    def explain(
        self,
        id: str,  # noqa: A002  the field's name everywhere
        text: str | None = None,
        *,
        image: Picture | None = None,
        parts: Sequence[SearchPart] = (),
        instruction: str | None = None,
        modality: str | None = None,
        where: Sequence[str] = (),
        match: str | None = None,
        beam: int | None = None,
    ) -> Explanation:
        """Explain why a search finds an item, or does not, level by level of its ID."""
        query = self._query(
            text, image, parts, where, id=id, instruction=instruction, modality=modality, match=match,
            beam=beam,
        )  # fmt: skip
        return Explanation.model_validate_json(self._request("POST", "/v1/explain", json=query))

    def add(self, items: Iterable[NewItem]) -> Added:
        """Add items, or replace those with the same id, in requests of bounded size.

        Items acknowledged before an error stay added; adding them again is harmless.

        Raises
        ------
        ServiceProblem
            For example, no item of a request can be used.
        """
        total = Added(added=0, replaced=0, unchanged=0, left_out=[], ids=[])
        for batch in _batches(items):
            body = self._request("POST", "/v1/items", params=self._index, json={"items": batch})
            added = Added.model_validate_json(body)
            total = Added(
                **{name: getattr(total, name) + getattr(added, name) for name in Added.model_fields}
            )
        return total

    def delete(self, ids: Sequence[str]) -> Deleted:
        """Delete items; on return no search finds them."""
        body = self._request("POST", "/v1/items/delete", params=self._index, json={"ids": list(ids)})
        return Deleted.model_validate_json(body)

    def get(self, id: str) -> Item:  # noqa: A002
        """Return an item; raises :class:`ServiceProblem` with status 404 if there is none."""
        body = self._request("GET", "/v1/items", params={**self._index, "id": id})
        return Item.model_validate_json(body)

    def codes(self, prefix: Sequence[int] = ()) -> CodeNode:
        """Describe the codes and items below a prefix of IDs; by default, of all items."""
        params = {**self._index, "prefix": ",".join(map(str, prefix))}
        return CodeNode.model_validate_json(self._request("GET", "/v1/codes", params=params))

    def indexes(self) -> list[str]:
        """Return the names of the indexes."""
        return [index["name"] for index in json.loads(self._request("GET", "/v1/indexes"))["indexes"]]

    def _query(
        self,
        text: str | None,
        image: Picture | None,
        parts: Sequence[SearchPart],
        where: Sequence[str],
        **rest: object,
    ) -> dict[str, Any]:
        if image is not None:
            data = image if isinstance(image, bytes) else Path(image).read_bytes()
            rest["image"] = base64.b64encode(data).decode()
        query = {
            **self._index,
            "text": text,
            "parts": [part.model_dump(exclude_unset=True) for part in parts] or None,
            "where": list(where) or None,
            **rest,
        }
        return {name: value for name, value in query.items() if value is not None}

    def _request(self, method: str, path: str, **content: Any) -> bytes:
        """Send a request, retrying while the service is busy; return the body of the response.

        Raises
        ------
        ServiceProblem
            The service responds with an error.
        NetworkNeeded
            The service does not respond.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                response = self._http.request(method, path, **content)
            except httpx.TransportError as error:
                raise NetworkNeeded(
                    f"{self._http.base_url} does not answer ({type(error).__name__}: {error}); is `genius "
                    "serve` running there?"
                ) from None
            if response.is_success:
                return response.content
            seconds = response.headers.get("Retry-After", "")
            if attempt == ATTEMPTS or response.status_code not in (429, 503) or not seconds.isdecimal():
                break
            time.sleep(min(float(seconds), MAX_WAIT_SECONDS))
        try:
            body = response.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):  # from a proxy
            body = {"title": response.reason_phrase, "detail": response.text[:500]}
        raise ServiceProblem(response.status_code, body)


def _batches(items: Iterable[NewItem]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    num_bytes = 0
    for item in items:
        body = item.model_dump(exclude_none=True)
        size = len(item.image or "") + len(item.text or "")
        if batch and (len(batch) >= BATCH_ITEMS or num_bytes + size > BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(body)
        num_bytes += size
    if batch:
        yield batch
