"""Searches and changes of open indexes for many clients: a few threads, and one writer for each index.

An index is searched as it is when a search begins, and changed by one request at a time. Once enough deleted
items have piled up it is compacted, while searches continue on the previous state. An add is acknowledged
when it is on the disk and the next search finds it.
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
"""Of each kind; more would keep more memory."""
MAX_WAITING: Final = 256
"""Requests that wait for the threads of a kind."""
LONG_TEXT: Final = 1_000
"""Characters of a query's texts from which they may have many passages to encode."""
PATIENCE_SECONDS: Final = 10.0
"""Longest wait for another process that is changing the index."""
# Of texts in a picture; 64 MB by default, each up to four times in memory.
PngImagePlugin.MAX_TEXT_MEMORY = 4 << 20


def _load_small_exif(
    exif: Image.Exif, data: bytes, load: Callable[[Image.Exif, bytes], None] = Image.Exif.load
) -> None:
    load(exif, data if len(data) <= MAX_EXIF_BYTES else b"")


# Pillow reads some tags already when it opens a JPEG.
Image.Exif.load = _load_small_exif  # type: ignore[assignment, method-assign]


class Threads(ThreadPoolExecutor):
    """A few threads; who waits for one gets it in the order of coming.

    A thread is free when its work is done, also if nobody waits for the result any more.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._num_waiting = 0

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
        if self._num_waiting >= MAX_WAITING:
            raise Problem(429, f"{MAX_WAITING} requests are waiting, the maximum; try again")
        self._num_waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.get_running_loop().run_in_executor(self, work)
        except TimeoutError:
            raise DeadlinePassed(
                "no answer within the time allowed; allow more, or try again when the service is less busy"
            ) from None
        except (GeniusError, Problem) as error:
            # Its traceback leads to what the thread had in memory, which would stay until the answer is read.
            raise error.with_traceback(None) from None
        finally:
            self._num_waiting -= 1


class Service:
    """Searches and changes open indexes for many concurrent clients, on one event loop.

    Parameters
    ----------
    indexes
        By name.
    roots
        Folders whose pictures are handed out for items of any index.
    """

    def __init__(self, indexes: Mapping[str, Index], *, roots: Sequence[Path] = ()) -> None:
        self.indexes = dict(indexes)
        self.roots = [root.resolve() for root in roots]
        self.parsers = Threads(1)
        """More would not be faster, but keep Python from the searches."""
        self._searches = Threads(THREADS)
        """For searches by words alone, with settings of the index."""
        self._pictures = Threads(THREADS)
        """For searches with pictures, and for pictures that are added."""
        self.slow = Threads(THREADS)
        """For explanations and all other searches, which can take as long as their deadline."""
        self._writers = {name: Threads(1) for name in self.indexes}
        self.watches = [FileWatch(index) for index in self.indexes.values()]

    def warm_up(self) -> None:
        """Search every index once, so that no client waits for what is loaded on first use."""
        sys.setswitchinterval(
            0.0005
        )  # a change waits for the disk often, and for searches each time
        os.environ["TOKENIZERS_PARALLELISM"] = (
            "false"  # threads for a few texts take longer than the texts
        )
        for index in self.indexes.values():
            with contextlib.suppress(
                GeniusError
            ):  # an encoder without texts cannot be warmed up by one
                index.search("a first search", k=1)
        anyio.run(anyio.sleep, 0)  # loads what runs look-ups in threads
        if "torch" in sys.modules:  # an encoder runs in PyTorch
            sys.modules["torch"].set_num_threads(1)

    def threads_for(self, body: schemas.SearchBody, pictures: Mapping[str, memoryview]) -> Threads:
        """Return the threads for a search, so that slow ones delay no others."""
        if pictures:
            return self._pictures
        texts = [body.text or "", *(part.text or "" for part in body.parts)]
        is_long = sum(map(len, texts)) > LONG_TEXT
        _, left_out = split_excluded(body.text or "")
        conditions = (body.where, body.match, left_out)
        special = (is_long, *conditions, body.beam, body.rerank, body.router, body.candidates)
        is_plain = (body.text or body.parts) and body.combine == "sum" and not any(special)
        return (
            self._searches if is_plain and body.k + body.offset <= schemas.QUICK_HITS else self.slow
        )

    async def add(
        self, name: str, items: Sequence[schemas.NewItem], pictures: Mapping[str, memoryview]
    ) -> schemas.Added:
        """Add items; report unusable ones with their reasons. On return, all others are on the disk."""
        checked = await self._pictures.run(
            lambda: [_check_item(item, pictures, n) for n, item in enumerate(items, start=1)]
        )
        new = {item.id: item for item in checked if isinstance(item, NewItem)}
        left_out = [item for item in checked if isinstance(item, LeftOut)]
        done = ChangeSummary()
        if new:
            done = await self.change(
                name, lambda index: index.add([*new.values()], wait_seconds=PATIENCE_SECONDS)
            )
        left_out += [LeftOut(id=one.file, reason=one.reason) for one in done.left_out]
        return schemas.Added(
            added=done.added - done.replaced,
            replaced=done.replaced,
            unchanged=done.unchanged,
            left_out=left_out,
            ids=[str(item.id) for item in checked],
        )

    async def change(self, name: str, change: Callable[[Index], Result]) -> Result:
        """Change an index after those who came before; compact it afterwards if it needs that."""
        index, writer = self.indexes[name], self._writers[name]

        def compact() -> None:
            try:
                index.compact(wait_seconds=PATIENCE_SECONDS)
            except Exception:  # noqa: BLE001  nobody waits for this
                log.exception("%s could not be compacted", name)

        result = await writer.run(lambda: change(index))
        writer.submit(compact)
        return result


def search_config(index: Index, body: schemas.SearchBody) -> SearchSettings:
    """Return the settings of an index, overridden by those of a request."""
    config = SearchConfig(rerank=body.rerank, router=body.router, candidates=body.candidates)
    return adjust_settings(index.settings, index.model, config)


def search_request(
    body: schemas.SearchBody, pictures: Mapping[str, memoryview], deadline: float
) -> SearchRequest:
    """Convert the body of a search, decoding its pictures."""

    @functools.cache
    def image(name: str | None) -> Image.Image | None:
        return None if name is None else decode(_find_picture(pictures, name))

    parts = [
        SearchPart(text=part.text, image=image(part.image), id=part.id, weight=part.weight)
        for part in body.parts
    ]
    names = (
        "text",
        "combine",
        "instruction",
        "modality",
        "where",
        "match",
        "hybrid",
        "k",
        "offset",
        "beam",
    )
    request = SearchRequest(
        **{name: getattr(body, name) for name in names},
        image=image(body.image),
        parts=tuple(parts),
        deadline=deadline,
    )
    if request.filter is not None and any(
        condition.column == "image" for condition in request.filter.conditions
    ):
        raise Problem(
            422, "where: the image of an item is a path on the server and cannot be compared"
        )
    width = request.k + request.offset
    if request.query and width > schemas.MAX_HITS:
        raise Problem(
            422, f"offset: with k at most {schemas.MAX_HITS:,}; use where for other items"
        )
    width = max(width, request.beam or 1) * len(request.alternatives())
    if request.query and body.rerank == "none" and width > schemas.QUICK_HITS:
        raise Problem(
            422,
            f"rerank: with none, at most {schemas.QUICK_HITS} hits or beams in all its alternatives; "
            "ask for fewer, or leave it out",
        )
    return request


def find_picture(item: Item, folder: Path, roots: Sequence[Path]) -> Path:
    """Return where the picture of an item is, if it may be handed out.

    It may if it is in the folder of the index or below a root, or is the file that the index was made of: the
    item has its hash, which somebody else's index cannot have of a private file.

    Raises
    ------
    Problem
        The item has no picture, or it may not be handed out.
    """
    if item.image is None:
        raise Problem(404, f"item {item.id[:80]!r} has no picture")
    place = Path(item.image).resolve()
    is_below = any(place.is_relative_to(root) for root in (folder.resolve(), *roots))
    if not place.is_file() or not (is_below or is_same_picture(item, place)):
        raise Problem(
            404,
            "the picture of this item is gone, or is not the one that the index was made of; bring the index "
            "up to date, or start the service with --roots and the folder of its pictures",
        )
    return place


def decode(data: bytes) -> Image.Image:
    """Decode a picture of a request, no larger than the encoder needs.

    Raises
    ------
    BadImage
        It is no picture of a safe format, is damaged, or has too many pixels.
    """
    return open_image(
        data,
        name="image",
        formats=SAFE_FORMATS,
        max_pixels=schemas.PICTURE_PIXELS,
        shortest_side=SHORTEST_SIDE,
    )


def _find_picture(pictures: Mapping[str, memoryview], name: str) -> bytes:
    if name not in pictures:
        raise Problem(
            422,
            f"image: there is no part {name[:80]!r}; send multipart/form-data with a part json and a part "
            "for each picture, and name that part here. URLs are not fetched",
        )
    return bytes(pictures[name])


def _check_item(
    item: schemas.NewItem, pictures: Mapping[str, memoryview], number: int
) -> NewItem | LeftOut:
    """Return an item as the index takes it, or why it cannot be used."""
    name = item.id or f"item {number}"
    fields = json.dumps(item.fields, sort_keys=True)
    if len(fields) > FIELDS_BYTES:
        return LeftOut(id=name, reason=f"fields: at most {FIELDS_BYTES:,} bytes")
    try:
        image = None if item.image is None else _find_picture(pictures, item.image)
        if image is not None:
            decode(image)  # raises for pictures that the index could not read
    except (Problem, BadImage) as error:
        return LeftOut(
            id=name, reason=error.reason if isinstance(error, BadImage) else error.detail
        )
    # Without an id, the item is named by a hash of its contents, so that sending it twice adds it once.
    derived = hashlib.sha256((image or b"") + json.dumps([item.text, fields]).encode()).hexdigest()[
        :24
    ]
    return NewItem(item.id or derived, item.text, image, item.fields)
