"""What the routes of one application share."""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Event
from typing import Any, cast

from starlette.requests import Request

from invariant_rag.server.admission import Admission
from invariant_rag.server.engines.base import Engine, Reranker
from invariant_rag.server.errors import TooLarge, UnknownModel
from invariant_rag.server.metrics import Metrics
from invariant_rag.server.order_sampling import OrderSampling
from invariant_rag.server.parsing import Parsed, parse
from invariant_rag.server.settings import Settings
from invariant_rag.server.tracing import Tracing
from invariant_rag.server.worker import PARSERS
from invariant_rag.shown import shown

_PARSING_SECONDS = 5.0
_BYTES_PER_SECOND = 1e6
"""About how fast bodies are parsed: a short one is parsed before long ones."""


@dataclass(frozen=True)
class State:
    """The engine, the settings, and what counts and limits requests.

    Attributes:
        engine: What answers.
        settings: What is allowed.
        metrics: What is counted.
        admission: Who may wait, and whose turn it is.
        executor: Threads for as many requests as may run and wait.
        sampling: Asks some requests again in another order.
        reranker: Scores documents for a query.
        tracing: Spans of OpenTelemetry.
        started: Seconds since 1970.
    """

    engine: Engine
    settings: Settings
    metrics: Metrics
    admission: Admission
    executor: ThreadPoolExecutor
    sampling: OrderSampling
    reranker: Reranker
    tracing: Tracing
    started: int = field(default_factory=lambda: int(time.time()))

    def parse(self, route: str, body: bytes, tenant: str, abandoned: Event) -> Parsed:
        """Return a body as a call. A process that can be stopped does the work.

        Raises:
            CancelledError: It was abandoned.
            InvariantRAGError: As for `parsing.parse`.
            TooLarge: It takes too long.
        """
        with self.admission.parsing.turn(tenant, len(body) / _BYTES_PER_SECOND, abandoned):
            try:
                return PARSERS.call(_PARSING_SECONDS, abandoned, parse, route, body, self._without_keys, tenant)
            except TimeoutError:
                raise TooLarge(f"expected a body that is parsed within {_PARSING_SECONDS:g} seconds") from None

    def check_model(self, name: str | None, *allowed: str) -> None:
        """Check the model of a request; None is the one that there is.

        Raises:
            UnknownModel: There is no such model.
        """
        known = allowed or (self.engine.name,)
        if name is not None and name not in known:
            raise UnknownModel(f"expected the model {known[0]!r}, got {shown(name)}", param="model")

    @cached_property
    def _without_keys(self) -> Settings:
        return replace(self.settings, keys={}, operator_key=None)


def state_of(request: Request) -> State:
    """Return the state of the application that got a request."""
    return cast("State", request.app.state.serving)


def tenant_of(request: Request) -> str:
    """Return whose key a request came with; an empty text where no keys are needed."""
    return str(request.scope["state"].get("tenant", ""))


def noted_of(request: Request) -> MutableMapping[str, Any]:
    """Return what the log will say of a request, to add to it."""
    noted: MutableMapping[str, Any] = request.scope["state"]["noted"]
    return noted


def passed_on(request: Request) -> Mapping[str, str]:
    """Return the headers that an engine behind this server gets, too: names of the request and of its trace."""
    given = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
    return {**given, "x-request-id": str(noted_of(request)["request_id"])}
