"""Documents to rank and answers to judge: from requests to calls, and from scores to results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from invariant_rag.orderings import Candidate
from invariant_rag.segments import Segment, plain_rendering
from invariant_rag.server.conversation import choices_of
from invariant_rag.server.documents import segment_of
from invariant_rag.server.engines.base import JudgeCall, RerankCall, Reranker
from invariant_rag.server.errors import InvalidRequest
from invariant_rag.server.schemas import JudgeRequest, RerankRequest
from invariant_rag.server.settings import Settings

_EXPLANATION_TOKENS = 128
_UNUSED_ORDERINGS = ("given", "score")


def rerank_call(request: RerankRequest, _settings: Settings, _tenant: str) -> RerankCall:
    """Return the call of a ranking."""
    segments = tuple(map(segment_of, request.documents))
    return RerankCall(request.query, segments, request.top_n, return_documents=request.return_documents)


def judge_call(request: JudgeRequest, settings: Settings, tenant: str) -> JudgeCall:
    """Return the call of a judgement.

    Raises:
        InvalidRequest: It asks for what a verdict has not.
    """
    if request.invariant.check_order:
        raise InvalidRequest("expected no check_order: a verdict is that of every order", param="invariant.check_order")
    if request.invariant.ordering in _UNUSED_ORDERINGS:
        raise InvalidRequest(
            f"expected an ordering by text, got {request.invariant.ordering!r}: a verdict is that of every order, and "
            "answers have no scores",
            param="invariant.ordering",
        )
    if request.invariant.overflow not in (None, "error"):
        raise InvalidRequest("expected no overflow: a judge reads every answer whole", param="invariant.overflow")
    if request.max_tokens is not None and not request.explain:
        raise InvalidRequest("expected max_tokens only with explain", param="max_tokens")
    most = min(request.max_tokens or _EXPLANATION_TOKENS, settings.max_new_tokens)
    return JudgeCall(
        choices=choices_of(request.invariant, settings, tenant),
        answers=tuple(request.options or request.answers or ()),
        question=request.question,
        reference=request.reference,
        criteria=request.criteria,
        is_choice=request.options is not None,
        by=request.by,
        explain_tokens=most if request.explain else 0,
    )


def rerank(reranker: Reranker, call: RerankCall) -> list[dict[str, Any]]:
    """Return the best documents, best first; of equal scores, by content. Scores are bit-equal for every order."""
    candidates = _candidates(call.documents)
    keys = reranker.sort_keys(candidates, call.query)
    ranking = sorted(range(len(keys)), key=lambda index: (keys[index], candidates[index].tie_breaker))
    found = []
    for index in ranking[: call.top_n]:
        result = {"index": index, "relevance_score": reranker.probability(-keys[index])}
        found.append(result | ({"document": {"text": call.documents[index].text}} if call.return_documents else {}))
    return found


def _candidates(segments: Sequence[Segment]) -> list[Candidate]:
    return [Candidate(segment, (), plain_rendering(segment)) for segment in segments]
