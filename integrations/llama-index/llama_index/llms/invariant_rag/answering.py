"""One call: from a prompt and LlamaIndex's parameters to the text that the library generates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

from llama_index.core.bridge.pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from invariant_rag import Generation, InvariantModel, Prompt
from invariant_rag.checks import check_real
from invariant_rag.errors import InvalidOption, TokenizerRequired
from invariant_rag.generation.answer_pieces import parse_answer
from invariant_rag.generation.answers import Answer as ParsedAnswer
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.citations import CitedSpan, cite_spans, numbers_of
from invariant_rag.generation.ledger import ledger
from invariant_rag.generation.logprobs import TokenLogprob, token_logprobs
from invariant_rag.generation.streaming import (
    StopOnEvent,
    decode_keeping,
    stream_until_stop_string,
    trim_at_stop_string,
)
from invariant_rag.generation.structured import check_complete, constrain
from invariant_rag.prompts import ToolCall
from invariant_rag.prompts.labels import Labels, translate_stream
from invariant_rag.routing import RoutedGeneration
from llama_index.llms.invariant_rag.errors import no_swallowed_errors
from llama_index.llms.invariant_rag.function_calling import ChatOptions


@dataclass(frozen=True)
class Reporting:
    """What an answer says of itself, besides the ledger.

    Attributes:
        logprobs: Whether it holds the log-probabilities of its tokens.
        citations: Whether it says which spans of it are found in which nodes.
    """

    logprobs: bool = False
    citations: bool = False


@dataclass(frozen=True)
class Request:
    """What one call asks for.

    Attributes:
        prompt: Builds the prompt, once there is a model with a chat template.
        options: Keywords of `InvariantModel.generate`.
        stops: Strings that end the answer; there are none where it is an object.
        output_cls: The answer is JSON of its schema; None: any text.
        recognized: Whether every node in the prompt is known to be a segment.
        chat: What offers tools, and takes reasoning and calls out of an answer. None: the answer is its text.
        reporting: What the answer says of itself, besides the ledger.
    """

    prompt: Callable[[InvariantModel], Prompt]
    options: Mapping[str, Any]
    stops: Sequence[str] = ()
    output_cls: type[BaseModel] | None = None
    recognized: bool = True
    chat: ChatOptions | None = None
    reporting: Reporting = Reporting()

    def keywords(self, model: InvariantModel, prompt: Prompt) -> dict[str, Any]:
        """Return keywords of `generate` for this model and the prompt of this request."""
        if self.output_cls is not None:
            return constrain(model, self.output_cls, **self.options).options
        if self.chat is not None and self.chat.tools:  # stop strings end the text, and do not cut calls
            return self.chat.calling(model).constrain(prompt, **self.options).options
        return {**self.options, "stop_strings": list(self.stops) or None}

    @property
    def alone(self) -> bool:
        """Whether it shares no batch: a seed or a grammar is for one text."""
        tools = self.chat is not None and self.chat.tools
        return self.output_cls is not None or bool(tools) or bool(self.options.get("do_sample"))

    def kept_tokens(self, model: InvariantModel) -> frozenset[int]:
        """Return the special tokens that the text of an answer keeps, because `deltas` parses them."""
        return self.chat.calling(model).kept_tokens if self.chat is not None else frozenset()

    def deltas(
        self, model: InvariantModel, prompt: Prompt, texts: Iterable[str], labels: Labels
    ) -> Iterator[AnswerDelta]:
        """Yield what pieces of a text mean, up to the first stop string, with citations as the caller numbers nodes.

        Raises:
            IncompleteObject: The text ends within a call.
        """
        if self.chat is None:
            yield from map(AnswerDelta, translate_stream(stream_until_stop_string(texts, self.stops), labels))
            return
        parser, tools = self.chat.calling(model).parser(prompt), bool(self.chat.tools)
        if not tools:  # `generate` got the stop strings, too: they end reasoning as well
            texts = stream_until_stop_string(texts, self.stops)
        yield from parse_answer(parser, texts, self.stops if tools else ())

    def answer(self, model: InvariantModel, prompt: Prompt, generation: Generation) -> Answer:
        """Return the answer that a generation for this request's prompt is.

        Raises:
            IncompleteObject: An object was asked for, and the answer was cut off; or it ends within a call.
        """
        if self.output_cls is not None:
            check_complete(generation.text)
        kept = self.kept_tokens(model)
        text = decode_keeping(_tokenizer_of(model), generation.token_ids, kept) if kept else generation.text
        found = ParsedAnswer.join(self.deltas(model, prompt, [text], generation.labels))
        logprobs = None
        if self.reporting.logprobs:
            tools = self.chat is not None and self.chat.tools
            end = len(trim_at_stop_string(generation.text, () if tools else self.stops))
            tokens = token_logprobs(generation, _tokenizer_of(model))
            logprobs = [each for each in tokens if each.start < end or not each.token]
        citations = None
        if self.reporting.citations and self.output_cls is None:
            numbers = numbers_of(prompt)
            citations = cite_spans(found.content, prompt.query or "", prompt.segments, generation.order, numbers)
        return Answer(
            found.content, generation, prompt, self.recognized, found.reasoning, found.tool_calls, logprobs, citations
        )


def _tokenizer_of(model: InvariantModel) -> PreTrainedTokenizerBase:
    if model.tokenizer is None:
        raise TokenizerRequired("expected a model with a tokenizer: tokens are reported as text")
    return model.tokenizer


def generation_options(
    *,
    max_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    **more: Any,
) -> dict[str, Any]:
    """Return LlamaIndex's parameters as keywords of `InvariantModel.generate`.

    Raises:
        InvalidOption: The temperature is no number.
    """
    options = {"max_new_tokens": max_tokens, **more}
    if check_real("temperature", temperature, error=InvalidOption) > 0:
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        options |= {"do_sample": True} | {name: value for name, value in sampling.items() if value is not None}
    return options


@dataclass(frozen=True)
class Answer:
    """What came of a call.

    Attributes:
        text: The text, without the stop string that ended it, and with citations of documents by their given numbers.
        generation: All else about it.
        prompt: The prompt, whose segments the generation names by their index.
        recognized: Whether every node in the prompt is known to be a segment.
        reasoning: What a chat model thought before.
        tool_calls: The calls of tools.
        logprobs: The tokens with their log-probabilities, if asked for.
        citations: The parts of the text that have a source, if asked for.
    """

    text: str
    generation: Generation
    prompt: Prompt
    recognized: bool
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    logprobs: Sequence[TokenLogprob] | None = None
    citations: Sequence[CitedSpan] | None = None

    def report(self) -> dict[str, Any]:
        """Return usage, why it ended, the ledger, and which branch a router took."""
        generation = self.generation
        usage = generation.usage
        report: dict[str, Any] = {
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.total_tokens,
                "cached_tokens": usage.cached_tokens,
            },
            "finish_reason": generation.finish_reason,
            **ledger(generation, self.prompt, recognized=self.recognized),
        }
        if isinstance(generation, RoutedGeneration):
            report["routing"] = {
                "branch": generation.branch,
                "plain_confidence": generation.plain_confidence,
                "invariant_confidence": generation.invariant_confidence,
            }
        return report


@dataclass(frozen=True)
class MicroBatches:
    """A queue in which concurrent calls wait to be decoded together.

    Attributes:
        batcher: The queue.
        size: The most calls to decode together.
    """

    batcher: MicroBatcher
    size: int

    def generate(self, model: InvariantModel, prompt: Prompt, options: Mapping[str, Any]) -> Generation:
        """Generate, possibly together with other calls that wait."""
        return self.batcher.generate(model, prompt, options, batch_size=self.size)


def answer(load: Callable[[], InvariantModel], request: Request, batches: MicroBatches | None = None) -> Answer:
    """Answer a request.

    Args:
        load: Returns the model.
        request: What is asked for.
        batches: Where to wait for concurrent calls; None: nowhere. Sampled answers and objects are decoded alone.

    Raises:
        AnswerFailed: transformers refused the call.
        IncompleteObject: An object was asked for, and something else than its end ended the answer.
        UnsupportedCombination: An object was asked for, and none is known to fit into `max_tokens`.
    """
    with no_swallowed_errors():
        model = load()
        prompt = request.prompt(model)
        options = request.keywords(model, prompt)
        if batches is None or request.alone:
            generation = model.generate(prompt, **options)
        else:
            generation = batches.generate(model, prompt, options)
        return request.answer(model, prompt, generation)


async def answer_in_thread(
    load: Callable[[], InvariantModel], request: Request, batches: MicroBatches | None = None
) -> Answer:
    """Return what `answer` does; the event loop goes on meanwhile, and cancelling the task ends the generation.

    With `batches`, a cancelled generation runs on: others may be decoded with it.
    """
    if batches is not None and not request.alone:
        return await asyncio.to_thread(answer, load, request, batches)
    abandoned = Event()
    criteria = [*(request.options.get("stopping_criteria") or ()), StopOnEvent(abandoned)]
    stoppable = replace(request, options={**request.options, "stopping_criteria": criteria})
    try:
        return await asyncio.to_thread(answer, load, stoppable)
    finally:
        abandoned.set()


def stream(load: Callable[[], InvariantModel], request: Request) -> Generator[AnswerDelta | Answer, None, None]:
    """Yield the pieces of `answer` as they come, and then the whole answer. Nothing is loaded before it is read.

    Raises:
        AnswerFailed: transformers refused the call.
        IncompleteObject: An object was asked for, and something else than its end ended the answer.
        UnsupportedCombination: An object was asked for, and none is known to fit into `max_tokens`.
    """
    with no_swallowed_errors():
        model = load()
        prompt = request.prompt(model)
        labels = model.prepare(prompt).labels if any(each.slots for each in prompt.sets) else {}
        options = {**request.keywords(model, prompt), "keep_tokens": request.kept_tokens(model)}
        with closing(model.stream(prompt, **options)) as pieces:
            yield from request.deltas(model, prompt, pieces, labels)
            if pieces.generation is not None:
                yield request.answer(model, prompt, pieces.generation)
