"""From a request to a call: documents become segments, and every segment is put into a set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from invariant_rag.checks import SEEDS
from invariant_rag.files import parse_json
from invariant_rag.prompts import DEFAULT_SYSTEM, FIXES, Turn, recognize
from invariant_rag.segments import Segment, SegmentSet
from invariant_rag.server.documents import check_ids, segment_of, set_of
from invariant_rag.server.engines.base import Call, Choices, Sampling
from invariant_rag.server.errors import InvalidRequest
from invariant_rag.server.fields import about
from invariant_rag.server.schema_checks import check_schema, check_tools, check_values
from invariant_rag.server.schemas import (
    ChatRequest,
    CompletionRequest,
    Decoding,
    Document,
    DocumentPart,
    FunctionTool,
    InvariantOptions,
    Message,
    NamedTool,
    SetPart,
    TextPart,
    TokenizeRequest,
)
from invariant_rag.server.settings import Settings

_FIELDS: Mapping[str, Any] = {
    "name": True,
    "tool_calls": {"__all__": {"id": True, "type": True, "function": {"name", "arguments"}}},
    "tool_call_id": True,
    "reasoning_content": True,
}


_MOST_ARGUMENTS = 10_000
"""Values of the arguments of all calls: the chat template writes them one by one."""
_ALWAYS = ("top_p", "top_k", "min_p", "repetition_penalty")
_CHANGING = ("frequency_penalty", "presence_penalty", "logit_bias")


def chat_call(request: ChatRequest, settings: Settings, tenant: str) -> Call:
    """Return the call of a chat.

    The documents of the request stand before the text of the last user message, where `lm.chat_prompt(question,
    documents)` puts them; so equal requests have equal answers, over HTTP and in Python.

    Raises:
        InvalidRequest: A choice is not allowed, a limit is passed, or there are documents and no user message.
        InvalidSchema: As for `check_schema`.
    """
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise InvalidRequest("expected max_tokens or max_completion_tokens, got both", param="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("expected top_logprobs with logprobs only", param="top_logprobs", hint="Set logprobs.")
    tools = _tools(request.tools)
    turns, question, warnings = conversation(request.messages, request.documents)
    choice = request.tool_choice
    return Call(
        turns=turns,
        extra=extra_fields(request.messages, len(turns)),
        question=question,
        choices=choices_of(request.invariant, settings, tenant),
        sampling=sampling_of(request, settings, request.max_completion_tokens or request.max_tokens),
        count=request.n,
        stop=tuple(request.stops),
        schema=_schema(request),
        strict=_is_strict(request),
        response_format=_response_format(request),
        tools=tools,
        tool_choice=choice.function.name if isinstance(choice, NamedTool) else choice or "auto",
        parallel=request.parallel_tool_calls is not False,
        template_kwargs=request.chat_template_kwargs,
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
        stream=request.stream,
        warnings=warnings,
    )


def completion_calls(request: CompletionRequest, settings: Settings, tenant: str) -> list[Call]:
    """Return the calls of a completion: one for each prompt.

    Raises:
        InvalidRequest: As for `chat_call`; or there are documents beside token ids, or too many prompts.
    """
    prompts = _prompts(request.prompt)
    if len(prompts) * request.n > settings.max_choices:
        raise InvalidRequest(f"expected at most {settings.max_choices} answers", param="prompt")
    if request.documents and any(not isinstance(part, str) for prompt in prompts for part in prompt):
        raise InvalidRequest("expected documents beside prompts of text alone", param="documents")
    calls = []
    for prompt in prompts:
        documents = [SegmentSet(map(segment_of, request.documents)), "\n"] if request.documents else []
        recognition = recognize([Turn("user", (*documents, *prompt))])
        check_ids(_sets(recognition.turns))
        calls.append(
            Call(
                turns=recognition.turns,
                chat=False,
                question=recognition.turns[0].text.strip() if all(_is_readable(each) for each in prompt) else "",
                choices=choices_of(request.invariant, settings, tenant),
                sampling=sampling_of(request, settings, request.max_tokens),
                count=request.n,
                stop=tuple(request.stops),
                logprobs=request.logprobs is not None,
                top_logprobs=request.logprobs or 0,
                stream=request.stream,
                warnings=_warnings(recognition.findings),
            )
        )
    return calls


def tokenize_call(request: TokenizeRequest, tenant: str) -> Call:
    """Return a call that is only tokenized."""
    choices, sampling = Choices(tenant), Sampling(1)
    if request.messages is None:
        return Call((Turn("user", (request.prompt,)),), "", choices, sampling, chat=False)
    turns, question, _ = conversation(request.messages, request.documents)
    extra = extra_fields(request.messages, len(turns))
    return Call(
        turns,
        question,
        choices,
        sampling,
        extra=extra,
        tools=_tools(request.tools),
        template_kwargs=request.chat_template_kwargs,
    )


def conversation(
    messages: Sequence[Message], documents: Sequence[Document | str]
) -> tuple[tuple[Turn, ...], str, tuple[str, ...]]:
    """Return turns in which every segment is in a set, the question, and why order may matter all the same.

    Raises:
        InvalidRequest: There are documents, and no user message; or two of a set have one id.
    """
    turns = [Turn(_role(each), tuple(_parts(each.content))) for each in messages]
    asked = next((index for index in reversed(range(len(turns))) if turns[index].role == "user"), None)
    question = "" if asked is None else turns[asked].text.strip()
    recognition = recognize(turns)
    found = list(recognition.turns)
    if documents:
        if asked is None:
            raise InvalidRequest("expected a user message, before whose text the documents stand", param="documents")
        segments = SegmentSet(map(segment_of, documents))
        found[asked] = Turn("user", (segments, "\nQuestion: ", *found[asked].parts))
        if not any(turn.role == "system" for turn in found):
            found.insert(0, Turn("system", (DEFAULT_SYSTEM,)))
    check_ids(_sets(found))
    return tuple(found), question, _warnings(recognition.findings)


def extra_fields(messages: Sequence[Message], turns: int) -> tuple[Mapping[str, Any], ...]:
    """Return the fields of messages beside role and content; none for a system message that was put before them."""
    fields = [each.model_dump(include=_FIELDS, exclude_none=True) for each in messages]
    given = [call.function.arguments for each in messages for call in each.tool_calls or ()]
    with suppress(ValueError, RecursionError):  # what is no JSON is refused where a call is made of it
        check_values([parse_json(each) for each in given], _MOST_ARGUMENTS, "calls with arguments")
    return (*({} for _ in range(turns - len(fields))), *fields)


def choices_of(wanted: InvariantOptions, settings: Settings, tenant: str) -> Choices:
    """Return how the documents are to be read.

    Raises:
        InvalidRequest: A choice is not allowed.
    """
    for name, value, allowed in (
        ("method", wanted.method, settings.methods),
        ("ordering", wanted.ordering, settings.orderings),
    ):
        if value is not None and value not in allowed:
            listed = ", ".join(sorted(allowed))
            raise InvalidRequest(f"invariant.{name}: expected one of {listed}", param=f"invariant.{name}")
    return Choices(tenant, wanted.method, wanted.ordering, wanted.overflow)


def sampling_of(request: Decoding, settings: Settings, max_tokens: int | None) -> Sampling:
    """Return how tokens are to be chosen.

    Raises:
        InvalidRequest: The answer would be too long, or there would be too many.
    """
    wanted = min(settings.default_new_tokens, settings.max_new_tokens) if max_tokens is None else max_tokens
    if wanted > settings.max_new_tokens:
        raise InvalidRequest(
            f"max_tokens: expected at most {settings.max_new_tokens}, got {wanted}", param="max_tokens"
        )
    if request.n > settings.max_choices:
        raise InvalidRequest(f"n: expected at most {settings.max_choices}, got {request.n}", param="n")
    more = {name: value for name in _ALWAYS if (value := getattr(request, name)) is not None}
    more |= {name: value for name in _CHANGING if (value := getattr(request, name))}
    if request.seed is not None and request.seed > (most := SEEDS[1] - request.n + 1):
        raise InvalidRequest(f"seed: expected at most {most} with n={request.n}, got {request.seed}", param="seed")
    return Sampling(wanted, request.temperature or 0.0, request.seed, more)


def _schema(request: ChatRequest) -> Mapping[str, Any] | None:
    form = request.response_format
    if form is None or form.type == "text":
        return None
    schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema_
    with about("response_format"):
        check_schema(schema)
    return schema


def _is_strict(request: ChatRequest) -> bool:
    form = request.response_format
    return form is None or form.json_schema is None or form.json_schema.strict is not False


def _tools(given: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    """Return tools as they were given, with schemas that can be followed."""
    tools = [each.model_dump(exclude_unset=True) for each in given]
    with about("tools"):
        check_tools(tools)
    return tools


def _response_format(request: ChatRequest) -> Mapping[str, Any] | None:
    form = request.response_format
    return None if form is None else form.model_dump(by_alias=True, exclude_none=True)


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _parts(content: str | Sequence[TextPart | DocumentPart | SetPart] | None) -> Iterator[str | Segment | SegmentSet]:
    if content is None or isinstance(content, str):
        yield content or ""
        return
    for part in content:
        if isinstance(part, TextPart):
            yield part.text
        else:
            yield segment_of(part.document) if isinstance(part, DocumentPart) else set_of(part)


def _sets(turns: Iterable[Turn]) -> Iterator[SegmentSet]:
    for turn in turns:
        yield from (part for part in turn.parts if isinstance(part, SegmentSet))


def _prompts(prompt: Any) -> list[list[Any]]:
    """Return the prompts of a completion, as parts of one turn: texts, segments, or tuples of token ids."""
    if isinstance(prompt, str):
        return [[prompt]]
    if not prompt:
        raise InvalidRequest("prompt: expected at least one prompt, got none", param="prompt")
    if isinstance(prompt[0], int):
        return [[tuple(prompt)]]
    if isinstance(prompt[0], str):
        return [[each] for each in prompt]
    if isinstance(prompt[0], list):
        return [[tuple(each)] for each in prompt]
    return [list(_parts(prompt))]


def _is_readable(part: object) -> bool:
    return isinstance(part, str | Segment | SegmentSet)


def _warnings(findings: Iterable[Any]) -> tuple[str, ...]:
    return tuple(f"{each.message} {FIXES.get(each.kind, '')}".strip() for each in findings)
