"""Changes of one index, as the service makes them: one at a time, each of many requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

from genius.errors import ArtifactError
from genius.index import Index, NewItem, Outcome
from genius.search.live import Deleted, HeldByAnother
from genius.serve.batching import Batcher, BatchLimits
from genius.serve.metrics import Metrics
from genius.serve.refused import DiskFull, Overloaded, Refused

__all__ = ["IndexWriter"]

MOST_DEAD: Final = 0.2
"""Share of deleted items at which an index is compacted: that writes at most four items for each deleted
one. Segments need no compaction, for adding merges them, and searching eight costs little more than one."""
PATIENCE_SECONDS: Final = 10.0
"""How long to wait while another process changes the index."""
COUNTED_EVERY_SECONDS: Final = 60.0
"""Collisions are counted no more often than this, because every ID is looked at."""
DISK_FULL: Final = "the server's disk is full; nothing was changed, so try again when there is room"

_Job: TypeAlias = Literal["add", "delete", "compact"]

_log = logging.getLogger(__name__)


class IndexWriter:
    """Adds to an index, deletes from it and compacts it, in a thread of its own.

    Parameters
    ----------
    index
        a handle of the writer's own.
    """

    def __init__(self, name: str, index: Index, limits: BatchLimits, metrics: Metrics) -> None:
        self._name = name
        self._index = index
        self._metrics = metrics
        self._changes: Batcher[_Job, Sequence[Any], Any] = Batcher(self._change, limits)
        self._compacting: asyncio.Task[None] | None = None
        self._is_compaction_due = False
        self._counted_at = 0.0

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._changes)

    def start(self) -> None:
        """Begin to write; inside a running event loop."""
        self._tell()
        self._changes.start()

    async def stop(self, seconds: float | None = None) -> None:
        """Write what waits and take nothing new; what is not written after some seconds is refused."""
        await self._changes.stop(seconds)

    async def add(self, items: Sequence[NewItem]) -> list[Outcome]:
        """Add items, in one change with what else comes at the same time; what became of each, in order."""
        done = await self._changes.ask("add", items, size=len(items))
        outcomes: list[Outcome] = done.answer
        self._compact_if_due()
        return outcomes

    async def delete(self, item_ids: Sequence[str]) -> Deleted:
        """Delete items, in one change with what else comes at the same time."""
        done = await self._changes.ask("delete", item_ids, size=len(item_ids))
        deleted: Deleted = done.answer
        self._compact_if_due()
        return deleted

    def _change(self, job: _Job, requests: Sequence[Sequence[Any]]) -> Sequence[Any]:
        try:
            match job:
                case "add":
                    answers: Sequence[Any] = self._add(requests)
                case "delete":
                    answers = self._delete(requests)
                case "compact":
                    self._index.compact(wait_seconds=PATIENCE_SECONDS)
                    self._metrics.compacted(self._name)
                    answers = [None]
        except HeldByAnother as held:
            again = Overloaded(str(held), retry_after_seconds=PATIENCE_SECONDS)
            return [again] * len(requests)
        except (ArtifactError, OSError) as error:  # it is not one of the requests that is wrong
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                _log.error("the disk is full", exc_info=error)
                return [DiskFull(DISK_FULL)] * len(requests)
            return [error] * len(requests)
        self._tell()
        return answers

    def _add(self, requests: Sequence[Sequence[NewItem]]) -> list[list[Outcome]]:
        together = [item for items in requests for item in items]
        outcomes = self._index.add_items(together, wait_seconds=PATIENCE_SECONDS)
        for outcome in outcomes:
            self._metrics.changed(self._name, outcome.became, 1)
        rest = iter(outcomes)
        return [list(islice(rest, len(items))) for items in requests]

    def _delete(self, requests: Sequence[Sequence[str]]) -> list[Deleted]:
        together = dict.fromkeys(name for ids in requests for name in ids)
        done = self._index.delete(together, wait_seconds=PATIENCE_SECONDS)
        self._metrics.changed(self._name, "deleted", done.deleted)
        missing = set(done.missing)
        answers = []
        for ids in requests:
            own = dict.fromkeys(ids)
            gone = [name for name in own if name not in missing]
            answers.append(Deleted(len(gone), [name for name in own if name in missing]))
            missing.update(gone)  # whoever asks again finds them missing
        return answers

    def _tell(self) -> None:
        """Note what the index consists of now, and whether it should be compacted."""
        state = self._index.opened.state
        items = state.num_alive
        dead = sum(len(segment.dead) for segment in state.segments)
        self._metrics.state(self._name, items=items, segments=len(state.segments), deleted=dead)
        self._is_compaction_due = dead > MOST_DEAD * (items + dead)
        if time.monotonic() - self._counted_at > COUNTED_EVERY_SECONDS:
            self._metrics.collisions(self._name, self._index.info().collision_rate)
            self._counted_at = time.monotonic()

    def _compact_if_due(self) -> None:
        """Let compaction be the next change but those that wait already."""
        if self._is_compaction_due and (self._compacting is None or self._compacting.done()):
            self._compacting = asyncio.create_task(self._compact())

    async def _compact(self) -> None:
        try:
            with contextlib.suppress(Refused):
                await self._changes.ask("compact", ())
        except Exception:  # noqa: BLE001  nobody waits for it
            _log.exception("%s could not be compacted", self._name)
