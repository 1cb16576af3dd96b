"""Replies of a model as responses of LlamaIndex: reasoning, text, calls and citations are blocks of a message."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CitationBlock,
    CompletionResponse,
    ContentBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from invariant_rag.generation.answers import AnswerDelta, ModelAnswer, Reply
from invariant_rag.generation.citations import CitedSpan
from llama_index.llms.invariant_rag.calls import Call, iterate_in_thread

R = TypeVar("R", ChatResponse, CompletionResponse)


def _report(reply: Reply, call: Call) -> dict[str, Any]:
    """Return what is known of a reply besides its text, the `raw` of a response; and report it to the engines around.

    It holds `usage`, `finish_reason`, and the ledger (see `invariant_rag.generation.ledger`): segments are named by
    their content hash (the `source` of their `SegmentBlock`), so it does not depend on the order in which they came.
    With `citations`, it holds the parts of the text that have a source: `start`, `end`, `text`, `source`, and the
    `node_id` of a node.
    """
    answer = reply.first
    counts = ("prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens")
    usage = {name: getattr(reply.usage, name) for name in counts}
    report = {"usage": usage, "finish_reason": answer.finish_reason, **reply.ledger}
    if answer.citations is not None:
        report["citations"] = [_cited(each, answer.content) for each in answer.citations]
    for sink in call.sinks:
        sink.note(report)
    return report


def _cited(span: CitedSpan, text: str) -> dict[str, Any]:
    node_id = span.segment.metadata.get("node_id")
    found = {"start": span.start, "end": span.end, "text": text[span.start : span.end]}
    return {**found, "source": span.segment.content_hash} | ({} if node_id is None else {"node_id": node_id})


def _logprobs(answer: ModelAnswer) -> list[list[LogProb]] | None:
    """Return the log-probabilities, if they were asked for: at each place that of the token, then those of others."""
    if answer.logprobs is None:
        return None
    places = []
    for each in answer.logprobs:
        others = [(token, logprob) for token, logprob in each.top if logprob != each.logprob]
        listed = [(each.token, each.logprob), *others]
        places.append([LogProb(token=token, logprob=value, bytes=list(token.encode())) for token, value in listed])
    return places


def as_completion(reply: Reply, call: Call, delta: str | None = None) -> CompletionResponse:
    """Return the response to a text."""
    report = _report(reply, call)
    text, logprobs = reply.first.content, _logprobs(reply.first)
    return CompletionResponse(
        text=text, delta=delta, raw=report, logprobs=logprobs, additional_kwargs=dict(report["usage"])
    )


def as_chat(reply: Reply, call: Call, delta: str | None = None) -> ChatResponse:
    """Return the response to a conversation."""
    report, answer = _report(reply, call), reply.first
    calls = [(each.id, each.name, dict(each.arguments)) for each in answer.tool_calls]
    message = _message(answer.content, answer.reasoning, calls)  # a call that was cut is none: the reason is `length`
    message.blocks += [_citation(each) for each in answer.citations or ()]
    return ChatResponse(
        message=message,
        delta=delta,
        raw=report,
        logprobs=_logprobs(answer),
        additional_kwargs=dict(report["usage"]),
    )


def stream(call: Call, whole: Callable[..., R]) -> Generator[R, None, None]:
    """Yield a response with all that was written so far for every piece; the last one adds usage and `raw` alone.

    Args:
        call: What is asked.
        whole: `as_chat` or `as_completion`.
    """
    growing = _Growing()
    grow: Callable[..., Any] = growing.chat if whole is as_chat else growing.completion
    for piece in call.stream():
        yield grow(piece) if isinstance(piece, AnswerDelta) else whole(piece, call, delta="")


async def astream(call: Call, whole: Callable[..., R]) -> AsyncGenerator[R, None]:
    """Yield the same, without blocking the event loop."""
    async with aclosing(iterate_in_thread(stream(call, whole))) as pieces:
        async for piece in pieces:
            yield piece


@dataclass
class _Growing:
    """An answer that is being written: its text, its reasoning, and id, name and arguments of its calls."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, tuple[str, str, str]] = field(default_factory=dict)

    def completion(self, delta: AnswerDelta) -> CompletionResponse:
        self.text += delta.content
        return CompletionResponse(text=self.text, delta=delta.content)

    def chat(self, delta: AnswerDelta) -> ChatResponse:
        self.text += delta.content
        self.reasoning += delta.reasoning
        if piece := delta.call:
            id_, name, written = self.calls.get(piece.index, (piece.id or "", piece.name or "", ""))
            self.calls[piece.index] = id_, name, written + piece.arguments
        extra = {"thinking_delta": delta.reasoning} if delta.reasoning else {}
        message = _message(self.text, self.reasoning, self.calls.values())
        return ChatResponse(message=message, delta=delta.content, additional_kwargs=extra)


def _citation(span: CitedSpan) -> CitationBlock:
    segment = span.segment
    return CitationBlock(
        cited_content=TextBlock(text=segment.text),
        source=segment.content_hash,
        title=segment.title or "",
        additional_location_info={"start": span.start, "end": span.end},
    )


def _message(text: str, reasoning: str, calls: Iterable[tuple[str, str, dict[str, Any] | str]]) -> ChatMessage:
    """Return a message of the assistant.

    The calls are in `additional_kwargs` as well, in OpenAI's shape: chat engines and programs of LlamaIndex look there.
    """
    called = list(calls)
    blocks: list[ContentBlock] = [ThinkingBlock(content=reasoning)] if reasoning else []
    if text or not called:
        blocks.append(TextBlock(text=text))
    blocks += [ToolCallBlock(tool_call_id=id_, tool_name=name, tool_kwargs=given) for id_, name, given in called]
    listed = []
    for id_, name, given in called:
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        listed.append({"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}})
    extra = {"tool_calls": listed} if listed else {}
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=extra)
