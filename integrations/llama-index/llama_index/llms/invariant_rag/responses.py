"""Requests to a model, and its replies as responses of LlamaIndex: reasoning, text, calls and citations are blocks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

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

from invariant_rag.errors import InvariantRAGError
from invariant_rag.generation.answers import Answer, AnswerDelta, AnswerRequest, Reply
from invariant_rag.remote import RemoteModel
from llama_index.llms.invariant_rag.runs import Reports

if TYPE_CHECKING:
    from invariant_rag import InvariantModel

T = TypeVar("T")
R = TypeVar("R", ChatResponse, CompletionResponse)


class AnswerFailed(InvariantRAGError, RuntimeError):
    """A call failed with a `ValueError` or `TypeError`, the `__cause__`: LlamaIndex would answer "Empty Response"."""

    hint = "The message and `__cause__` say what was wrong with the call; it has no answer."


@contextmanager
def no_swallowed_errors() -> Iterator[None]:
    """Raise `AnswerFailed` from every `ValueError` and `TypeError`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        hint = error.hint if isinstance(error, InvariantRAGError) else None
        raise AnswerFailed(f"{type(error).__name__}: {error}", hint=hint) from error


@dataclass(frozen=True)
class Call:
    """One call of a model, in this process or on a server."""

    request: AnswerRequest
    sinks: Sequence[Reports]  # of the engines around
    model: Callable[[], InvariantModel] | RemoteModel  # the former loads it
    choices: Mapping[str, Any] = field(default_factory=dict)  # of a server: method, ordering and overflow

    def reply(self, abandoned: Event | None = None) -> Reply:
        """Ask, and return the reply."""
        with no_swallowed_errors():
            if isinstance(self.model, RemoteModel):
                return self.model.reply(self.request, choices=self.choices)
            from invariant_rag.generation.answering import Answering  # models of a server need no torch

            return Answering(self.model(), self.request).reply(abandoned=abandoned)

    async def reply_in_thread(self) -> Reply:
        """Return what `reply` does; the event loop goes on, and cancelling the task ends the generation."""
        abandoned = Event()
        try:
            return await asyncio.to_thread(self.reply, abandoned)
        finally:
            abandoned.set()

    def stream(self, whole: Callable[[Reply, Call, str], R]) -> Generator[R, None, None]:
        """Yield responses with all that was written so far; the last one adds `raw`. `whole` is `as_chat` or so."""
        growing = _Growing()
        grow: Callable[..., Any] = growing.chat if whole is as_chat else growing.completion
        with no_swallowed_errors():
            if isinstance(self.model, RemoteModel):
                pieces = self.model.stream_reply(self.request, choices=self.choices)
            else:
                from invariant_rag.generation.answering import Answering

                pieces = Answering(self.model(), self.request).stream()
            for piece in pieces:
                yield grow(piece) if isinstance(piece, AnswerDelta) else whole(piece, self, "")


async def iterate_in_thread(pieces: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Iterate over a generator in a worker thread that has this context; closing this iterator closes the generator."""
    loop, worker = asyncio.get_running_loop(), ThreadPoolExecutor(1, thread_name_prefix="invariant-rag")
    step: Callable[[], T | None] = partial(copy_context().run, lambda: next(pieces, None))
    try:
        while (piece := await loop.run_in_executor(worker, step)) is not None:
            yield piece
    finally:
        worker.submit(pieces.close)  # runs after a step that is still in progress
        worker.shutdown(wait=False)


async def astream(call: Call, whole: Callable[[Reply, Call, str], R]) -> AsyncGenerator[R, None]:
    """Yield what `Call.stream` does, without blocking the event loop."""
    async with aclosing(iterate_in_thread(call.stream(whole))) as pieces:
        async for piece in pieces:
            yield piece


def as_completion(reply: Reply, call: Call, delta: str | None = None) -> CompletionResponse:
    """Return the response to a text."""
    return CompletionResponse(text=reply.first.content, delta=delta, **_said(reply, call))


def as_chat(reply: Reply, call: Call, delta: str | None = None) -> ChatResponse:
    """Return the response to a conversation."""
    answer = reply.first
    calls = [(each.id, each.name, dict(each.arguments)) for each in answer.tool_calls]
    message = _message(answer.content, answer.reasoning, calls)  # a call that was cut is none: the reason is `length`
    for span in answer.citations or ():
        location = {"start": span.start, "end": span.end}
        cited = CitationBlock(
            cited_content=TextBlock(text=span.segment.text),
            source=span.segment.content_hash,
            title=span.segment.title or "",
            additional_location_info=location,
        )
        message.blocks.append(cited)
    return ChatResponse(message=message, delta=delta, **_said(reply, call))


def _said(reply: Reply, call: Call) -> dict[str, Any]:
    """Return what is known of a reply besides its text, and report it to the engines around.

    `raw` holds usage, finish reason, ledger and citations; segments are named by their content hash, in any order.
    """
    answer = reply.first
    counts = ("prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens")
    usage = {name: getattr(reply.usage, name) for name in counts}
    report = {"usage": usage, "finish_reason": answer.finish_reason, **reply.ledger}
    if answer.citations is not None:
        report["citations"] = [
            {"start": span.start, "end": span.end, "text": answer.content[span.start : span.end]}
            | {"source": span.segment.content_hash}
            | {name: value for name, value in span.segment.metadata.items() if name == "node_id"}
            for span in answer.citations
        ]
    for sink in call.sinks:
        sink.note(report)
    return {"raw": report, "logprobs": _logprobs(answer), "additional_kwargs": dict(usage)}


def _logprobs(answer: Answer) -> list[list[LogProb]] | None:
    """Return at each place the log-probability of the token, then those of others; None if nobody asked."""
    if answer.logprobs is None:
        return None
    places = []
    for each in answer.logprobs:
        others = [(token, logprob) for token, logprob in each.top if logprob != each.logprob]
        listed = [(each.token, each.logprob), *others]
        places.append([LogProb(token=token, logprob=value, bytes=list(token.encode())) for token, value in listed])
    return places


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
