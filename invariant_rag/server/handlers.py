"""Answers to requests that were parsed: what runs in the thread of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from invariant_rag.cancellation import cancellable
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.orderings import Candidate
from invariant_rag.orderings.monot5 import EMBEDDED_NAME, PUBLISHED
from invariant_rag.segments import plain_rendering
from invariant_rag.server.documents import segment_of
from invariant_rag.server.job import Job
from invariant_rag.server.metrics import StreamClock
from invariant_rag.server.replies import ChatReplies, TextReplies
from invariant_rag.server.schemas import RerankRequest

_SECONDS_PER_TOKEN = 0.05
_SECONDS_PER_DOCUMENT = 0.05
TOY = (
    "The embedded MonoT5 ranks these documents: a toy that was trained on synthetic ones. "
    f"Start the server with `--reranker {PUBLISHED}`, or another checkpoint."
)
"""What clients and the console are told of the embedded reranker."""


def chat(job: Job) -> Any:
    """Answer a conversation."""
    return _answered(job, ChatReplies(job.id, job.state.engine.name))


def complete(job: Job) -> Any:
    """Continue a text, or several."""
    return _answered(job, TextReplies(job.id, job.state.engine.name))


def tokenize(job: Job) -> Any:
    """Return the token ids of a text, or of a conversation as the model gets it."""
    (call,), engine = job.parsed.work, job.state.engine
    job.state.check_model(job.parsed.model)
    with job.turn(0.0), cancellable(job.abandoned):
        tokens = engine.tokens(call)
    return {"count": len(tokens), "max_model_len": engine.context_window, "tokens": tokens}


def rank(job: Job, version: str) -> Any:
    """Rank documents by their relevance to a query, best first, for a version of Cohere's API.

    Of equal scores, the content decides. Scores are bit-equal for every order.
    """
    reranker = job.state.reranker
    asked: RerankRequest = job.parsed.work
    job.state.check_model(job.parsed.model, reranker.model_name, reranker.name)
    candidates = [Candidate(each, (), plain_rendering(each)) for each in map(segment_of, asked.documents)]
    with job.turn(len(candidates) * _SECONDS_PER_DOCUMENT), cancellable(job.abandoned):
        keys = reranker.sort_keys(candidates, asked.query)
    ranking = sorted(range(len(keys)), key=lambda index: (keys[index], candidates[index].tie_breaker))
    results = []
    for index in ranking[: asked.top_n]:
        result = {"index": index, "relevance_score": reranker.probability(-keys[index])}
        texts = {"document": {"text": candidates[index].segment.text}} if asked.return_documents else {}
        results.append(result | texts)
    meta: dict[str, Any] = {"api_version": {"version": version}}
    meta |= {"warnings": [TOY]} if reranker.model_name == EMBEDDED_NAME else {}
    return {"id": job.id, "object": "list", "model": reranker.model_name, "results": results, "meta": meta}


def judge(job: Job) -> Any:
    """Say which answer is the best, or which option is right."""
    job.state.check_model(job.parsed.model)
    with job.turn((job.parsed.work.request.max_tokens or 0) * _SECONDS_PER_TOKEN), cancellable(job.abandoned):
        verdict = job.state.engine.judge(job.parsed.work)
    told = ("winner", "best", "ranking", "probabilities", "labels", "explanation")
    said = {name: getattr(verdict, name) for name in told}
    return {"id": job.id, "object": "judgement", "model": job.state.engine.name, **said}


def _answered(job: Job, replies: ChatReplies | TextReplies) -> Any:
    """Return a whole reply, or put the chunks of a stream. Prompts are answered at a time, as one batch if possible."""
    job.state.check_model(job.parsed.model)
    calls = [replace(each, headers=job.headers) for each in job.parsed.work]
    request = calls[0].request  # but for the question, that of all
    waiting = list(range(len(calls) * request.n))  # answers whose first chunk is not sent
    clock = StreamClock(job.state.metrics, job.begun)

    def begin() -> None:
        for index in waiting:
            for chunk in replies.begin(index):
                job.put(chunk)
        waiting.clear()

    def emit(index: int, delta: AnswerDelta) -> None:
        clock.tick(index)
        begin()
        job.put(replies.piece(index, delta))

    with job.turn(len(waiting) * (request.max_new_tokens or 1) * _SECONDS_PER_TOKEN):
        found = job.state.engine.answer_all(calls, emit, job.abandoned)
    for reply in found:
        job.state.metrics.count_tokens(reply.usage)
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            job.noted[name] = job.noted.get(name, 0) + getattr(reply.usage, name)
    job.noted["set_key"] = found[0].report.get("set_key")
    if not calls[0].stream:
        return replies.whole(found)
    begin()
    ends = [(choice, reply) for reply in found for choice in reply.choices]
    for index, (choice, reply) in enumerate(ends):
        job.put(replies.end(index, choice, reply))
    if job.parsed.include_usage:
        job.put(replies.usage(found))
    return None
