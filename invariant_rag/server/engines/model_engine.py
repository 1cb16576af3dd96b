"""What engines around an `InvariantModel` share: calls as requests to the model, and its answers as replies."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria

from invariant_rag.cancellation import cancellable, check_cancelled
from invariant_rag.errors import (
    IncompleteObject,
    InvalidObject,
    InvalidOption,
    InvalidSchema,
    InvalidTool,
    InvariantRAGError,
    UnsupportedCombination,
)
from invariant_rag.generation.answering import Answering, reply_all
from invariant_rag.generation.answers import Answer, AnswerDelta, AnswerRequest, ModelAnswer, TokenLogprob
from invariant_rag.generation.answers import Reply as ModelReply
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.penalties import TokenPenalties
from invariant_rag.generation.structured import CACHE_BYTES, check_complete, compile_elsewhere
from invariant_rag.judge import DEFAULT_CRITERIA, By, Criteria, Judge, Verdict
from invariant_rag.methods import METHODS
from invariant_rag.models.embedded import is_toy
from invariant_rag.orderings import ORDERINGS
from invariant_rag.segments import Prompt, SegmentSet, document_rendering
from invariant_rag.server.compiling import SchemaCompiler, validate
from invariant_rag.server.documents import citations_of, report_of
from invariant_rag.server.engines.base import Call, Choice, Choices, Emit, JudgeCall, Reply, in_threads
from invariant_rag.server.errors import TooLarge
from invariant_rag.server.fields import about
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from invariant_rag.generation.prepare import PreparedPrompt


_DRAWING = ("top_p", "top_k", "min_p")
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
        self._schemas = SchemaCompiler(CACHE_BYTES)

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

    def model_of(self, call: Call) -> InvariantModel:
        """Return the model as a call wants it."""
        return self.model_for(call.choices)

    def answer(self, call: Call, emit: Emit, abandoned: Event) -> Reply:
        """Answer a request; see `Engine.answer`."""
        return self.answer_all([call], emit, abandoned)[0]

    def answer_all(self, calls: Sequence[Call], emit: Emit, abandoned: Event) -> list[Reply]:
        """Answer the prompts of a request as one batch; see `Engine.answer_all`.

        Raises:
            TooLarge: A prompt is longer than the server allows.
        """
        lm = self.model_of(calls[0])
        answerings = [self._prepared(lm, call, abandoned) for call in calls]
        with _about_parts(calls[0]):
            hook = compile_elsewhere.set(partial(self._schemas.compile, abandoned))
            try:
                replies = self._replies(answerings, calls[0], emit, abandoned)
            finally:
                compile_elsewhere.reset(hook)
            for call, reply in zip(calls, replies, strict=True):
                for each in reply.answers:
                    _validate(each, call, abandoned)
        if abandoned.is_set():
            raise CancelledError
        found = zip(calls, answerings, replies, strict=True)
        return [_reply(call, answering.prompt, reply, lm.ordering.name) for call, answering, reply in found]

    def _prepared(self, lm: InvariantModel, call: Call, abandoned: Event) -> Answering:
        self._check_characters(_texts_of(call), call.field)
        answering = _answering(lm, call)
        with about(call.field), cancellable(abandoned):  # only here: batches are decoded for others, too
            _check_length(answering.prepared, self._max_prompt_tokens)
        return answering

    def _replies(
        self, answerings: Sequence[Answering], call: Call, emit: Emit, abandoned: Event
    ) -> Sequence[ModelReply]:
        """Return the replies to prompts that share all choices of a call."""
        if not call.stream:
            return reply_all(answerings, self.batcher, batch_size=self.together, abandoned=abandoned)
        # All of them wait before one is read.
        streams = [each.stream(self.batcher, batch_size=self.together, abandoned=abandoned) for each in answerings]

        def read(number: int) -> ModelReply:
            for piece in streams[number]:
                if not isinstance(piece, AnswerDelta):
                    return piece
                emit(number * call.count + piece.index, piece)
            raise CancelledError

        return in_threads(read, len(streams))

    def tokens(self, call: Call) -> list[int]:
        """Return the token ids of what the model reads."""
        lm = self.model_for(call.choices)
        self._check_characters(_texts_of(call), call.field)
        return list(lm.prepare(_answering(lm, call).prompt).input_ids)

    def _check_characters(self, texts: Iterable[str], field: str) -> None:
        """Check that texts are not so long that tokenizing them takes seconds, only to see that they do not fit."""
        window, found = self.lm.context_window, sum(map(len, texts))
        if window is not None and found > _CHARACTERS_PER_TOKEN * window:
            raise TooLarge(
                f"expected at most {_CHARACTERS_PER_TOKEN * window:,} characters for a context window of {window:,} "
                f"tokens, got {found:,}",
                param=field,
            )

    def judge(self, call: JudgeCall) -> Verdict:
        """Compare answers; see `Judge`.

        Raises:
            TooLarge: A prompt of the judge is longer than the server allows.
        """
        lm = self.model_for(call.choices)
        criteria = DEFAULT_CRITERIA if call.criteria is None else call.criteria
        described = chain(*criteria.items()) if isinstance(criteria, Mapping) else [criteria]
        texts = (*call.answers, *described, call.question or "", call.reference or "")
        self._check_characters(texts, "options" if call.is_choice else "answers")
        explain = bool(call.explain_tokens)
        stopping = {"stopping_criteria": [_StopWhenCancelled()]}
        options: dict[str, Any] = {"max_new_tokens": call.explain_tokens, **stopping} if explain else {}
        with about("criteria"):
            judge = _LimitedJudge(lm, criteria, call.by, self._max_prompt_tokens)
        with about("options" if call.is_choice else "answers"):
            if call.is_choice:
                return judge.choose(call.question or "", call.answers, explain=explain, **options)
            return judge.rank(call.question, call.answers, reference=call.reference, explain=explain, **options)


def _texts_of(call: Call) -> Iterator[str]:
    """Yield the texts of a conversation; of calls of tools, as JSON."""
    for part in (part for turn in call.turns for part in turn.parts):
        if isinstance(part, SegmentSet):
            yield from (segment.text for segment in part)
        elif isinstance(part, str):
            yield part
    for each in (*call.extra, *call.tools, call.template_kwargs):
        if each:
            yield json.dumps(each)


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
    drawing = {name: value for name, value in sampling.more.items() if name in _DRAWING}
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
        options=_options(lm, sampling.more),
        n=call.count,
        logprobs=call.logprobs,
        top_logprobs=call.top_logprobs,
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


def _options(lm: InvariantModel, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of the sampling are keywords of `InvariantModel.generate`.

    Raises:
        InvalidOption: A biased token does not exist.
    """
    options = {name: value for name, value in more.items() if name == "repetition_penalty"}
    if bias := more.get("logit_bias"):
        size = lm.model.config.get_text_config(decoder=True).vocab_size
        if wrong := [token for token in bias if not (token.isascii() and token.isdecimal()) or int(token) >= size]:
            raise InvalidOption(f"logit_bias: expected token ids from 0 to {size - 1}, got {shown(wrong[0])}")
        options["sequence_bias"] = [[[int(token)], value] for token, value in bias.items()]
    presence, frequency = more.get("presence_penalty") or 0.0, more.get("frequency_penalty") or 0.0
    if presence or frequency:
        options["logits_processor"] = [TokenPenalties(presence, frequency)]
    return options


