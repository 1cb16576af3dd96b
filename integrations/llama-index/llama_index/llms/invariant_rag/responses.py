"""Messages of LlamaIndex as turns and as messages of the core; replies of a model as responses of LlamaIndex."""

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
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from llama_index.core.base.llms import types
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole, TextBlock

from invariant_rag.errors import InvalidPrompt, InvariantRAGError
from invariant_rag.generation.answers import Answer, AnswerDelta, AnswerRequest, Reply
from invariant_rag.prompts import Message, Turn, without_marks
from invariant_rag.remote import RemoteModel
from invariant_rag.segments import Segment, SegmentSet
from llama_index.llms.invariant_rag.runs import Reports
from llama_index.llms.invariant_rag.slots import Part, SlotBlock

if TYPE_CHECKING:
    from invariant_rag import InvariantModel

    Whole = Callable[[Reply, "ModelCall", str | None], "R"]

T = TypeVar("T")
R = TypeVar("R", ChatResponse, CompletionResponse)

ASSISTANT = (MessageRole.ASSISTANT, MessageRole.CHATBOT, MessageRole.MODEL)
_TOOL = (MessageRole.TOOL, MessageRole.FUNCTION)
_ROLES = {**dict.fromkeys(ASSISTANT, "assistant"), **dict.fromkeys(_TOOL, "tool"), MessageRole.DEVELOPER: "system"}


class SegmentBlock(types.CitableBlock):
    """A content block with one segment. For LLMs other than `InvariantLLM` it is an ordinary `CitableBlock`."""

    score: float | None = None
    """The retriever's score, used by the `score` ordering."""

    @classmethod
    def of(cls, segment: Segment | str) -> SegmentBlock:
        """Build a block from a segment with text."""
        segment = Segment.of(segment)
        content: list[Any] = [TextBlock(text=segment.text)]
        return cls(title=segment.title or "", source=segment.content_hash, content=content, score=segment.score)


