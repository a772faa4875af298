"""Whether the pictures that a data set refers to are there and can be opened."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from genius.data.check_findings import Findings, Kind
from genius.data.ids import NameSet
from genius.data.images import TooManyPixels, open_image
from genius.data.mbeir import MBeir
from genius.errors import BadData, BadImage

_FOLDER: Final = "mbeir_images"
"""Where M-BEIR's own pictures are unpacked."""
_SHORTEST_SIDE: Final = 224
"""What encoders look at; pictures are decoded no larger than that where the format allows."""


class Pictures:
    """Looks at every picture once, in threads, a few at a time."""

    def __init__(self, data: MBeir, findings: Findings, *, decode: bool, workers: int) -> None:
        self._data = data
        self._findings = findings
        self._decode = decode
        self._threads = ThreadPoolExecutor(max(1, workers))
        self._most_waiting = 32 * max(1, workers)
        self._waiting: deque[Future[tuple[Kind, str] | None]] = deque()
        self._seen = NameSet()
        self._unpacked = decode or (data.root / _FOLDER).exists()
        self._num_packed = 0

    @property
    def num_seen(self) -> int:
        """Different pictures so far."""
        return len(self._seen)

    def close(self) -> None:
        """Wait for what is still being looked at."""
        while self._waiting:
            self._collect()
        self._threads.shutdown()
        if self._num_packed:
            self._findings.add(
                "no-images",
                f"{self._data.root / _FOLDER} is missing, so no picture was looked for; unpack M-BEIR's "
                "archive of pictures there, or use an encoder that needs none (precomputed:)",
                self._num_packed,
            )

    def look_at(self, relative: str, owner: str) -> None:
        """Have a picture looked at, if this is the first time that it is referred to."""
        if not self._seen.add(relative):
            return
        if not self._unpacked and relative.startswith(f"{_FOLDER}/"):
            self._num_packed += 1
            return
        self._waiting.append(self._threads.submit(self._trouble, relative, owner))
        if len(self._waiting) >= self._most_waiting:
            self._collect()

    def _collect(self) -> None:
        trouble = self._waiting.popleft().result()
        if trouble is not None:
            self._findings.add(*trouble)

    def _trouble(self, relative: str, owner: str) -> tuple[Kind, str] | None:
        try:
            path = self._data.image_path(relative)
        except BadData as error:
            return "missing-image", f"{owner}: {error}"
        if not path.exists():
            return "missing-image", f"{owner}: {path} is missing; put the picture there, or drop the record"
        if not self._decode:
            return None
        try:
            open_image(path, shortest_side=_SHORTEST_SIDE).close()
        except TooManyPixels as error:
            return "oversized-image", f"{owner}: {error}"
        except BadImage as error:
            return "broken-image", f"{owner}: {error}"
        return None
