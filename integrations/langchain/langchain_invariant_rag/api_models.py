"""`canonical` and `vote`: chat models behind an API, whose attention is fixed but whose prompt can be sorted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import chain, repeat
from typing import Any
from uuid import UUID

from invariant_rag.api_models import PlainRequests, answer_key, ask_all, elect, object_key
from invariant_rag.errors import UnsupportedModel
from invariant_rag.generation.digest import describe
from invariant_rag.orderings import Ordering, resolve_ordering
from langchain_core.language_models import FakeListChatModel
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_messages
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig, RunnableLambda
from langchain_core.runnables.config import set_config_context
from pydantic import model_validator

from langchain_invariant_rag.documents import to_content
from langchain_invariant_rag.recognition import KEY, Recognized, RecognizesMessages
from langchain_invariant_rag.tracking import run_of

AnswerOf = Callable[[Any], Hashable]
Ballot = tuple[list[BaseMessage], dict[str, Any]]  # messages with plain text, and the ledger of what is in them

_TAKEN_OVER = "cache callbacks custom_get_token_ids disable_streaming metadata output_version profile".split()
_TAKEN_OVER += "rate_limiter streaming tags verbose".split()


class CanonicalChatModel(RecognizesMessages, BaseChatModel):  # type: ignore[misc]  # one `generate` for messages and texts
    """A chat model that gets segments in canonical order, once or in several orders; made by `canonical` and `vote`."""

    model: BaseChatModel
    ordering: str | Ordering = "lexical"
    votes: int | None = None
    """How many orders to request. None: only the canonical one, and no vote."""
    seed: int = 0
    answer_of: AnswerOf | None = None
    streaming: bool = False
    """Whether `invoke` streams, so that callbacks get every token."""

    @model_validator(mode="before")
    @classmethod
    def _take_over(cls, values: Any) -> Any:
        """Take rate limiter, callbacks, cache... from the wrapped model where they are not set."""
        if not isinstance(values, Mapping) or not isinstance(model := values.get("model"), BaseChatModel):
            return values
        return {**{name: getattr(model, name) for name in _TAKEN_OVER if name in model.model_fields_set}, **values}

    @property
    def _strategy(self) -> str:
        return "canonical" if self.votes is None else "vote"

    @property
    def _llm_type(self) -> str:
        return f"{self._strategy}-{self.model._llm_type}"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        own = {"votes": self.votes, "seed": self.seed, "answer_of": describe(self.answer_of)}
        ordering = describe(resolve_ordering(self.ordering))
        return {"model": self.model._get_llm_string(), "ordering": ordering, **own}

    def _get_ls_params(self, stop: Any = None, **kwargs: Any) -> LangSmithParams:
        return self.model._get_ls_params(stop, **kwargs)

    def _resolve_model_profile(self) -> Any:
        return self.model.profile

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        return self.model._combine_llm_outputs(llm_outputs)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, from the wrapped model."""
        return self.model.get_token_ids(text)

    def get_num_tokens_from_messages(self, messages: Any, tools: Any = None, **kwargs: Any) -> int:
        """Return the number of tokens of one request, as the wrapped model counts."""
        return self.model.get_num_tokens_from_messages(self._ballots(messages, {})[0][0], tools, **kwargs)

    def _ballots(
        self, messages: Sequence[BaseMessage], keywords: dict[str, Any], run: UUID | None = None
    ) -> list[Ballot]:
        """Return the requests; messages without segments stay as they are."""
        recognized = self._recognized(messages, run, keywords.pop("documents", None))
        if (noted := Recognized.of(recognized)) is None:
            return [(recognized, {})]
        ballots: list[Ballot] = []
        for request in PlainRequests(self.ordering, self.votes, self.seed).of_turns(noted.turns):
            written = [
                message.model_copy(update={"content": to_content(after.parts)}) if before.has_segments else message
                for message, before, after in zip(recognized, noted.turns, request.turns, strict=True)
            ]
            own = {name: value for name, value in written[-1].additional_kwargs.items() if name != KEY}
            written[-1] = written[-1].model_copy(update={"additional_kwargs": own})
            ballots.append((written, request.ledger(self._strategy, recognized=noted["recognized"])))
        return ballots

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        ballots = self._ballots(messages, kwargs)
        manager = run_manager if len(ballots) == 1 else None  # callbacks get one call

        def ask(ballot: Ballot) -> ChatResult:
            if ballot is not ballots[0] and self.rate_limiter:  # LangChain has waited for the first call
                self.rate_limiter.acquire(blocking=True)
            return _with_ledger(self.model._generate(ballot[0], stop, manager, **kwargs), ballot)

        return self._elected(ask_all([partial(ask, each) for each in ballots]))

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        ballots = self._ballots(messages, kwargs)
        manager = run_manager if len(ballots) == 1 else None

        async def ask(ballot: Ballot) -> ChatResult:
            if ballot is not ballots[0] and self.rate_limiter:
                await self.rate_limiter.aacquire(blocking=True)
            return _with_ledger(await self.model._agenerate(ballot[0], stop, manager, **kwargs), ballot)

        return self._elected(await asyncio.gather(*map(ask, ballots)))

    def _elected(self, results: Sequence[ChatResult]) -> ChatResult:
        """Return the result that counts."""
        if self.votes is None:
            return results[0]
        generations = [result.generations[0] for result in results]
        index, message = elected([each.message for each in generations], self.answer_of)
        combined = self.model._combine_llm_outputs([result.llm_output for result in results])
        output = {**(results[index].llm_output or {}), **(combined or {})}  # providers combine tokens, and no names
        chosen = ChatGeneration(message=message, generation_info=generations[index].generation_info)
        return ChatResult(generations=[chosen], llm_output=output or None)

    def _stream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        if self.votes is None and type(self.model)._stream is not BaseChatModel._stream:
            ((ballot, ledger),) = self._ballots(messages, kwargs)
            reports = chain([ledger], repeat({}))  # LangChain adds up those of all chunks
            for chunk in self.model._stream(ballot, stop, run_manager, **kwargs):
                yield _reporting(chunk, ledger, next(reports))
        else:
            yield _one_chunk(self._generate(messages, stop, run_manager, **kwargs))

    async def _astream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        kind = type(self.model)
        streams = (kind._stream, kind._astream) != (BaseChatModel._stream, BaseChatModel._astream)
        if self.votes is None and streams:
            ((ballot, ledger),) = self._ballots(messages, kwargs)
            reports = chain([ledger], repeat({}))
            async for chunk in self.model._astream(ballot, stop, run_manager, **kwargs):
                yield _reporting(chunk, ledger, next(reports))
        else:
            yield _one_chunk(await self._agenerate(messages, stop, run_manager, **kwargs))

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any) -> Runnable[Any, AIMessage]:
        """Return the wrapped model with tools, wrapped in the same way."""
        choice = {} if tool_choice is None else {"tool_choice": tool_choice}
        return self._around(self.model.bind_tools(tools, **choice, **kwargs))

    def with_structured_output(self, schema: Any, *, include_raw: bool = False, **kwargs: Any) -> Runnable[Any, Any]:
        """Return the wrapped model with structured output, wrapped in the same way."""
        return self._around(self.model.with_structured_output(schema, include_raw=include_raw, **kwargs))

    def _around(self, other: Runnable[Any, Any]) -> Runnable[Any, Any]:
        """Wrap what the wrapped model returned, or another runnable that is no chat model."""
        if isinstance(other, RunnableBinding) and isinstance(other.bound, BaseChatModel):
            return other.model_copy(update={"bound": self.model_copy(update={"model": other.bound})})

        def inputs_of(value: Any, config: RunnableConfig, keywords: dict[str, Any]) -> list[Any]:
            """Return one input for each order: texts for a text, and messages for anything else."""
            listed = [value] if isinstance(value, str) else value
            messages = value.to_messages() if isinstance(value, PromptValue) else convert_to_messages(listed)
            ballots = self._ballots(messages, keywords, run_of(config.get("callbacks")))
            is_text = isinstance(value, str) or (isinstance(value, PromptValue) and hasattr(value, "text"))
            return [written[0].content if is_text else written for written, _ in ballots]

        def ask(value: Any, config: RunnableConfig, **keywords: Any) -> Any:
            with set_config_context({**config, "max_concurrency": None}) as context:  # `BaseLLM.batch` reads it, too
                return elected(context.run(other.batch, inputs_of(value, config, keywords), config), self.answer_of)[1]

        async def aask(value: Any, config: RunnableConfig, **keywords: Any) -> Any:
            with set_config_context({**config, "max_concurrency": None}) as context:
                call = other.abatch(inputs_of(value, config, keywords), config)
                return elected(await asyncio.create_task(call, context=context), self.answer_of)[1]

        def sort(value: Any, config: RunnableConfig, **keywords: Any) -> Any:
            return inputs_of(value, config, keywords)[0]

        if self.votes is None:
            return WrappedRunnable(bound=RunnableLambda(sort, name="canonical") | other)
        return WrappedRunnable(bound=RunnableLambda(ask, aask, name="vote"))


