"""What engines around an `InvariantModel` share: calls as requests to the model, and its answers as replies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria

from invariant_rag.cancellation import cancellable, check_cancelled
from invariant_rag.errors import (
    IncompleteObject,
    InvalidObject,
    InvalidSchema,
    InvalidTool,
    InvariantRAGError,
    UnsupportedCombination,
)
from invariant_rag.generation.answering import Answering
from invariant_rag.generation.answers import Answer, AnswerDelta, AnswerRequest, ModelAnswer, TokenLogprob
from invariant_rag.generation.answers import Reply as ModelReply
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.grammar import before_compiling
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.schema_validation import validate_value
from invariant_rag.generation.structured import check_complete
from invariant_rag.judge import DEFAULT_CRITERIA, By, Criteria, Judge, Verdict
from invariant_rag.methods import METHODS
from invariant_rag.models.embedded import is_toy
from invariant_rag.orderings import ORDERINGS
from invariant_rag.segments import Prompt, SegmentSet, document_rendering
from invariant_rag.server.compiling import SchemaTrials
from invariant_rag.server.documents import citations_of, report_of
from invariant_rag.server.engines.base import Call, Choice, Choices, Emit, JudgeCall, Reply
from invariant_rag.server.errors import TooLarge
from invariant_rag.server.fields import about

if TYPE_CHECKING:
    from invariant_rag.generation.prepare import PreparedPrompt


_CHARACTERS_PER_TOKEN = 64
"""Of the context window; more are refused before they are tokenized."""


class ModelEngine(ABC):
    """An engine around an `InvariantModel`; a subclass says where its keys and values are kept.

    Args:
        lm: The model. It needs a tokenizer.
        name: What requests call it. None: its own name.
        together: How many requests are decoded at a time.
        max_prompt_tokens: A longer prompt is refused.
    """

    def __init__(
        self, lm: InvariantModel, name: str | None, *, together: int, max_prompt_tokens: int | None = None
    ) -> None:
        self.lm = lm
        self.name = lm.name if name is None else name
        self.toy = is_toy(lm.name)
        self.together = together
        self.caches: Mapping[str, KeyValueCache] = {}
        self.batcher = MicroBatcher()
        self._max_prompt_tokens = max_prompt_tokens
        self._chosen: dict[Choices, InvariantModel] = {}
        self._lock = Lock()
        self._trials = SchemaTrials(lm)

    @property
    def context_window(self) -> int | None:
        """Tokens that a prompt and its answer may have together."""
        return self.lm.context_window

    @property
    def method(self) -> str:
        """The method of requests that choose none."""
        return self.lm.method.name

    @property
    def methods(self) -> frozenset[str]:
        """What requests may choose."""
        return frozenset(METHODS)

    @property
    def sampling(self) -> frozenset[str]:
        """None of the fields that not all engines have."""
        return frozenset()

    @property
    def orderings(self) -> Mapping[str, frozenset[str]]:
        """All of them with each method."""
        return dict.fromkeys(self.methods, frozenset(ORDERINGS))

    @abstractmethod
    def for_tenant(self, lm: InvariantModel, choices: Choices) -> InvariantModel:
        """Return a model that stores nothing where another tenant than that of the choices finds it."""

    def model_for(self, choices: Choices) -> InvariantModel:
        """Return the model as somebody wants it, for their tenant."""
        with self._lock:
            lm = self._chosen.get(choices)
            if lm is None:
                wanted: dict[str, Any] = {name: getattr(choices, name) for name in ("method", "ordering", "overflow")}
                with about("invariant.method"):
                    lm = self.for_tenant(self.lm.with_method(**wanted), choices)
                self._chosen[choices] = lm
            return lm

    def answer(self, call: Call, emit: Emit, abandoned: Event) -> Reply:
        """Answer a request; see `Engine.answer`.

        Raises:
            TooLarge: The prompt is longer than the server allows.
        """
        lm = self.model_for(call.choices)
        self._check_characters(call)
        answering = _answering(lm, call)
        with about(call.field), cancellable(abandoned):  # only here: batches are decoded for others, too
            _check_length(answering.prepared, self._max_prompt_tokens)
        with _about_parts(call):
            hook = before_compiling.set(partial(self._trials.check, abandoned))
            try:
                answering.compile()
            finally:
                before_compiling.reset(hook)
            reply = self._reply(answering, call, emit, abandoned)
            for each in reply.answers:
                _validate(each, call)
        first = reply.first.generation
        if first is None or abandoned.is_set():
            raise CancelledError
        return Reply(
            choices=[_choice(each, answering.prompt) for each in reply.answers],
            usage=reply.usage,
            report=report_of(first, answering.prompt, lm.ordering.name, call.warnings),
        )

    def _reply(self, answering: Answering, call: Call, emit: Emit, abandoned: Event) -> ModelReply:
        if not call.stream:
            return answering.reply(self.batcher, batch_size=self.together, abandoned=abandoned)
        for piece in answering.stream(self.batcher, batch_size=self.together, abandoned=abandoned):
            if isinstance(piece, AnswerDelta):
                emit(piece.index, piece)
            else:
                return piece
        raise CancelledError

    def tokens(self, call: Call) -> list[int]:
        """Return the token ids of what the model reads."""
        lm = self.model_for(call.choices)
        self._check_characters(call)
        return list(lm.prepare(_answering(lm, call).prompt).input_ids)

    def _check_characters(self, call: Call) -> None:
        """Check that a call is not so long that tokenizing it takes seconds, only to see that it does not fit."""
        if (window := self.lm.context_window) is None:
            return
        parts = [part for turn in call.turns for part in turn.parts]
        segments = [segment for part in parts if isinstance(part, SegmentSet) for segment in part]
        found = sum(len(part) for part in parts if isinstance(part, str)) + sum(len(each.text) for each in segments)
        if found > _CHARACTERS_PER_TOKEN * window:
            raise TooLarge(
                f"expected at most {_CHARACTERS_PER_TOKEN * window:,} characters for a context window of {window:,} "
                f"tokens, got {found:,}",
                param=call.field,
            )

    def judge(self, call: JudgeCall) -> Verdict:
        """Compare answers; see `Judge`.

        Raises:
            TooLarge: A prompt of the judge is longer than the server allows.
        """
        lm = self.model_for(call.choices)
        explain = bool(call.explain_tokens)
        stopping = {"stopping_criteria": [_StopWhenCancelled()]}
        options: dict[str, Any] = {"max_new_tokens": call.explain_tokens, **stopping} if explain else {}
        with about("criteria"):
            criteria = DEFAULT_CRITERIA if call.criteria is None else call.criteria
            judge = _LimitedJudge(lm, criteria, call.by, self._max_prompt_tokens)
        with about("options" if call.is_choice else "answers"):
            if call.is_choice:
                return judge.choose(call.question or "", call.answers, explain=explain, **options)
            return judge.rank(call.question, call.answers, reference=call.reference, explain=explain, **options)


class _StopWhenCancelled(StoppingCriteria):
    """Ends the explanation of a judge whose client has left."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return that no row stops `[B]`, or raise CancelledError."""
        check_cancelled()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class _LimitedJudge(Judge):
    """A judge whose prompts have at most so many tokens; None: as many as the context window takes."""

    def __init__(self, lm: InvariantModel, criteria: Criteria, by: By, most: int | None) -> None:
        super().__init__(lm, criteria=criteria, by=by)
        self._most = most

    def _prompt(self, *parts: Any) -> Prompt:
        prompt = super()._prompt(*parts)
        if self._most is not None:
            _check_length(self.lm.prepare(prompt), self._most)
        return prompt


