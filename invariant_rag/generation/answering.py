r"""One request to a model, through all its steps: prompt, constraint, decoding, parsing, citations, ledger.

LangChain, LlamaIndex and the server are thin adapters of this: they write an `AnswerRequest`, and convert a `Reply`.

>>> request = AnswerRequest(messages=[{"role": "user", "content": [documents, question]}])  # doctest: +SKIP
>>> Answering(lm, request).reply().first.content  # doctest: +SKIP
'At noon.'
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice, repeat, zip_longest
from operator import attrgetter
from threading import Event
from typing import Any

from invariant_rag.checks import MOST_CALLS, check_kind, check_number, check_real
from invariant_rag.errors import IncompleteObject, InvalidOption, InvalidPrompt
from invariant_rag.generation.answer_parsing import trim_at_stop_string, until_stop_string
from invariant_rag.generation.answers import Answer, AnswerDelta, AnswerRequest, Reply
from invariant_rag.generation.batching import Call, MicroBatcher
from invariant_rag.generation.citations import cite_spans
from invariant_rag.generation.json_schema import check_expressible, json_schema
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import check_options, resolve_max_new_tokens
from invariant_rag.generation.outputs import Generation, Usage, ledger
from invariant_rag.generation.prepare import PreparedPrompt
from invariant_rag.generation.streaming import TextStream, decode_keeping, token_logprobs
from invariant_rag.generation.structured import ToolCalling, constrain
from invariant_rag.prompts import Tool, render_chat, template_format
from invariant_rag.prompts.tools import as_tools
from invariant_rag.segments import Prompt


class Answering:
    """A request to one model; `prompt` is what the model gets.

    Raises:
        InvalidPrompt: There is not one of messages and prompt; or as for `render_chat`.
        InvalidTool: As for `ToolCalling`.
    """

    def __init__(self, lm: InvariantModel, request: AnswerRequest) -> None:
        self.lm = check_kind("lm", lm, InvariantModel)
        self.request = check_kind("request", request, AnswerRequest)
        check_number("n", request.n, 1, MOST_CALLS, error=InvalidOption)
        if (request.messages is None) == (request.prompt is None):
            raise InvalidPrompt("expected either messages or a prompt")
        tools = as_tools(request.tools) if request.tools else ()
        choice, parallel = request.tool_choice, request.parallel
        self._schema, self._object_tool = request.schema, ""
        if self._schema is not None and tools and choice != "none":
            if choice == "auto":  # decoded as the call of one more tool, so that the model knows the schema
                tools = (*tools, _object_tool(self._schema))
                self._object_tool, choice, parallel = tools[-1].name, "required", False
            self._schema = None
        # Where the model may write calls or an object, the text is cut afterwards: stop strings do not cut those.
        self._stops = request.stop if self._schema is None and not tools else ()
        self._calling: ToolCalling | None = None
        self._tokenizer: Any = lm.tokenizer
        self._kept_tokens = frozenset[int]()
        if request.prompt is not None:
            self.prompt = check_kind("prompt", request.prompt, Prompt, error=InvalidPrompt)
            return
        messages, variables = request.messages or (), request.template_kwargs
        reasons = self._tokenizer and self._schema is None and template_format(self._tokenizer).reasoning is not None
        if tools or reasons or choice not in ("auto", "none"):
            calling = ToolCalling(lm, tools, tool_choice=choice, parallel=parallel)
            self.prompt = calling.prompt(messages, request.question, **variables)
            if self._schema is None:
                self._calling, self._kept_tokens = calling, calling.kept_tokens
        else:
            self.prompt = render_chat(messages, self._tokenizer, request.question, template_kwargs=variables)

    @cached_property
    def prepared(self) -> PreparedPrompt:
        """The prompt as the model gets it, or ContextOverflow: it does not fit, with the tokens of the answer."""
        limit = resolve_max_new_tokens(self.request.max_new_tokens, self.request.options)
        return self.lm.prepare_to_generate(self.prompt, limit)

    def reply(
        self, batcher: MicroBatcher | None = None, *, batch_size: int = 8, abandoned: Event | None = None
    ) -> Reply:
        """Generate the answers, as one batch where that is possible; for the arguments, see `MicroBatcher.generate`.

        Raises:
            IncompleteObject: The model ended its answer within a call, though there was room for more.
        """
        return reply_all([self], batcher, batch_size=batch_size, abandoned=abandoned)[0]

    def stream(
        self, batcher: MicroBatcher | None = None, *, batch_size: int = 8, abandoned: Event | None = None
    ) -> Generator[AnswerDelta | Reply, None, None]:
        """Generate, and yield the deltas of the answers as they come, and then the whole reply. See `reply`.

        With a batcher, the request waits from now on, before a delta is requested. Closing the iterator ends the
        generation.
        """
        begin = partial((batcher or MicroBatcher()).stream, self.lm, batch_size=batch_size, abandoned=abandoned)
        keywords = {"keep_tokens": self._kept_tokens}
        return self._merged([begin(prompt, {**options, **keywords}) for prompt, options in self.calls()], abandoned)

    def _merged(
        self, streams: Sequence[TextStream], abandoned: Event | None
    ) -> Generator[AnswerDelta | Reply, None, None]:
        try:
            for deltas in zip_longest(*map(self._deltas, streams)):
                for index, delta in enumerate(deltas):
                    for copy in [index] if len(streams) > 1 else range(self.request.n):
                        if delta is not None:
                            yield replace(delta, index=copy)
            if abandoned is not None and abandoned.is_set():
                raise CancelledError
            generations = [each.generation for each in streams if each.generation]
            if len(generations) == len(streams):
                yield self.parse(generations)
        finally:
            for each in streams:
                each.close()

    def calls(self) -> list[Call]:
        """Return a call for each answer that may be another one."""
        prompt: Any = self.prompt
        if type(self.lm) is InvariantModel:  # what was prepared already need not be tokenized again
            prompt = vars(self).get("prepared", prompt)
        is_sampled = self.request.temperature or self.request.options.get("do_sample")
        return list(zip(repeat(prompt), map(self._options, range(self.request.n if is_sampled else 1))))

    def _options(self, index: int) -> dict[str, Any]:
        """Return the keywords of `InvariantModel.generate` for the answer of an index."""
        request = self.request
        options = {"max_new_tokens": request.max_new_tokens, **request.options}
        sampling: dict[str, Any] = {}
        for name in ("top_p", "top_k", "min_p", "seed"):
            if (value := getattr(request, name)) is not None:
                sampling[name] = value
        if check_real("temperature", request.temperature, error=InvalidOption):
            options = {"do_sample": True, **options, "temperature": request.temperature, **sampling}
            if request.seed is not None:
                options["seed"] = check_number("seed", request.seed, error=InvalidOption) + index
        elif sampling:  # wrong ones are refused where they mean nothing, too
            check_options(sampling, self.lm.model)
        if request.top_logprobs:
            options["top_logprobs"] = check_number("top_logprobs", request.top_logprobs, 1, error=InvalidOption)
        if self._stops:
            options["stop_strings"] = list(self._stops)
        if self._schema is not None:
            return constrain(self.lm, self._schema, **options)
        if self._calling is not None and self._calling.offered:
            return self._calling.constrain(self.prompt, **options)
        return options

    def _deltas(self, texts: Iterable[str], *, stops: bool = True) -> Iterator[AnswerDelta]:
        """Yield the parts of a text, up to the first stop string."""
        early = self._stops if stops else ()
        deltas = until_stop_string(map(AnswerDelta, filter(None, texts)), early)
        if self._calling is None:
            return deltas
        parsed = self._calling.parser(self.prompt).parse(each.content for each in deltas)
        is_text = stops and not self._calling.forced  # half a marker looks like text
        return self._with_object(until_stop_string(parsed, self.request.stop if is_text else ()))

    def _with_object(self, deltas: Iterable[AnswerDelta]) -> Iterator[AnswerDelta]:
        """Yield the parts of an answer, with calls of the tool of a schema's object as text."""
        objects = set()
        for delta in deltas:
            call = delta.call
            if call and call.name and call.name == self._object_tool:
                objects.add(call.index)
            if call is None or call.index not in objects:
                yield delta
            elif call.arguments:
                yield AnswerDelta(call.arguments)

    def parse(self, generations: Sequence[Generation]) -> Reply:
        """Return the reply of generations, one for each of `calls`, or raise IncompleteObject; see `reply`."""
        first, request = generations[0], self.request
        answers = list(map(self._answer, generations))
        answers += answers[:1] * (request.n - len(answers))
        written = sum(map(attrgetter("generation.usage.completion_tokens"), answers))
        return Reply(
            answers=tuple(answers),
            usage=Usage(first.usage.prompt_tokens, written, first.usage.cached_tokens),
            read_ledger=partial(ledger, first, self.prompt, recognized=request.recognized),
            model=self.lm.name,
        )

    def _answer(self, generation: Generation) -> Answer:
        request, reason, kept = self.request, str(generation.finish_reason), self._kept_tokens
        text = decode_keeping(self._tokenizer, generation.token_ids, kept) if kept else generation.text
        is_plain, logprobs, citations = self._calling is None and not request.stop, None, None
        answer = Answer(text) if is_plain else Answer.join(self._deltas([text]))
        if request.stop and answer != Answer.join(self._deltas([text], stops=False)):
            reason = "stop"
        if reason == "stop" and answer.tool_calls:
            reason = "tool_calls"
        if reason != "length" and not is_plain:
            answer.check_complete()
            if self._calling and self._calling.forced and not (answer.tool_calls or self._object_tool):
                raise IncompleteObject(f"expected a call of a tool, got an answer that ends with {answer.content!r}")
        if request.logprobs:  # of no token that begins after a stop string
            end = len(trim_at_stop_string(generation.text, self._stops))
            tokens = token_logprobs(generation, self._tokenizer)
            logprobs = [each for each in tokens if each.start < end or not each.token]
        if request.citations and request.schema is None:
            citations = cite_spans(answer.content, self.prompt.segments, generation.order, generation.labels)
        return replace(answer, finish_reason=reason, logprobs=logprobs, citations=citations, generation=generation)


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
    lm, calls, queue = answerings[0].lm, list(map(Answering.calls, answerings)), batcher or MicroBatcher()
    generations = iter(queue.generate_all(lm, chain(*calls), batch_size=batch_size, abandoned=abandoned))
    return [each.parse(list(islice(generations, len(own)))) for each, own in zip(answerings, calls, strict=True)]


def _object_tool(schema: Any) -> Tool:
    """Return a tool whose arguments are the object that a schema describes."""
    described = check_expressible(json_schema(schema))
    name = re.sub(r"[^\w./:-]+", "_", described.get("title") or "answer")
    purpose = "Give the final answer to the user."
    return Tool(name, " ".join(filter(None, (purpose, described.get("description")))), described)
