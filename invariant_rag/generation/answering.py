r"""One request to a model, through all its steps: prompt, constraint, decoding, parsing, citations, ledger.

LangChain, LlamaIndex and the server are thin adapters of this: they write an `AnswerRequest`, and read a `Reply`.

>>> request = AnswerRequest(
...     messages=[{"role": "user", "content": [documents, question]}], stop=("\n\n",)
... )  # doctest: +SKIP
>>> Answering(lm, request).reply().first.content  # doctest: +SKIP
'At noon.'
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice, repeat, starmap
from operator import attrgetter
from threading import Event
from typing import TYPE_CHECKING, Any

from invariant_rag.checks import MOST_CALLS, check_kind, check_number, check_real
from invariant_rag.errors import InvalidOption, InvalidPrompt, TokenizerRequired, UnsupportedCombination
from invariant_rag.generation.answer_parsing import parse_answer
from invariant_rag.generation.answers import Answer, AnswerDelta, AnswerRequest, ModelAnswer, Reply, Usage
from invariant_rag.generation.batching import MicroBatcher, generate_alone
from invariant_rag.generation.citations import cite_spans
from invariant_rag.generation.json_schema import check_expressible, json_schema
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import check_options, resolve_max_new_tokens
from invariant_rag.generation.outputs import Generation, ledger
from invariant_rag.generation.streaming import (
    StopOnEvent,
    TextStream,
    decode_keeping,
    stream_until_stop_string,
    token_logprobs,
    trim_at_stop_string,
)
from invariant_rag.generation.structured import constrain
from invariant_rag.generation.tools import ToolCalling
from invariant_rag.prompts import Tool, render_chat, template_format
from invariant_rag.prompts.tools import as_tools
from invariant_rag.segments import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from invariant_rag.generation.prepare import PreparedPrompt


class Answering:
    """A request to one model.

    Attributes:
        lm: The model.
        request: The request.
        prompt: What the model gets.

    Raises:
        InvalidPrompt: There is not one of messages and prompt; or as for `render_chat`.
        InvalidTool: As for `ToolCalling`.
        TokenizerRequired: There are messages, tools or a schema, and the model has no tokenizer.
    """

    def __init__(self, lm: InvariantModel, request: AnswerRequest) -> None:
        self.lm = check_kind("lm", lm, InvariantModel)
        self.request = check_kind("request", request, AnswerRequest)
        check_number("n", request.n, 1, MOST_CALLS, error=InvalidOption)
        if (request.messages is None) == (request.prompt is None):
            raise InvalidPrompt("expected either messages or a prompt")
        if request.prompt is not None and request.tools:
            raise UnsupportedCombination(
                "expected a prompt without tools: only in a conversation is there a place for them",
                hint="Give messages.",
            )
        tools, choice, parallel = as_tools(request.tools), request.tool_choice, request.parallel
        self._schema, self._object_tool = request.schema, ""
        if self._schema is not None and tools and choice != "none":
            if choice == "auto":  # decoded as the call of one more tool, so that the model knows the schema
                tools = (*tools, _object_tool(self._schema))
                self._object_tool, choice, parallel = tools[-1].name, "required", False
            self._schema = None
        self._calling: ToolCalling | None = None
        if request.prompt is not None:
            self.prompt = check_kind("prompt", request.prompt, Prompt, error=InvalidPrompt)
        elif (
            tools
            or choice not in ("auto", "none")
            or (self._schema is None and template_format(self._tokenizer).reasoning)
        ):
            calling = ToolCalling(lm, tools, tool_choice=choice, parallel=parallel)
            self.prompt = calling.prompt(request.messages or (), request.question, **request.template_kwargs)
            self._calling = calling if self._schema is None else None
        else:
            values = request.template_kwargs
            self.prompt = render_chat(request.messages or (), self._tokenizer, request.question, template_kwargs=values)
        # Where the model may write calls or an object, the text is cut afterwards: stop strings do not cut those.
        is_free = self._schema is None and not tools
        self._stops = request.stop if is_free else ()

    @cached_property
    def prepared(self) -> PreparedPrompt:
        """The prompt as the model reads it, or ContextOverflow: it does not fit, with the tokens of the answer."""
        wanted = resolve_max_new_tokens(self.request.max_new_tokens, self.request.options)
        return self.lm.prepare_to_generate(self.prompt, wanted)

    def reply(
        self, batcher: MicroBatcher | None = None, *, batch_size: int = 8, abandoned: Event | None = None
    ) -> Reply:
        """Generate the answers, as one batch where that is possible.

        Args:
            batcher: Where to wait for concurrent requests, to be decoded with them. None: nowhere.
            batch_size: The most sequences of a batch.
            abandoned: Once set, nobody waits for the answer any more, and the generation ends.

        Raises:
            CancelledError: It was abandoned.
            IncompleteObject: The model ended its answer within a call, though there was room for more.
            InvariantRAGError: As for `InvariantModel.generate` and `constrain`.
        """
        return reply_all([self], batcher, batch_size=batch_size, abandoned=abandoned)[0]

    def stream(
        self, batcher: MicroBatcher | None = None, *, batch_size: int = 8, abandoned: Event | None = None
    ) -> Generator[AnswerDelta | Reply, None, None]:
        """Generate, and yield the pieces of the answers as they come, and then the whole reply. See `reply`.

        With a batcher, the request waits from now on, before a piece is asked for. Closing the iterator ends the
        generation.
        """
        queue = MicroBatcher() if batcher is None and self._drawn > 1 else batcher
        streams = []
        for prompt, options in self.calls():
            options["keep_tokens"] = self._kept_tokens
            if queue is None:
                if abandoned is not None:
                    criteria = options.get("stopping_criteria") or ()
                    options["stopping_criteria"] = [*criteria, StopOnEvent(abandoned)]
                streams.append(self.lm.stream(prompt, **options))
            else:
                streams.append(queue.stream(self.lm, prompt, options, batch_size=batch_size, abandoned=abandoned))
        return self._pieces(streams, abandoned)

    def _pieces(
        self, streams: Sequence[TextStream], abandoned: Event | None
    ) -> Generator[AnswerDelta | Reply, None, None]:
        with ExitStack() as stack:
            for each in streams:
                stack.enter_context(closing(each))
            found: list[list[AnswerDelta]] = [[] for _ in streams]
            for index, delta in _interleaved([self._deltas(each) for each in streams]):
                found[index].append(delta)
                yield replace(delta, index=index)
            if abandoned is not None and abandoned.is_set():
                raise CancelledError
            generations = [each.generation for each in streams]
            if all(generations):
                pairs = [(each, Answer.join(deltas)) for each, deltas in zip(generations, found, strict=True) if each]
                for index in range(self._drawn, self.request.n):
                    yield from (replace(delta, index=index) for delta in found[0])
                yield self._reply(pairs)

    @property
    def _drawn(self) -> int:
        """How many answers are generated: greedy ones are all the same."""
        is_sampled = bool(self.request.temperature or self.request.options.get("do_sample"))
        return self.request.n if is_sampled else 1

    def calls(self) -> list[tuple[Prompt, dict[str, Any]]]:
        """Return the prompt, with keywords of `InvariantModel.generate`, for each answer to generate."""
        prompt: Any = self.prompt
        if type(self.lm) is InvariantModel:  # what was prepared already need not be tokenized again
            prompt = vars(self).get("prepared", prompt)
        return list(zip(repeat(prompt), map(self._options, range(self._drawn))))

    def parse(self, generations: Sequence[Generation]) -> Reply:
        """Return the reply that generations are, one for each of `calls`, or raise IncompleteObject; see `reply`."""
        kept, is_text = self._kept_tokens, self._calling is None and not self._stops
        pairs = []
        for each in generations:
            text = decode_keeping(self._tokenizer, each.token_ids, kept) if kept else each.text
            pairs.append((each, Answer(text) if is_text else Answer.join(self._deltas([text]))))
        return self._reply(pairs)

    def _options(self, index: int) -> dict[str, Any]:
        """Return the keywords of `InvariantModel.generate` for the answer of an index."""
        request = self.request
        options = {"max_new_tokens": request.max_new_tokens, **request.options}
        sampling: dict[str, Any] = {}
        for name in ("top_p", "top_k", "min_p", "seed"):
            if (value := getattr(request, name)) is not None:
                sampling[name] = value
        if sampling:  # wrong ones are refused where they mean nothing, too
            check_options(sampling, self.lm.model)
        if check_real("temperature", request.temperature, error=InvalidOption):
            options = {"do_sample": True, **options, "temperature": request.temperature, **sampling}
            if request.seed is not None:
                options["seed"] = request.seed + index
        if request.top_logprobs:
            options["top_logprobs"] = check_number("top_logprobs", request.top_logprobs, 1, error=InvalidOption)
        if self._stops:
            options["stop_strings"] = list(self._stops)
        if self._schema is not None:
            return constrain(self.lm, self._schema, **options)
        if self._calling is not None and self._calling.offered:
            return self._calling.constrain(self.prompt, **options)
        return options

    @property
    def _kept_tokens(self) -> frozenset[int]:
        return frozenset() if self._calling is None else self._calling.kept_tokens

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.lm.tokenizer is None:
            raise TokenizerRequired("expected a model with a tokenizer: a conversation is text")
        return self.lm.tokenizer

    def _deltas(self, texts: Iterable[str]) -> Iterator[AnswerDelta]:
        """Yield what pieces of a text mean, up to the first stop string."""
        texts = stream_until_stop_string(texts, self._stops) if self._stops else texts
        if self._calling is None:
            yield from map(AnswerDelta, texts)
            return
        stops = () if self._stops else self.request.stop
        objects = set()
        for delta in parse_answer(self._calling.parser(self.prompt), texts, stops):
            call = delta.call
            if call and call.name and call.name == self._object_tool:
                objects.add(call.index)
            if call is None or call.index not in objects:
                yield delta
            elif call.arguments:  # of the tool that stands for the object of a schema
                yield AnswerDelta(call.arguments)

    def _reply(self, found: Sequence[tuple[Generation, Answer]]) -> Reply:
        first, request = found[0][0], self.request
        answers = list(starmap(self._answer, found))
        answers += answers[:1] * (request.n - len(answers))
        written = sum(map(attrgetter("generation.usage.completion_tokens"), answers))
        return Reply(
            answers=tuple(answers),
            usage=Usage(first.usage.prompt_tokens, written, first.usage.cached_tokens),
            ledger={**ledger(first, self.prompt, recognized=request.recognized), **first.details},
            model=self.lm.name,
        )

    def _answer(self, generation: Generation, answer: Answer) -> ModelAnswer:
        request, reason, logprobs, citations = self.request, str(generation.finish_reason), None, None
        may_stop = request.stop and self._schema is None
        if may_stop and trim_at_stop_string(generation.text, request.stop) != generation.text:
            reason = "stop"
        if reason == "stop" and answer.tool_calls:
            reason = "tool_calls"
        if reason != "length":
            answer.check_complete()
        if request.logprobs:  # of no token that begins after a stop string
            end = len(trim_at_stop_string(generation.text, self._stops))
            tokens = token_logprobs(generation, self._tokenizer)
            logprobs = [each for each in tokens if each.start < end or not each.token]
        if request.citations and request.schema is None:
            question, segments = self.prompt.query or "", self.prompt.segments
            citations = cite_spans(answer.content, question, segments, generation.order, generation.labels)
        return ModelAnswer(
            **vars(answer), finish_reason=reason, logprobs=logprobs, citations=citations, generation=generation
        )


def reply_all(
    answerings: Sequence[Answering],
    batcher: MicroBatcher | None = None,
    *,
    batch_size: int = 8,
    abandoned: Event | None = None,
) -> list[Reply]:
    """Generate the answers to several requests to one model; see `Answering.reply`."""
    if not answerings:
        return []
    lm, calls = answerings[0].lm, list(map(Answering.calls, answerings))
    if batcher is None and len(calls) == len(calls[0]) == 1:
        return [answerings[0].parse([generate_alone(lm, *calls[0][0], abandoned)])]
    queue = batcher or MicroBatcher()
    generations = iter(queue.generate_all(lm, chain(*calls), batch_size=batch_size, abandoned=abandoned))
    return [each.parse(list(islice(generations, len(own)))) for each, own in zip(answerings, calls, strict=True)]


def _interleaved(streams: Iterable[Iterator[AnswerDelta]]) -> Iterator[tuple[int, AnswerDelta]]:
    """Yield one piece of each in turn with its index, until all have ended."""
    running, done = dict(enumerate(streams)), object()
    while running:
        for index, each in list(running.items()):
            delta: Any = next(each, done)
            if delta is done:
                del running[index]
            else:
                yield index, delta


def _object_tool(schema: Any) -> Tool:
    """Return a tool whose arguments are the object that a schema describes."""
    described = json_schema(schema)
    check_expressible(described)
    name = re.sub(r"[^\w./:-]+", "_", described.get("title") or "answer")
    purpose = "Give the final answer to the user."
    return Tool(name, " ".join(filter(None, (purpose, described.get("description")))), described)
