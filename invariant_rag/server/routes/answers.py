"""`POST /v1/chat/completions`, `/v1/completions`, `/tokenize`, `/v1/rerank`, `/v2/rerank` and `/v1/judge`."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from invariant_rag.server.handling import chat, complete, judge, rank, tokenize
from invariant_rag.server.running import respond
from invariant_rag.server.schemas import (
    ChatRequest,
    CompletionRequest,
    JudgeRequest,
    RerankRequest,
    TokenizeRequest,
)

router = APIRouter()
_REFERENCE = "#/components/schemas/{model}"
_MODELS: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, JudgeRequest, RerankRequest, TokenizeRequest)


def _body(model: type[BaseModel]) -> dict[str, Any]:
    """Return what OpenAPI says of a body; it is parsed elsewhere, and not by FastAPI."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_bodies(app: FastAPI) -> None:
    """Add the schemas of all bodies to what the application says at `/openapi.json`."""
    _, found = models_json_schema([(each, "validation") for each in _MODELS], ref_template=_REFERENCE)
    own = app.openapi

    def openapi() -> dict[str, Any]:
        described = own()
        described.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        return described

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI says


@router.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation. Listing its documents in another order changes no bit of the answer."""
    return await respond(request, "chat", chat)


@router.post("/v1/completions", openapi_extra=_body(CompletionRequest))
async def completions(request: Request) -> Response:
    """Continue a text, or several."""
    return await respond(request, "completions", complete)


@router.post("/tokenize", openapi_extra=_body(TokenizeRequest))
async def tokenize_text(request: Request) -> Response:
    """Return the token ids of a text, or of a conversation as the model reads it."""
    return await respond(request, "tokenize", tokenize)


@router.post("/v1/rerank", openapi_extra=_body(RerankRequest))
async def rerank_v1(request: Request) -> Response:
    """Rank documents by their relevance to a query, as Cohere v1 and Jina do."""
    return await respond(request, "rerank", partial(rank, version="1"))


@router.post("/v2/rerank", openapi_extra=_body(RerankRequest))
async def rerank_v2(request: Request) -> Response:
    """Rank documents by their relevance to a query, as Cohere v2 does."""
    return await respond(request, "rerank", partial(rank, version="2"))


@router.post("/v1/judge", openapi_extra=_body(JudgeRequest))
async def judge_answers(request: Request) -> Response:
    """Say which answer is the best, or which option is right: the same for every order in which they are listed."""
    return await respond(request, "judge", judge)
