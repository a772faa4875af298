"""Search and change open indexes for many clients, with a few threads and one writer per index.

A search uses the snapshot of the index at its start. Changes of an index run one after the other.
An index with enough deleted items is compacted after a change, while searches continue with the
previous snapshot. The response to an added item is sent when the item is on the disk and the next
search finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import anyio
from PIL import Image, PngImagePlugin

from genius_search.config import SearchConfig, SearchSettings
from genius_search.data.images import MAX_EXIF_BYTES, SAFE_FORMATS, SHORTEST_SIDE, open_image
from genius_search.errors import BadImage, DeadlinePassed, GeniusError
from genius_search.index.build import ChangeSummary
from genius_search.index.index import Index
from genius_search.index.items import Item
from genius_search.index.match import split_excluded
from genius_search.index.pool import NewItem
from genius_search.index.query import adjust_settings
from genius_search.index.request import SearchPart, SearchRequest
from genius_search.index.roots import is_same_picture
from genius_search.serve import schemas
from genius_search.serve.schemas import FIELDS_BYTES, LeftOut, Problem, log
from genius_search.serve.watch import FileWatch

Result = TypeVar("Result")

THREADS: Final = 2
"""Number of threads in each pool. Every thread needs memory for its searches."""
MAX_WAITING: Final = 256
"""Maximum number of requests that wait for a pool of threads."""
LONG_TEXT: Final = 1_000
"""Number of characters above which a query may have several passages to encode, and is slow."""
MAX_CHANGE_WAIT_SECONDS: Final = 10.0
"""Maximum wait for another process that changes the index."""
# Limit the texts inside a PNG file to 4 MB; Pillow's limit is 64 MB, of which it makes copies.
PngImagePlugin.MAX_TEXT_MEMORY = 4 << 20


def _load_small_exif(
    exif: Image.Exif, data: bytes, load: Callable[[Image.Exif, bytes], None] = Image.Exif.load
) -> None:
    load(exif, data if len(data) <= MAX_EXIF_BYTES else b"")


# Pillow parses EXIF data when it opens a JPEG, so the limit cannot be checked by the caller.
Image.Exif.load = _load_small_exif  # type: ignore[assignment, method-assign]


class Threads(ThreadPoolExecutor):
    """A small pool of threads with a first-in, first-out queue.

    A thread that runs a function is busy until the function returns, even if the request that
    waits for the result has been cancelled.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._num_waiting = 0

    async def run(self, work: Callable[[], Result], *, deadline: float = math.inf) -> Result:
        """Run a function in a thread, and return its result.

        Parameters
        ----------
        deadline
            the time of :func:`time.monotonic` after which the result is useless.

        Raises
        ------
        Problem
            Too many requests are waiting (status 429).
        DeadlinePassed
            The deadline has passed. If the function has not started yet, it does not run.
        """
        if self._num_waiting >= MAX_WAITING:
            raise Problem(429, f"{MAX_WAITING} requests are already waiting; retry later")
        self._num_waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.get_running_loop().run_in_executor(self, work)
        except TimeoutError:
            raise DeadlinePassed(
                "no result before the deadline; set a later deadline, or retry when the service is "
                "less busy"
            ) from None
        except (GeniusError, Problem) as error:
            # The traceback refers to the variables of the thread, such as pictures, and would keep
            # them in memory until the client has read the response.
            raise error.with_traceback(None) from None
        finally:
            self._num_waiting -= 1


