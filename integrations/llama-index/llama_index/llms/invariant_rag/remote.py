"""Requests to a model of `invariant-rag serve`, and its answers. Needs no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.bridge.pydantic import BaseModel

from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.answers import AnswerDelta, CallDelta
from invariant_rag.generation.citations import CitedSpan
from invariant_rag.generation.json_schema import json_schema
from invariant_rag.prompts import ToolCall
from invariant_rag.remote import RemoteModel
from invariant_rag.segments import Segment
from llama_index.llms.invariant_rag.errors import no_swallowed_errors
from llama_index.llms.invariant_rag.function_calling import ChatOptions

_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "min_p", "repetition_penalty")
_SAMPLING = ("top_p", "top_k", "seed", "min_p")
_LEDGER = ("sets", "order", "dropped", "trimmed", "method")


@dataclass(frozen=True)
class TokenReport:
    """A token, and its log-probability."""

    token: str
    logprob: float


@dataclass(frozen=True)
class RemoteAnswer:
    """What came of a call; the attributes are those of `answering.Answer`, and the reply."""

    text: str
    reply: Mapping[str, Any]
    recognized: bool
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    logprobs: Sequence[TokenReport] | None = None
    citations: Sequence[CitedSpan] | None = None

    def report(self) -> dict[str, Any]:
        """Return usage, why it ended, and what was read: see `invariant_rag.generation.ledger`."""
        said, usage = self.reply["invariant"], self.reply["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        return {
            "usage": {name: usage[name] for name in names} | {"cached_tokens": cached},
            "finish_reason": self.reply["choices"][0]["finish_reason"],
            **{name: said[name] for name in _LEDGER},
            "cached_tokens": cached,
            "invariant": said["invariant"] and self.recognized,
        }


@dataclass(frozen=True)
class RemoteRequest:
    """What one call asks a server for.

    Attributes:
        remote: The server.
        content: The messages of a chat, or the parts of a text.
        fields: Other fields of the request.
        chat: Whether it is a chat.
        recognized: Whether every node in the prompt is known to be a segment.
        citations: Whether to report citations.
    """

    remote: RemoteModel
    content: Sequence[Any]
    fields: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = True
    recognized: bool = True
    citations: bool = False

    def answer(self) -> RemoteAnswer:
        """Ask, and return the answer.

        Raises:
            AnswerFailed: The call is refused with a `ValueError` or `TypeError`.
        """
        with no_swallowed_errors():
            if not self.chat:
                reply = self.remote.complete(self.content, **self.fields)
                return self._text_answer(reply["choices"][0]["text"], reply)
            reply = self.remote.chat(self.content, **self.fields)
            choice = reply["choices"][0]
            message = choice["message"]
            return RemoteAnswer(
                message.get("content") or "",
                reply,
                self.recognized,
                message.get("reasoning_content") or "",
                tuple(map(ToolCall.of, message.get("tool_calls") or ())),
                _tokens(choice),
                self._spans(message),
            )

    async def answer_in_thread(self) -> RemoteAnswer:
        """Return what `answer` does; the event loop goes on meanwhile."""
        return await asyncio.to_thread(self.answer)

    def stream(self) -> Generator[AnswerDelta | RemoteAnswer, None, None]:
        """Yield the pieces of `answer` as they come, and then the whole answer.

        Raises:
            AnswerFailed: As for `answer`.
        """
        with no_swallowed_errors():
            ask = self.remote.stream_chat if self.chat else self.remote.stream_complete
            text, reasoning = "", ""
            last: dict[str, Any] = {}
            calls: dict[int, list[str]] = {}
            for chunk in ask(self.content, **self.fields):
                if not chunk["choices"]:
                    yield self._whole(text, reasoning, calls, {**last, "usage": chunk["usage"]})
                    continue
                choice = chunk["choices"][0]
                if choice["finish_reason"] is not None:
                    last = chunk
                    continue
                delta = choice["delta"] if self.chat else {"content": choice["text"]}
                for call in delta.get("tool_calls") or ():
                    yield AnswerDelta(call=_piece(call, calls))
                if said := delta.get("reasoning_content"):
                    reasoning += said
                    yield AnswerDelta(reasoning=said)
                if said := delta.get("content"):
                    text += said
                    yield AnswerDelta(said)

    def _whole(
        self, text: str, reasoning: str, calls: Mapping[int, list[str]], reply: Mapping[str, Any]
    ) -> RemoteAnswer:
        if not self.chat:
            return self._text_answer(text, reply)
        choice = reply["choices"][0]
        found = [{"id": id_, "name": name, "arguments": written} for id_, name, written in calls.values()]
        spans = self._spans(choice["delta"])
        called = tuple(map(ToolCall.of, found))
        return RemoteAnswer(text, reply, self.recognized, reasoning, called, _tokens(choice), spans)

    def _text_answer(self, text: str, reply: Mapping[str, Any]) -> RemoteAnswer:
        tokens = reply["choices"][0]["logprobs"]
        pairs = zip(tokens["tokens"], tokens["token_logprobs"], strict=True) if tokens else ()
        logprobs = [TokenReport(*pair) for pair in pairs] if tokens else None
        return RemoteAnswer(text, reply, self.recognized, logprobs=logprobs)

    def _spans(self, message: Mapping[str, Any]) -> list[CitedSpan] | None:
        if not self.citations:
            return None
        return [
            CitedSpan(cited["start"], cited["end"], 0, _segment(source["document"]))
            for cited in message.get("citations") or ()
            for source in cited["sources"]
        ]


def request_fields(
    given: Mapping[str, Any],
    choices: Mapping[str, Any],
    *,
    stops: Sequence[str],
    logprobs: bool,
    chat: ChatOptions | None,
    output_cls: type[BaseModel] | None,
) -> dict[str, Any]:
    """Return the fields of a request; None for those to leave away.

    Raises:
        UnsupportedCombination: There are keywords that a server does not take.
    """
    if refused := sorted(given.keys() - set(_FIELDS)):
        raise UnsupportedCombination(
            f"expected keywords that a server takes, got {', '.join(refused)}",
            hint="Leave them away, or run the model here, without base_url.",
        )
    fields = {name: value for name, value in given.items() if given["temperature"] or name not in _SAMPLING}
    fields |= {"stop": list(stops) or None, "invariant": dict(choices) or None}
    if chat is None:
        return fields | {"logprobs": 1 if logprobs else None}
    named = chat.tool_choice not in ("auto", "none", "required", "any")
    choice: Any = "required" if chat.tool_choice == "any" else chat.tool_choice
    form = None
    if output_cls is not None:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": json_schema(output_cls)}}
    offered = {
        "tools": list(chat.tools),
        "tool_choice": {"type": "function", "function": {"name": choice}} if named else choice,
        "parallel_tool_calls": chat.parallel,
    }
    return {
        **fields,
        **(offered if chat.tools else {}),
        "logprobs": logprobs or None,
        "response_format": form,
        "chat_template_kwargs": dict(chat.template_kwargs) or None,
    }


def _piece(call: Mapping[str, Any], calls: dict[int, list[str]]) -> CallDelta:
    function = call["function"]
    written = calls.setdefault(call["index"], [call.get("id") or "", function.get("name") or "", ""])
    written[2] += function.get("arguments") or ""
    return CallDelta(call["index"], call.get("id"), function.get("name"), function.get("arguments") or "")


def _tokens(choice: Mapping[str, Any]) -> list[TokenReport] | None:
    said = choice.get("logprobs")
    return None if said is None else [TokenReport(each["token"], each["logprob"]) for each in said["content"]]


def _segment(document: Mapping[str, Any]) -> Segment:
    metadata = {name: value for name, value in document.items() if name not in ("id", "text", "title")}
    return Segment(document["text"], title=document.get("title"), metadata=metadata)
