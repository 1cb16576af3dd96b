"""What engines around an `InvariantModel` share: prompts from requests, and answers taken apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, cast

from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.answer_parsing import Answer, AnswerDelta
from invariant_rag.generation.answer_pieces import parse_answer
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.logprobs import token_logprobs
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.outputs import Generation, Usage
from invariant_rag.generation.schema_validation import validate_value
from invariant_rag.generation.streaming import (
    TextStream,
    decode_keeping,
    stream_until_stop_string,
    trim_at_stop_string,
)
from invariant_rag.generation.structured import check_complete, constrain
from invariant_rag.generation.tools import ToolCalling
from invariant_rag.judge import DEFAULT_CRITERIA, By, Criteria, Judge, Verdict
from invariant_rag.methods import METHODS
from invariant_rag.orderings import ORDERINGS
from invariant_rag.prompts.labels import Labels, translate_stream
from invariant_rag.segments import Prompt, document_rendering
from invariant_rag.server.documents import citations_of, report_of
from invariant_rag.server.engines.base import Call, Choice, Choices, Emit, JudgeCall, Reply
from invariant_rag.server.errors import TooLarge
from invariant_rag.server.fields import about
from invariant_rag.server.schema_limits import MOST_MASKED, check_masked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from invariant_rag.generation.prepare import PreparedPrompt

_QUICK = MOST_MASKED / 20
"""What compiles in about a second."""


class ModelEngine(ABC):
    """An engine whose prompts are written by an `InvariantModel`; a subclass says whose, and what decodes them.

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
        self.together = together
        self.caches: Mapping[str, KeyValueCache] = {}
        self._max_prompt_tokens = max_prompt_tokens
        self._chosen: dict[Choices, InvariantModel] = {}
        self._lock = Lock()
        self._compiling = Lock()

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

    @abstractmethod
    def generate(self, lm: InvariantModel, prompt: Prompt, options: dict[str, Any], abandoned: Event) -> Generation:
        """Generate for a prompt.

        Args:
            lm: The model that was chosen.
            prompt: The prompt.
            options: Keywords of `InvariantModel.generate`.
            abandoned: Once set, nobody waits for the answer any more.

        Raises:
            CancelledError: It was abandoned.
        """

    @abstractmethod
    def stream(self, lm: InvariantModel, prompt: Prompt, options: dict[str, Any], abandoned: Event) -> TextStream:
        """Return the stream of a prompt's text; see `generate`."""

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

    @contextmanager
    def compiling(self, schemas: Sequence[Any], abandoned: Event) -> Iterator[None]:
        """Wait until schemas may be compiled: those that take seconds one after another, others at once.

        Raises:
            CancelledError: It was abandoned.
            InvalidSchema: They take too long with the vocabulary of the model.
        """
        size = self.lm.model.config.get_text_config(decoder=True).vocab_size
        if check_masked(schemas, size) < _QUICK:
            yield
            return
        while not abandoned.is_set():
            if self._compiling.acquire(timeout=0.05):
                try:
                    yield
                finally:
                    self._compiling.release()
                return
        raise CancelledError

    def answer(self, call: Call, emit: Emit, abandoned: Event) -> Reply:
        """Answer a request; see `Engine.answer`.

        Raises:
            TooLarge: The prompt is longer than the server allows.
        """
        lm = self.model_for(call.choices)
        request = _Request(self, lm, call)
        request.check_size(self._max_prompt_tokens)
        found = [request.one(index, emit, abandoned) for index in range(call.count)]
        generations = [generation for generation, _ in found]
        first = generations[0]
        return Reply(
            choices=[choice for _, choice in found],
            usage=Usage(
                prompt_tokens=first.usage.prompt_tokens,
                completion_tokens=sum(each.usage.completion_tokens for each in generations),
                cached_tokens=first.usage.cached_tokens,
            ),
            report=report_of(first, request.prompt, lm.ordering.name, call.warnings),
        )

    def tokens(self, call: Call) -> list[int]:
        """Return the token ids of what the model reads."""
        lm = self.model_for(call.choices)
        return list(lm.prepare(_Request(self, lm, call).prompt).input_ids)

    def judge(self, call: JudgeCall) -> Verdict:
        """Compare answers; see `Judge`.

        Raises:
            TooLarge: A prompt of the judge is longer than the server allows.
        """
        lm = self.model_for(call.choices)
        explain = bool(call.explain_tokens)
        options: dict[str, Any] = {"max_new_tokens": call.explain_tokens} if explain else {}
        with about("criteria"):
            criteria = DEFAULT_CRITERIA if call.criteria is None else call.criteria
            judge = _LimitedJudge(lm, criteria, call.by, self._max_prompt_tokens)
        with about("options" if call.is_choice else "answers"):
            if call.is_choice:
                return judge.choose(call.question or "", call.answers, explain=explain, **options)
            return judge.rank(call.question, call.answers, reference=call.reference, explain=explain, **options)


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


