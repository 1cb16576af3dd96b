"""One call of a model: its keywords for `InvariantModel.generate`, and its result as LangChain reports it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

from invariant_rag.checks import check_stops
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.prompts.labels import translate_labels, translate_stream
from invariant_rag.segments import Prompt
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.runnables import run_in_executor

from langchain_invariant_rag.errors import langchain_errors

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.generation.outputs import Generation
    from invariant_rag.generation.structured import Constraint

# Models of a server need no torch, so what imports it is imported where it is used.

T = TypeVar("T")

SAMPLING = ("temperature", "top_p", "top_k", "seed")


@dataclass(frozen=True)
class Call:
    """What one call asks for.

    Attributes:
        max_tokens: The most tokens to generate.
        sampling: Temperature, top_p, top_k and seed.
        stop: The text ends before the first of these; none where there is a schema, whose end is the end.
        schema: JSON schema that the text must follow.
        constrain: What else holds one text to a form: it takes and returns keywords, as `structured.constrain` does.
        more: Further keywords of transformers' `generate`.
        abandoned: Once set, the generation ends: nobody waits for it any more.
    """

    max_tokens: int
    sampling: Mapping[str, Any]
    stop: tuple[str, ...] = ()
    schema: str | None = None
    constrain: Callable[..., Constraint] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    abandoned: Event | None = None

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn at random."""
        return bool(self.sampling["temperature"])

    @property
    def alone(self) -> bool:
        """Whether its prompts are decoded one by one: a seed or a grammar is for one text."""
        constrained = self.schema is not None or self.constrain is not None
        return self.sampled or constrained or bool(self.more.get("do_sample"))

    def options(self, lm: InvariantModel) -> dict[str, Any]:
        """Return the keywords of `InvariantModel.generate`, for one prompt or one batch."""
        from invariant_rag.generation.streaming import StopOnEvent
        from invariant_rag.generation.structured import constrain

        options = {"max_new_tokens": self.max_tokens, **self.more}
        if self.sampled:
            given = {name: value for name, value in self.sampling.items() if value is not None}
            options = {"do_sample": True, **options, **given}
        if self.stop:
            options["stop_strings"] = list(self.stop)
        if self.schema is not None:
            options = constrain(lm, self.schema, **options).options
        if self.constrain is not None:
            options = self.constrain(**options).options
        if self.abandoned is not None:
            options["stopping_criteria"] = [*options.get("stopping_criteria", ()), StopOnEvent(self.abandoned)]
        return options

    def text(self, generation: Generation) -> str:
        """Return the text of a generation, up to the first stop sequence.

        Raises:
            IncompleteObject: It should follow a schema, and was cut off.
        """
        from invariant_rag.generation.streaming import trim_at_stop_string
        from invariant_rag.generation.structured import check_complete

        if self.schema is not None:
            check_complete(generation.text)
        return translate_labels(trim_at_stop_string(generation.text, self.stop), generation.labels)

    def stream(self, lm: InvariantModel, prompt: Prompt) -> Iterator[str | Generation]:
        """Yield the text in pieces, and at the end the whole generation. Joined, the pieces are `text` of it.

        Raises:
            IncompleteObject: As for `text`.
            InvariantContextOverflowError: The prompt is too long.
        """
        from invariant_rag.generation.streaming import stream_until_stop_string

        with langchain_errors():
            pieces = lm.stream(prompt, **self.options(lm))
            labels = lm.prepare(prompt).labels if any(each.slots for each in prompt.sets) else {}
            yield from translate_stream(stream_until_stop_string(pieces, self.stop), labels)
        if pieces.generation is not None:
            self.text(pieces.generation)
            yield pieces.generation


def call_of(parameters: Mapping[str, Any], stop: str | Sequence[str] | None, keywords: Mapping[str, Any]) -> Call:
    """Return what a call asks for: its own keywords, over the parameters of the model object.

    Args:
        parameters: `max_tokens`, `stop`, `generation_kwargs`, and those that concern sampling.
        stop: Stop sequences of the call, instead of the object's.
        keywords: What was bound or passed: any of the parameters, a `json_schema`, or further keywords of transformers'
            `generate`.

    Raises:
        UnsupportedCombination: Tools are left, which only a chat model calls.
    """
    more = {**parameters["generation_kwargs"], **keywords}
    if more.pop("tools", None):
        raise UnsupportedCombination(
            "expected a call without tools: a completion model does not call them", hint="Use ChatInvariant."
        )
    for name in ("stream", "tool_choice"):  # how LangChain asks, not what for
        more.pop(name, None)
    given = check_stops(stop if stop is not None else parameters["stop"])
    schema = more.pop("json_schema", None)
    return Call(
        max_tokens=more.pop("max_tokens", parameters["max_tokens"]),
        sampling={name: more.pop(name, parameters[name]) for name in SAMPLING},
        stop=tuple(given) if schema is None else (),
        schema=schema,
        abandoned=more.pop("abandoned", None),
        more=more,
    )


def usage_of(generation: Generation) -> UsageMetadata:
    """Return the tokens read and written, and how many of those read came from the cache."""
    usage = generation.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )


def report_of(
    generation: Generation, prompt: Prompt, call: Call, model_name: str, *, recognized: bool
) -> dict[str, Any]:
    """Return what else there is to say: why it ended, and the ledger (see `invariant_rag.generation.ledger`).

    Segments are named by their content hash, which is the id of their content block.
    """
    from invariant_rag.generation.ledger import ledger
    from invariant_rag.generation.streaming import trim_at_stop_string
    from invariant_rag.routing import RoutedGeneration

    stopped = trim_at_stop_string(generation.text, call.stop) != generation.text
    report: dict[str, Any] = {
        "model_name": model_name,
        "finish_reason": "stop" if stopped else generation.finish_reason,
        **ledger(generation, prompt, recognized=recognized),
    }
    if isinstance(generation, RoutedGeneration):
        report["routing"] = {
            "branch": generation.branch,
            "plain_confidence": generation.plain_confidence,
            "invariant_confidence": generation.invariant_confidence,
        }
    return report


async def off_the_loop(work: Callable[[Event], T]) -> T:
    """Run blocking work in a thread. A cancelled wait sets the event that the work was given."""
    abandoned = Event()
    try:
        return await run_in_executor(None, work, abandoned)
    finally:
        abandoned.set()


async def iterate_off_the_loop(iterate: Callable[[Event], Iterator[T]]) -> AsyncIterator[T]:
    """Yield what a blocking iterator yields, without blocking the loop.

    Whoever stops reading, or is cancelled, sets the event that the iterator was given.
    """
    abandoned, done = Event(), object()
    try:
        iterator = iterate(abandoned)
        while True:
            item: Any = await run_in_executor(None, next, iterator, done)
            if item is done:
                return
            yield item
    finally:
        abandoned.set()
