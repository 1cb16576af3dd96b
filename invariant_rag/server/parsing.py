"""From the body of a request to what an engine is called with: documents become segments, all of them in sets.

It runs in a worker; see `worker`. What comes out is bounded, too: the server unpickles it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from invariant_rag.checks import SEEDS
from invariant_rag.errors import InvalidSchema, InvalidTool
from invariant_rag.files import parse_json
from invariant_rag.generation.answers import AnswerRequest
from invariant_rag.generation.json_schema import check_json_schema
from invariant_rag.prompts import DEFAULT_SYSTEM, FIXES, Turn, recognize
from invariant_rag.segments import Prompt, Segment, SegmentSet, Slot, document_rendering
from invariant_rag.server import schemas
from invariant_rag.server.engines.base import Call, CallChoices, JudgeCall
from invariant_rag.server.errors import InvalidRequest, TooLarge, about, invalid_request
from invariant_rag.server.replies import ID, document_id
from invariant_rag.server.settings import Settings
from invariant_rag.shown import shown

_MOST_VALUES = 100_000  # of a body, not counting numbers: texts, names, lists and objects
_MOST_ARGUMENTS = 10_000  # values of the arguments of all calls: the chat template writes them one by one
_MOST_BYTES = 65_536  # of a schema, and of all tools together
_MOST_TOOLS = 128
_EXPLANATION_TOKENS = 128
_EXTERNAL = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)": "([^#"][^"]*)"')  # a reference out of a schema
_FIELDS = {"name", "tool_calls", "tool_call_id", "reasoning_content"}  # what a model gets beside role and content


@dataclass(frozen=True)
class Parsed:
    """A request that was parsed: work for an engine, and the request for the log, if it is to hold contents."""

    work: Any
    model: str | None
    include_usage: bool = False
    contents: Mapping[str, Any] | None = None


def parse(route: str, body: bytes, settings: Settings, tenant: str) -> Parsed:
    """Return the body of a request to a route of `ROUTES` as work for an engine."""
    schema, to_work = ROUTES[route]
    request: Any
    try:
        document = parse_json(body, finite=True)
        _check_values(document, _MOST_VALUES, "a body")
        request = schema.model_validate(document)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"expected a body of JSON: {error.msg} at character {error.pos}") from None
    except ValidationError as error:
        raise invalid_request(error.errors(include_url=False, include_context=False, include_input=False)) from None
    except ValueError as error:
        raise InvalidRequest(f"expected a body of JSON: {error}") from None
    options = getattr(request, "stream_options", None)
    return Parsed(
        to_work(request, settings, tenant),
        request.model,
        include_usage=options is not None and options.include_usage,
        contents=request.model_dump(mode="json", exclude_defaults=True) if settings.log_contents else None,
    )


def _chat(request: schemas.ChatRequest, settings: Settings, tenant: str) -> list[Call]:
    """Return the call of a chat."""
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise InvalidRequest("expected max_tokens or max_completion_tokens, got both", param="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("expected top_logprobs with logprobs only", param="top_logprobs", hint="Set logprobs.")
    form, schema, choice = request.response_format, None, request.tool_choice
    if choice not in (None, "auto", "none") and not request.tools:
        with about("tool_choice"):
            raise InvalidTool("expected tools to choose from with tool_choice, got none", hint="Give tools.")
    if form is not None and form.type != "text":
        schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema_
        with about("response_format"):
            _check_schema(schema)
    messages, more = _conversation(request.messages, request.documents)
    answers = AnswerRequest(
        messages=messages,
        tools=_tools(request.tools),
        tool_choice=choice.function["name"] if isinstance(choice, schemas.NamedTool) else choice or "auto",
        parallel=request.parallel_tool_calls is not False,
        template_kwargs=request.chat_template_kwargs,
        schema=schema,
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
        citations=schema is None,
        question=more.pop("question"),
        **_decoding(request, settings, request.max_completion_tokens or request.max_tokens),
    )
    response_format = None if form is None else form.model_dump(by_alias=True, exclude_none=True)
    choices = _choices(request.invariant, settings, tenant)
    return [_call(answers, choices, stream=request.stream, response_format=response_format, **more)]


def _completions(request: schemas.CompletionRequest, settings: Settings, tenant: str) -> list[Call]:
    """Return the calls of a completion: one for each prompt."""
    prompts = _prompts(request.prompt)
    if len(prompts) * request.n > settings.max_choices:
        raise InvalidRequest(f"expected at most {settings.max_choices} answers", param="prompt")
    if request.documents and any(not isinstance(part, str) for prompt in prompts for part in prompt):
        raise InvalidRequest("expected documents beside prompts of text alone", param="documents")
    choices, decoding = _choices(request.invariant, settings, tenant), _decoding(request, settings, request.max_tokens)
    decoding |= {"logprobs": request.logprobs is not None, "top_logprobs": request.logprobs or 0}
    documents = [SegmentSet(map(segment_of, request.documents)), "\n"] if request.documents else []
    calls = []
    for parts in prompts:
        (turn,), warnings = _in_sets([Turn("user", (*documents, *parts))])
        # Token ids are no text that an ordering could compare documents with.
        question = "" if any(isinstance(part, tuple) for part in parts) else turn.text.strip()
        prompt = Prompt.of(*turn.parts, query=question, rendering=document_rendering).to_complete()
        answers = AnswerRequest(prompt=prompt, question=question, **decoding)
        calls.append(_call(answers, choices, stream=request.stream, warnings=warnings))
    return calls


def _tokenize(request: schemas.TokenizeRequest, _settings: Settings, tenant: str) -> list[Call]:
    if request.messages is None:
        return [_call(AnswerRequest(prompt=Prompt(request.prompt or ""), max_new_tokens=1), CallChoices(tenant))]
    messages, more = _conversation(request.messages, request.documents)
    fields: dict[str, Any] = {"tools": _tools(request.tools), "template_kwargs": request.chat_template_kwargs}
    answers = AnswerRequest(messages=messages, question=more.pop("question"), max_new_tokens=1, **fields)
    return [_call(answers, CallChoices(tenant), **more)]


def _judge(request: schemas.JudgeRequest, settings: Settings, tenant: str) -> JudgeCall:
    most = min(request.max_tokens or _EXPLANATION_TOKENS, settings.max_new_tokens)
    limited = request.model_copy(update={"max_tokens": most if request.explain else 0})
    return JudgeCall(limited, _choices(request.invariant, settings, tenant))


ROUTES: Mapping[str, tuple[type[schemas.RequestBody], Callable[[Any, Settings, str], Any]]] = {
    "chat": (schemas.ChatRequest, _chat),
    "completions": (schemas.CompletionRequest, _completions),
    "tokenize": (schemas.TokenizeRequest, _tokenize),
    "rerank": (schemas.RerankRequest, lambda request, _settings, _tenant: request),
    "judge": (schemas.JudgeRequest, _judge),
}


def _conversation(
    messages: Sequence[schemas.Message], documents: Sequence[schemas.DocumentBody | str]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return messages in which every segment is in a set, and the question and the warnings of a call.

    The documents of the request come before the text of the last user message, where `lm.chat_prompt(question,
    documents)` puts them; so equal requests have equal answers, over HTTP and in Python.
    """
    arguments = [call.function.arguments for each in messages for call in each.tool_calls or ()]
    with suppress(ValueError, RecursionError):  # what is no JSON is refused where a call is made of it
        _check_values([parse_json(each) for each in arguments], _MOST_ARGUMENTS, "calls with arguments")
    conversation = [
        Turn("system" if each.role == "developer" else each.role, tuple(_parts(each.content))) for each in messages
    ]
    last_user = max((index for index, each in enumerate(conversation) if each.role == "user"), default=None)
    question = "" if last_user is None else conversation[last_user].text.strip()
    turns, warnings = _in_sets(conversation)
    prepared = [
        {**each.model_dump(include=_FIELDS, exclude_none=True), "role": turn.role, "content": list(turn.parts)}
        for each, turn in zip(messages, turns, strict=True)
    ]
    if documents:
        if last_user is None:
            raise InvalidRequest("expected a user message, before whose text the documents stand", param="documents")
        segments = SegmentSet(map(segment_of, documents))
        check_ids(segments)
        prepared[last_user]["content"][:0] = [segments, "\nQuestion: "]
        if not any(turn.role == "system" for turn in turns):
            prepared.insert(0, {"role": "system", "content": [DEFAULT_SYSTEM]})
    return prepared, {"question": question, "warnings": warnings}