def _reply(call: Call, prompt: Prompt, reply: ModelReply, ordering: str) -> Reply:
    first = reply.first.generation
    if first is None:
        raise CancelledError
    return Reply(
        choices=[_choice(each, prompt) for each in reply.answers],
        usage=reply.usage,
        report=report_of(first, prompt, ordering, call.warnings),
    )


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


def _validate(answer: ModelAnswer, call: Call, abandoned: Event) -> None:
    """Validate a complete answer with what no grammar expresses: its object, and its calls by the schemas of the tools.

    Tools with `strict: false` have a caller who does that.

    Raises:
        InvalidObject: It does not follow a schema.
    """
    if call.schema is not None and call.strict and answer.finish_reason != "length":
        validate(check_complete(answer.content), call.schema, abandoned)
    functions = {each["function"]["name"]: each["function"] for each in call.tools}
    for each in answer.tool_calls:
        function = functions.get(each.name)
        if function is not None and function.get("strict") is not False:
            schema = {"type": "object", **(function.get("parameters") or {})}
            validate(dict(each.arguments), schema, abandoned)


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
        "bytes": list(token.token.encode("utf-8", "replace")),
        "top_logprobs": [
            {"token": name, "logprob": value, "bytes": list(name.encode("utf-8", "replace"))}
            for name, value in token.top
        ],
    }
