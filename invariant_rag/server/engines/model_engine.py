"""Engines around an `InvariantModel`: calls as requests to the model, and its answers as replies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from math import inf
from threading import Event, Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from invariant_rag import errors
from invariant_rag.cancellation import cancellable, cancelled_event
from invariant_rag.generation.answering import Answering, reply_all
from invariant_rag.generation.answers import Answer, AnswerDelta, Reply
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.decode import TokenPenalties
from invariant_rag.generation.json_schema import check_complete
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.streaming import StopOnEvent
from invariant_rag.generation.structured import CACHE_BYTES, compile_in_worker
from invariant_rag.judge import DEFAULT_CRITERIA, Judge, Verdict
from invariant_rag.methods import METHODS
from invariant_rag.models.embedded import is_toy
from invariant_rag.orderings import ORDERINGS
from invariant_rag.segments import Prompt
from invariant_rag.server.admission import FairQueue
from invariant_rag.server.engines.base import Call, Choice, Emit, Engine, EngineReply, JudgeCall, in_threads
from invariant_rag.server.errors import TooLarge, about
from invariant_rag.server.replies import citations_of, ledger_of, token_of
from invariant_rag.server.worker import SchemaCompiler, validate
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.prepare import PreparedPrompt
    from invariant_rag.server.engines.base import CallChoices

_CHARACTERS_PER_TOKEN = 64  # of the context window; more are refused before they are tokenized
_LONG = 10_000
"""Characters of a prompt that is tokenized by its own thread, which can leave, before it waits for a batch."""


class ModelEngine(Engine):
    """An engine around an `InvariantModel`; a subclass says where its keys and values are cached."""

    def __init__(
        self, lm: InvariantModel, name: str | None, *, together: int, max_prompt_tokens: int | None = None
    ) -> None:
        self.lm = lm
        self.name = lm.name if name is None else name
        self.toy = is_toy(lm.name)
        self.together = together
        self.context_window, self.method = lm.context_window, lm.method.name
        self._most_characters = inf if lm.context_window is None else _CHARACTERS_PER_TOKEN * lm.context_window
        self.methods = frozenset(METHODS)
        self.orderings = dict.fromkeys(METHODS, frozenset(ORDERINGS))
        self.batcher = MicroBatcher()
        self._max_prompt_tokens = max_prompt_tokens
        self._chosen: dict[CallChoices, InvariantModel] = {}
        self._lock = Lock()
        self._schemas = SchemaCompiler(CACHE_BYTES, FairQueue(1, 1))

    @abstractmethod
    def for_tenant(self, lm: InvariantModel, tenant: str) -> InvariantModel:
        """Return a model whose cache no other tenant shares."""

    def model_for(self, choices: CallChoices, headers: Mapping[str, str] = MappingProxyType({})) -> InvariantModel:
        """Return the model of the choices, for their tenant; a remote one gets the headers."""
        with self._lock:
            lm = self._chosen.get(choices)
            if lm is None:
                with about("invariant.method"):
                    resolved: Any = {name: getattr(choices, name) for name in ("method", "ordering", "overflow")}
                    lm = self._chosen[choices] = self.for_tenant(self.lm.with_method(**resolved), choices.tenant)
            return lm

    def answer_all(self, calls: Sequence[Call], emit: Emit, abandoned: Event) -> list[EngineReply]:
        """Answer the prompts of a request as one batch; see `Engine.answer_all`."""
        lm = self.model_for(calls[0].choices, calls[0].headers)
        answered = []
        try:
            answerings = list(map(partial(self._prepared, lm, abandoned), calls))
            hook = compile_in_worker.set(partial(self._schemas.compile, calls[0].choices.tenant, abandoned))
            try:
                replies: Sequence[Reply]
                if calls[0].stream:
                    replies = self._stream(answerings, calls[0], emit, abandoned)
                else:
                    replies = reply_all(answerings, self.batcher, batch_size=self.together, abandoned=abandoned)
            finally:
                compile_in_worker.reset(hook)
            for call, answering, reply in zip(calls, answerings, replies, strict=True):
                for each in reply.answers:
                    if each.tool_calls or call.request.schema is not None:
                        _validate(each, call, abandoned)
                answered.append(_engine_reply(call, answering.prompt, reply, lm.ordering.name))
        except errors.InvariantRAGError as error:
            with about(_part_of(calls[0], error)):
                raise
        if abandoned.is_set():
            raise CancelledError
        return answered

    def _prepared(self, lm: InvariantModel, abandoned: Event, call: Call) -> Answering:
        answering = self._answering(lm, call)
        if call.characters > _LONG or self._max_prompt_tokens is not None:
            with cancellable(abandoned):  # only here: batches are decoded for others, too
                _check_length(answering.prepared, self._max_prompt_tokens)
        return answering

    def _stream(self, answerings: Sequence[Answering], call: Call, emit: Emit, abandoned: Event) -> list[Reply]:
        """Emit the deltas of the answers, and return the replies. All wait before one delta is requested."""
        streams = [each.stream(self.batcher, batch_size=self.together, abandoned=abandoned) for each in answerings]

        def follow(number: int) -> Reply:
            for delta in streams[number]:
                if not isinstance(delta, AnswerDelta):
                    return delta
                emit(number * call.request.n + delta.index, delta)
            raise CancelledError

        return in_threads(follow, len(streams))

    def tokens(self, call: Call) -> list[int]:
        """Return the token ids of the prompt."""
        lm = self.model_for(call.choices)
        try:
            return list(lm.prepare(self._answering(lm, call).prompt).input_ids)
        except errors.InvariantRAGError as error:
            with about(_part_of(call, error)):
                raise

    def _refuse_characters(self, characters: int, field: str) -> NoReturn:
        """Refuse texts that are so long that tokenizing them alone takes seconds."""
        most, window = self._most_characters, self.context_window
        message = f"expected at most {most:,} characters for a context window of {window:,} tokens, got {characters:,}"
        raise TooLarge(message, param=field)

    def _answering(self, lm: InvariantModel, call: Call) -> Answering:
        """Return a call as a request to a model."""
        request = call.request
        if call.characters > self._most_characters:
            self._refuse_characters(call.characters, call.field)
        if request.schema is not None and (request.stop or (request.tools and request.tool_choice != "none")):
            raise errors.UnsupportedCombination(
                "expected response_format without stop and tools: the schema alone decides where the answer ends",
                hint="Leave stop and tools away, or set tool_choice to none.",
            )
        return Answering(lm, replace(request, options=_options(lm, request.options)) if request.options else request)

    def judge(self, call: JudgeCall) -> Verdict:
        """Compare answers; see `Judge`."""
        request, lm = call.request, self.model_for(call.choices)
        field, answers = ("answers", request.answers) if request.options is None else ("options", request.options)
        criteria = DEFAULT_CRITERIA if request.criteria is None else request.criteria
        described = [*criteria, *criteria.values()] if isinstance(criteria, Mapping) else [criteria]
        texts = (*(answers or ()), *described, request.question or "", request.reference or "")
        if (characters := sum(map(len, texts))) > self._most_characters:
            self._refuse_characters(characters, field)
        options: dict[str, Any] = {"explain": request.explain}
        if request.explain:
            options |= {"max_new_tokens": request.max_tokens, "stopping_criteria": [StopOnEvent(cancelled_event())]}
        with about("criteria"):
            judge = _LimitedJudge(lm, criteria=criteria, by=request.by)
            judge.most = self._max_prompt_tokens
        with about(field):
            if request.options is not None:
                return judge.choose(request.question or "", request.options, **options)
            return judge.rank(request.question, request.answers or (), reference=request.reference, **options)


class InProcess(ModelEngine):
    """An `InvariantModel` in this process: concurrent requests are decoded as one batch, each tenant with its cache.

    Args:
        lm: The model. It needs a tokenizer.
        name: What requests call it. None: its own name.
        caches: A cache of keys and values for each tenant. None for all: nothing is cached.
        together: The most requests to decode as one batch.
        max_prompt_tokens: A longer prompt is refused.

    Raises:
        UnsupportedCombination: There are caches, and the keys of this model cannot be reused.
    """

    def __init__(
        self,
        lm: InvariantModel,
        name: str | None = None,
        *,
        caches: Mapping[str, KeyValueCache] | None = None,
        together: int = 8,
        max_prompt_tokens: int | None = None,
    ) -> None:
        super().__init__(lm, name, together=together, max_prompt_tokens=max_prompt_tokens)
        self.caches = dict(caches or {})
        for tenant in [*self.caches][:1]:
            self.for_tenant(lm, tenant)

    def for_tenant(self, lm: InvariantModel, tenant: str) -> InvariantModel:
        """Return a model with the cache of the tenant."""
        return lm.with_cache(self.caches.get(tenant))


class _LimitedJudge(Judge):
    """A judge whose prompts have at most so many tokens; None: as many as the context window takes."""

    most: int | None = None

    def _prompt(self, *parts: Any) -> Prompt:
        prompt = super()._prompt(*parts)
        if self.most is not None:
            _check_length(self.lm.prepare(prompt), self.most)
        return prompt


def _check_length(prepared: PreparedPrompt, most: int | None) -> None:
    if most is not None and (size := len(prepared.input_ids)) > most:
        raise TooLarge(f"expected a prompt of at most {most} tokens, got {size}")


def _options(lm: InvariantModel, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a call, whose penalties and biases are OpenAI's, as keywords of `InvariantModel.generate`."""
    options = dict(requested)
    presence, frequency = (options.pop(f"{name}_penalty", 0.0) for name in ("presence", "frequency"))
    if bias := options.pop("logit_bias", None):
        size = lm.model.config.get_text_config(decoder=True).vocab_size
        if wrong := [token for token in bias if not (token.isascii() and token.isdecimal()) or int(token) >= size]:
            raise errors.InvalidOption(f"logit_bias: expected token ids from 0 to {size - 1}, got {shown(wrong[0])}")
        options["sequence_bias"] = [[[int(token)], value] for token, value in bias.items()]
    if presence or frequency:
        options["logits_processor"] = [TokenPenalties(presence, frequency)]
    return options