class Service:
    """Search and change open indexes for many concurrent clients, on one event loop.

    Parameters
    ----------
    indexes
        name -> opened index.
    roots
        folders whose pictures are sent for items of any index.
    """

    def __init__(self, indexes: Mapping[str, Index], *, roots: Sequence[Path] = ()) -> None:
        self.indexes = dict(indexes)
        self.roots = [root.resolve() for root in roots]
        self.parsers = Threads(1)
        """One thread to parse bodies. Parsing holds Python's lock, so more would not be faster."""
        self._searches = Threads(THREADS)
        """Threads for text queries with the default settings of the index."""
        self._pictures = Threads(THREADS)
        """Threads for queries with pictures, and for decoding pictures to add."""
        self.slow = Threads(THREADS)
        """Threads for explanations and all other searches, which may run until their deadline."""
        self._writers = {name: Threads(1) for name in self.indexes}
        self.watches = [FileWatch(index) for index in self.indexes.values()]

    def warm_up(self) -> None:
        """Search every index once, so that no client waits for encoders and libraries to load."""
        # A change waits for the disk often, and needs Python's lock again each time. With the
        # default interval of 5 ms, searches in other threads would hold it for too long.
        sys.setswitchinterval(0.0005)
        # Starting threads to tokenise a few texts takes longer than tokenising them.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        for index in self.indexes.values():
            with contextlib.suppress(GeniusError):  # the encoder may not read texts
                index.search("a first search", k=1)
        anyio.run(anyio.sleep, 0)  # imports anyio's event loop, for routes that run in threads
        if "torch" in sys.modules:  # an encoder uses PyTorch
            sys.modules["torch"].set_num_threads(1)

    def threads_for(self, body: schemas.SearchBody, pictures: Mapping[str, memoryview]) -> Threads:
        """Return the threads for a search, so that slow searches do not delay quick ones."""
        if pictures:
            return self._pictures
        texts = [body.text or "", *(part.text or "" for part in body.parts)]
        is_long = sum(map(len, texts)) > LONG_TEXT
        _, excluded_words = split_excluded(body.text or "")
        has_conditions = bool(body.where or body.match or excluded_words)
        has_settings = any((body.beam, body.rerank, body.router, body.candidates))
        has_query = bool(body.text or body.parts) and body.combine == "sum"
        is_small = body.k + body.offset <= schemas.QUICK_HITS
        is_quick = has_query and is_small and not (is_long or has_conditions or has_settings)
        return self._searches if is_quick else self.slow

    async def add(
        self, name: str, items: Sequence[schemas.NewItem], pictures: Mapping[str, memoryview]
    ) -> schemas.Added:
        """Add items, and return the reasons for items that were left out.

        On return, all other items are on the disk.
        """
        checked = await self._pictures.run(
            lambda: [_check_item(item, pictures, n) for n, item in enumerate(items, start=1)]
        )
        new_items = {item.id: item for item in checked if isinstance(item, NewItem)}
        left_out = [item for item in checked if isinstance(item, LeftOut)]
        summary = ChangeSummary()
        if new_items:
            summary = await self.change(
                name,
                lambda index: index.add(
                    [*new_items.values()], wait_seconds=MAX_CHANGE_WAIT_SECONDS
                ),
            )
        left_out += [LeftOut(id=item.file, reason=item.reason) for item in summary.left_out]
        return schemas.Added(
            added=summary.added - summary.replaced,
            replaced=summary.replaced,
            unchanged=summary.unchanged,
            left_out=left_out,
            ids=[str(item.id) for item in checked],
        )

    async def change(self, name: str, change: Callable[[Index], Result]) -> Result:
        """Change an index after all earlier changes, and compact it afterwards if necessary."""
        index = self.indexes[name]
        writer = self._writers[name]

        def compact() -> None:
            try:
                index.compact(wait_seconds=MAX_CHANGE_WAIT_SECONDS)
            except Exception:  # noqa: BLE001  nobody waits for the result
                log.exception("%s could not be compacted", name)

        result = await writer.run(lambda: change(index))
        writer.submit(compact)
        return result


def search_config(index: Index, body: schemas.SearchBody) -> SearchSettings:
    """Return the settings of an index, with the changes of a request."""
    config = SearchConfig(rerank=body.rerank, router=body.router, candidates=body.candidates)
    return adjust_settings(index.settings, index.model, config)


def search_request(
    body: schemas.SearchBody, pictures: Mapping[str, memoryview], deadline: float
) -> SearchRequest:
    """Convert the body of a search to a request, and decode its pictures."""

    @functools.cache
    def decode_part(name: str | None) -> Image.Image | None:
        return None if name is None else decode(_picture_part(pictures, name))

    parts = [
        SearchPart(text=part.text, image=decode_part(part.image), id=part.id, weight=part.weight)
        for part in body.parts
    ]
    request = SearchRequest(
        text=body.text,
        image=decode_part(body.image),
        parts=tuple(parts),
        combine=body.combine,
        instruction=body.instruction,
        modality=body.modality,
        where=body.where,
        match=body.match,
        hybrid=body.hybrid,
        k=body.k,
        offset=body.offset,
        beam=body.beam,
        deadline=deadline,
    )
    _check_limits(request, body)
    return request