def _in_sets(conversation: Sequence[Turn]) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
    """Return turns whose segments are in sets, and why their order may matter all the same."""
    recognition = recognize(conversation)
    for turn in recognition.turns:
        for each in turn.sets:
            check_ids(each)
    return recognition.turns, tuple(
        f"{each.message} {FIXES.get(each.kind, '')}".strip() for each in recognition.findings
    )


def _call(request: AnswerRequest, choices: CallChoices, **more: Any) -> Call:
    """Return a call, with the length of its texts; calls of tools count as JSON."""
    prompt = request.prompt
    parts: list[Any] = [*prompt.texts, *prompt.sets] if prompt else list(map(json.dumps, request.tools))
    for message in request.messages or ():
        parts += message["content"]
        if len(message) > 2:
            parts.append(json.dumps({**message, "content": None}))
    characters = len(json.dumps(request.template_kwargs)) if request.template_kwargs else 0
    for part in parts:
        if isinstance(part, str):
            characters += len(part)
        elif isinstance(part, SegmentSet):
            for segment in part:
                characters += len(segment.text) + len(segment.title or "")
            for slot in part.slots or ():
                characters += len(slot.before) + len(slot.after)
    return Call(request, choices, characters=characters, **more)


def _choices(options: schemas.InvariantOptions, settings: Settings, tenant: str) -> CallChoices:
    """Return how the documents are arranged."""
    for name, allowed in (("method", settings.methods), ("ordering", settings.orderings)):
        if (value := getattr(options, name)) is not None and value not in allowed:
            listed = ", ".join(sorted(allowed))
            raise InvalidRequest(f"invariant.{name}: expected one of {listed}", param=f"invariant.{name}")
    return CallChoices(tenant, options.method, options.ordering, options.overflow)


