"""Answers to conversations as responses of LlamaIndex: reasoning, text, calls and citations are blocks of a message."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CitationBlock,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from invariant_rag.generation.answers import AnswerDelta, CallDelta
from invariant_rag.generation.citations import CitedSpan
from llama_index.llms.invariant_rag.responses import as_logprobs, report_of
from llama_index.llms.invariant_rag.streaming import iterate_in_thread

if TYPE_CHECKING:
    from llama_index.llms.invariant_rag.responses import Answered


@dataclass
class _Call:
    """A call, as far as it is written."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class GrowingMessage:
    """A message that is being written.

    Attributes:
        text: Its text so far.
        reasoning: Its reasoning so far.
        calls: Its calls so far.
    """

    text: str = ""
    reasoning: str = ""
    calls: dict[int, _Call] = field(default_factory=dict)

    def add(self, delta: AnswerDelta) -> None:
        """Add a piece of the answer."""
        self.text += delta.content
        self.reasoning += delta.reasoning
        if delta.call:
            self._add_call(delta.call)

    def _add_call(self, piece: CallDelta) -> None:
        call = self.calls.setdefault(piece.index, _Call(piece.id or "", piece.name or ""))
        call.arguments += piece.arguments

    def response(self, delta: AnswerDelta) -> ChatResponse:
        """Return the response so far, whose last piece is `delta`."""
        self.add(delta)
        calls = [(call.id, call.name, call.arguments) for call in self.calls.values()]
        extra = {"thinking_delta": delta.reasoning} if delta.reasoning else {}
        message = _message(self.text, self.reasoning, calls)
        return ChatResponse(message=message, delta=delta.content, additional_kwargs=extra)


def as_chat(answer: Answered, delta: str | None = None) -> ChatResponse:
    """Return the response to a conversation."""
    report = report_of(answer)
    message = _message(
        answer.text, answer.reasoning, [(call.id, call.name, dict(call.arguments)) for call in answer.tool_calls]
    )
    message.blocks += [_citation(each) for each in answer.citations or ()]
    return ChatResponse(
        message=message,
        delta=delta,
        raw=report,
        logprobs=as_logprobs(answer),
        additional_kwargs=dict(report["usage"]),
    )


def as_chat_stream(pieces: Iterable[AnswerDelta | Answered]) -> ChatResponseGen:
    """Yield a response with the message so far for every piece. The last one adds no text, but usage and `raw`."""
    growing = GrowingMessage()
    for piece in pieces:
        yield growing.response(piece) if isinstance(piece, AnswerDelta) else as_chat(piece, delta="")


async def as_async_chat_stream(pieces: Generator[AnswerDelta | Answered, None, None]) -> ChatResponseAsyncGen:
    """Yield the same, without blocking the event loop."""
    growing = GrowingMessage()
    async with aclosing(iterate_in_thread(pieces)) as read:
        async for piece in read:
            yield growing.response(piece) if isinstance(piece, AnswerDelta) else as_chat(piece, delta="")


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
    listed = [
        {
            "id": id_,
            "type": "function",
            "function": {
                "name": name,
                "arguments": given if isinstance(given, str) else json.dumps(given, ensure_ascii=False),
            },
        }
        for id_, name, given in called
    ]
    extra = {"tool_calls": listed} if listed else {}
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=extra)
