"""Requests to a model and its answers as data, and in the format of the OpenAI API, as `serve` speaks it. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

from invariant_rag.errors import IncompleteObject, UnsupportedCombination
from invariant_rag.generation.citations import CitedSpan
from invariant_rag.generation.json_schema import json_schema
from invariant_rag.generation.outputs import Generation, Usage
from invariant_rag.prompts.tools import Tool, ToolCall, as_tools
from invariant_rag.segments import Prompt, Segment, SegmentSet

_OPTIONS = ("min_p", "repetition_penalty")  # keywords of transformers' `generate` that a server takes
_LEDGER = ("sets", "order", "dropped", "trimmed", "method", "invariant")


@dataclass(frozen=True)
class AnswerRequest:
    """One request: what a model gets, and what its answers are to be. Exactly one of `messages` and `prompt` is set."""

    messages: Sequence[Mapping[str, Any]] | None = None  # a conversation, as for `InvariantModel.chat_prompt`
    prompt: Prompt | None = None  # a prompt to continue as it is, without a chat template
    question: str | None = None  # what relevance orderings score with. None: that of the prompt, or its last text
    tools: Sequence[Tool | Mapping[str, Any]] = ()  # offered in a conversation: `Tool`s, or dicts in OpenAI's shape
    tool_choice: str = "auto"  # `auto`, `none`, `required` (or `any`), or the name of a tool
    parallel: bool = True  # whether an answer may hold several calls
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    schema: Any = None  # what `json_schema` takes: the answer is JSON of it, and ends there; with tools, or it is calls
    stop: tuple[str, ...] = ()  # strings that end an answer; with tools its text only; with a schema without effect
    max_new_tokens: int | None = None  # the most tokens of an answer. None: as for `InvariantModel.generate`
    temperature: float = 0.0  # 0: greedy; then the next four have no effect
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None  # as in transformers
    seed: int | None = None  # of the first answer; the next ones have the numbers after it
    options: Mapping[str, Any] = field(default_factory=dict)  # further keywords of transformers' `generate`
    n: int = 1  # number of answers
    logprobs: bool = False  # whether to report the tokens with their log-probabilities
    top_logprobs: int = 0  # how many of the most likely tokens to report for each token, too
    citations: bool = False  # whether to report which parts of the text have a source
    recognized: bool = True  # whether every document is known to be a segment; if not, nothing is said to be invariant

    def __post_init__(self) -> None:
        if self.prompt is not None and (self.tools or self.template_kwargs or self.tool_choice not in ("auto", "none")):
            wrong = "tools, tool_choice and template_kwargs: only a conversation has them"
            raise UnsupportedCombination(
                f"expected a prompt without {wrong}", hint="Give messages, or leave them away."
            )

    @property
    def segments(self) -> list[Segment]:
        """All segments of the prompt, or of the conversation."""
        if self.prompt is not None:
            return list(self.prompt.segments)
        segments: list[Segment] = []
        for content in (message.get("content") for message in self.messages or ()):
            for part in [content] if isinstance(content, str | Segment | SegmentSet) else content or ():
                segments += [part] if isinstance(part, Segment) else part if isinstance(part, SegmentSet) else []
        return segments


@dataclass(frozen=True)
class CallDelta:
    """A delta of the JSON of a call's arguments, with the index of the call; the first one has its id and name."""

    index: int
    id: str | None = None
    name: str | None = None  # empty: the arguments are all that came of a call that was cut off before them
    arguments: str = ""


@dataclass(frozen=True)
class AnswerDelta:
    """A delta of an answer: of its text, of its reasoning, or of a call. `index` is that of the answer to a request."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None
    index: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token, as frameworks report it."""

    token: str  # its part of the text: empty if it is special, or its character is completed by the next one
    logprob: float  # under the model
    start: int = 0  # where its part begins in the text of the generation
    end: int = 0
    top: tuple[tuple[str, float], ...] = ()  # the most likely tokens in its stead, the most likely one first