def _check_length(prepared: PreparedPrompt, most: int | None) -> None:
    size = len(prepared.input_ids)
    if most is not None and size > most:
        raise TooLarge(f"expected a prompt of at most {most} tokens, got {size}")


def _answering(lm: InvariantModel, call: Call) -> Answering:
    """Return a call as a request to a model."""
    if call.schema is not None and (call.stop or (call.tools and call.tool_choice != "none")):
        with about("response_format"):
            raise UnsupportedCombination(
                "expected response_format without stop and tools: the schema alone says where the answer ends",
                hint="Leave stop and tools away, or set tool_choice to none.",
            )
    sampling = call.sampling
    penalty = {name: value for name, value in sampling.more.items() if name == "repetition_penalty"}
    drawing = {name: value for name, value in sampling.more.items() if name not in penalty}
    request = AnswerRequest(
        question=call.question,
        tools=call.tools,
        tool_choice=call.tool_choice,
        parallel=call.parallel,
        template_kwargs=call.template_kwargs,
        schema=None if call.schema is None else dict(call.schema),
        stop=call.stop,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        **drawing,
        options=penalty,
        n=call.count,
        logprobs=call.logprobs,
        citations=call.chat and call.schema is None,
    )
    with _about_parts(call):
        if call.chat:
            extra = call.extra or ({},) * len(call.turns)
            messages = [
                {**more, "role": turn.role, "content": list(turn.parts)}
                for turn, more in zip(call.turns, extra, strict=True)
            ]
            return Answering(lm, replace(request, messages=messages))
        (turn,) = call.turns
        prompt = Prompt.of(*turn.parts, query=call.question, rendering=document_rendering).to_complete()
        return Answering(lm, replace(request, prompt=prompt))


@contextmanager
def _about_parts(call: Call) -> Iterator[None]:
    """Note what part of a request an error is about: its tools, its schema or its prompt."""
    try:
        yield
    except (IncompleteObject, InvalidObject, InvalidSchema, InvalidTool, UnsupportedCombination) as error:
        of_schema = call.schema is not None and not isinstance(error, InvalidTool)
        with about("response_format" if of_schema else "tools" if call.tools else call.field):
            raise
    except InvariantRAGError:
        with about(call.field):
            raise


def _validate(answer: ModelAnswer, call: Call) -> None:
    """Validate a complete answer with what no grammar expresses: its object, and its calls by the schemas of the tools.

    Tools with `strict: false` have a caller who does that.

    Raises:
        InvalidObject: It does not follow a schema.
    """
    if call.schema is not None and call.strict and answer.finish_reason != "length":
        validate_value(check_complete(answer.content), call.schema)
    functions = {each["function"]["name"]: each["function"] for each in call.tools}
    for each in answer.tool_calls:
        function = functions.get(each.name)
        if function is not None and function.get("strict") is not False:
            validate_value(dict(each.arguments), {"type": "object", **(function.get("parameters") or {})})


def _choice(answer: ModelAnswer, prompt: Prompt) -> Choice:
    return Choice(
        answer=Answer(answer.content, answer.reasoning, answer.tool_calls, answer.cut_call),
        finish_reason=answer.finish_reason,
        logprobs=None if answer.logprobs is None else [_token(each) for each in answer.logprobs],
        citations=citations_of(answer.content, answer.citations or (), prompt),
    )


def _token(token: TokenLogprob) -> dict[str, Any]:
    """Return a token in OpenAI's shape."""
    return {
        "token": token.token,
        "logprob": token.logprob,
        "bytes": list(token.token.encode()),
        "top_logprobs": [],
    }
