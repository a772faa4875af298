"""Prometheus metrics of the service."""

from __future__ import annotations

from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Values of the label ``method``; clients could send any number of others."""
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
COUNTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CANDIDATES: Final = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)


class Metrics:
    """Metrics of one service, in a separate registry.

    >>> metrics = Metrics()
    >>> metrics.errors.labels("Overloaded").inc()
    >>> metrics.registry.get_sample_value("genius_errors_total", {"kind": "Overloaded"})
    1.0
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter("genius_requests", "HTTP responses", ("route", "method", "status"))
        self.request_seconds = histogram(
            "genius_request_seconds",
            "From the first byte of a request to the end of its response",
            ("route",),
            buckets=SECONDS,
        )
        self.stage_seconds = histogram(
            "genius_stage_seconds",
            "Time of a search by stage; encode and search are those of its whole batch",
            ("stage",),
            buckets=SECONDS,
        )
        self.batch_size = histogram("genius_search_batch_size", "Searches run together", buckets=COUNTS)
        self.beam = histogram("genius_search_beam", "Beam width", buckets=COUNTS)
        self.candidates = histogram(
            "genius_search_leaves", "Items under all beams of a search", buckets=CANDIDATES
        )
        self.errors = counter("genius_errors", "Requests that failed, by error", ("kind",))
        self.changes = counter("genius_items_changed", "Items by outcome", ("index", "became"))
        self.compactions = counter("genius_compactions", "Compactions", ("index",))
        self.queue_length = gauge("genius_queue_length", "Waiting requests", ("queue",))
        self.items = gauge("genius_items", "Items that can be found", ("index",))
        self.collision_rate = gauge("genius_collision_rate", "Share of items whose ID is shared", ("index",))
        self.segments = gauge("genius_segments", "Segments of the index", ("index",))
        self.deleted_items = gauge("genius_deleted_items", "Deleted items not yet compacted away", ("index",))
