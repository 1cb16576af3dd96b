"""The application: OpenAI's routes and their like, those for who runs the server, and the order lab at `/`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from invariant_rag import __version__
from invariant_rag.errors import InvariantRAGError
from invariant_rag.orderings import Relevance
from invariant_rag.server.endpoints import AppState, Handler, answer, endpoint, judge, rank, tokenize
from invariant_rag.server.engines.base import Engine
from invariant_rag.server.errors import error_response, http_error, json_reply
from invariant_rag.server.middleware import Guard, log_fault
from invariant_rag.server.parsing import ROUTES
from invariant_rag.server.replies import TextReplies
from invariant_rag.server.settings import Settings

router = APIRouter()
_REFERENCE = "#/components/schemas/{model}"


def create_app(engine: Engine, settings: Settings | None = None, reranker: Relevance | None = None) -> FastAPI:
    """Return an ASGI application that serves an engine; without a reranker, with that of `build_reranker`."""
    settings = (settings or Settings()).within(engine.methods)
    state = AppState(engine, settings, reranker)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        state.close()

    app = FastAPI(title="invariant-rag", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.serving = state
    app.include_router(router)
    _add_lab(app)
    app.add_middleware(Guard, settings=settings, metrics=state.metrics)
    _add_bodies(app)
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


def _body(route: str) -> dict[str, Any]:
    """Return what OpenAPI says of a body, which FastAPI does not parse."""
    schema = {"$ref": _REFERENCE.format(model=ROUTES[route][0].__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_bodies(app: FastAPI) -> None:
    """Add the schemas of all bodies to what the application says at `/openapi.json`."""
    models: list[tuple[type[BaseModel], Any]] = [(model, "validation") for model, _ in ROUTES.values()]
    _, schemas = models_json_schema(models, ref_template=_REFERENCE)
    own = app.openapi

    def openapi() -> dict[str, Any]:
        described = own()
        described.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return described

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI says


_POSTS: Mapping[str, tuple[str, Handler]] = {
    "/v1/chat/completions": ("chat", answer),
    "/v1/completions": ("completions", partial(answer, kind=TextReplies)),
    "/tokenize": ("tokenize", tokenize),
    "/v1/rerank": ("rerank", partial(rank, version="1")),
    "/v2/rerank": ("rerank", partial(rank, version="2")),
    "/v1/judge": ("judge", judge),
}


for _path, (_route, _handler) in _POSTS.items():
    _told: dict[str, Any] = {"description": getattr(_handler, "func", _handler).__doc__, "openapi_extra": _body(_route)}
    router.add_api_route(_path, endpoint(_route, _handler), methods=["POST"], name=_path, **_told)


@router.get("/health")
async def health() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Say whether the model can answer: 503 while it is out of reach, and not while many requests wait for it."""
    state: AppState = request.app.state.serving
    status = {"status": "ready", "active": state.admission.active, "places": state.settings.max_requests}
    try:
        await run_in_threadpool(state.engine.check_ready)
    except InvariantRAGError as error:
        request.scope["state"]["noted"]["error"] = type(error).__name__
        return json_reply({**status, "status": "unreachable"}, 503)
    return json_reply(status)


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of invariant-rag."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics as Prometheus parses them."""
    return Response(generate_latest(request.app.state.serving.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the model, with what requests may choose."""
    return {"object": "list", "data": [await run_in_threadpool(_card, request.app.state.serving)]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """Describe the model."""
    request.app.state.serving.check_model(name)
    return await run_in_threadpool(_card, request.app.state.serving)


def _card(state: AppState) -> dict[str, Any]:
    """Return the card of the model. A gateway requests it from the API behind it, which takes its time."""
    engine, allowed = state.engine, state.settings.orderings
    choices = {name: sorted(engine.orderings[name] & allowed) for name in sorted(state.settings.methods)}
    return {
        "id": engine.name,
        "object": "model",
        "created": state.started,
        "owned_by": "invariant-rag",
        "toy": engine.toy,
        "max_model_len": engine.context_window,
        "invariant": {
            "method": engine.method,
            "methods": list(choices),
            "orderings": choices.get(engine.method, []),
            "choices": choices,
        },
    }


_HEADERS = {
    "Cache-Control": "no-cache",  # revalidate, which costs no contents: an upgrade is visible at once
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _PageFiles(StaticFiles):
    """The files of the order lab, which a browser may only use with each other. The page uses the public API alone."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file, or that it has not changed."""
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        if path.endswith(".js"):  # some systems have another type for it, with which browsers run no module
            response.headers["Content-Type"] = "text/javascript; charset=utf-8"
        return response


def _add_lab(app: FastAPI) -> None:
    """Serve the page at `/`, and what it is made of at `/lab`."""
    files = _PageFiles(directory=Path(__file__).parent / "page")

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    app.mount("/lab", files)