def _decoding(request: schemas.Decoding, settings: Settings, max_tokens: int | None) -> dict[str, Any]:
    """Return how tokens are to be chosen, as fields of an `AnswerRequest`."""
    limit = min(settings.default_new_tokens, settings.max_new_tokens) if max_tokens is None else max_tokens
    last_seed = SEEDS[1] - request.n + 1
    for name, value, most, why in (
        ("max_tokens", limit, settings.max_new_tokens, ""),
        ("n", request.n, settings.max_choices, ""),
        ("seed", request.seed or 0, last_seed, f" with n={request.n}"),
    ):
        if value > most:
            raise InvalidRequest(f"{name}: expected at most {most}{why}, got {value}", param=name)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    names = ("frequency_penalty", "presence_penalty", "logit_bias", "repetition_penalty")
    return {
        "n": request.n,
        "stop": tuple(each for each in stops if each),
        "max_new_tokens": limit,
        "temperature": request.temperature or 0.0,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "seed": request.seed,
        "options": {name: value for name in names if (value := getattr(request, name))},
    }


def _tools(functions: Sequence[schemas.FunctionTool]) -> list[dict[str, Any]]:
    """Return tools as they are, with schemas that can be followed."""
    tools = [each.model_dump(exclude_unset=True) for each in functions]
    with about("tools"):
        if len(tools) > _MOST_TOOLS or len(json.dumps(tools)) > _MOST_BYTES:
            raise InvalidTool(
                f"expected at most {_MOST_TOOLS} tools of {_MOST_BYTES:,} bytes together, got more",
                hint="Give fewer tools.",
            )
        for each in tools:
            _check_schema(each["function"].get("parameters") or {})
    return tools