class WrappedRunnable(RunnableBinding[Any, Any]):
    """A runnable that is no chat model, and gets documents in canonical order, or in several orders."""


def _with_ledger(result: ChatResult, ballot: Ballot) -> ChatResult:
    generations = [_reporting(each, ballot[1], ballot[1]) for each in result.generations]
    return ChatResult(generations=generations, llm_output=result.llm_output)


def _reporting(generation: Any, ledger: Mapping[str, Any], report: Mapping[str, Any]) -> Any:
    """Return an answer, or a chunk of one, with a report in place of a ledger of its own."""
    message = generation.message
    own = {name: value for name, value in message.response_metadata.items() if name not in ledger}
    message = message.model_copy(update={"response_metadata": {**own, **report}})
    return type(generation)(message=message, generation_info=generation.generation_info)


def _one_chunk(result: ChatResult) -> ChatGenerationChunk:
    """Return a whole answer as the only chunk of a stream, with everything that `invoke` reports of it."""
    generation = result.generations[0]
    said = generation.message.model_dump(exclude={"type"})
    metadata = {**(result.llm_output or {}), **said["response_metadata"]}
    message = AIMessageChunk(**{**said, "response_metadata": metadata, "chunk_position": "last"})
    return ChatGenerationChunk(message=message, generation_info=generation.generation_info)


