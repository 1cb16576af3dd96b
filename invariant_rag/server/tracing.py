"""Spans of OpenTelemetry, where it is installed and told where they go, and nothing where it is not.

`OTEL_EXPORTER_OTLP_ENDPOINT` and the other variables of OpenTelemetry say where they go.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from invariant_rag.errors import ExtraRequired

_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Tracing:
    """Makes spans of requests, as parts of the traces that their `traceparent` names."""

    def __init__(self) -> None:
        self._tracer: Any = None
        if find_spec("opentelemetry") is not None:
            from opentelemetry import trace

            self._tracer = trace.get_tracer("invariant_rag.server")

    @contextmanager
    def span(self, name: str, headers: Mapping[str, str]) -> Iterator[None]:
        """Have a span during the block, within the trace that the headers name."""
        if self._tracer is None:
            yield
            return
        from opentelemetry.propagate import extract

        with self._tracer.start_as_current_span(
            f"invariant_rag.{name}", extract(headers), attributes={"request.id": headers.get("x-request-id", "")}
        ):
            yield


def export_traces() -> None:
    """Send spans to where the variables of OpenTelemetry say; without one of them, nothing happens.

    Raises:
        ExtraRequired: They say so, and the extra is not installed.
    """
    if not any(map(os.environ.get, _VARIABLES)):
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
