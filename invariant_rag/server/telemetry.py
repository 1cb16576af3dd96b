"""What a server tells its operator: metrics, logs as lines of JSON (not too many), and spans of OpenTelemetry."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from invariant_rag.errors import ExtraRequired

if TYPE_CHECKING:
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.outputs import Usage

_WINDOW_SECONDS = 10.0
_MOST, _MOST_REQUESTS = 20, 1000  # lines of one kind in a window, and lines of requests
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one application, by the names that vLLM has, behind `invariant_rag_`.

    Labels hold routes and outcomes, never contents, ids of requests or tenants. What caches of this process count is
    exported, all tenants together.
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
        self.first_seconds = made(Histogram, "time_to_first_token_seconds", "Until the first chunk of a stream.")
        self.between_seconds = made(Histogram, "inter_token_latency_seconds", "Between the chunks of a stream.")
        self._prompt = made(Counter, "prompt_tokens", "Tokens of prompts.")
        self._cached = made(Counter, "prompt_tokens_cached", "Those from a cache.")
        self._written = made(Counter, "generation_tokens", "Tokens of answers.")
        if watched := list(caches):
            self.registry.register(_Caches(watched))

    def count_tokens(self, usage: Usage) -> None:
        """Count the tokens of one request."""
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._written.inc(usage.completion_tokens)


@dataclass
class StreamClock:
    """Measures the time to each chunk of a stream, from when the request came."""

    metrics: Metrics
    begun: float
    last: dict[int, float] = field(default_factory=dict)  # chunk, by answer

    def tick(self, index: int) -> None:
        """Note that a chunk of an answer is sent."""
        now, last = time.monotonic(), self.last.get(index)
        if last is not None:
            self.metrics.between_seconds.observe(now - last)
        elif not self.last:
            self.metrics.first_seconds.observe(now - self.begun)
        self.last[index] = now


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


class JsonLines(logging.Formatter):
    """Writes a record as one line of JSON. Errors have a traceback and no message, which may hold texts."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if left_out := getattr(record, "left_out", 0):
            line["left_out"] = left_out
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = traceback.extract_tb(error.__traceback__)
            line["error"] = type(error).__name__
            line["at"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-12:]]
        return json.dumps(line, default=str)


class LogLimit(logging.Filter):
    """Limits the records of one line of code within a window; the next one counts those left out."""

    def __init__(self) -> None:
        super().__init__()
        self.now = time.monotonic
        self._lock = Lock()
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a record is written."""
        most = _MOST_REQUESTS if record.msg == "request" else _MOST
        line, now = (record.pathname, record.lineno), self.now()
        with self._lock:
            begun, count = self._seen.get(line, (-_WINDOW_SECONDS, 0))
            if now - begun >= _WINDOW_SECONDS:
                record.left_out = max(count - most, 0)
                begun, count = now, 0
            self._seen[line] = begun, count + 1
        return count < most


def configure_logging() -> None:
    """Write all logs of this process, and warnings, to stderr, as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    handler.addFilter(LogLimit())
    logging.captureWarnings(capture=True)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in ("invariant_rag", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.INFO)


class Tracing:
    """Makes spans of requests within the traces that they name, where OpenTelemetry is installed."""

    def __init__(self) -> None:
        self._tracer: Any = None
        if find_spec("opentelemetry") is not None:
            from opentelemetry import trace

            self._tracer = trace.get_tracer("invariant_rag.server")

    def span(self, name: str, headers: Mapping[str, str]) -> AbstractContextManager[Any]:
        """Return a span to have during a block, within the trace that the headers name."""
        if self._tracer is None:
            return nullcontext()
        from opentelemetry.propagate import extract

        attributes = {"gen_ai.request.id": headers.get("x-request-id", "")}
        span: AbstractContextManager[Any] = self._tracer.start_as_current_span(
            f"invariant_rag.{name}", extract(headers), attributes=attributes
        )
        return span


def export_traces() -> None:
    """Send spans to where the variables of OpenTelemetry say; without one of them, nothing happens."""
    if not any(map(os.environ.get, ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))):
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ExtraRequired("opentelemetry-exporter-otlp-proto-http", "otel") from error
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
