"""`POST /v1/rerank`, `/v2/rerank` and `/v1/judge`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Body, Request
from starlette.responses import Response

from invariant_rag.orderings import Candidate
from invariant_rag.orderings.monot5 import EMBEDDED_NAME, PUBLISHED
from invariant_rag.segments import plain_rendering
from invariant_rag.server.conversation import choices_of
from invariant_rag.server.documents import segment_of
from invariant_rag.server.engines.base import JudgeCall, Reranker
from invariant_rag.server.errors import InvalidRequest, UnknownModel
from invariant_rag.server.json_text import JsonReply, JsonRoute
from invariant_rag.server.running import Running
from invariant_rag.server.schemas import JudgeRequest, RerankRequest
from invariant_rag.server.state import state_of
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from invariant_rag.judge import Verdict

router = APIRouter(route_class=JsonRoute)
_EXPLANATION_TOKENS = 128
_UNUSED_ORDERINGS = ("given", "score")
TOY = (
    "The embedded MonoT5 ranks these documents: a toy that was trained on synthetic ones. "
    f"Start the server with `--reranker {PUBLISHED}`, or another checkpoint."
)
"""What clients and the console are told of the embedded reranker."""


@router.post("/v1/rerank")
async def rerank_v1(request: Request, body: Annotated[RerankRequest, Body()]) -> Response:
    """Rank documents by their relevance to a query, as Cohere v1 and Jina do."""
    return await _rerank(request, body, "1")


@router.post("/v2/rerank")
async def rerank_v2(request: Request, body: Annotated[RerankRequest, Body()]) -> Response:
    """Rank documents by their relevance to a query, as Cohere v2 does."""
    return await _rerank(request, body, "2")


async def _rerank(request: Request, body: RerankRequest, api_version: str) -> Response:
    state = state_of(request)
    name = state.reranker.model_name
    if body.model not in (None, name, state.reranker.name):
        raise UnknownModel(f"expected the reranker {name!r}, got {shown(body.model)}", param="model")
    state.note(request, body)
    running: Running[None, list[dict[str, Any]]] = state.run(lambda _put, _gone: rerank(state.reranker, body))
    return JsonReply(
        {
            "id": state.request_id(request),
            "object": "list",
            "model": name,
            "results": await running.result(request),
            "meta": {"api_version": {"version": api_version}} | ({"warnings": [TOY]} if name == EMBEDDED_NAME else {}),
        }
    )


def rerank(reranker: Reranker, body: RerankRequest) -> list[dict[str, Any]]:
    """Return the best documents, best first; of equal scores, by content. Scores are bit-equal for every order."""
    segments = [segment_of(each) for each in body.documents]
    candidates = [Candidate(segment, (), plain_rendering(segment)) for segment in segments]
    keys = reranker.sort_keys(candidates, body.query)
    ranking = sorted(range(len(keys)), key=lambda index: (keys[index], candidates[index].tie_breaker))
    found = []
    for index in ranking[: body.top_n]:
        result = {"index": index, "relevance_score": reranker.probability(-keys[index])}
        found.append(result | ({"document": {"text": segments[index].text}} if body.return_documents else {}))
    return found


@router.post("/v1/judge")
async def judge(request: Request, body: Annotated[JudgeRequest, Body()]) -> Response:
    """Say which answer is the best, or which option is right: the same for every order in which they are listed."""
    state = state_of(request)
    state.check_model(body.model)
    state.note(request, body)
    if body.invariant.check_order:
        raise InvalidRequest("expected no check_order: a verdict is that of every order", param="invariant.check_order")
    if body.invariant.ordering in _UNUSED_ORDERINGS:
        raise InvalidRequest(
            f"expected an ordering by text, got {body.invariant.ordering!r}: a verdict is that of every order, and "
            "answers have no scores",
            param="invariant.ordering",
        )
    if body.invariant.overflow not in (None, "error"):
        raise InvalidRequest("expected no overflow: a judge reads every answer whole", param="invariant.overflow")
    if body.max_tokens is not None and not body.explain:
        raise InvalidRequest("expected max_tokens only with explain", param="max_tokens")
    most = min(body.max_tokens or _EXPLANATION_TOKENS, state.settings.max_new_tokens)
    call = JudgeCall(
        choices=choices_of(body.invariant, state.settings, state.tenant(request)),
        answers=tuple(body.options or body.answers or ()),
        question=body.question,
        reference=body.reference,
        criteria=body.criteria,
        is_choice=body.options is not None,
        by=body.by,
        explain_tokens=most if body.explain else 0,
    )
    running: Running[None, Verdict] = state.run(lambda _put, _gone: state.engine.judge(call))
    verdict = await running.result(request)
    return JsonReply(
        {
            "id": state.request_id(request),
            "object": "judgement",
            "model": state.engine.name,
            "winner": verdict.winner,
            "best": list(verdict.best),
            "ranking": list(verdict.ranking),
            "probabilities": list(verdict.probabilities),
            "labels": list(verdict.labels),
            "explanation": verdict.explanation,
        }
    )
