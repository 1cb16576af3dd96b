"""What Prometheus reads, by the names that vLLM has, behind `invariant_rag_`.

Labels hold routes and outcomes, never contents, ids of requests or tenants.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.outputs import Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self._counts: dict[str, list[int]] = {}
        self._lock = Lock()
        labels = ["route", "status"]
        self.requests = Counter("invariant_rag_requests", "Requests by route and status.", labels, registry=own)
        self.seconds = Histogram(
            "invariant_rag_e2e_request_latency_seconds",
            "Of a request.",
            ["route"],
            buckets=_SECONDS,
            registry=own,
        )
        self.active = Gauge("invariant_rag_active_requests", "Requests that run or wait.", registry=own)
        self.rejected = Counter("invariant_rag_rejected", "Requests refused unread.", ["reason"], registry=own)
        self.queue_seconds = self._seconds_of("request_queue_time_seconds", "Until it was the turn of a request.")
        self.first_seconds = self._seconds_of("time_to_first_token_seconds", "Until the first piece of a stream.")
        self.between_seconds = self._seconds_of("inter_token_latency_seconds", "Between the pieces of a stream.")
        self._checked = Counter(
            "invariant_rag_order_checked", "Answers asked again in another order.", ["model"], registry=own
        )
        self._flipped = Counter(
            "invariant_rag_order_flipped", "Those that came out differently.", ["model"], registry=own
        )
        self._flip_rate = Gauge("invariant_rag_order_flip_rate", "Their share.", ["model"], registry=own)
        self._prompt = Counter("invariant_rag_prompt_tokens", "Tokens of prompts.", registry=own)
        self._cached = Counter("invariant_rag_cached_tokens", "Those from a cache.", registry=own)
        self._written = Counter("invariant_rag_completion_tokens", "Tokens of answers.", registry=own)

    def _seconds_of(self, name: str, what: str) -> Histogram:
        return Histogram(f"invariant_rag_{name}", what, buckets=_SECONDS, registry=self.registry)

    def count_order_check(self, model: str, *, flipped: bool) -> None:
        """Count an answer that was asked again in another order."""
        checked, flips = self._checked.labels(model), self._flipped.labels(model)
        checked.inc()
        flips.inc(int(flipped))
        with self._lock:
            counts = self._counts.setdefault(model, [0, 0])
            counts[0] += 1
            counts[1] += int(flipped)
            self._flip_rate.labels(model).set(counts[1] / counts[0])

    def count_tokens(self, usage: Usage) -> None:
        """Count the tokens of one request."""
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._written.inc(usage.completion_tokens)

    def watch(self, caches: Iterable[KeyValueCache]) -> None:
        """Export what caches count, all tenants together; nothing if they are in another process."""
        if found := list(caches):
            self.registry.register(_Caches(found))

    def page(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self.registry)


class StreamClock:
    """Measures how long the pieces of a stream take.

    Args:
        metrics: Gets the times.
        begun: When the request came, in seconds of `time.monotonic`.
    """

    def __init__(self, metrics: Metrics, begun: float) -> None:
        self._metrics, self._begun = metrics, begun
        self._last: dict[int, float] = {}

    def tick(self, index: int) -> None:
        """Note that a piece of an answer is there."""
        now, last = time.monotonic(), self._last.get(index)
        if last is not None:
            self._metrics.between_seconds.observe(now - last)
        elif not self._last:
            self._metrics.first_seconds.observe(now - self._begun)
        self._last[index] = now


class _Caches(Collector):
    def __init__(self, caches: list[KeyValueCache]) -> None:
        self._caches = caches

    def collect(self) -> Iterable[Metric]:
        stats = [each.stats() for each in self._caches]
        for name in ("hits", "misses", "evictions", "damaged", "disk_errors"):
            total = sum(getattr(each, name) for each in stats)
            yield CounterMetricFamily(f"invariant_rag_cache_{name}", f"{name} of the caches.", total)
        for name in ("entries", "bytes"):
            total = sum(getattr(each, name) for each in stats)
            yield GaugeMetricFamily(f"invariant_rag_cache_{name}", f"{name} in memory.", total)
