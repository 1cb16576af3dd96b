"""A call as a request of `invariant_rag.generation.answering`, and its replies as messages of LangChain."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from invariant_rag.checks import check_kind, check_stops, check_tools
from invariant_rag.errors import InvalidTool
from invariant_rag.generation.answers import Answer, AnswerDelta, AnswerRequest, Reply
from invariant_rag.generation.citations import CitedSpan
from invariant_rag.prompts.tools import choice_of
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.content import Citation
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_invariant_rag.documents import DOCUMENT_ID

PROVIDER = "invariant-rag"
PER_CALL = ("max_tokens", "temperature", "top_p", "top_k", "seed")
PER_CHAT = ("n", "logprobs", "top_logprobs", "citations")

_URL = re.compile(r"\w+://\S+")


def request_of(
    parameters: Mapping[str, Any], stop: str | Sequence[str] | None, keywords: Mapping[str, Any], **fields: Any
) -> AnswerRequest:
    """Return the request of a call: its own keywords, over the parameters (fields) of the model object.

    Keywords are any of the parameters, a `json_schema`, or further keywords of transformers' `generate`. Variables of
    the chat template are added to those of the object.
    """
    options = {**parameters["generation_kwargs"], **keywords}
    options.pop("stream", None)  # how LangChain calls, not what for
    chosen: dict[str, Any] = {}
    for name in (*PER_CALL, *PER_CHAT):
        value = options.pop(name, None)
        chosen[name] = parameters.get(name) if value is None else value
    top_logprobs = chosen["top_logprobs"] or 0
    tools, choice = options.pop("tools", None), options.pop("tool_choice", None)
    if variables := options.pop("template_kwargs", None) or {}:
        check_kind("template_kwargs", variables, Mapping)  # type: ignore[type-abstract]
    return AnswerRequest(
        tools=[] if tools is None else to_tools(tools),
        tool_choice="auto" if choice is None else choice_of(choice),
        parallel=options.pop("parallel_tool_calls", None) is not False,
        template_kwargs={**parameters.get("template_kwargs", {}), **variables},
        schema=options.pop("json_schema", None),
        stop=tuple(check_stops(stop if stop is not None else parameters["stop"])),
        max_new_tokens=chosen["max_tokens"],
        **{name: chosen[name] for name in ("temperature", "top_p", "top_k", "seed")},
        n=1 if chosen["n"] is None else chosen["n"],
        logprobs=bool(chosen["logprobs"] or top_logprobs),
        top_logprobs=top_logprobs,
        citations=bool(chosen["citations"]),
        options=options,
        **fields,
    )


def to_tools(tools: Any) -> list[dict[str, Any]]:
    """Return tools in OpenAI's shape, or raise `InvalidTool`."""
    try:
        return list(map(convert_to_openai_tool, check_tools(tools)))
    except ValueError as error:
        raise InvalidTool(str(error)) from error


def to_message(answer: Answer, reply: Reply, model_name: str) -> AIMessage:
    """Return an answer as a message. A call that was cut off has its arguments as far as they came."""
    cut = answer.cut_call
    return AIMessage(
        content=answer.content if answer.citations is None else _cited(answer),
        tool_calls=[tool_call(name=call.name, args=dict(call.arguments), id=call.id) for call in answer.tool_calls],
        invalid_tool_calls=[] if cut is None else [_cut_call(cut.name, cut.arguments, cut.id)],
        additional_kwargs={"reasoning_content": answer.reasoning} if answer.reasoning else {},
        usage_metadata=usage_of(reply),
        response_metadata=response_metadata_of(answer, reply, model_name),
    )


def to_chunks(
    deltas: Iterable[AnswerDelta | Reply], model_name: str, *, cites: bool, with_usage: bool
) -> Iterator[AIMessageChunk]:
    """Yield an answer as chunks. Joined, they are its message."""
    for delta in deltas:
        if isinstance(delta, Reply):
            yield AIMessageChunk(
                content=[{**each, "text": "", "index": 0} for each in _cited(delta.first)] if cites else "",
                usage_metadata=usage_of(delta) if with_usage else None,
                response_metadata=response_metadata_of(delta.first, delta, model_name),
                chunk_position="last",
            )
        elif call := delta.call:
            call_piece = tool_call_chunk(name=call.name, args=call.arguments, id=call.id, index=call.index)
            yield AnswerChunk(content="", tool_call_chunks=[call_piece])
        elif delta.reasoning:
            yield AnswerChunk(content="", additional_kwargs={"reasoning_content": delta.reasoning})
        else:
            yield AnswerChunk(content=[{"type": "text", "text": delta.content, "index": 0}] if cites else delta.content)


class AnswerChunk(AIMessageChunk):
    """A chunk of an answer. Joined with the last one, a call that was cut off is invalid, and not completed."""

    def __add__(self, other: Any) -> Any:
        """Return both, and as a plain chunk if `other` is the last one."""
        joined: Any = super().__add__(other)
        if joined.chunk_position != "last":
            return joined
        whole = AIMessageChunk(**{name: getattr(joined, name) for name in AIMessageChunk.model_fields})
        cut = [each for each in whole.tool_call_chunks if not _is_json(each["args"])]
        whole.invalid_tool_calls = [_cut_call(each["name"], each["args"], each["id"]) for each in cut]
        invalid = [each["id"] for each in cut]
        whole.tool_calls = [each for each in whole.tool_calls if each["id"] not in invalid]
        return whole


def _is_json(text: str | None) -> bool:
    try:
        json.loads(text or "")
    except ValueError:
        return False
    return True


def _cut_call(name: str | None, arguments: str | None, identifier: str | None) -> Any:
    return invalid_tool_call(name=name, args=arguments, id=identifier, error="the answer was cut off")


def _cited(answer: Answer) -> Any:
    """Return an answer with citations as content blocks: one of text, or none."""
    annotations = [_citation(each) for each in answer.citations or ()]
    return [{"type": "text", "text": answer.content, "annotations": annotations}] if answer.content else []


def _citation(span: CitedSpan) -> Citation:
    segment = span.segment
    metadata = dict(segment.metadata)
    extras = {"id": segment.content_hash, "metadata": metadata}
    if DOCUMENT_ID in metadata:
        extras["document_id"] = metadata.pop(DOCUMENT_ID)
    citation = Citation(
        type="citation", start_index=span.start, end_index=span.end, cited_text=segment.text, extras=extras
    )
    source = next((each for each in map(metadata.get, ("url", "source")) if isinstance(each, str)), "")
    if _URL.fullmatch(source):
        citation["url"] = source
    if title := segment.title or source:
        citation["title"] = title
    return citation


def response_metadata_of(answer: Answer, reply: Reply, model_name: str) -> dict[str, Any]:
    """Return why it ended, and the ledger, in which the content hash (the id of the content block) names a segment."""
    names = {"model_name": model_name, "model_provider": PROVIDER, "finish_reason": answer.finish_reason}
    metadata: dict[str, Any] = {**names, **reply.ledger}
    if answer.logprobs is not None:
        tokens = [
            {**_token(each.token, each.logprob), "top_logprobs": [_token(*top) for top in each.top]}
            for each in answer.logprobs
        ]
        metadata["logprobs"] = {"content": tokens}
    return metadata


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage_of(reply: Reply) -> UsageMetadata:
    """Return the tokens of prompt and answers, and how many of the prompt came from the cache."""
    usage = reply.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )
