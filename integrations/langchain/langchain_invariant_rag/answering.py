"""What a call asks for, as a request of `invariant_rag.generation.answering`, and its answers as LangChain has them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any, TypeVar, cast

from invariant_rag.checks import check_stops, check_tools
from invariant_rag.generation.answers import AnswerDelta, AnswerRequest, ModelAnswer, Reply
from invariant_rag.prompts.tools import choice_of
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessageChunk, InvalidToolCall
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.runnables import run_in_executor
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_invariant_rag.citations import citation_of
from langchain_invariant_rag.parsing import object_parser

T = TypeVar("T")

PROVIDER = "invariant-rag"
SAMPLING = ("temperature", "top_p", "top_k", "seed")
PER_CALL = ("max_tokens", *SAMPLING)
"""Parameters that a single call may set for itself."""


def request_of(
    parameters: Mapping[str, Any], stop: str | Sequence[str] | None, keywords: Mapping[str, Any], **given: Any
) -> AnswerRequest:
    """Return the request of a call: its own keywords, over the parameters of the model object.

    Args:
        parameters: The fields of the model object.
        stop: Stop sequences of the call, instead of the object's.
        keywords: What was bound or passed: any of the parameters, a `json_schema`, or further keywords of transformers'
            `generate`. Variables of the chat template are added to those of the object.
        **given: Messages or a prompt, and whether everything in them is recognised.

    Raises:
        InvalidTool: The tools are no collection, or the choice of one is of no known shape.
    """
    more = {**parameters["generation_kwargs"], **keywords}
    more.pop("stream", None)  # how LangChain asks, not what for

    def take(name: str, default: Any = None) -> Any:
        found = more.pop(name, None)
        return parameters.get(name, default) if found is None else found

    top = take("top_logprobs")
    return AnswerRequest(
        tools=[convert_to_openai_tool(tool) for tool in check_tools(more.pop("tools", None))],
        tool_choice=choice_of(more.pop("tool_choice", None)),
        parallel=more.pop("parallel_tool_calls", None) is not False,
        template_kwargs={**parameters.get("template_kwargs", {}), **(more.pop("template_kwargs", None) or {})},
        schema=more.pop("json_schema", None),
        stop=tuple(check_stops(stop if stop is not None else parameters["stop"])),
        max_new_tokens=take("max_tokens"),
        temperature=take("temperature"),
        top_p=take("top_p"),
        top_k=take("top_k"),
        seed=take("seed"),
        n=take("n", 1),
        logprobs=bool(take("logprobs", False) or top),
        top_logprobs=top or 0,
        citations=bool(take("citations", False)),
        options=more,
        **given,
    )


def response_schema(response_format: Mapping[str, Any] | type) -> str:
    """Return the JSON schema of a response format: a class, a schema, or what LangChain's `ProviderStrategy` writes."""
    if isinstance(response_format, Mapping) and "json_schema" in response_format:
        described = response_format["json_schema"]
        return json.dumps({"title": described.get("name", ""), **described["schema"]})
    schema = dict(response_format) if isinstance(response_format, Mapping) else response_format
    return json.dumps(object_parser(schema).get_json_schema())


def to_message(answer: ModelAnswer, reply: Reply, model_name: str) -> AIMessage:
    """Return an answer as a message."""
    return AIMessage(
        content=_content(answer),
        tool_calls=[tool_call(name=each.name, args=dict(each.arguments), id=each.id) for each in answer.tool_calls],
        invalid_tool_calls=_cut_calls(answer),
        additional_kwargs={"reasoning_content": answer.reasoning} if answer.reasoning else {},
        usage_metadata=usage_of(reply),
        response_metadata=report_of(answer, reply, model_name),
    )


