"""One call: from a prompt and LlamaIndex's parameters to the text that the library generates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

from llama_index.core.bridge.pydantic import BaseModel

from invariant_rag import Generation, InvariantModel, Prompt
from invariant_rag.generation.streaming import StopOnEvent, stream_until_stop_string, trim_at_stop_string
from invariant_rag.generation.structured import check_complete, constrain


@dataclass(frozen=True)
class Request:
    """What one call asks for.

    Attributes:
        prompt: Builds the prompt, once there is a model with a chat template.
        options: Keywords of `InvariantModel.generate`.
        stops: Strings that end the answer; there are none where it is an object.
        output_cls: The answer is JSON of its schema; None: any text.
    """

    prompt: Callable[[InvariantModel], Prompt]
    options: Mapping[str, Any]
    stops: Sequence[str] = ()
    output_cls: type[BaseModel] | None = None

    def keywords(self, model: InvariantModel) -> dict[str, Any]:
        """Return keywords of `generate` for this model."""
        if self.output_cls is not None:
            return constrain(model, self.output_cls, **self.options).options
        return {**self.options, "stop_strings": list(self.stops) or None}

    def check(self, generation: Generation) -> None:
        """Raise IncompleteObject where an object was asked for, and the answer was cut off."""
        if self.output_cls is not None:
            check_complete(generation.text)


def generation_options(
    *,
    max_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    **more: Any,
) -> dict[str, Any]:
    """Return LlamaIndex's parameters as keywords of `InvariantModel.generate`."""
    options = {"max_new_tokens": max_tokens, **more}
    if temperature > 0:
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        options |= {"do_sample": True} | {name: value for name, value in sampling.items() if value is not None}
    return options


def answer(load: Callable[[], InvariantModel], request: Request) -> tuple[str, Generation]:
    """Return the text of an answer, without the stop string that ended it, and all else about it.

    Raises:
        IncompleteObject: An object was asked for, and something else than its end ended the answer.
        UnsupportedCombination: An object was asked for, and none is known to fit into `max_tokens`.
    """
    model = load()
    generation = model.generate(request.prompt(model), **request.keywords(model))
    request.check(generation)
    return trim_at_stop_string(generation.text, request.stops), generation


async def answer_in_thread(load: Callable[[], InvariantModel], request: Request) -> tuple[str, Generation]:
    """Return what `answer` does; the event loop goes on meanwhile, and cancelling the task ends the generation."""
    abandoned = Event()
    criteria = [*(request.options.get("stopping_criteria") or ()), StopOnEvent(abandoned)]
    stoppable = replace(request, options={**request.options, "stopping_criteria": criteria})
    try:
        return await asyncio.to_thread(answer, load, stoppable)
    finally:
        abandoned.set()


def stream(load: Callable[[], InvariantModel], request: Request) -> Generator[str | Generation, None, None]:
    """Yield the text of `answer` as it comes, and then all else about it. Nothing is loaded before it is read.

    Raises:
        IncompleteObject: An object was asked for, and something else than its end ended the answer.
        UnsupportedCombination: An object was asked for, and none is known to fit into `max_tokens`.
    """
    model = load()
    with closing(model.stream(request.prompt(model), **request.keywords(model))) as pieces:
        yield from stream_until_stop_string(pieces, request.stops)
        if pieces.generation is not None:
            request.check(pieces.generation)
            yield pieces.generation
