"""`GET /health`, `/ready`, `/version`, `/metrics` and `/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from invariant_rag import __version__
from invariant_rag.errors import InvariantRAGError
from invariant_rag.server.json_text import JsonReply
from invariant_rag.server.state import noted_of, state_of

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Say whether the model can answer: 503 while it is out of reach, and not while many requests wait for it."""
    state = state_of(request)
    active, places, status = state.admission.active, state.settings.max_requests, "ready"
    try:
        await run_in_threadpool(state.engine.check_ready)
    except InvariantRAGError as error:
        status = "unreachable"
        noted_of(request)["error"] = type(error).__name__
    return JsonReply({"status": status, "active": active, "places": places}, 200 if status == "ready" else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of invariant-rag."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return what Prometheus reads."""
    return Response(state_of(request).metrics.page(), media_type=CONTENT_TYPE_LATEST)


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
    allowed = state.settings.orderings
    choices = {name: sorted(state.engine.orderings[name] & allowed) for name in sorted(state.settings.methods)}
    return {
        "id": state.engine.name,
        "object": "model",
        "created": state.started,
        "owned_by": "invariant-rag",
        "toy": state.engine.toy,
        "max_model_len": state.engine.context_window,
        "invariant": {
            "method": state.engine.method,
            "methods": list(choices),
            "orderings": choices.get(state.engine.method, []),
            "choices": choices,
        },
    }