class _Request:
    """One call of one model: its prompt, how its answers are decoded, and each of them taken apart."""

    def __init__(self, engine: ModelEngine, lm: InvariantModel, call: Call) -> None:
        self._engine, self._lm, self._call = engine, lm, call
        self._tokenizer = cast("PreTrainedTokenizerBase", lm.tokenizer)
        if call.schema is not None and (call.stop or (call.tools and call.tool_choice != "none")):
            with about("response_format"):
                raise UnsupportedCombination(
                    "expected response_format without stop and tools: the schema alone says where the answer ends",
                    hint="Leave stop and tools away, or set tool_choice to none.",
                )
        with about("tools"):
            self._calling = ToolCalling(lm, call.tools, tool_choice=call.tool_choice, parallel=call.parallel)
        with about(call.field):
            self.prompt = self._chat_prompt() if call.chat else self._text_prompt()
        # Stop strings end text, not calls: with tools, the model is not stopped, and the text is cut afterwards.
        self._stops_model = call.stop if not call.tools else ()

    def _chat_prompt(self) -> Prompt:
        extra = self._call.extra or ({},) * len(self._call.turns)
        messages = [
            {**more, "role": turn.role, "content": list(turn.parts)}
            for turn, more in zip(self._call.turns, extra, strict=True)
        ]
        return self._calling.prompt(messages, self._call.question, **self._call.template_kwargs)

    def _text_prompt(self) -> Prompt:
        (turn,) = self._call.turns
        return Prompt.of(*turn.parts, query=self._call.question, rendering=document_rendering).to_complete()

    def check_size(self, most: int | None) -> None:
        """Check that the prompt fits, beside its answer, into the context window and into what the server allows.

        Raises:
            ContextOverflow: It does not fit into the context window.
            TooLarge: It is longer than the server allows.
        """
        with about(self._call.field):
            prepared = self._lm.prepare_to_generate(self.prompt, self._call.sampling.max_new_tokens)
            _check_length(prepared, most)

    def one(self, index: int, emit: Emit, abandoned: Event) -> tuple[Generation, Choice]:
        """Generate one answer."""
        options = self._options(index, abandoned)
        if not self._call.stream:
            generation = self._engine.generate(self._lm, self.prompt, options, abandoned)
            kept = self._kept
            text = decode_keeping(self._tokenizer, generation.token_ids, kept) if kept else generation.text
            return generation, self._choice(Answer.join(self._deltas([text], generation.labels)), generation)
        options["keep_tokens"] = self._kept
        stream = self._engine.stream(self._lm, self.prompt, options, abandoned)
        labels = self._lm.prepare(self.prompt).labels if any(each.slots for each in self.prompt.sets) else {}
        deltas = []
        for delta in self._deltas(stream, labels):
            deltas.append(delta)
            emit(index, delta)
        if stream.generation is None or abandoned.is_set():
            raise CancelledError
        return stream.generation, self._choice(Answer.join(deltas), stream.generation)

    @property
    def _kept(self) -> frozenset[int]:
        return self._calling.kept_tokens if self._call.chat and self._call.schema is None else frozenset()

    def _options(self, index: int, abandoned: Event) -> dict[str, Any]:
        """Return the keywords of `generate`."""
        call, sampling = self._call, self._call.sampling
        options: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens}
        if "repetition_penalty" in sampling.more:
            options["repetition_penalty"] = sampling.more["repetition_penalty"]
        if sampling.temperature:
            options |= {**sampling.more, "do_sample": True, "temperature": sampling.temperature}
            if sampling.seed is not None:
                options["seed"] = sampling.seed + index
        if self._stops_model:
            options["stop_strings"] = list(self._stops_model)
        if call.schema is not None:
            with about("response_format"), self._engine.compiling([call.schema], abandoned):
                return constrain(self._lm, dict(call.schema), **options).options
        if call.tools:
            parameters = [each["function"].get("parameters") for each in call.tools]
            with about("tools"), self._engine.compiling(parameters, abandoned):
                return self._calling.constrain(self.prompt, **options).options
        return options

    def _deltas(self, texts: Iterable[str], labels: Labels) -> Iterator[AnswerDelta]:
        """Yield the pieces of an answer, up to the first stop string, with the caller's numbers of documents."""
        if self._call.schema is not None:
            yield from map(AnswerDelta, translate_stream(_checked(texts, self._call), labels))
            return
        if self._stops_model:
            texts = stream_until_stop_string(texts, self._stops_model)
        if self._call.chat:
            stops = () if self._stops_model else self._call.stop
            yield from parse_answer(self._calling.parser(self.prompt), texts, stops, labels)
        else:
            yield from map(AnswerDelta, translate_stream(texts, labels))

    def _choice(self, answer: Answer, generation: Generation) -> Choice:
        _check_arguments(answer, self._call.tools)
        stopped = trim_at_stop_string(generation.text, self._call.stop) != generation.text
        reason = "tool_calls" if answer.tool_calls else "stop" if stopped else generation.finish_reason
        cites = self._call.chat and self._call.schema is None and self.prompt.segments
        question, order = self._call.question, generation.order
        return Choice(
            answer=answer,
            finish_reason=reason,
            logprobs=self._logprobs(generation) if self._call.logprobs else None,
            citations=citations_of(answer.content, question, self.prompt, order) if cites else [],
        )

    def _logprobs(self, generation: Generation) -> list[dict[str, Any]]:
        """Return the tokens in OpenAI's shape; none that begins after a stop string."""
        end = len("".join(stream_until_stop_string([generation.text], self._stops_model)))
        return [
            {"token": each.token, "logprob": each.logprob, "bytes": list(each.token.encode()), "top_logprobs": []}
            for each in token_logprobs(generation, self._tokenizer)
            if each.start < end or not each.token
        ]


def _checked(texts: Iterable[str], call: Call) -> Iterator[str]:
    """Yield texts that are JSON of the schema of a call when joined.

    Raises:
        IncompleteObject: They are no JSON.
        InvalidObject: They do not follow the schema, in what no grammar expresses.
    """
    whole = []
    for text in texts:
        whole.append(text)
        yield text
    with about("response_format"):
        value = check_complete("".join(whole))
        if call.strict:
            validate_value(value, call.schema or {})


def _check_arguments(answer: Answer, tools: Sequence[Mapping[str, Any]]) -> None:
    """Check calls with the schemas of their tools, but for tools with `strict: false`, whose caller does that.

    Raises:
        InvalidObject: Arguments do not follow a schema, in what no grammar expresses.
    """
    functions = {each["function"]["name"]: each["function"] for each in tools}
    for call in answer.tool_calls:
        function = functions.get(call.name)
        if function is not None and function.get("strict") is not False:
            with about("tools"):
                validate_value(dict(call.arguments), {"type": "object", **(function.get("parameters") or {})})