def to_chunks(
    pieces: Iterable[AnswerDelta | Reply], model_name: str, *, cites: bool, with_usage: bool
) -> Iterator[AIMessageChunk]:
    """Yield an answer in pieces. Joined, they are its message."""
    for piece in pieces:
        if isinstance(piece, Reply):
            answer = piece.first
            blocks: Any = [{**each, "text": "", "index": 0} for each in _content(answer)] if cites else ""
            yield AIMessageChunk(
                content=blocks,
                usage_metadata=usage_of(piece) if with_usage else None,
                response_metadata=report_of(answer, piece, model_name),
                chunk_position="last",
            )
        elif call := piece.call:
            call_piece = tool_call_chunk(name=call.name, args=call.arguments, id=call.id, index=call.index)
            yield AnswerChunk(content="", tool_call_chunks=[call_piece])
        elif piece.reasoning:
            yield AnswerChunk(content="", additional_kwargs={"reasoning_content": piece.reasoning})
        else:
            yield AnswerChunk(content=[{"type": "text", "text": piece.content, "index": 0}] if cites else piece.content)


class AnswerChunk(AIMessageChunk):
    """A piece of an answer. Joined with the last one, a call that was cut off is in `invalid_tool_calls`.

    LangChain would complete its arguments as far as they came, and an agent would call the tool with them.
    """

    def __add__(self, other: Any) -> BaseMessageChunk:  # type: ignore[override]
        """Return both, and as a plain chunk if `other` is the last one."""
        joined = cast("AIMessageChunk", super().__add__(other))
        if joined.chunk_position != "last":
            return joined
        whole = AIMessageChunk(**{name: getattr(joined, name) for name in AIMessageChunk.model_fields})
        cut = [each["id"] for each in whole.tool_call_chunks if not _is_json(each["args"])]
        whole.tool_calls = [each for each in whole.tool_calls if each["id"] not in cut]
        chunks = (each for each in whole.tool_call_chunks if each["id"] in cut)
        whole.invalid_tool_calls = [_cut_call(each["name"], each["args"], each["id"]) for each in chunks]
        return whole


def _is_json(text: str | None) -> bool:
    try:
        json.loads(text or "")
    except ValueError:
        return False
    return True


def _content(answer: ModelAnswer) -> Any:
    """Return the content of an answer: its text, or a block with citations."""
    if answer.citations is None:
        return answer.content
    annotations = [citation_of(each) for each in answer.citations]
    return [{"type": "text", "text": answer.content, "annotations": annotations}] if answer.content else []


def _cut_calls(answer: ModelAnswer) -> list[InvalidToolCall]:
    """Return a call that was cut off as LangChain has it: with its arguments as far as they came."""
    call = answer.cut_call
    return [] if call is None else [_cut_call(call.name, call.arguments, call.id)]


def _cut_call(name: str | None, arguments: str | None, identifier: str | None) -> InvalidToolCall:
    return invalid_tool_call(name=name, args=arguments, id=identifier, error="the answer was cut off")


def report_of(answer: ModelAnswer, reply: Reply, model_name: str) -> dict[str, Any]:
    """Return what else there is to say: why it ended, and the ledger (see `invariant_rag.generation.ledger`).

    Segments are named by their content hash, which is the id of their content block.
    """
    report = {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "finish_reason": answer.finish_reason,
        **reply.ledger,
    }
    if answer.logprobs is not None:
        content = [
            {**_token(each.token, each.logprob), "top_logprobs": [_token(*top) for top in each.top]}
            for each in answer.logprobs
        ]
        report["logprobs"] = {"content": content}
    return report


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage_of(reply: Reply) -> UsageMetadata:
    """Return the tokens read and written, and how many of those read came from the cache."""
    usage = reply.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )


async def off_the_loop(work: Callable[[Event], T]) -> T:
    """Run blocking work in a thread. A cancelled wait sets the event that the work was given."""
    abandoned = Event()
    try:
        return await run_in_executor(None, work, abandoned)
    finally:
        abandoned.set()


async def iterate_off_the_loop(iterate: Callable[[Event], Iterator[T]]) -> AsyncIterator[T]:
    """Yield what a blocking iterator yields, without blocking the loop.

    Whoever stops reading, or is cancelled, sets the event that the iterator was given.
    """
    abandoned, done = Event(), object()
    try:
        iterator = iterate(abandoned)
        while True:
            item: Any = await run_in_executor(None, next, iterator, done)
            if item is done:
                return
            yield item
    finally:
        abandoned.set()
