"""What was generated, as responses of LlamaIndex."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeAlias

from llama_index.core.base.llms.types import (
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LogProb,
)

from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.generation.citations import CitedSpan
from llama_index.llms.invariant_rag.remote import RemoteAnswer
from llama_index.llms.invariant_rag.streaming import iterate_in_thread
from llama_index.llms.invariant_rag.tracking import note_answer

if TYPE_CHECKING:
    from llama_index.llms.invariant_rag.answering import Answer

    Answered: TypeAlias = Answer | RemoteAnswer


def report_of(answer: Answered) -> dict[str, Any]:
    """Return what is known of an answer besides its text, the `raw` of a response; and report it to engines around.

    It holds `usage`, `finish_reason`, and the ledger (see `invariant_rag.generation.ledger`): segments are named by
    their content hash (the `source` of their `SegmentBlock`), so it does not depend on the order in which they came.
    With `citations`, it holds the parts of the text that have a source: `start`, `end`, `text`, `source`, and the
    `node_id` of a node that was recognised.
    """
    report = answer.report()
    if answer.tool_calls:
        report["finish_reason"] = "tool_calls"
    if answer.citations is not None:
        report["citations"] = [_citation(each, answer.text) for each in answer.citations]
    note_answer(report, recognized=answer.recognized)
    return report


def _citation(span: CitedSpan, text: str) -> dict[str, Any]:
    node_id = span.segment.metadata.get("node_id")
    found = {"start": span.start, "end": span.end, "text": text[span.start : span.end]}
    return {**found, "source": span.segment.content_hash} | ({} if node_id is None else {"node_id": node_id})


def as_completion(answer: Answered, delta: str | None = None) -> CompletionResponse:
    """Return the response to a text."""
    report = report_of(answer)
    return CompletionResponse(
        text=answer.text,
        delta=delta,
        raw=report,
        logprobs=as_logprobs(answer),
        additional_kwargs=dict(report["usage"]),
    )


def as_logprobs(answer: Answered) -> list[list[LogProb]] | None:
    """Return the log-probabilities of the tokens, if they were asked for: one of each token."""
    if answer.logprobs is None:
        return None
    return [
        [LogProb(token=each.token, logprob=each.logprob, bytes=list(each.token.encode()))] for each in answer.logprobs
    ]


def as_stream(pieces: Iterable[AnswerDelta | Answered]) -> CompletionResponseGen:
    """Yield a response with the text so far for every piece. The last one adds no text, but usage and `raw`."""
    text = ""
    for piece in pieces:
        if isinstance(piece, AnswerDelta):
            text += piece.content
            yield CompletionResponse(text=text, delta=piece.content)
        else:
            yield as_completion(piece, delta="")


async def as_async_stream(pieces: Generator[AnswerDelta | Answered, None, None]) -> CompletionResponseAsyncGen:
    """Yield the same, without blocking the event loop."""
    text = ""
    async with aclosing(iterate_in_thread(pieces)) as read:
        async for piece in read:
            if isinstance(piece, AnswerDelta):
                text += piece.content
                yield CompletionResponse(text=text, delta=piece.content)
            else:
                yield as_completion(piece, delta="")