@dataclass(frozen=True)
class Answer:
    """One answer to a request."""

    content: str = ""  # what the model wrote, up to a stop string
    reasoning: str = ""  # what it wrote between its markers of reasoning
    tool_calls: tuple[ToolCall, ...] = ()
    cut_call: CallDelta | None = None  # a call that the answer ends within, with its arguments as far as they came
    finish_reason: str = "stop"  # `stop`, `tool_calls`, or `length`: room forced the end, so that something may be cut
    logprobs: Sequence[TokenLogprob] | None = None  # None: not requested
    citations: Sequence[CitedSpan] | None = None  # with the caller's own segments; None: not requested
    generation: Generation | None = None  # None: of a remote model

    @classmethod
    def join(cls, deltas: Iterable[AnswerDelta]) -> Answer:
        """Join the deltas of an answer."""
        content, reasoning = "", ""
        calls: dict[int, list[str]] = {}
        for delta in deltas:
            content, reasoning = content + delta.content, reasoning + delta.reasoning
            if delta.call:
                parts = calls.setdefault(delta.call.index, [delta.call.id or "", delta.call.name or "", ""])
                parts[2] += delta.call.arguments
        complete: list[ToolCall] = []
        for index, (identifier, name, text) in calls.items():
            try:
                complete.append(ToolCall(identifier, name, json.loads(text)))
            except ValueError:
                return cls(content, reasoning, tuple(complete), CallDelta(index, identifier, name, text))
        return cls(content, reasoning, tuple(complete))

    def check_complete(self) -> None:
        """Check that no call was cut off, or raise IncompleteObject."""
        if (cut := self.cut_call) is not None:
            where = f"call {cut.index} of {cut.name!r}: {cut.arguments!r}"
            raise IncompleteObject(f"expected whole calls, got an answer that ends within {where}")


@dataclass(frozen=True)
class Reply:
    """All answers to a request: as many as `n`."""

    answers: tuple[Answer, ...]
    usage: Usage  # tokens of the prompt, once, and of all answers
    read_ledger: Callable[[], dict[str, Any]] = field(repr=False, compare=False)
    model: str = ""  # its name

    @property
    def ledger(self) -> dict[str, Any]:
        """The ledger of the documents; see `generation.outputs.ledger`."""
        return self.read_ledger()

    @property
    def first(self) -> Answer:
        """The first answer."""
        return self.answers[0]


