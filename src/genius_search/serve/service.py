"""Search and change open indexes for many clients, with a few threads and one writer per index.

A search uses the snapshot of the index at its start. Changes of an index run one after the other.
An index with enough deleted items is compacted after a change, while searches continue with the
previous snapshot. The response to an added item is sent when the item is on the disk and the next
search finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import anyio
import numpy as np
from jaxtyping import Shaped
from PIL import Image, PngImagePlugin

from genius_search.data.images import MAX_EXIF_BYTES
from genius_search.errors import BadImage, DeadlinePassed, GeniusError
from genius_search.index.build import ChangeSummary
from genius_search.index.index import Index
from genius_search.index.items import Item
from genius_search.index.match import split_excluded
from genius_search.index.pool import SAME_ID, NewItem
from genius_search.index.roots import is_same_picture
from genius_search.records import Modality
from genius_search.serve import schemas
from genius_search.serve.queries import check_vector, decode, picture_part
from genius_search.serve.schemas import FIELDS_BYTES, LATE, LeftOut, Problem, log
from genius_search.serve.watch import FileWatch

Result = TypeVar("Result")

THREADS: Final = 2
"""Number of threads in each pool. Every thread needs memory for its searches."""
MAX_WAITING: Final = 256
"""Maximum number of requests that wait for a pool of threads."""
LONG_TEXT: Final = 1_000
"""Number of characters above which a query may have several passages to encode, and is slow."""
MAX_QUICK_SECONDS: Final = 0.01
"""Maximum CPU time of a search that may run on the event loop."""
GC_THRESHOLD: Final = 20_000
"""Number of new objects after which Python looks for unreachable ones; by default 700."""
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
            raise DeadlinePassed(LATE) from None
        except (GeniusError, Problem) as error:
            # The traceback refers to the variables of the thread, such as pictures, and would keep
            # them in memory until the client has read the response.
            raise error.with_traceback(None) from None
        finally:
            self._num_waiting -= 1


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """An index and its name on this server."""

    name: str
    index: Index


def _is_quick(search: Callable[[], object]) -> bool:
    """Return whether a search takes at most :data:`MAX_QUICK_SECONDS`, the second time it runs."""
    search()
    start = time.thread_time()
    search()
    return time.thread_time() - start <= MAX_QUICK_SECONDS


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
        self.searches = Threads(THREADS)
        """Threads for text queries with the default settings of the index."""
        self._pictures = Threads(THREADS)
        """Threads for queries with pictures, and for decoding pictures to add."""
        self.slow = Threads(THREADS)
        """Threads for explanations and all other searches, which may run until their deadline."""
        self.quick_texts: set[str] = set()
        """Names of indexes whose searches by text may run on the event loop."""
        self.quick_vectors: set[str] = set()
        """Names of indexes whose searches by vector may run on the event loop."""
        self._writers = {name: Threads(1) for name in self.indexes}
        self.watches: list[FileWatch] = []
        """Checks of the indexes' files, while the application runs."""

    @contextlib.contextmanager
    def watch_files(self) -> Iterator[None]:
        """Check the files of all indexes in the background."""
        self.watches = [FileWatch(index) for index in self.indexes.values()]
        try:
            yield
        finally:
            for watch in self.watches:
                watch.end()

    def warm_up(self) -> None:
        """Search every index once, so that no client waits for encoders and libraries to load."""
        # A change waits for the disk often, and needs Python's lock again each time. With the
        # default interval of 5 ms, searches in other threads would hold it for too long.
        sys.setswitchinterval(0.0005)
        # Starting threads to tokenise a few texts takes longer than tokenising them.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        for name, index in self.indexes.items():
            vector = np.ones(index.model.encoder.dim, dtype=np.float32)
            if _is_quick(partial(index.search, vector=vector)):
                self.quick_vectors.add(name)
            with contextlib.suppress(GeniusError):  # the encoder may not read texts
                if _is_quick(partial(index.search, "a first search")):
                    self.quick_texts.add(name)
        anyio.run(anyio.sleep, 0)  # imports anyio's event loop, for routes that run in threads
        if "torch" in sys.modules:  # an encoder uses PyTorch
            sys.modules["torch"].set_num_threads(1)
        # Objects of the start live as long as the process, and need not be looked at again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)

    def find_index(self, name: str | None) -> Served:
        """Return the index with a name, or the only index; raise :class:`Problem` otherwise."""
        names = ", ".join(list(self.indexes)[:20])
        if name is None and len(self.indexes) > 1:
            raise Problem(
                422, f"index: required, since the server has several; give one of {names}"
            )
        if name is not None and name not in self.indexes:
            raise Problem(404, f"index {name[:80]!r} does not exist; give one of {names}")
        name = name or next(iter(self.indexes))
        return Served(name, self.indexes[name])

    def is_quick(
        self, name: str, body: schemas.SearchBody, pictures: Mapping[str, memoryview]
    ) -> bool:
        """Return whether a search may run on the event loop, because it takes little time.

        That is known from a first search (:meth:`warm_up`): large indexes and most encoders are not
        quick.
        """
        if pictures or body.searches is not None or not is_quick_search(body):
            return False
        has_text = bool(body.text) or any(part.text for part in body.parts)
        return name in (self.quick_texts if has_text else self.quick_vectors)

    def threads_for(self, body: schemas.SearchBody, pictures: Mapping[str, memoryview]) -> Threads:
        """Return the threads for a search, so that slow searches do not delay quick ones."""
        if pictures:
            return self._pictures
        is_quick = all(map(is_quick_search, body.searches or [body]))
        return self.searches if is_quick else self.slow

    async def add(
        self, name: str, items: Sequence[schemas.NewItem], pictures: Mapping[str, memoryview]
    ) -> schemas.Added:
        """Add items, and return the reasons for items that were left out.

        On return, all other items are on the disk.
        """
        checked = await self._pictures.run(
            lambda: [
                _check_item(item, pictures, self.indexes[name], number)
                for number, item in enumerate(items)
            ]
        )
        # Of several items with the same id, the last one counts.
        new_items = {item.id: item for item in checked if not isinstance(item, LeftOut)}
        contents = [item for item in new_items.values() if isinstance(item, NewItem)]
        vectors = [item for item in new_items.values() if isinstance(item, VectorItem)]
        summaries = []
        if contents:
            summaries.append(
                await self.change(
                    name,
                    lambda index: index.add(contents, wait_seconds=MAX_CHANGE_WAIT_SECONDS),
                )
            )
        if vectors:
            summaries.append(await self.change(name, lambda index: _add_vectors(index, vectors)))
        left_out = [item for item in checked if isinstance(item, LeftOut)]
        left_out += [
            LeftOut(id=str(item.id), reason=SAME_ID)
            for item in checked
            if not isinstance(item, LeftOut) and new_items[item.id] is not item
        ]
        for summary in summaries:
            left_out += [LeftOut(id=item.file, reason=item.reason) for item in summary.left_out]
        return schemas.Added(
            added=sum(summary.added - summary.replaced for summary in summaries),
            replaced=sum(summary.replaced for summary in summaries),
            unchanged=sum(summary.unchanged for summary in summaries),
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


def is_quick_search(search: schemas.Search) -> bool:
    """Return whether a search without pictures takes a few milliseconds in any index."""
    texts = [search.text or "", *(part.text or "" for part in search.parts)]
    is_long = sum(map(len, texts)) > LONG_TEXT
    _, excluded_words = split_excluded(search.text or "")
    has_conditions = bool(search.where or search.match or excluded_words)
    has_settings = any((search.beam, search.rerank, search.router))
    is_arranged = bool(search.order_by or search.facets or search.group_by)
    has_query = bool(search.text or search.parts) or search.vector is not None
    is_sum = has_query and search.combine == "sum"
    is_small = search.k + search.offset <= schemas.QUICK_HITS
    is_plain = not (has_conditions or has_settings or is_arranged)
    return is_sum and is_small and is_plain and not is_long


class VectorItem(NamedTuple):
    """An item to add by its vector."""

    id: str | int
    vector: Shaped[np.ndarray, " dim"]
    modality: Modality
    text: str | None
    fields: dict[str, Any] | None


def _check_item(
    item: schemas.NewItem, pictures: Mapping[str, memoryview], index: Index, number: int
) -> NewItem | VectorItem | LeftOut:
    """Return an item for :meth:`Index.add`, or the reason why it is left out."""
    name = item.id or f"items[{number}]"
    fields = json.dumps(item.fields, sort_keys=True)
    if len(fields) > FIELDS_BYTES:
        return LeftOut(id=name, reason=f"fields: at most {FIELDS_BYTES:,} bytes")
    content = b""
    try:
        _check_vector(item, index)
        if item.vector is not None:
            content = item.vector.tobytes()
        elif item.image is not None:
            content = picture_part(pictures, item.image)
            decode(content)  # raises an error for pictures that cannot be read
    except (Problem, BadImage) as error:
        reason = error.reason if isinstance(error, BadImage) else error.detail
        return LeftOut(id=name, reason=reason)
    # The default id is a hash of the contents, so that an item that is sent twice is added once.
    digest = hashlib.sha256(content + json.dumps([item.text, fields]).encode())
    item_id = item.id or digest.hexdigest()[:24]
    if item.vector is None:
        return NewItem(item_id, item.text, content or None, item.fields)
    modality = item.modality or Modality.TEXT
    return VectorItem(item_id, item.vector, modality, item.text, item.fields)


def _check_vector(item: schemas.NewItem, index: Index) -> None:
    """Raise :class:`Problem` for an item whose vector or modality cannot be used."""
    if item.vector is None:
        if item.modality is not None:
            raise Problem(422, "modality: only items with a vector name it; leave it out")
        return
    if item.image is not None:
        raise Problem(422, "image: an item has a vector or an image, not both")
    check_vector(item.vector, index.model.encoder.dim)


def _add_vectors(index: Index, items: Sequence[VectorItem]) -> ChangeSummary:
    return index.add_vectors(
        np.stack([item.vector for item in items]),
        ids=[item.id for item in items],
        modalities=[item.modality for item in items],
        texts=[item.text for item in items],
        fields=[item.fields for item in items],
        wait_seconds=MAX_CHANGE_WAIT_SECONDS,
    )