_OF_PARTS = (errors.IncompleteObject, errors.InvalidObject, errors.InvalidSchema, errors.UnsupportedCombination)


def _part_of(call: Call, error: errors.InvariantRAGError) -> str:
    """Return what part of a request an error is about: its schema, its tools or its prompt."""
    if call.request.schema is not None and isinstance(error, _OF_PARTS):
        return "response_format"
    return "tools" if call.request.tools and isinstance(error, (*_OF_PARTS, errors.InvalidTool)) else call.field


def _validate(answer: Answer, call: Call, abandoned: Event) -> None:
    """Validate a complete answer with what no grammar expresses: its object, and its calls by the schemas of the tools.

    Tools with `strict: false` have a caller who does that.
    """
    if call.request.schema is not None and call.is_strict and answer.finish_reason != "length":
        validate(check_complete(answer.content), call.request.schema, call.choices.tenant, abandoned)
    functions: Any = {each["function"]["name"]: each["function"] for each in call.request.tools}  # type: ignore[index]
    for each in answer.tool_calls:
        function = functions.get(each.name)
        if function is not None and function.get("strict") is not False:
            schema = {"type": "object", **(function.get("parameters") or {})}
            validate(dict(each.arguments), schema, call.choices.tenant, abandoned)


def _engine_reply(call: Call, prompt: Prompt, reply: Reply, ordering: str) -> EngineReply:
    generation = reply.answers[0].generation
    if generation is None:
        raise CancelledError
    choices = []
    for each in reply.answers:
        answer = replace(each, generation=None, logprobs=None, citations=None)
        logprobs = None if each.logprobs is None else list(map(token_of, each.logprobs))
        citations = citations_of(each.content, each.citations, prompt) if each.citations else []
        choices.append(Choice(answer, each.finish_reason, logprobs, citations))
    return EngineReply(choices, reply.usage, ledger_of(generation, prompt, ordering, call.warnings))