def answer_of(output: Any) -> Hashable:
    """Return what outputs share if they agree: text without regard to case and white space, tool calls, or an object.

    >>> answer_of("Noon ") == answer_of(AIMessage("noon"))
    True
    """
    if isinstance(output, AIMessage):
        return answer_key(output.text, [(call["name"], call["args"]) for call in output.tool_calls])
    if isinstance(output, dict) and "parsed" in output and isinstance(output.get("raw"), AIMessage):
        return answer_of(output["raw"] if output["parsed"] is None else output["parsed"])
    return answer_key(output) if isinstance(output, str) else object_key(output)


def elected(outputs: Sequence[Any], count: AnswerOf | None) -> tuple[int, Any]:
    """Return the index of the output whose answer most others share, and that output, which reports the vote."""
    vote = elect([(count or answer_of)(output) for output in outputs])
    winner = outputs[vote.winner]
    if isinstance(winner, AIMessage):
        usages: list[UsageMetadata | None] = [output.usage_metadata for output in outputs]
        usage = reduce(add_usage, usages, None) if any(usages) else None
        metadata = {**winner.response_metadata, "vote": vote.as_dict()}
        winner = winner.model_copy(update={"usage_metadata": usage, "response_metadata": metadata})
    return vote.winner, winner


def canonical(
    model: Runnable[Any, Any],
    *,
    ordering: str | Ordering = "lexical",
    find_documents: bool = True,
    strict: bool = False,
    require_segments: bool = False,
) -> Any:
    """Wrap a model, so that it gets segments, one `Document: ...` each, in an order by their contents.

    The request does not depend on the order of the segments, and neither does the answer of a deterministic model.

    Args:
        model: A chat model, for which one is returned, or another runnable that takes the input of language models.
        ordering: The content ordering: a name from `invariant-rag orderings`, or an `Ordering`. Rank 0 is last.
        find_documents: As for `ChatInvariant`.
        strict: As for `ChatInvariant`.
        require_segments: As for `ChatInvariant`.

    Raises:
        UnsupportedCombination: The ordering keeps the input order.
        UnsupportedModel: The model is no runnable.
    """
    own = {"ordering": ordering, "find_documents": find_documents}
    return _wrap(model, strict=strict, require_segments=require_segments, **own)


def vote(
    model: Runnable[Any, Any],
    *,
    votes: int = 5,
    seed: int = 0,
    ordering: str | Ordering = "lexical",
    answer_of: AnswerOf | None = None,
    find_documents: bool = True,
    strict: bool = False,
    require_segments: bool = False,
) -> Any:
    """Wrap a model, so that it answers for several orders of the segments, and the most frequent answer is returned.

    This is permutation self-consistency (arXiv 2310.07712), in `votes` concurrent calls, or as many as there are
    orders, of which the first is the canonical one; callbacks get one call, and a stream is one chunk. `seed` is that
    of the orders; `answer_of` maps an output to the value that is counted (None: text and tool calls, or the object);
    the rest is as for `canonical`. `usage_metadata` reports the tokens of all calls, `response_metadata["vote"]` the
    `calls` made and how many `agreed`.

    Raises:
        InvalidChoice: Fewer than one vote. Else as for `canonical`.
    """
    own = {"ordering": ordering, "votes": votes, "seed": seed, "answer_of": answer_of}
    return _wrap(model, find_documents=find_documents, strict=strict, require_segments=require_segments, **own)


def _wrap(model: object, **options: Any) -> Any:
    """Wrap a chat model, one with bound keywords, or another runnable."""
    PlainRequests(options["ordering"], options.get("votes", 1), options.get("seed", 0))  # raises its errors as they are
    if isinstance(model, BaseChatModel):
        return CanonicalChatModel(model=model, **options)
    if isinstance(model, Runnable):
        bound = model.bound if isinstance(model, RunnableBinding) else None
        inner = bound if isinstance(bound, BaseChatModel) else FakeListChatModel(responses=[])  # never called
        return CanonicalChatModel(model=inner, **options)._around(model)
    raise UnsupportedModel(
        f"expected a chat model or another runnable, got {type(model).__name__}",
        hint='Give the model itself, for a name that of init_chat_model("...").',
    )
