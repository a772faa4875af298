"""Metrics for Prometheus: how many requests each route answered with each status, and how fast."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from genius_search.serve.workers import METRICS_FOLDER

BUCKETS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""Upper limits of the counted durations, in seconds."""


class Metrics:
    """Counts the requests of an application.

    Parameters
    ----------
    paths
        The paths of its routes. All other paths share a label, since clients can invent any.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "http_requests",
            "Number of requests.",
            ("handler", "method", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time from the head of a request to the end of its response.",
            ("handler", "method"),
            registry=self._registry,
            buckets=BUCKETS,
        )
        self._counters: dict[tuple[str, str, int], Counter] = {}
        self._histograms: dict[tuple[str, str], Histogram] = {}

    def count(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        if path not in self._paths:
            path = "/assets" if path.startswith("/assets/") else "none"
        key = (path, method, status)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = self._requests.labels(path, method, str(status))
            self._histograms[key[:2]] = self._seconds.labels(path, method)
        counter.inc()
        self._histograms[key[:2]].observe(seconds)

    def write(self) -> bytes:
        """Return all metrics as text in the format of Prometheus, those of all workers added."""
        registry = self._registry
        if METRICS_FOLDER in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
