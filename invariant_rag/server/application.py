"""The application: routes, middleware, and errors as answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from invariant_rag import __version__
from invariant_rag.errors import InvariantRAGError
from invariant_rag.server.admission import Admission
from invariant_rag.server.engines.base import Engine, Reranker
from invariant_rag.server.engines.building import build_reranker
from invariant_rag.server.errors import error_response, http_error
from invariant_rag.server.logs import Tracing
from invariant_rag.server.metrics import Metrics
from invariant_rag.server.middleware import BodyLimit, Keys, RequestLog, log_fault
from invariant_rag.server.order_sampling import OrderSampling
from invariant_rag.server.routes import add_bodies, add_lab, router
from invariant_rag.server.running import State
from invariant_rag.server.settings import Settings
from invariant_rag.server.worker import PARSERS


def create_app(engine: Engine, settings: Settings | None = None, reranker: Reranker | None = None) -> FastAPI:
    """Return an ASGI application that serves an engine.

    Args:
        engine: What answers.
        settings: Limits, keys and what requests may choose.
        reranker: What scores documents for a query. None: that of `build_reranker`.
    """
    settings = (settings or Settings()).within(engine.methods)
    metrics = Metrics(engine.caches.values())
    executor = ThreadPoolExecutor(settings.max_requests, "invariant-rag-request")
    sampling = OrderSampling(engine, settings.check_order, metrics)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        sampling.close()
        executor.shutdown(wait=True, cancel_futures=True)
        engine.close()

    app = FastAPI(title="invariant-rag", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.serving = State(
        engine,
        settings,
        settings.without_keys(),
        metrics,
        Admission(settings.max_requests, engine.together, PARSERS.count, settings.tenants, metrics),
        executor,
        sampling,
        reranker or build_reranker(None),
        Tracing(),
    )
    app.include_router(router)
    add_lab(app)
    # The last one that is added runs first.
    app.add_middleware(BodyLimit, settings=settings, metrics=metrics)
    app.add_middleware(Keys, settings=settings, metrics=metrics)
    app.add_middleware(RequestLog, metrics=metrics)
    add_bodies(app)
    app.add_exception_handler(InvariantRAGError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return http_error(error)
    response = error_response(error)
    noted = request.scope["state"]["noted"]
    noted["error"] = type(error).__name__
    if response.status_code == 500:
        log_fault(error, noted)
    return response
