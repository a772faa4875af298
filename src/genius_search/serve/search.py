"""The route of searches, in plain ASGI, since FastAPI costs as much as a third of a search.

Quick searches that arrive at about the same time are run in one batch on the event loop, which
costs less than handing each one to a thread. All other searches run in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic_core import to_json

from genius_search.errors import DeadlinePassed
from genius_search.index.index import is_current
from genius_search.serve import schemas
from genius_search.serve.body import read_body
from genius_search.serve.queries import Query, Result, encode_results, read_queries, search_all
from genius_search.serve.schemas import LATE, Problem

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from genius_search.serve.service import Served, Service, Threads

MAX_BATCH: Final = 16
"""Maximum number of searches in a batch on the event loop, which does nothing else meanwhile."""
MAX_WAITING: Final = 256
"""Maximum number of searches that wait for a batch."""


class Waiting(NamedTuple):
    """A search that waits for a batch."""

    query: Query
    result: asyncio.Future[Result]


class Batches:
    """Runs quick searches of an index in batches on the event loop.

    Parameters
    ----------
    threads
        Run the batches while the index has changed, because opening its new state may take long.
    """

    def __init__(self, served: Served, threads: Threads) -> None:
        self._index = served.index
        self._threads = threads
        self._waiting: list[Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def search(self, query: Query) -> Result:
        """Search in the next batch, and return the result."""
        if len(self._waiting) >= MAX_WAITING:
            raise Problem(429, f"{MAX_WAITING} requests are already waiting; retry later")
        loop = asyncio.get_running_loop()
        waiting = Waiting(query, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._start)
        self._waiting.append(waiting)
        return await waiting.result

    def _start(self) -> None:
        """Run the searches that wait, up to :data:`MAX_BATCH`; the others follow."""
        batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._start)
        batch = [waiting for waiting in batch if not waiting.result.done()]
        if is_current(self._index):
            _settle(batch, self._run(batch))
        else:
            task = asyncio.ensure_future(self._run_in_thread(batch))
            self._tasks.add(task)  # the event loop has only a weak reference
            task.add_done_callback(self._tasks.discard)

    async def _run_in_thread(self, batch: Sequence[Waiting]) -> None:
        results: Sequence[Result | BaseException]
        try:
            results = await self._threads.run(lambda: self._run(batch))
        except Problem as error:
            results = [error] * len(batch)
        _settle(batch, results)

    def _run(self, batch: Sequence[Waiting]) -> Sequence[Result | BaseException]:
        """Return the result of each search, or its error."""
        queries = [waiting.query for waiting in batch]
        try:
            return search_all(self._index, queries)
        except BaseException as error:  # noqa: BLE001  panics of libraries are not Exceptions
            if len(batch) == 1:
                return [error]
        # One search failed, so each is run alone.
        results: list[Result | BaseException] = []
        for query in queries:
            try:
                results += search_all(self._index, [query])
            except BaseException as error:  # noqa: BLE001  see above
                results.append(error)
        return results


def _settle(batch: Sequence[Waiting], results: Sequence[Result | BaseException]) -> None:
    """Pass the results of a batch to the requests that wait for them."""
    for waiting, result in zip(batch, results, strict=True):
        if waiting.result.done():  # the request was cancelled
            continue
        if isinstance(result, BaseException):
            # The traceback refers to the queries of the whole batch.
            waiting.result.set_exception(result.with_traceback(None))
        else:
            waiting.result.set_result(result)


class SearchRoute:
    """Answers ``POST /v1/search``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._batches = {
            name: Batches(service.find_index(name), service.searches) for name in service.indexes
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Process a request, whose body the guard has read."""
        answer = await self.answer(scope["state"])
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(answer)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def answer(self, state: dict[str, Any]) -> bytes:
        """Return the hits as JSON.

        Parameters
        ----------
        state
            What the guard knows about the request: its id, its start, its type and its body.
        """
        body, pictures = await read_body(
            state["content_type"], state["body"], schemas.SearchBody, self._service.parsers
        )
        return await self.search(body, pictures, state)

    async def search(
        self,
        body: schemas.SearchBody,
        pictures: Mapping[str, memoryview],
        state: Mapping[str, Any],
    ) -> bytes:
        """Return the hits of a search as JSON; see :meth:`answer`."""
        service = self._service
        search = _Search(service.find_index(body.index), body, pictures, state)
        if not service.is_quick(search.served.name, body, pictures):
            threads = service.threads_for(body, pictures)
            return await threads.run(search.run, deadline=search.deadline)
        start = time.monotonic()
        queries = search.read_queries()
        result = await self._batches[search.served.name].search(queries[0])
        if time.monotonic() > search.deadline:
            raise DeadlinePassed(LATE)
        return search.encode(start, queries, [result])


class _Search(NamedTuple):
    """A request to search."""

    served: Served
    body: schemas.SearchBody
    pictures: Mapping[str, memoryview]
    state: Mapping[str, Any]

    @property
    def deadline(self) -> float:
        """Time of :func:`time.monotonic` after which the result is useless."""
        return float(self.state["began"] + self.body.deadline_ms / 1000)

    def run(self) -> bytes:
        """Search, and return the response."""
        start = time.monotonic()
        queries = self.read_queries()
        return self.encode(start, queries, search_all(self.served.index, queries))

    def read_queries(self) -> list[Query]:
        """Return the search, or the searches."""
        return read_queries(self.body, self.pictures, self.deadline, self.served.index)

    def encode(self, start: float, queries: Sequence[Query], results: Sequence[Result]) -> bytes:
        """Return the response, with the result of each query."""
        took = {
            "queue": 1000 * (start - self.state["began"]),
            "search": 1000 * (time.monotonic() - start),
        }
        name = self.served.name
        head = to_json({"request_id": self.state["request_id"], "index": name, "took_ms": took})
        encoded = encode_results(self.served.index, name, queries, results)
        if self.body.searches is None:
            return head[:-1] + b"," + encoded[0] + b"}"
        return head[:-1] + b',"results":[{' + b"},{".join(encoded) + b"}]}"
