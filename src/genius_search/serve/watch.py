"""Check the files of served indexes continuously in the background."""

from __future__ import annotations

import time
from threading import Event, Thread
from typing import Final

from genius_search.index.index import Index, current_state
from genius_search.index.info import check
from genius_search.serve.schemas import log

MIN_PAUSE_SECONDS: Final = 30.0
"""Minimum pause between two checks of an index."""
PAUSE_FACTOR: Final = 9
"""Minimum ratio of a pause to the check before it, so that checks take at most a tenth of the
time."""


class FileWatch:
    """Compare all files of an index except pictures with their checksums, in a thread.

    The files are read at about 2 GB per second. Damage is logged, and searches raise an error until
    the index is opened again or changed. The thread ends after :meth:`end` was called, when the
    check that may be running is finished.
    """

    def __init__(self, index: Index) -> None:
        self.damage: str | None = None
        """The damage found by the last check, and the remedy; None if all files are intact."""
        self._index = index
        self._is_ended = Event()
        Thread(target=self._run, name=f"watch {index.folder}", daemon=True).start()

    def end(self) -> None:
        """Start no further check."""
        self._is_ended.set()

    def _run(self) -> None:
        pause = 0.0
        while not self._is_ended.wait(pause):
            start_time = time.monotonic()
            self._check()
            pause = max(MIN_PAUSE_SECONDS, PAUSE_FACTOR * (time.monotonic() - start_time))

    def _check(self) -> None:
        index = self._index
        try:
            snapshot = current_state(index).snapshot
            check(index.folder, snapshot, model_folder=index.model.folder, with_pictures=False)
            self.damage = current_state(index).snapshot.damage
        except Exception as error:  # noqa: BLE001  any error means that the index cannot be read
            if str(error) != self.damage:
                log.error("%s", error)
            self.damage = str(error)
