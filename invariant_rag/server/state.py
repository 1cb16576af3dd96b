"""What the routes of one application share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any, TypeVar, cast

from pydantic import BaseModel
from starlette.requests import Request

from invariant_rag.server.admission import Admission
from invariant_rag.server.engines.base import Engine, Reply, Reranker
from invariant_rag.server.errors import UnknownModel
from invariant_rag.server.metrics import Metrics
from invariant_rag.server.order_sampling import OrderSampling
from invariant_rag.server.running import Running
from invariant_rag.server.settings import Settings
from invariant_rag.shown import shown

T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True)
class State:
    """The engine, the settings, and what counts and limits requests.

    Attributes:
        engine: What answers.
        settings: What is allowed.
        metrics: What is counted.
        admission: Who may wait.
        executor: Threads for as many requests as may run and wait.
        sampling: Asks some requests again in another order.
        reranker: Scores documents for a query.
        started: Seconds since 1970.
    """

    engine: Engine
    settings: Settings
    metrics: Metrics
    admission: Admission
    executor: ThreadPoolExecutor
    sampling: OrderSampling
    reranker: Reranker
    started: int = field(default_factory=lambda: int(time.time()))

    def run(self, work: Callable[[Callable[[Item], None], Event], T]) -> Running[Item, T]:
        """Start blocking work for a request.

        Raises:
            Busy: There is no place for it.
        """
        return Running(work, self.executor, self.admission, self.settings.timeout)

    def check_model(self, name: str | None) -> None:
        """Check the model of a request; None is the one that there is.

        Raises:
            UnknownModel: There is no such model.
        """
        if name not in (None, self.engine.name):
            raise UnknownModel(f"expected the model {self.engine.name!r}, got {shown(name)}", param="model")

    def tenant(self, request: Request) -> str:
        """Return whose key a request came with; an empty text where no keys are needed."""
        return str(request.scope["state"].get("tenant", ""))

    def noted(self, request: Request) -> dict[str, Any]:
        """Return what the log will say of a request, to add to it."""
        noted: dict[str, Any] = request.scope["state"]["noted"]
        return noted

    def request_id(self, request: Request) -> str:
        """Return the id of a request."""
        return str(self.noted(request)["request_id"])

    def note(self, request: Request, body: BaseModel) -> None:
        """Log the contents of a request, if that was asked for."""
        if self.settings.log_contents:
            self.noted(request)["contents"] = body.model_dump(mode="json", exclude_defaults=True)

    def finish(self, request: Request, replies: Sequence[Reply]) -> None:
        """Count and log the tokens of a request that was answered."""
        noted = self.noted(request)
        for reply in replies:
            self.metrics.count_tokens(reply.usage)
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            noted[name] = sum(getattr(reply.usage, name) for reply in replies)
        noted["set_key"] = next((reply.report.get("set_key") for reply in replies), None)


def state_of(request: Request) -> State:
    """Return the state of the application that got a request."""
    return cast("State", request.app.state.serving)
