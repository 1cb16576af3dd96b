"""What Prometheus reads, by the names that vLLM has, behind `invariant_rag_`.

Labels hold routes and outcomes, never contents, ids of requests or tenants.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from invariant_rag.generation.answers import Usage
    from invariant_rag.generation.kv_cache import KeyValueCache

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one application.

    Args:
        caches: What caches count is exported, all tenants together; nothing if they are in another process.
    """

    def __init__(self, caches: Iterable[KeyValueCache] = ()) -> None:
        self.registry = CollectorRegistry()

        def made(kind: type[Any], name: str, what: str, *labels: str) -> Any:
            more = {"buckets": _SECONDS} if kind is Histogram else {}
            return kind(f"invariant_rag_{name}", what, labels, registry=self.registry, **more)

        self.requests = made(Counter, "requests", "Requests by route and status.", "route", "status")
        self.seconds = made(Histogram, "e2e_request_latency_seconds", "Of a request.", "route")
        self.active = made(Gauge, "active_requests", "Requests that run or wait.")
        self.rejected = made(Counter, "rejected", "Requests refused unread.", "reason")
        self.queue_seconds = made(Histogram, "request_queue_time_seconds", "Until it was the turn of a request.")
        self.first_seconds = made(Histogram, "time_to_first_token_seconds", "Until the first piece of a stream.")
        self.between_seconds = made(Histogram, "inter_token_latency_seconds", "Between the pieces of a stream.")
        self._prompt = made(Counter, "prompt_tokens", "Tokens of prompts.")
        self._cached = made(Counter, "cached_tokens", "Those from a cache.")
        self._written = made(Counter, "completion_tokens", "Tokens of answers.")
        if watched := list(caches):
            self.registry.register(_Caches(watched))

    def count_tokens(self, usage: Usage) -> None:
        """Count the tokens of one request."""
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._written.inc(usage.completion_tokens)


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
        counted = ("hits", "misses", "evictions", "damaged", "disk_errors")
        for name in (*counted, "entries", "bytes"):
            kind = CounterMetricFamily if name in counted else GaugeMetricFamily
            total = sum(getattr(each, name) for each in stats)
            yield kind(f"invariant_rag_cache_{name}", f"{name} of the caches.", total)
