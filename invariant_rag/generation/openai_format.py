"""Requests and replies in the format of the OpenAI API, as `invariant-rag serve` speaks it. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.answers import (
    Answer,
    AnswerDelta,
    AnswerRequest,
    CallDelta,
    ModelAnswer,
    Reply,
    TokenLogprob,
    Usage,
)
from invariant_rag.generation.citations import CitedSpan
from invariant_rag.generation.json_schema import json_schema
from invariant_rag.prompts.tools import as_tools
from invariant_rag.segments import Segment, SegmentSet

_OPTIONS = ("min_p", "repetition_penalty")
"""Keywords of transformers' `generate` that a server takes."""
_LEDGER = ("sets", "order", "dropped", "trimmed", "method", "invariant")


def request_fields(request: AnswerRequest, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request besides its messages or its prompt; None for those to leave away.

    `choices` are method, ordering and overflow to ask for. Options that a server does not take are refused.
    """
    if refused := sorted(request.options.keys() - set(_OPTIONS)):
        raise UnsupportedCombination(
            f"expected keywords that a server takes, got {', '.join(refused)}",
            hint="Leave them away, or run the model here, without base_url.",
        )
    sampling = ("temperature", "top_p", "top_k", "min_p", "seed") if request.temperature else ()
    fields = {
        **request.options,
        **{name: value for name in sampling if (value := getattr(request, name)) is not None},
        "max_tokens": request.max_new_tokens,
        "n": request.n if request.n > 1 else None,
        "stop": None if request.schema is not None else list(request.stop) or None,
        "invariant": dict(choices) or None,
    }
    if request.messages is None:
        return fields | {"logprobs": (request.top_logprobs or 1) if request.logprobs else None}
    schema = None if request.schema is None else {"name": "answer", "schema": json_schema(request.schema)}
    tools = [each.to_dict() for each in as_tools(request.tools)]
    choice = "required" if request.tool_choice == "any" else request.tool_choice
    is_name = choice not in ("auto", "none", "required")
    return fields | {
        "logprobs": request.logprobs or None,
        "top_logprobs": request.top_logprobs or None,
        "tools": tools or None,
        "tool_choice": ({"type": "function", "function": {"name": choice}} if is_name else choice) if tools else None,
        "parallel_tool_calls": request.parallel if tools else None,
        "chat_template_kwargs": dict(request.template_kwargs) or None,
        "response_format": None if schema is None else {"type": "json_schema", "json_schema": schema},
    }


def parse_reply(body: Mapping[str, Any], request: AnswerRequest) -> Reply:
    """Return the reply that a `chat.completion` or a `text_completion` is."""
    answers = []
    for choice in body["choices"]:
        said = choice.get("message") or {"content": choice.get("text")}
        answers.append(_answer(Answer.join(parse_deltas(said, 0)), said, choice, request))
    return _reply(answers, body, body["usage"], request)


def parse_chunks(chunks: Iterable[Mapping[str, Any]], request: AnswerRequest) -> Iterator[AnswerDelta | Reply]:
    """Yield what the chunks of a stream are: the pieces of the answers, and then the whole reply."""
    pieces: dict[int, list[AnswerDelta]] = {}
    ends: dict[int, Mapping[str, Any]] = {}
    last: Mapping[str, Any] = {}
    for chunk in chunks:
        if not chunk["choices"]:
            answers = []
            for index, choice in sorted(ends.items()):
                joined = Answer.join(pieces.get(index, ()))
                answers.append(_answer(joined, choice.get("delta") or {}, choice, request))
            yield _reply(answers, last, chunk["usage"], request)
            return
        for choice in chunk["choices"]:
            if choice["finish_reason"] is not None:
                ends[choice["index"]], last = choice, chunk
                continue
            for delta in parse_deltas(choice.get("delta") or {"content": choice.get("text")}, choice["index"]):
                pieces.setdefault(delta.index, []).append(delta)
                yield delta


def parse_deltas(said: Mapping[str, Any], index: int) -> Iterator[AnswerDelta]:
    """Yield what the message of a choice, or the delta of a chunk, is: pieces of the answer of an index."""
    if reasoning := said.get("reasoning_content") or said.get("reasoning"):
        yield AnswerDelta(reasoning=reasoning, index=index)
    if content := said.get("content") or said.get("refusal"):
        yield AnswerDelta(content + "", index=index)
    for place, call in enumerate(said.get("tool_calls") or ()):
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        piece = CallDelta(call.get("index", place), call.get("id"), function.get("name"), arguments)
        yield AnswerDelta(call=piece, index=index)


def _answer(answer: Answer, said: Mapping[str, Any], choice: Mapping[str, Any], request: AnswerRequest) -> ModelAnswer:
    cites = request.citations and request.schema is None
    return ModelAnswer(
        **vars(answer),
        finish_reason=choice["finish_reason"],
        logprobs=parse_logprobs(choice.get("logprobs")) if request.logprobs else None,
        citations=_citations(said.get("citations") or (), request) if cites else None,
    )


def parse_logprobs(said: Mapping[str, Any] | None) -> list[TokenLogprob]:
    """Return the log-probabilities of a chat or of a completion."""
    if not said:
        return []
    if "content" in said:
        tops = [[(top["token"], top["logprob"]) for top in each["top_logprobs"]] for each in said["content"]]
        tokens = [(each["token"], each["logprob"]) for each in said["content"]]
    else:
        tops = [list(each.items()) for each in said.get("top_logprobs") or [{}] * len(said["tokens"])]
        tokens = list(zip(said["tokens"], said["token_logprobs"], strict=True))
    ends = list(accumulate(len(token) for token, _ in tokens))
    return [
        TokenLogprob(token, logprob, end - len(token), end, tuple(top))
        for (token, logprob), end, top in zip(tokens, ends, tops, strict=True)
    ]


def _citations(said: Iterable[Mapping[str, Any]], request: AnswerRequest) -> list[CitedSpan]:
    """Return citations with the caller's own segments, which the server names by their content hash."""
    known = {segment.content_hash: (index, segment) for index, segment in enumerate(_segments(request))}
    return [
        CitedSpan(cited["start"], cited["end"], *known[source["id"]])
        for cited in said
        for source in cited["sources"]
        if source["id"] in known
    ]


def _segments(request: AnswerRequest) -> list[Segment]:
    if request.prompt is not None:
        return list(request.prompt.segments)
    found: list[Segment] = []
    for message in request.messages or ():
        content = message.get("content")
        for part in [content] if isinstance(content, str | Segment | SegmentSet) else content or ():
            found += [part] if isinstance(part, Segment) else part if isinstance(part, SegmentSet) else []
    return found


def _reply(
    answers: Sequence[ModelAnswer], body: Mapping[str, Any], usage: Mapping[str, Any], request: AnswerRequest
) -> Reply:
    said = body["invariant"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Reply(
        answers=tuple(answers),
        usage=Usage(usage["prompt_tokens"], usage["completion_tokens"], cached),
        ledger={
            **{name: said[name] for name in _LEDGER},
            "cached_tokens": cached,
            "invariant": said["invariant"] if request.recognized else False,
        },
        model=body["model"],
    )
