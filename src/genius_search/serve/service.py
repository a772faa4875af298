"""Searches and changes of open indexes for many clients: a few threads, and one writer for each index.

An index is searched as it is when a search begins, and changed by one request at a time. Once enough deleted
items have piled up it is compacted, while searches continue on the previous state. An add is acknowledged
when it is on the disk and the next search finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import torch
from pydantic_core import to_json

from genius_search.config import SearchConfig
from genius_search.errors import BadImage, DeadlinePassed, GeniusError
from genius_search.index.adding import ItemOutcome
from genius_search.index.adding import NewItem as GivenItem
from genius_search.index.index import Index
from genius_search.index.requests import SearchPart, SearchRequest
from genius_search.index.writer import Deleted
from genius_search.serve import schemas
from genius_search.serve.describe import describe_settings, show
from genius_search.serve.pictures import decode
from genius_search.serve.problems import Problem
from genius_search.serve.schemas import FIELDS_BYTES, FIELDS_DEPTH, LeftOut, NewItem

Result = TypeVar("Result")

SEARCH_THREADS: Final = 2
"""For searches by words alone."""
PICTURE_THREADS: Final = 2
"""For searches with pictures, and for pictures that are added. More would keep more memory."""
SLOW_THREADS: Final = 2
"""For searches with conditions and for explanations, which can take as long as their deadline."""
LOOK_UP_THREADS: Final = 2
"""For items, thumbnails and codes."""
MAX_WAITING: Final = 256
MAX_DEAD_SHARE: Final = 0.2
"""Share of deleted items that triggers compaction: at most four items are rewritten per deleted one."""
PATIENCE_SECONDS: Final = 10.0
"""Longest wait for another process that is changing the index."""
ANSWER_BYTES: Final = 8 << 20
"""Size of the hits of one answer."""

log = logging.getLogger("genius_search.serve")


class Threads:
    """A few threads, and those who wait for one in the order of their coming.

    Parameters
    ----------
    count
        things that run at the same time. A thread is free when its work is done, also if nobody waits for
        the result any more.
    """

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._threads = ThreadPoolExecutor(count)
        self._waiting = 0

    async def run(self, work: Callable[[], Result], *, deadline: float = math.inf) -> Result:
        """Return the result of a function that runs in a thread.

        Parameters
        ----------
        deadline
            latest useful time of the result, on the clock of :func:`time.monotonic`.

        Raises
        ------
        Problem
            429: too many wait.
        DeadlinePassed
            The deadline has passed. A function that was still waiting is not run.
        """
        if self._waiting >= MAX_WAITING:
            raise Problem(
                429, f"{MAX_WAITING} requests are waiting, the maximum; try again", retry_after_seconds=1
            )
        loop = asyncio.get_running_loop()
        seconds = None if deadline == math.inf else deadline - time.monotonic()
        self._waiting += 1
        is_waiting = True
        try:
            async with asyncio.timeout(seconds):
                await self._free.acquire()
                self._waiting -= 1
                is_waiting = False
                running = loop.run_in_executor(self._threads, _contain, work)
                running.add_done_callback(lambda _: self._free.release())
                return await asyncio.shield(running)
        except TimeoutError:
            raise DeadlinePassed(
                "no answer within the time allowed; allow more, or try again when the service is less busy"
            ) from None
        finally:
            self._waiting -= is_waiting


def _contain(work: Callable[[], Result]) -> Result:
    """Call a function; what is no ordinary exception, such as a panic of a library in Rust, becomes one."""
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


class Service:
    """Searches and changes open indexes for many concurrent clients, on one event loop.

    Parameters
    ----------
    indexes
        by name; used for reading only, as changes have handles of their own.
    """

    def __init__(self, indexes: Mapping[str, Index]) -> None:
        self.indexes = dict(indexes)
        self.is_ready = False
        """True once every index has answered a first search, until the service stops."""
        self.parsers = Threads(1)
        """More would not be faster, but keep Python from the searches."""
        self.look_ups = Threads(LOOK_UP_THREADS)
        self._searches = Threads(SEARCH_THREADS)
        self._pictures = Threads(PICTURE_THREADS)
        self._slow = Threads(SLOW_THREADS)
        self._writable = {name: index.reopen() for name, index in self.indexes.items()}
        self._writers = {name: Threads(1) for name in self.indexes}
        self._compacting: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Warm up every index with one search."""
        torch.set_num_threads(1)
        first = SearchRequest(text="a first search", k=1)
        for index in self.indexes.values():
            with contextlib.suppress(GeniusError):  # an encoder without texts cannot be warmed up by one
                await self._searches.run(functools.partial(index.search_many, [first]))
        self.is_ready = True

    async def stop(self) -> None:
        """Wait for changes that have begun."""
        self.is_ready = False
        await asyncio.gather(*(writer.run(lambda: None) for writer in self._writers.values()))

    async def search(
        self,
        name: str,
        body: schemas.SearchBody,
        pictures: Mapping[str, memoryview],
        request_id: str,
        began: float,
    ) -> bytes:
        """Search an index; return a :class:`~genius_search.serve.schemas.SearchResult` as JSON.

        Parameters
        ----------
        began
            when the request came, on the clock of :func:`time.monotonic`.
        """
        deadline = began + body.deadline_ms / 1000

        def work() -> bytes:
            index, started = self.indexes[name], time.monotonic()
            request = _search_request(body, pictures, deadline)
            config = _search_config(index, body)
            hits = index.search_many([request], config=config)[0]
            ended = time.monotonic()
            result = {
                "request_id": request_id,
                "index": name,
                "took_ms": {"queue": 1000 * (started - began), "search": 1000 * (ended - started)},
                "settings": describe_settings(index, config, request.beam, request.k),
                "good_match": index.good_match(hits),
            }
            return to_json(result)[:-1] + b',"hits":[' + b",".join(_within_limit(hits, name)) + b"]}"

        is_slow = body.where or body.match or body.combine == "any"
        threads = self._pictures if pictures else self._slow if is_slow else self._searches
        return await threads.run(work, deadline=deadline)

    async def explain(
        self,
        name: str,
        body: schemas.ExplainBody,
        pictures: Mapping[str, memoryview],
        began: float,
        neighbours: int,
    ) -> dict[str, Any]:
        """Explain why a search finds an item, or does not; with items that share most of its codes."""
        deadline = began + body.deadline_ms / 1000

        def work() -> dict[str, Any]:
            index = self.indexes[name]
            request = _search_request(body, pictures, deadline)
            explanation = index.explain_request(body.id, request, config=_search_config(index, body))
            shared = [level.level for level in explanation.levels if level.items > 1]
            prefix = explanation.codes[: shared[-1] + 1] if shared else ()
            near = index.tree(prefix, examples=neighbours + 1, most_children=0).examples
            others = [item for item in near if item.id != body.id][:neighbours]
            return {**show(explanation, name), "neighbours": show(others, name)}

        return await self._slow.run(work, deadline=deadline)

    async def add(
        self, name: str, items: Sequence[NewItem | LeftOut], pictures: Mapping[str, memoryview]
    ) -> schemas.Added:
        """Add items; report unusable ones with their reasons. On return, all others are on the disk."""
        checked = await self._pictures.run(
            lambda: [_check_item(item, pictures, n) for n, item in enumerate(items)]
        )
        new = [item for item in checked if isinstance(item, GivenItem)]
        outcomes: list[ItemOutcome] = []
        if new:
            outcomes = await self._change(
                name, lambda index: index.add_items(new, wait_seconds=PATIENCE_SECONDS)
            )
        rest = iter(outcomes)
        left_out, counts = [], {"added": 0, "replaced": 0, "unchanged": 0}
        for item in checked:
            if isinstance(item, LeftOut):
                left_out.append(item)
            elif (outcome := next(rest)).status == "left out":
                left_out.append(LeftOut(id=outcome.id, reason=outcome.reason or ""))
            else:
                counts[outcome.status] += 1
        return schemas.Added(**counts, left_out=left_out, ids=[item.id for item in checked])

    async def delete(self, name: str, ids: Sequence[str]) -> Deleted:
        """Delete items; on return no search finds them."""
        return await self._change(name, lambda index: index.delete(ids, wait_seconds=PATIENCE_SECONDS))

    async def _change(self, name: str, change: Callable[[Index], Result]) -> Result:
        """Change an index after those who came before; compact it afterwards if it needs that."""
        index, writer = self._writable[name], self._writers[name]

        def compact() -> None:
            snapshot = index.snapshot
            num_dead = sum(len(segment.dead) for segment in snapshot.segments)
            if num_dead > MAX_DEAD_SHARE * (snapshot.num_alive + num_dead):
                index.compact(wait_seconds=PATIENCE_SECONDS)

        async def compact_later() -> None:
            try:
                await writer.run(compact)
            except Exception:  # a background task: log instead of raising
                log.exception("%s could not be compacted", name)

        result = await writer.run(lambda: change(index))
        if name not in self._compacting or self._compacting[name].done():
            self._compacting[name] = asyncio.create_task(compact_later())
        return result


