"""What the service counts and times, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

__all__ = ["Metrics"]

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""A client may make up others; each would stay for ever."""
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
COUNTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LEAVES: Final = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)


class Metrics:
    """Counters of one service, in a registry of their own.

    >>> metrics = Metrics()
    >>> metrics.request("/v1/search", "POST", 200, 0.012)
    >>> b"genius_requests_total" in metrics.render()
    True
    """

    content_type: Final = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._counter("requests", "Answers of the service", "route", "method", "status")
        self._seconds = Histogram(
            "genius_request_seconds",
            "From a request's first byte to its answer",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._stages = Histogram(
            "genius_stage_seconds",
            "Time of a search by stage; encode and search are those of its whole batch",
            ("stage",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._batch = self._histogram("search_batch_size", "Searches answered together", COUNTS)
        self._beam = self._histogram("search_beam", "Width of the beam", COUNTS)
        self._leaves = self._histogram("search_leaves", "Items under all beams of a search", LEAVES)
        self._errors = self._counter("errors", "Requests that the engine did not answer", "kind")
        self._changes = self._counter("items_changed", "Items by what became of them", "index", "became")
        self._compactions = self._counter("compactions", "Compactions", "index")
        self._queue = self._gauge("queue_length", "Requests that wait", "queue")
        self._items = self._gauge("items", "Items that can be found", "index")
        self._collisions = self._gauge("collision_rate", "Share of the items whose ID is shared", "index")
        self._segments = self._gauge("segments", "Segments of the index", "index")
        self._dead = self._gauge("deleted_items", "Deleted items that take room until compaction", "index")

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an answer of the service."""
        self._requests.labels(route, method if method in METHODS else "other", str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def search(self, *, queue_seconds: float, encode_seconds: float, search_seconds: float) -> None:
        """Time a search by stage."""
        self._stages.labels("queue").observe(queue_seconds)
        self._stages.labels("encode").observe(encode_seconds)
        self._stages.labels("search").observe(search_seconds)

    def batch(self, size: int) -> None:
        """Count searches that were answered together."""
        self._batch.observe(size)

    def found(self, *, beam: int, leaves: int) -> None:
        """How far a search had to look."""
        self._beam.observe(beam)
        self._leaves.observe(leaves)

    def failed(self, kind: str) -> None:
        """Count a request that was not answered."""
        self._errors.labels(kind).inc()

    def changed(self, index: str, became: str, count: int) -> None:
        """Count items that were added, replaced, left alone, left out or deleted."""
        self._changes.labels(index, became).inc(count)

    def compacted(self, index: str) -> None:
        """Count a compaction."""
        self._compactions.labels(index).inc()

    def watch_queue(self, queue: str, length: Callable[[], int]) -> None:
        """Ask for the length of a queue whenever Prometheus asks."""
        self._queue.labels(queue).set_function(lambda: float(length()))

    def state(self, index: str, *, items: int, segments: int, deleted: int) -> None:
        """What an index consists of now."""
        self._items.labels(index).set(items)
        self._segments.labels(index).set(segments)
        self._dead.labels(index).set(deleted)

    def collisions(self, index: str, rate: float) -> None:
        """Share of an index's items whose ID is shared."""
        self._collisions.labels(index).set(rate)

    def render(self) -> bytes:
        """Everything, in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"genius_{name}", help_, labels, registry=self.registry)

    def _gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        return Gauge(f"genius_{name}", help_, labels, registry=self.registry)

    def _histogram(self, name: str, help_: str, buckets: tuple[int, ...]) -> Histogram:
        return Histogram(f"genius_{name}", help_, buckets=buckets, registry=self.registry)
