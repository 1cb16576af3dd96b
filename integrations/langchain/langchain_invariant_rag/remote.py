"""Requests to a model of `invariant-rag serve`, and its answers as LangChain reports them. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from invariant_rag.errors import UnsupportedCombination
from invariant_rag.remote import RemoteModel
from invariant_rag.segments import Prompt
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.content import Citation
from langchain_core.messages.tool import tool_call, tool_call_chunk

from langchain_invariant_rag.calls import Call
from langchain_invariant_rag.chat_options import ChatOptions
from langchain_invariant_rag.documents import DOCUMENT_ID
from langchain_invariant_rag.messages import chat_messages

_ALSO = ("min_p", "repetition_penalty")
"""Keywords of transformers' `generate` that a server takes."""
_LEDGER = ("sets", "order", "dropped", "trimmed", "method", "invariant")


class RemoteChat:
    """A conversation for a model of a server.

    Args:
        messages: The conversation, recognised.
        call: How to decode.
        options: What else the call asks for.
        choices: Method, ordering and overflow to ask for.
        recognized: Whether every document is known to be a segment.

    Raises:
        UnsupportedCombination: There are keywords that a server does not take.
    """

    def __init__(
        self,
        messages: Sequence[BaseMessage],
        call: Call,
        options: ChatOptions,
        choices: Mapping[str, Any],
        *,
        recognized: bool = True,
    ) -> None:
        self._messages = chat_messages(messages)
        self._cites, self._recognized = options.citations and call.schema is None, recognized
        self._fields = decoding_fields(call, choices) | {
            "logprobs": options.logprobs or None,
            "tools": list(options.tools) or None,
            "tool_choice": _choice(options) if options.tools else None,
            "parallel_tool_calls": options.parallel_tool_calls if options.tools else None,
            "chat_template_kwargs": dict(options.template_kwargs) or None,
            "response_format": None if call.schema is None else _form(call.schema),
        }

    def message(self, remote: RemoteModel) -> AIMessage:
        """Ask, and return the answer."""
        reply = remote.chat(self._messages, **self._fields)
        choice = reply["choices"][0]
        message = choice["message"]
        reasoning = message.get("reasoning_content")
        return AIMessage(
            content=self._content(message.get("content") or "", message.get("citations") or []),
            tool_calls=[
                tool_call(name=each["function"]["name"], args=json.loads(each["function"]["arguments"]), id=each["id"])
                for each in message.get("tool_calls") or ()
            ],
            additional_kwargs={"reasoning_content": reasoning} if reasoning else {},
            usage_metadata=usage_of(reply["usage"]),
            response_metadata=self._metadata(reply, choice),
        )

    def stream(self, remote: RemoteModel) -> Iterator[AIMessageChunk]:
        """Ask, and yield the answer in pieces. Joined, they are what `message` returns."""
        last: dict[str, Any] = {}
        for chunk in remote.stream_chat(self._messages, **self._fields):
            if not chunk["choices"]:
                yield self._end(last | {"usage": chunk["usage"]})
                continue
            choice = chunk["choices"][0]
            delta = choice["delta"]
            if choice["finish_reason"] is not None:
                last = chunk
            elif calls := delta.get("tool_calls"):
                yield AIMessageChunk(content="", tool_call_chunks=[_call_piece(each) for each in calls])
            elif reasoning := delta.get("reasoning_content"):
                yield AIMessageChunk(content="", additional_kwargs={"reasoning_content": reasoning})
            elif text := delta.get("content"):
                yield AIMessageChunk(content=[{"type": "text", "text": text, "index": 0}] if self._cites else text)

    def _end(self, last: dict[str, Any]) -> AIMessageChunk:
        choice = last["choices"][0]
        citations = [_citation(each) for each in choice["delta"].get("citations") or ()]
        block = {"type": "text", "text": "", "annotations": citations, "index": 0}
        return AIMessageChunk(
            content=[block] if self._cites else "",
            usage_metadata=usage_of(last["usage"]),
            response_metadata=self._metadata(last, choice),
            chunk_position="last",
        )

    def _content(self, text: str, citations: Sequence[Mapping[str, Any]]) -> Any:
        if not self._cites:
            return text
        return [{"type": "text", "text": text, "annotations": list(map(_citation, citations))}] if text else []

    def _metadata(self, reply: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
        report = remote_report(reply, choice, recognized=self._recognized)
        logprobs = choice.get("logprobs")
        return report | ({"logprobs": {"content": logprobs["content"]}} if logprobs else {})


def decoding_fields(call: Call, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that say how to decode; None for those to leave away.

    Raises:
        UnsupportedCombination: There are keywords that a server does not take.
    """
    if refused := sorted(call.more.keys() - set(_ALSO)):
        raise UnsupportedCombination(
            f"expected keywords that a server takes, got {', '.join(refused)}",
            hint="Leave them away, or run the model here, without base_url.",
        )
    sampling = dict(call.sampling) if call.sampled else {}
    fields = {"max_tokens": call.max_tokens, **sampling, "stop": list(call.stop) or None, **call.more}
    return fields | {"invariant": dict(choices) or None}


def complete(remote: RemoteModel, prompt: Prompt, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to a completion."""
    return remote.complete(_parts(prompt), **fields)


def stream_complete(remote: RemoteModel, prompt: Prompt, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a completion; the last one has text, the report and the usage."""
    last: dict[str, Any] = {}
    for chunk in remote.stream_complete(_parts(prompt), **fields):
        if not chunk["choices"]:
            yield last | {"usage": chunk["usage"]}
        elif chunk["choices"][0]["finish_reason"] is not None:
            last = chunk
        else:
            yield chunk


def remote_report(reply: Mapping[str, Any], choice: Mapping[str, Any], *, recognized: bool) -> dict[str, Any]:
    """Return what was read for an answer, in the words of `invariant_rag.generation.ledger`."""
    said = reply["invariant"]
    return {
        "model_name": reply["model"],
        "finish_reason": choice["finish_reason"],
        **{name: said[name] for name in _LEDGER},
        "cached_tokens": reply["usage"]["prompt_tokens_details"]["cached_tokens"],
        "invariant": said["invariant"] and recognized,
    }


def usage_of(usage: Mapping[str, Any]) -> UsageMetadata:
    """Return the tokens read and written, and how many of those read came from the cache."""
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        input_token_details=InputTokenDetails(cache_read=usage["prompt_tokens_details"]["cached_tokens"]),
    )


def _parts(prompt: Prompt) -> list[Any]:
    parts = [part for pair in zip(prompt.texts, (*prompt.sets, ""), strict=True) for part in pair]
    return [part for part in parts if len(part)]


def _choice(options: ChatOptions) -> Any:
    choice = "required" if options.tool_choice == "any" else options.tool_choice
    named = choice not in ("auto", "none", "required")
    return {"type": "function", "function": {"name": choice}} if named else choice


def _form(schema: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": json.loads(schema)}}


def _call_piece(call: Mapping[str, Any]) -> Any:
    function = call["function"]
    pieces = {"name": function.get("name"), "args": function.get("arguments") or "", "id": call.get("id")}
    return tool_call_chunk(**pieces, index=call["index"])


def _citation(cited: Mapping[str, Any]) -> Citation:
    document = dict(cited["sources"][0]["document"])
    extras: dict[str, Any] = {"id": document.pop("id")}
    if DOCUMENT_ID in document:
        extras["document_id"] = document.pop(DOCUMENT_ID)
    text, title = document.pop("text"), document.pop("title", None)
    extras["metadata"] = document
    citation = Citation(
        type="citation", start_index=cited["start"], end_index=cited["end"], cited_text=text, extras=extras
    )
    if title or isinstance(document.get("source"), str):
        citation["title"] = title or document["source"]
    return citation