def _check_limits(request: SearchRequest, body: schemas.SearchBody) -> None:
    """Raise :class:`Problem` for a request that would reveal paths or take too long."""
    conditions = () if request.filter is None else request.filter.conditions
    if any(condition.column == "image" for condition in conditions):
        raise Problem(
            422, "where: the image of an item is a path on the server, and cannot be compared"
        )
    if not request.query:
        return
    num_hits = request.k + request.offset
    if num_hits > schemas.MAX_HTTP_HITS:
        raise Problem(
            422,
            f"offset: k and offset together are at most {schemas.MAX_HTTP_HITS:,}; use where to "
            "find other items",
        )
    num_beams = max(num_hits, request.beam or 1) * len(request.alternatives())
    if body.rerank == "none" and num_beams > schemas.QUICK_HITS:
        raise Problem(
            422,
            f"rerank: none allows at most {schemas.QUICK_HITS} hits or beams, counted for each "
            "alternative; request fewer, or leave out rerank",
        )


def find_picture(item: Item, folder: Path, roots: Sequence[Path]) -> Path:
    """Return the file of an item's picture, if it may be sent.

    A picture may be sent if it is in the folder of the index or below a root, or if its contents
    have the hash that the index recorded. An index from someone else may name a private file, but
    does not know its hash.

    Raises
    ------
    Problem
        The item has no picture, or it may not be sent (status 404).
    """
    if item.image is None:
        raise Problem(404, f"item {item.id[:80]!r} has no picture")
    file = Path(item.image).resolve()
    is_allowed = any(file.is_relative_to(root) for root in (folder.resolve(), *roots))
    if not file.is_file() or not (is_allowed or is_same_picture(item, file)):
        raise Problem(
            404,
            "the picture of this item is missing, or differs from the indexed picture; bring the "
            "index up to date, or start the service with --roots and the folder of its pictures",
        )
    return file


def decode(data: bytes) -> Image.Image:
    """Decode a picture of a request, at about the size that the encoder needs.

    Raises
    ------
    BadImage
        The picture is damaged, has too many pixels, or has a format that is not accepted from
        clients.
    """
    return open_image(
        data,
        name="image",
        formats=SAFE_FORMATS,
        max_pixels=schemas.PICTURE_PIXELS,
        shortest_side=SHORTEST_SIDE,
    )


def _picture_part(pictures: Mapping[str, memoryview], name: str) -> bytes:
    if name not in pictures:
        raise Problem(
            422,
            f"image: there is no part {name[:80]!r}; send multipart/form-data with a part json and "
            "a part for each picture, and name that part here. URLs are not fetched",
        )
    return bytes(pictures[name])


def _check_item(
    item: schemas.NewItem, pictures: Mapping[str, memoryview], number: int
) -> NewItem | LeftOut:
    """Return an item for :meth:`Index.add`, or the reason why it is left out."""
    name = item.id or f"item {number}"
    fields = json.dumps(item.fields, sort_keys=True)
    if len(fields) > FIELDS_BYTES:
        return LeftOut(id=name, reason=f"fields: at most {FIELDS_BYTES:,} bytes")
    try:
        image = None if item.image is None else _picture_part(pictures, item.image)
        if image is not None:
            decode(image)  # raises an error for pictures that cannot be read
    except (Problem, BadImage) as error:
        reason = error.reason if isinstance(error, BadImage) else error.detail
        return LeftOut(id=name, reason=reason)
    # The default id is a hash of the contents, so that an item that is sent twice is added once.
    contents = (image or b"") + json.dumps([item.text, fields]).encode()
    default_id = hashlib.sha256(contents).hexdigest()[:24]
    return NewItem(item.id or default_id, item.text, image, item.fields)