def _search_config(index: Index, body: schemas.SearchBody) -> SearchConfig:
    """Return the settings of an index, overridden by those of a request.

    Raises
    ------
    Problem
        A setting is impossible or would have no effect.
    """
    usual = index.settings
    config = dataclasses.replace(
        usual,
        rerank=body.rerank or usual.rerank,
        router=body.router or usual.router,
        candidates=usual.candidates if body.candidates is None else body.candidates,
    )
    if config.rerank == "embeddings" and index.snapshot.manifest.embeddings == "none":
        raise Problem(422, "rerank: this index stores no embeddings; use codes or none")
    if body.candidates and config.rerank == "none":
        raise Problem(422, "candidates: needs re-ranking; set rerank to codes or embeddings")
    if body.router == "geometry" and config.rerank == "none":
        raise Problem(422, "router: geometry needs re-ranking; set rerank to codes or embeddings")
    if body.router == "generator" and not index.model.has_generator:
        raise Problem(422, "router: this index has no generator; leave router out")
    return config


def _search_request(
    body: schemas.SearchBody, pictures: Mapping[str, memoryview], deadline: float
) -> SearchRequest:
    """Convert the body of a search, decoding its pictures."""
    images = {name: decode(_find_picture(pictures, name)) for name in body.picture_names()}
    request = SearchRequest(
        text=body.text,
        image=images[body.image] if body.image else None,
        parts=tuple(
            SearchPart(
                text=part.text,
                image=images[part.image] if part.image else None,
                id=part.id,
                weight=part.weight,
            )
            for part in body.parts
        ),
        combine=body.combine,
        instruction=body.instruction,
        modality=body.modality,
        where=body.where,
        match=body.match,
        hybrid=body.hybrid,
        k=body.k,
        beam=body.beam,
        deadline=deadline,
    )
    if any(condition.column == "image" for condition in request.filter.conditions):
        raise Problem(422, "where: the image of an item is a path on the server and cannot be compared")
    return request


