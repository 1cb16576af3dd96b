"""What Prometheus reads. Labels hold routes and outcomes, never contents, ids of requests or tenants."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.outputs import Usage

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self._counts: dict[str, list[int]] = {}
        self._lock = Lock()
        labels = ["route", "status"]
        self.requests = Counter("invariant_rag_requests", "Requests by route and status.", labels, registry=own)
        self.seconds = Histogram(
            "invariant_rag_request_seconds", "Seconds of a request.", ["route"], buckets=_SECONDS, registry=own
        )
        self.active = Gauge("invariant_rag_active_requests", "Requests that run or wait.", registry=own)
        self.rejected = Counter("invariant_rag_rejected", "Requests refused unread.", ["reason"], registry=own)
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
