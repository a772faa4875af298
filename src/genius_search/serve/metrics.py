"""Prometheus metrics of the service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from genius_search.cluster.routed import ShardHealth

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
        self.requests = Counter(
            "genius_requests", "HTTP responses", ("route", "method", "status"), registry=registry
        )
        self.request_seconds = Histogram(
            "genius_request_seconds",
            "From the first byte of a request to the end of its response",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "genius_stage_seconds",
            "Time of a search by stage; encode and search are those of its whole batch",
            ("stage",),
            buckets=SECONDS,
            registry=registry,
        )
        self.batch_size = Histogram(
            "genius_search_batch_size", "Searches run together", buckets=COUNTS, registry=registry
        )
        self.beam = Histogram("genius_search_beam", "Beam width", buckets=COUNTS, registry=registry)
        self.candidates = Histogram(
            "genius_search_leaves", "Items under all beams of a search", buckets=CANDIDATES, registry=registry
        )
        self.errors = Counter("genius_errors", "Requests that failed, by error", ("kind",), registry=registry)
        self.changes = Counter(
            "genius_items_changed", "Items by outcome", ("index", "became"), registry=registry
        )
        self.compactions = Counter("genius_compactions", "Compactions", ("index",), registry=registry)
        self.queue_length = Gauge("genius_queue_length", "Waiting requests", ("queue",), registry=registry)
        self.items = Gauge("genius_items", "Items that can be found", ("index",), registry=registry)
        self.collision_rate = Gauge(
            "genius_collision_rate", "Share of items whose ID is shared", ("index",), registry=registry
        )
        self.segments = Gauge("genius_segments", "Segments of the index", ("index",), registry=registry)
        self.deleted_items = Gauge(
            "genius_deleted_items", "Deleted items not yet compacted away", ("index",), registry=registry
        )


class ShardCollector(Collector):
    """Metrics of the shards of clusters that are searched elsewhere.

    Parameters
    ----------
    clusters
        a function for each index, by name, that returns the health of its shards.
    """

    def __init__(self, clusters: Mapping[str, Callable[[], Mapping[str, ShardHealth]]]) -> None:
        self._clusters = clusters

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        labels = ("index", "shard")
        copies = GaugeMetricFamily("genius_shard_copies", "Copies of a shard", labels=labels)
        answering = GaugeMetricFamily(
            "genius_shard_copies_answering", "Copies whose last call was answered", labels=labels
        )
        calls = CounterMetricFamily("genius_shard_calls", "Answered calls to a shard", labels=labels)
        failures = CounterMetricFamily(
            "genius_shard_failures",
            "Calls that a copy did not answer",
            labels=labels,
        )
        for index, read in self._clusters.items():
            for shard, health in read().items():
                copies.add_metric((index, shard), health.copies)
                answering.add_metric((index, shard), health.answering)
                calls.add_metric((index, shard), health.calls)
                failures.add_metric((index, shard), health.failures)
        yield from (copies, answering, calls, failures)