def request_fields(request: AnswerRequest, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request besides messages and prompt, with `choices`; None: to be left out."""
    if refused := sorted(request.options.keys() - set(_OPTIONS)):
        hint = "Leave them away, or run the model here, without base_url."
        raise UnsupportedCombination(f"expected keywords that a server takes, got {', '.join(refused)}", hint=hint)
    names = ("temperature", "top_p", "top_k", "min_p", "seed") if request.temperature else ()
    sampling = {name: getattr(request, name) for name in names}
    fields = {
        **request.options,
        **{name: value for name, value in sampling.items() if value is not None},
        "max_tokens": request.max_new_tokens,
        "n": request.n if request.n > 1 else None,
        "stop": None if request.schema is not None else list(request.stop) or None,
        "invariant": dict(choices) or None,
    }
    if request.messages is None:
        return fields | {"logprobs": (request.top_logprobs or 1) if request.logprobs else None}
    schema = None if request.schema is None else {"name": "answer", "schema": json_schema(request.schema)}
    fields |= {
        "logprobs": request.logprobs or None,
        "top_logprobs": request.top_logprobs or None,
        "chat_template_kwargs": dict(request.template_kwargs) or None,
        "response_format": None if schema is None else {"type": "json_schema", "json_schema": schema},
    }
    if tools := [each.to_dict() for each in as_tools(request.tools)]:
        choice: Any = "required" if request.tool_choice == "any" else request.tool_choice
        if choice not in ("auto", "none", "required"):
            choice = {"type": "function", "function": {"name": choice}}
        fields |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": request.parallel}
    return fields


def parse_reply(body: Mapping[str, Any], request: AnswerRequest) -> Reply:
    """Return the reply that a `chat.completion` or a `text_completion` is: all of a stream in one chunk."""
    (reply,) = [each for each in parse_chunks([body, {**body, "choices": ()}], request) if isinstance(each, Reply)]
    return reply


def parse_chunks(chunks: Iterable[Mapping[str, Any]], request: AnswerRequest) -> Iterator[AnswerDelta | Reply]:
    """Yield the deltas of the answers from the chunks of a stream, and then the whole reply."""
    deltas: dict[int, list[AnswerDelta]] = {}
    ends: dict[int, Mapping[str, Any]] = {}
    body: dict[str, Any] = {}  # the fields of any of the chunks
    for chunk in chunks:
        body |= chunk
        for choice in chunk["choices"]:
            for delta in parse_deltas(choice, choice["index"]):
                deltas.setdefault(delta.index, []).append(delta)
                yield delta
            if choice["finish_reason"] is not None:
                ends[choice["index"]] = choice
        if not chunk["choices"]:
            answers = [_parse_answer(ends[index], deltas.get(index, ()), request) for index in sorted(ends)]
            usage, ledger = body["usage"], {name: body["invariant"][name] for name in _LEDGER}
            ledger["invariant"] = ledger["invariant"] if request.recognized else False
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            tokens = Usage(usage["prompt_tokens"], usage["completion_tokens"], cached)
            yield Reply(tuple(answers), tokens, partial(dict, ledger, cached_tokens=cached), body["model"])
            return


def _parse_answer(choice: Mapping[str, Any], deltas: Iterable[AnswerDelta], request: AnswerRequest) -> Answer:
    """Return the answer of deltas, and of the choice that ends it."""
    spans, logprobs = None, None
    if request.citations and request.schema is None:  # the server names segments by their content hash
        known = {each.content_hash: (index, each) for index, each in enumerate(request.segments)}
        cited = (choice.get("delta") or choice.get("message") or {}).get("citations") or ()
        sources = [(each, source["id"]) for each in cited for source in each["sources"]]
        spans = [CitedSpan(each["start"], each["end"], *known[name]) for each, name in sources if name in known]
    if request.logprobs:
        logprobs = parse_logprobs(choice.get("logprobs"))
    return replace(Answer.join(deltas), finish_reason=choice["finish_reason"], logprobs=logprobs, citations=spans)


def parse_deltas(choice: Mapping[str, Any], index: int) -> Iterator[AnswerDelta]:
    """Yield the deltas of a choice of a reply or of a chunk, for the answer of an index."""
    message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        yield AnswerDelta(reasoning=reasoning, index=index)
    if content := message.get("content") or message.get("refusal"):
        yield AnswerDelta(content + "", index=index)
    for position, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        delta = CallDelta(call.get("index", position), call.get("id"), function.get("name"), arguments)
        yield AnswerDelta(call=delta, index=index)


def parse_logprobs(logprobs: Mapping[str, Any] | None) -> list[TokenLogprob]:
    """Return the log-probabilities of a chat or of a completion."""
    if not logprobs:
        return []
    if "content" in logprobs:
        tops: Any = [[(top["token"], top["logprob"]) for top in each["top_logprobs"]] for each in logprobs["content"]]
        tokens = [(each["token"], each["logprob"]) for each in logprobs["content"]]
    else:
        tops = map(dict.items, logprobs.get("top_logprobs") or [{}] * len(logprobs["tokens"]))
        tokens = list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))
    ends = list(accumulate(len(token) for token, _ in tokens))
    return [
        TokenLogprob(token, logprob, end - len(token), end, tuple(top))
        for (token, logprob), end, top in zip(tokens, ends, tops, strict=True)
    ]