def to_turns(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Return messages as turns of texts (`Part`s), segments (citable and plain-text documents), and other blocks.

    Only a tool's message and the user's last may hold a set as text: system prompts and histories are somebody's words.
    """
    return [
        Turn(_ROLES.get(each.role, each.role.value), tuple(_parts(each, is_last=index == len(messages))))
        for index, each in enumerate(messages, start=1)
    ]


def _parts(message: ChatMessage, *, is_last: bool) -> Iterator[Any]:
    may_be_set = message.role in _TOOL or (is_last and message.role == MessageRole.USER)
    previous: object = None
    for block in message.blocks:
        if isinstance(block, TextBlock):
            if isinstance(previous, TextBlock):
                yield "\n"  # as ChatMessage.content joins them
            if message.role in ASSISTANT:
                yield without_marks(block.text)
            elif isinstance(block, SlotBlock):
                yield from block._parts
            else:
                yield Part(block.text, "finished", block=block) if may_be_set else block.text
        elif isinstance(block, types.CitableBlock):
            yield _citable_segment(block)
        elif isinstance(block, types.DocumentBlock) and (block.document_mimetype or "").startswith("text/"):
            yield Segment(block.resolve_document().read().decode("utf-8"), title=block.title or None)
        else:
            yield block
        previous = block


def _citable_segment(block: types.CitableBlock) -> Segment:
    texts = [
        each.text if isinstance(each, TextBlock) else _refuse("text blocks in a citable block", each)
        for each in block.content
    ]
    score = block.score if isinstance(block, SegmentBlock) else None
    return Segment("\n".join(texts), title=block.title or None, score=score)


def _refuse(expected: str, block: Any) -> NoReturn:
    raise InvalidPrompt(
        f"expected {expected}, got a block of type {block.block_type!r}",
        hint="The model takes text only. Remove the block, or describe its content in a TextBlock.",
    )


def chat_messages(turns: Sequence[Turn], messages: Sequence[ChatMessage]) -> list[Message]:
    """Convert turns for `render_chat`, with calls of tools and ids of results; adjacent ones of a role are merged."""
    converted: list[dict[str, Any]] = []
    for turn, message in zip(turns, messages, strict=True):
        content, fields = list(_read(turn.parts)), _tool_fields(message)
        if converted and converted[-1]["role"] == turn.role != "tool":
            last = converted[-1]
            last["content"] += ["\n\n", *content] if content and last["content"] else content
            if fields:
                last["tool_calls"] = [*last.get("tool_calls", ()), *fields["tool_calls"]]
        else:
            converted.append({"role": turn.role, "content": content, **fields})
    return list(converted)


def _read(parts: Sequence[Any]) -> Iterator[str | Segment | SegmentSet]:
    for part in parts:
        if isinstance(part, str | Segment | SegmentSet):
            yield part
        elif not isinstance(part, types.CachePoint | types.CitationBlock | types.ThinkingBlock | types.ToolCallBlock):
            _refuse("text, citable or plain-text document blocks", part)


def _tool_fields(message: ChatMessage) -> dict[str, Any]:
    """Return the tool fields of a message, as `render_chat` takes it: in blocks, or else in `additional_kwargs`."""
    fields = message.additional_kwargs
    if message.role in _TOOL:
        return {name: fields[name] for name in ("tool_call_id", "name") if fields.get(name) is not None}
    blocks = [block for block in message.blocks if isinstance(block, types.ToolCallBlock)]
    if message.role not in ASSISTANT:
        if blocks:
            raise InvalidPrompt(
                f"expected calls of tools in the assistant's messages, got one in a message of {message.role.value!r}",
                hint="Set the role of the message to assistant.",
            )
        return {}
    calls: list[Mapping[str, Any]] = [
        {"id": block.tool_call_id, "name": block.tool_name, "arguments": block.tool_kwargs} for block in blocks
    ] or [each if isinstance(each, Mapping) else each.model_dump() for each in fields.get("tool_calls") or ()]
    return {"tool_calls": calls} if calls else {}


class AnswerFailed(InvariantRAGError, RuntimeError):
    """A call failed with a `ValueError` or `TypeError`, the `__cause__`: LlamaIndex would answer "Empty Response"."""

    hint = "The message and `__cause__` say what was wrong with the call; it has no answer."


@contextmanager
def no_swallowed_errors() -> Iterator[None]:
    """Raise `AnswerFailed` from every `ValueError` and `TypeError`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise AnswerFailed(f"{type(error).__name__}: {error}", hint=getattr(error, "hint", None)) from error


@dataclass(frozen=True)
class ModelCall:
    """One call of a model, in this process or on a server."""

    request: AnswerRequest
    sinks: Sequence[Reports]  # of the engines around
    model: Callable[[], InvariantModel] | RemoteModel  # the former loads it
    choices: Mapping[str, Any] = field(default_factory=dict)  # of a server: method, ordering and overflow

    def _ask(self, abandoned: Event | None = None) -> Reply:
        with no_swallowed_errors():
            if isinstance(self.model, RemoteModel):
                return self.model.reply(self.request, choices=self.choices)
            from invariant_rag.generation.answering import Answering  # models of a server need no torch

            return Answering(self.model(), self.request).reply(abandoned=abandoned)

    def reply(self, whole: Whole[R]) -> R:
        """Ask, and return the response: `as_chat` or `as_completion` of the reply."""
        return whole(self._ask(), self, None)

    async def areply(self, whole: Whole[R]) -> R:
        """Return what `reply` does; the event loop goes on, and cancelling the task ends the generation."""
        abandoned = Event()
        try:
            return whole(await asyncio.to_thread(self._ask, abandoned), self, None)
        finally:
            abandoned.set()

    def stream(self, whole: Whole[R]) -> Generator[R, None, None]:
        """Yield responses with all that was written so far; the last one adds `raw`."""
        growing = _Growing()
        grow: Callable[..., Any] = growing.chat if whole is as_chat else growing.completion
        with no_swallowed_errors():
            if isinstance(self.model, RemoteModel):
                deltas = self.model.stream_reply(self.request, choices=self.choices)
            else:
                from invariant_rag.generation.answering import Answering

                deltas = Answering(self.model(), self.request).stream()
            for delta in deltas:
                yield grow(delta) if isinstance(delta, AnswerDelta) else whole(delta, self, "")

    async def astream(self, whole: Whole[R]) -> AsyncGenerator[R, None]:
        """Yield what `stream` does, without blocking the event loop."""
        async with aclosing(iterate_in_thread(self.stream(whole))) as deltas:
            async for delta in deltas:
                yield delta


async def iterate_in_thread(deltas: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Iterate over a generator in a worker thread that has this context; closing this iterator closes the generator."""
    loop, worker = asyncio.get_running_loop(), ThreadPoolExecutor(1, thread_name_prefix="invariant-rag")
    step: Callable[[], T | None] = partial(copy_context().run, lambda: next(deltas, None))
    try:
        while (delta := await loop.run_in_executor(worker, step)) is not None:
            yield delta
    finally:
        worker.submit(deltas.close)  # runs after a step that is still in progress
        worker.shutdown(wait=False)


def as_completion(reply: Reply, call: ModelCall, delta: str | None) -> CompletionResponse:
    """Return the response to a text."""
    return CompletionResponse(text=reply.first.content, delta=delta, **_said(reply, call))


def as_chat(reply: Reply, call: ModelCall, delta: str | None) -> ChatResponse:
    """Return the response to a conversation."""
    answer = reply.first
    calls = [(each.id, each.name, dict(each.arguments)) for each in answer.tool_calls]  # none that was cut
    message = _message(answer.content, answer.reasoning, calls)
    message.blocks += [
        types.CitationBlock(
            cited_content=TextBlock(text=span.segment.text),
            source=span.segment.content_hash,
            title=span.segment.title or "",
            additional_location_info={"start": span.start, "end": span.end},
        )
        for span in answer.citations or ()
    ]
    return ChatResponse(message=message, delta=delta, **_said(reply, call))


def _said(reply: Reply, call: ModelCall) -> dict[str, Any]:
    """Return what is known of a reply besides its text, and report it to the engines around."""
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


def _logprobs(answer: Answer) -> list[list[types.LogProb]] | None:
    """Return for each token its log-probability, then those of others; None if they were not requested."""
    if answer.logprobs is None:
        return None

    def logprob(token: str, value: float) -> types.LogProb:
        return types.LogProb(token=token, logprob=value, bytes=list(token.encode()))

    return [
        [logprob(each.token, each.logprob), *(logprob(*other) for other in each.top if other[1] != each.logprob)]
        for each in answer.logprobs
    ]


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
        if call := delta.call:
            id_, name, written = self.calls.get(call.index, (call.id or "", call.name or "", ""))
            self.calls[call.index] = id_, name, written + call.arguments
        extra = {"thinking_delta": delta.reasoning} if delta.reasoning else {}
        message = _message(self.text, self.reasoning, self.calls.values())
        return ChatResponse(message=message, delta=delta.content, additional_kwargs=extra)


def _message(text: str, reasoning: str, calls: Iterable[tuple[str, str, dict[str, Any] | str]]) -> ChatMessage:
    """Return a message of the assistant, with calls in OpenAI's shape, too: LlamaIndex's chat engines need it."""
    called = list(calls)
    blocks: list[types.ContentBlock] = [types.ThinkingBlock(content=reasoning)] if reasoning else []
    if text or not called:
        blocks.append(TextBlock(text=text))
    blocks += [types.ToolCallBlock(tool_call_id=id_, tool_name=name, tool_kwargs=args) for id_, name, args in called]
    written = [args if isinstance(args, str) else json.dumps(args, ensure_ascii=False) for _, _, args in called]
    listed = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for (id_, name, _), arguments in zip(called, written, strict=True)
    ]
    extra = {"tool_calls": listed} if listed else {}
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=extra)