def _parts(content: str | Iterable[schemas.Part] | None) -> Iterator[str | Segment | SegmentSet]:
    for part in [content or ""] if content is None or isinstance(content, str) else content:
        if isinstance(part, str | schemas.TextPart):
            yield part if isinstance(part, str) else part.text
        elif isinstance(part, schemas.DocumentPart):
            yield segment_of(part.document)
        else:
            slots = None if part.slots is None else [Slot(each.before, each.after, each.number) for each in part.slots]
            yield SegmentSet(map(segment_of, part.documents), slots=slots)


def _prompts(prompt: Any) -> list[list[Any]]:
    """Return the prompts of a completion, as parts of one turn: texts, segments, or tuples of token ids."""
    if isinstance(prompt, str):
        return [[prompt]]
    if not prompt:
        raise InvalidRequest("prompt: expected at least one prompt, got none", param="prompt")
    if isinstance(prompt[0], int):
        return [[tuple(prompt)]]
    if isinstance(prompt[0], str | list):
        return [[each if isinstance(each, str) else tuple(each)] for each in prompt]
    return [list(_parts(prompt))]


def _check_schema(schema: Mapping[str, Any]) -> None:
    """Check a client's schema. The time that it takes to compile is limited elsewhere; see `compiling`."""
    text, hint = json.dumps(schema), "Ask for less, or say it in the prompt."
    if len(text) > _MOST_BYTES:
        raise InvalidSchema(f"expected a schema of at most {_MOST_BYTES:,} bytes", hint=hint)
    check_json_schema(schema)
    if external := _EXTERNAL.search(text):
        raise InvalidSchema(
            f"expected references within the schema, got {shown(external[1])}: nothing is fetched",
            hint="Write the definition under $defs, and refer to #/$defs/NAME.",
        )


def _check_values(document: Any, most: int, what: str) -> None:
    """Check that a document is no heap of small values, which take far more memory and time than their text."""
    level, count = [document], 0
    while level:
        inner: list[Any] = []
        for each in level:
            values = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
            inner.extend(value for value in values if not isinstance(value, int | float))
            count += len(each) if isinstance(each, dict) else 0
        count += len(inner)
        if count > most:
            raise TooLarge(f"expected {what} of at most {most:,} values, got more")
        level = inner


def segment_of(document: schemas.DocumentBody | str) -> Segment:
    """Return a document as a segment: of several fields, all but the title by name.

    >>> segment_of(schemas.DocumentBody(id="a", data={"title": "Ferries", "snippet": "At noon."})).text
    'At noon.'
    """
    if isinstance(document, str):
        return Segment(document)
    text, title = document.text or "", document.title
    if isinstance(document.data, dict):
        fields = {name: str(value) for name, value in document.data.items() if value is not None}
        title = title or fields.pop("title", None)
        fields.pop("title", None)
        one = len(fields) == 1
        text = "\n".join(fields[name] if one else f"{name}: {fields[name]}" for name in sorted(fields))
    elif document.data is not None:
        text = document.data
    metadata = {**document.metadata, **({} if document.id is None else {ID: document.id})}
    return Segment(text, title=title, metadata=metadata, score=document.score)


def check_ids(segments: SegmentSet) -> None:
    """Check that an id names one document of a set. Other sets may number theirs anew, as turns do."""
    by_id: dict[str, Segment] = {}
    for segment in segments:
        identifier = document_id(segment)
        if by_id.setdefault(identifier, segment).content_hash != segment.content_hash:
            raise InvalidRequest(
                f"documents: expected an id for each document of a set, got two that are called {shown(identifier)}",
                param="documents",
                hint="Leave the ids away, or give each document its own.",
            )