def _find_picture(pictures: Mapping[str, memoryview], name: str) -> bytes:
    if name not in pictures:
        raise Problem(
            422,
            f"image: there is no part {name[:80]!r}; send multipart/form-data with a part json and a part "
            "for each picture, and name that part here. URLs are not fetched",
        )
    return bytes(pictures[name])


def _within_limit(hits: Sequence[Any], index: str) -> list[bytes]:
    """Return hits as JSON; raise :class:`Problem` if they are too large together."""
    shown, size = [], 0
    for hit in hits:
        shown.append(to_json(show(hit, index)))
        size += len(shown[-1])
        if size > ANSWER_BYTES:
            raise Problem(
                413, f"these hits have more than {ANSWER_BYTES:,} bytes together; ask for a smaller k"
            )
    return shown


def _check_item(
    item: NewItem | LeftOut, pictures: Mapping[str, memoryview], number: int
) -> GivenItem | LeftOut:
    """Return an item as the index takes it, or why it cannot be used."""
    name = item.id or f"item {number + 1}"
    if isinstance(item, LeftOut):
        return LeftOut(id=name, reason=item.reason)
    fields = json.dumps(item.fields, sort_keys=True)
    if len(fields) > FIELDS_BYTES or _depth(item.fields) > FIELDS_DEPTH:
        return LeftOut(id=name, reason=f"fields: at most {FIELDS_BYTES:,} bytes and {FIELDS_DEPTH} levels")
    try:
        image = None if item.image is None else _find_picture(pictures, item.image)
        if image is not None:
            decode(image)  # raises for pictures that the index could not read
    except (Problem, BadImage) as error:
        return LeftOut(id=name, reason=error.reason if isinstance(error, BadImage) else error.detail)
    # Without an id, the item is named by a hash of its contents, so that sending it twice adds it once.
    derived = hashlib.sha256((image or b"") + json.dumps([item.text, fields]).encode()).hexdigest()[:24]
    return GivenItem(item.id or derived, item.text, image, item.fields)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner)) if inner else 0
