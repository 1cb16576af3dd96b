"""Requests to a model and its answers as data, for frameworks, the server and remote models. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import IncompleteObject
from invariant_rag.generation.citations import CitedSpan
from invariant_rag.prompts.tools import Tool, ToolCall
from invariant_rag.segments import Prompt

if TYPE_CHECKING:
    from invariant_rag.generation.outputs import Generation


@dataclass(frozen=True)
class AnswerRequest:
    """One request: what a model gets, and what its answers are to be.

    Attributes:
        messages: A conversation, as for `InvariantModel.chat_prompt`: contents are texts, `Segment`s and `SegmentSet`s.
        prompt: Or a prompt to continue as it is, without a chat template. Exactly one of the two is given.
        question: What relevance orderings score documents with. None: that of the prompt, or its last text.
        tools: Tools that the model may call, in a conversation: `Tool`s, or dicts in OpenAI's shape.
        tool_choice: `auto`, `none`, `required` (or `any`), or the name of a tool.
        parallel: Whether an answer may hold several calls.
        template_kwargs: Variables of the chat template.
        schema: What `json_schema` takes: the answer is JSON of it, and ends where the JSON ends; `stop` does not apply.
            With tools, an answer is calls or the object.
        stop: Strings that end the text of an answer; not its reasoning, nor a call.
        max_new_tokens: The most tokens of an answer. None: as for `InvariantModel.generate`.
        temperature: 0: greedy; then `top_p`, `top_k`, `min_p` (as in transformers) and `seed` mean nothing.
        seed: Seed of the first answer; the next ones have the numbers after it.
        options: Further keywords of transformers' `generate`.
        n: Number of answers.
        logprobs: Whether to report the tokens with their log-probabilities.
        top_logprobs: How many of the most likely tokens to report at each place, too.
        citations: Whether to report which parts of the text have a source.
        recognized: Whether every document in the prompt is known to be a segment. If not, the ledger does not promise
            that the answer is invariant.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: Prompt | None = None
    question: str | None = None
    tools: Sequence[Tool | Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    parallel: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    schema: Any = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    citations: bool = False
    recognized: bool = True


@dataclass(frozen=True)
class CallDelta:
    """A piece of the JSON of a call's arguments, with the place of the call; in its first piece, its id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class AnswerDelta:
    """A piece of an answer: of its text, of its reasoning, or of a call. `index` is that of the answer to a request."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None
    index: int = 0


@dataclass(frozen=True)
class Answer:
    """The text of an answer, parsed.

    Attributes:
        content: The text.
        reasoning: What the model wrote between its markers of reasoning; empty if it has none.
        tool_calls: The calls.
        cut_call: A call that the answer ends within, with its arguments as far as they came; None: there is none.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    cut_call: CallDelta | None = None

    @classmethod
    def join(cls, deltas: Iterable[AnswerDelta]) -> Answer:
        """Put the pieces of an answer together."""
        content, reasoning = "", ""
        calls: dict[int, list[str]] = {}
        for delta in deltas:
            content, reasoning = content + delta.content, reasoning + delta.reasoning
            if delta.call:
                parts = calls.setdefault(delta.call.index, [delta.call.id or "", delta.call.name or "", ""])
                parts[2] += delta.call.arguments
        found: list[ToolCall] = []
        for index, (identifier, name, text) in calls.items():
            try:
                found.append(ToolCall(identifier, name, json.loads(text)))
            except ValueError:
                return cls(content, reasoning, tuple(found), CallDelta(index, identifier, name, text))
        return cls(content, reasoning, tuple(found))

    def check_complete(self) -> None:
        """Check that no call was cut off, or raise IncompleteObject."""
        if self.cut_call is not None:
            raise IncompleteObject(
                f"expected whole calls, got an answer that ends within call {self.cut_call.index} of "
                f"{self.cut_call.name!r}: {self.cut_call.arguments!r}"
            )


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token, as frameworks report it.

    Attributes:
        token: Its part of the text: empty for a special token, and for a token whose character the next one completes.
        logprob: Its log-probability under the model.
        start: Where its part begins in the text of the generation.
        end: Where it ends.
        top: The most likely tokens at its place with their log-probabilities, the most likely one first.
    """

    token: str
    logprob: float
    start: int = 0
    end: int = 0
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of one generation; `cached_tokens` of the prompt were loaded from a cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the answer."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class ModelAnswer(Answer):
    """One answer to a request. Its text is what the model wrote, up to a stop string.

    Attributes:
        finish_reason: `stop`, `tool_calls`, or `length`: room forced the end, so that an object or a call may be cut.
        logprobs: The tokens with their log-probabilities; None if they were not asked for.
        citations: The parts of the text that have a source, with the caller's own segments; None if not asked for.
        generation: What the model generated; None of a model elsewhere.
    """

    finish_reason: str = "stop"
    logprobs: Sequence[TokenLogprob] | None = None
    citations: Sequence[CitedSpan] | None = None
    generation: Generation | None = None


@dataclass(frozen=True)
class Reply:
    """All answers to a request.

    Attributes:
        answers: The answers: as many as `n` says.
        usage: Tokens of the prompt, once, and of all answers.
        ledger: What was read of the documents: see `generation.outputs.ledger`; and which branch a router took.
        model: Name of the model.
    """

    answers: tuple[ModelAnswer, ...]
    usage: Usage
    ledger: Mapping[str, Any]
    model: str = ""

    @property
    def first(self) -> ModelAnswer:
        """The first answer."""
        return self.answers[0]
