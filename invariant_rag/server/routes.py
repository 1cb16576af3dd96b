"""The routes: OpenAI's and their like, those for who runs the server, and the order lab at `/`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from invariant_rag import __version__
from invariant_rag.errors import InvariantRAGError
from invariant_rag.server.errors import JsonReply
from invariant_rag.server.handling import chat, complete, judge, rank, tokenize
from invariant_rag.server.parsing import ROUTES
from invariant_rag.server.running import respond, state_of

router = APIRouter()
_REFERENCE = "#/components/schemas/{model}"


def _body(route: str) -> dict[str, Any]:
    """Return what OpenAPI says of a body; it is parsed elsewhere, and not by FastAPI."""
    schema = {"$ref": _REFERENCE.format(model=ROUTES[route][0].__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_bodies(app: FastAPI) -> None:
    """Add the schemas of all bodies to what the application says at `/openapi.json`."""
    models: list[tuple[type[BaseModel], Any]] = [(model, "validation") for model, _ in ROUTES.values()]
    _, found = models_json_schema(models, ref_template=_REFERENCE)
    own = app.openapi

    def openapi() -> dict[str, Any]:
        described = own()
        described.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        return described

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI says


@router.post("/v1/chat/completions", openapi_extra=_body("chat"))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation. Listing its documents in another order changes no bit of the answer."""
    return await respond(request, "chat", chat)


@router.post("/v1/completions", openapi_extra=_body("completions"))
async def completions(request: Request) -> Response:
    """Continue a text, or several."""
    return await respond(request, "completions", complete)


@router.post("/tokenize", openapi_extra=_body("tokenize"))
async def tokenize_text(request: Request) -> Response:
    """Return the token ids of a text, or of a conversation as the model gets it."""
    return await respond(request, "tokenize", tokenize)


@router.post("/v1/rerank", openapi_extra=_body("rerank"))
async def rerank_v1(request: Request) -> Response:
    """Rank documents by their relevance to a query, as Cohere v1 and Jina do."""
    return await respond(request, "rerank", partial(rank, version="1"))


@router.post("/v2/rerank", openapi_extra=_body("rerank"))
async def rerank_v2(request: Request) -> Response:
    """Rank documents by their relevance to a query, as Cohere v2 does."""
    return await respond(request, "rerank", partial(rank, version="2"))


@router.post("/v1/judge", openapi_extra=_body("judge"))
async def judge_answers(request: Request) -> Response:
    """Say which answer is the best, or which option is right: the same for every order in which they are listed."""
    return await respond(request, "judge", judge)


@router.get("/health")
async def health() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Say whether the model can answer: 503 while it is out of reach, and not while many requests wait for it."""
    state = state_of(request)
    found = {"status": "ready", "active": state.admission.active, "places": state.settings.max_requests}
    try:
        await run_in_threadpool(state.engine.check_ready)
    except InvariantRAGError as error:
        request.scope["state"]["noted"]["error"] = type(error).__name__
        return JsonReply({**found, "status": "unreachable"}, 503)
    return JsonReply(found)


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of invariant-rag."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return what Prometheus reads."""
    return Response(generate_latest(state_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the model, with what requests may choose."""
    return {"object": "list", "data": [_card(request)]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """Describe the model."""
    state_of(request).check_model(name)
    return _card(request)


def _card(request: Request) -> dict[str, Any]:
    state = state_of(request)
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
    "Cache-Control": "no-cache",  # ask whether it has changed, which costs no contents: an upgrade is seen at once
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFiles(StaticFiles):
    """The files of the order lab, which a browser may only use with each other. The page uses the public API alone."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file, or that it has not changed."""
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        if path.endswith(".js"):  # some systems have another type for it, with which browsers run no module
            response.headers["Content-Type"] = "text/javascript; charset=utf-8"
        return response


def add_lab(app: FastAPI) -> None:
    """Serve the page at `/`, and what it is made of at `/lab`."""
    files = PageFiles(directory=Path(__file__).parent / "page")

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    app.mount("/lab", files)
