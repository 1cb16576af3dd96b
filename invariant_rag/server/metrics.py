"""What Prometheus reads. Labels hold routes and outcomes, never contents, ids of requests or tenants."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.outputs import Usage

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        labels = ["route", "status"]
        self.requests = Counter("invariant_rag_requests", "Requests by route and status.", labels, registry=own)
        self.seconds = Histogram(
            "invariant_rag_request_seconds", "Seconds of a request.", ["route"], buckets=_SECONDS, registry=own
        )
        self.active = Gauge("invariant_rag_active_requests", "Requests that run or wait.", registry=own)
        self.rejected = Counter("invariant_rag_rejected", "Requests refused unread.", ["reason"], registry=own)
        self._prompt = Counter("invariant_rag_prompt_tokens", "Tokens of prompts.", registry=own)
        self._cached = Counter("invariant_rag_cached_tokens", "Those from a cache.", registry=own)
        self._written = Counter("invariant_rag_completion_tokens", "Tokens of answers.", registry=own)

    def count_tokens(self, usage: Usage) -> None:
        """Count the tokens of one request."""
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._written.inc(usage.completion_tokens)

    def watch(self, caches: Iterable[KeyValueCache]) -> None:
        """Export what caches count, all tenants together."""
        self.registry.register(_Caches(list(caches)))

    def page(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self.registry)


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
