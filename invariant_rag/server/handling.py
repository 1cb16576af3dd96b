"""Answers to requests that were parsed: what runs in the thread of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from invariant_rag.cancellation import cancellable
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.orderings.monot5 import EMBEDDED_NAME, PUBLISHED
from invariant_rag.server.engines.base import Call, Emit, Reply
from invariant_rag.server.metrics import StreamClock
from invariant_rag.server.order_sampling import compare_orders
from invariant_rag.server.ranking import rerank
from invariant_rag.server.replies import ChatReplies, TextReplies
from invariant_rag.server.running import Job

_SECONDS_PER_TOKEN = 0.05
_SECONDS_PER_DOCUMENT = 0.05
TOY = (
    "The embedded MonoT5 ranks these documents: a toy that was trained on synthetic ones. "
    f"Start the server with `--reranker {PUBLISHED}`, or another checkpoint."
)
"""What clients and the console are told of the embedded reranker."""


def chat(job: Job) -> Any:
    """Answer a conversation."""
    (call,) = job.parsed.work
    replies = ChatReplies(job.id, job.state.engine.name)
    begun = False

    def begin() -> None:
        nonlocal begun
        for index in () if begun else range(call.count):
            job.put(replies.begin(index))
        begun = True

    def emit(index: int, delta: AnswerDelta) -> None:
        begin()
        job.put(replies.piece(index, delta))

    (reply,) = _answer(job, [call], emit)
    if not call.stream:
        return replies.whole(reply)
    begin()
    for index, choice in enumerate(reply.choices):
        job.put(replies.end(index, choice, reply))
    if job.parsed.include_usage:
        job.put(replies.usage(reply))
    return None


def complete(job: Job) -> Any:
    """Continue a text, or several."""
    replies = TextReplies(job.id, job.state.engine.name)
    found = _answer(job, job.parsed.work, lambda index, delta: job.put(replies.piece(index, delta)))
    if not job.parsed.work[0].stream:
        return replies.whole(found)
    ends = [(choice, reply) for reply in found for choice in reply.choices]
    for index, (choice, reply) in enumerate(ends):
        job.put(replies.end(index, choice, reply))
    if job.parsed.include_usage:
        job.put(replies.usage(found))
    return None


def tokenize(job: Job) -> Any:
    """Return the token ids of a text, or of a conversation as the model reads it."""
    (call,) = job.parsed.work
    job.state.check_model(job.parsed.model)
    with job.turn(0.0), cancellable(job.abandoned):
        tokens = job.state.engine.tokens(call)
    return {"count": len(tokens), "max_model_len": job.state.engine.context_window, "tokens": tokens}


def rank(job: Job, version: str) -> Any:
    """Rank documents by their relevance to a query, for a version of Cohere's API."""
    reranker = job.state.reranker
    job.state.check_model(job.parsed.model, reranker.model_name, reranker.name)
    with job.turn(len(job.parsed.work.documents) * _SECONDS_PER_DOCUMENT), cancellable(job.abandoned):
        results = rerank(reranker, job.parsed.work)
    meta: dict[str, Any] = {"api_version": {"version": version}}
    meta |= {"warnings": [TOY]} if reranker.model_name == EMBEDDED_NAME else {}
    return {"id": job.id, "object": "list", "model": reranker.model_name, "results": results, "meta": meta}


def judge(job: Job) -> Any:
    """Say which answer is the best, or which option is right."""
    job.state.check_model(job.parsed.model)
    with job.turn(job.parsed.work.explain_tokens * _SECONDS_PER_TOKEN), cancellable(job.abandoned):
        verdict = job.state.engine.judge(job.parsed.work)
    return {
        "id": job.id,
        "object": "judgement",
        "model": job.state.engine.name,
        "winner": verdict.winner,
        "best": list(verdict.best),
        "ranking": list(verdict.ranking),
        "probabilities": list(verdict.probabilities),
        "labels": list(verdict.labels),
        "explanation": verdict.explanation,
    }


def _answer(job: Job, calls: Sequence[Call], emit: Emit) -> list[Reply]:
    """Answer calls, all at a time, so that an engine can put them into one batch; answers are numbered through."""
    job.state.check_model(job.parsed.model)
    clock = StreamClock(job.state.metrics, job.begun)

    def emit_timed(index: int, delta: AnswerDelta) -> None:
        clock.tick(index)
        emit(index, delta)

    calls = [replace(each, headers=job.headers) for each in calls]
    with job.turn(sum(each.count * each.sampling.max_new_tokens for each in calls) * _SECONDS_PER_TOKEN):
        found = job.state.engine.answer_all(calls, emit_timed, job.abandoned)
        if job.parsed.check_orders:
            reports = [compare_orders(job.state.engine, each, job.parsed.check_orders, job.abandoned) for each in calls]
            found = [
                replace(reply, report={**reply.report, "check_order": report})
                for reply, report in zip(found, reports, strict=True)
            ]
    for call, reply in zip(calls, found, strict=True):
        job.state.sampling.consider(call, reply)
        job.state.metrics.count_tokens(reply.usage)
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        job.noted[name] = sum(getattr(reply.usage, name) for reply in found)
    job.noted["set_key"] = next((reply.report.get("set_key") for reply in found), None)
    return found
