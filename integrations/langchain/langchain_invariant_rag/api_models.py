"""Chat models behind somebody else's API: their attention cannot be changed, but the order in which they read can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from invariant_rag.api_models import content_ordering
from invariant_rag.errors import InvalidChoice, UnsupportedModel
from invariant_rag.orderings import Ordering
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.runnables import Runnable, RunnableBinding
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langchain_core.tools import BaseTool
from pydantic import BaseModel, Field, model_validator

from langchain_invariant_rag.identity import described
from langchain_invariant_rag.plain import Requests
from langchain_invariant_rag.sorting import sorted_messages
from langchain_invariant_rag.voting import AnswerOf, elected
from langchain_invariant_rag.wrapped import CanonicalRunnable, VotingRunnable

_TAKEN_OVER = (
    "cache", "callbacks", "custom_get_token_ids", "disable_streaming", "metadata", "output_version", "profile",
    "rate_limiter", "tags", "verbose",
)  # fmt: skip


class CanonicalChatModel(BaseChatModel):
    """What `canonical` makes of a chat model."""

    model: BaseChatModel
    """What answers."""
    ordering: str | Ordering = "lexical"
    """Which segment stands where, by content."""
    streaming: bool = False
    """Whether `invoke` streams, so that callbacks see tokens as they come."""

    @model_validator(mode="before")
    @classmethod
    def _take_over(cls, values: Any) -> Any:
        """What is not given is as in the wrapped model, so that it is not lost: rate limit, callbacks, cache..."""
        if not isinstance(values, Mapping) or not isinstance(model := values.get("model"), BaseChatModel):
            return values
        names = (*_TAKEN_OVER, "streaming")
        return {**{name: getattr(model, name) for name in names if name in model.model_fields_set}, **values}

    @model_validator(mode="after")
    def _check_ordering(self) -> Self:
        content_ordering(self.ordering)
        return self

    @property
    def _llm_type(self) -> str:
        return f"canonical-{self.model._llm_type}"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.model._get_llm_string(), "ordering": described(self.ordering)}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self.model._get_ls_params(stop, **kwargs)

    def _resolve_model_profile(self) -> Any:
        return self.model.profile

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        return self.model._combine_llm_outputs(llm_outputs)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, as the wrapped model does."""
        return self.model.get_token_ids(text)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> int:
        """Return how many tokens one call reads, as the wrapped model counts."""
        return self.model.get_num_tokens_from_messages(self._requests.of_messages(messages)[0], tools, **kwargs)

    @property
    def _requests(self) -> Requests:
        return Requests(self.ordering)

    def _request(self, messages: Sequence[BaseMessage], keywords: dict[str, Any]) -> list[BaseMessage]:
        return self._requests.of_messages(messages, keywords.pop("documents", None))[0]

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        """List segments by content, so that the same set in another order is a hit in LangChain's cache."""
        return ChatPromptValue(messages=sorted_messages(super()._convert_input(model_input).to_messages()))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self.model._generate(self._request(messages, kwargs), stop, run_manager, **kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await self.model._agenerate(self._request(messages, kwargs), stop, run_manager, **kwargs)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        if self._model_streams(asynchronous=False):
            yield from self.model._stream(self._request(messages, kwargs), stop, run_manager, **kwargs)
        else:
            yield _one_chunk(self._generate(messages, stop, run_manager, **kwargs))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        if self._model_streams(asynchronous=True):
            async for chunk in self.model._astream(self._request(messages, kwargs), stop, run_manager, **kwargs):
                yield chunk
        else:
            yield _one_chunk(await self._agenerate(messages, stop, run_manager, **kwargs))

    def _model_streams(self, *, asynchronous: bool) -> bool:
        ours = type(self.model)
        streams = ours._stream is not BaseChatModel._stream
        return streams or (asynchronous and ours._astream is not BaseChatModel._astream)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the wrapped model with tools, wrapped alike."""
        choice = {} if tool_choice is None else {"tool_choice": tool_choice}
        return self._around(self.model.bind_tools(tools, **choice, **kwargs))

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Return the wrapped model, answering with what a schema describes, wrapped alike."""
        return self._around(self.model.with_structured_output(schema, include_raw=include_raw, **kwargs))

    def _around(self, other: Runnable[Any, Any]) -> Runnable[Any, Any]:
        """Wrap what was made of the wrapped model in the same way."""
        if isinstance(other, RunnableBinding) and isinstance(other.bound, BaseChatModel):
            return other.model_copy(update={"bound": self.model_copy(update={"model": other.bound})})
        return CanonicalRunnable(other, self._requests)


class VotingChatModel(CanonicalChatModel):
    """What `vote` makes of a chat model."""

    votes: int = Field(default=5, ge=1)
    """How many orders to ask about."""
    seed: int = 0
    """What the orders are drawn with."""
    answer_of: AnswerOf | None = None
    """What is counted of a message."""

    @property
    def _llm_type(self) -> str:
        return f"voting-{self.model._llm_type}"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        counted = None if self.answer_of is None else f"{self.answer_of!r}"
        return {**super()._identifying_params, "votes": self.votes, "seed": self.seed, "answer_of": counted}

    @property
    def _requests(self) -> Requests:
        return Requests(self.ordering, self.votes, self.seed)

    def _ballots(self, messages: Sequence[BaseMessage], keywords: dict[str, Any]) -> list[list[BaseMessage]]:
        return self._requests.of_messages(messages, keywords.pop("documents", None))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        ballots = self._ballots(messages, kwargs)

        def ask(place: int) -> ChatResult:
            if place and self.rate_limiter:  # LangChain has waited for the first call
                self.rate_limiter.acquire(blocking=True)
            return self.model._generate(ballots[place], stop, None, **kwargs)

        with ContextThreadPoolExecutor(max_workers=len(ballots)) as pool:
            return self._elected(list(pool.map(ask, range(len(ballots)))))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        ballots = self._ballots(messages, kwargs)

        async def ask(place: int) -> ChatResult:
            if place and self.rate_limiter:
                await self.rate_limiter.aacquire(blocking=True)
            return await self.model._agenerate(ballots[place], stop, None, **kwargs)

        return self._elected(await asyncio.gather(*map(ask, range(len(ballots)))))

    def _elected(self, results: Sequence[ChatResult]) -> ChatResult:
        generations = [result.generations[0] for result in results]
        place, message = elected([each.message for each in generations], self.answer_of)
        return ChatResult(
            generations=[ChatGeneration(message=message, generation_info=generations[place].generation_info)],
            llm_output=self.model._combine_llm_outputs([result.llm_output for result in results]) or None,
        )

    def _model_streams(self, *, asynchronous: bool) -> bool:
        """Nothing can be said before all votes are in."""
        return False

    def _around(self, other: Runnable[Any, Any]) -> Runnable[Any, Any]:
        wrapped = super()._around(other)
        if isinstance(wrapped, CanonicalRunnable):
            return VotingRunnable(other, self._requests, self.answer_of)
        return wrapped


def _one_chunk(result: ChatResult) -> ChatGenerationChunk:
    """Return a whole answer as the only piece of a stream."""
    generation = result.generations[0]
    said = generation.message.model_dump(exclude={"type"})
    message = AIMessageChunk(**{**said, "chunk_position": "last"})
    return ChatGenerationChunk(message=message, generation_info=generation.generation_info)


def canonical(model: Runnable[Any, Any], *, ordering: str | Ordering = "lexical") -> Any:
    """Return a model that lists the segments it is given by content, and then asks another one.

    Segments reach the other model as plain text that any provider takes, one `Document: ...` each, whatever they
    travelled as. So `llm.with_fallbacks([canonical(other)])` works too.

    Guaranteed: the request does not depend on the order of the segments, and so neither does the answer, as long as
    the model is deterministic (temperature 0 is not quite that, with most providers). Not guaranteed: that it answers
    as well wherever a segment stands. The model still reads a sequence: what the ordering puts in the middle may be
    lost there. `vote` evens that out; `ChatInvariant` does not have the problem.

    Args:
        model: Any chat model, and then a chat model is returned: it streams, calls tools and writes structured output
            if the other does. Or any other runnable that takes what language models take, such as a completion model.
        ordering: Which segment stands where: a name from `invariant-rag orderings`, or an `Ordering`. Rank 0 is listed
            last, nearest to the question. `lexical` compares bytes.

    Raises:
        UnsupportedCombination: The ordering keeps the order given.
        UnsupportedModel: The model is no runnable.
    """
    content_ordering(ordering)
    _check_model(model)
    if isinstance(model, BaseChatModel):
        return CanonicalChatModel(model=model, ordering=ordering)
    if isinstance(model, RunnableBinding) and isinstance(model.bound, BaseChatModel):
        return model.model_copy(update={"bound": canonical(model.bound, ordering=ordering)})
    return CanonicalRunnable(model, Requests(ordering))


def vote(
    model: Runnable[Any, Any],
    *,
    votes: int = 5,
    seed: int = 0,
    ordering: str | Ordering = "lexical",
    answer_of: AnswerOf | None = None,
) -> Any:
    """Return a model that asks another one about several orders of the segments, and gives the most frequent answer.

    This is permutation self-consistency (arXiv 2310.07712). The orders are drawn from the canonical one, which is the
    first of them. Of answers that are equally frequent, the one whose order was drawn first is given.

    Guaranteed: what `canonical` guarantees. Answers that depend on where a segment stands tend to be outvoted, but
    they may win. The cost is `votes` calls at the same time, or as many as there are different orders. Free text hardly
    ever agrees word for word: then the vote is the first answer, so ask for short answers, or say what counts.
    A stream waits for the vote and is one piece. The message tells all tokens of all calls in `usage_metadata`, and in
    `response_metadata["vote"]` how many `calls` there were and how many `agreed`. For callbacks of a chat model it is
    one call.

    Args:
        model: As for `canonical`.
        votes: How many orders to ask about.
        seed: What the orders are drawn with.
        ordering: As for `canonical`.
        answer_of: What is counted of an output; equal values agree. None: its text but for case and white space,
            with the calls of tools; or the object, for structured output.

    Raises:
        InvalidChoice: Fewer than one vote.
        UnsupportedCombination: The ordering keeps the order given.
        UnsupportedModel: The model is no runnable.
    """
    content_ordering(ordering)
    _check_model(model)
    if votes < 1:
        raise InvalidChoice(f"votes: expected at least 1, got {votes}")
    if isinstance(model, BaseChatModel):
        return VotingChatModel(model=model, votes=votes, seed=seed, ordering=ordering, answer_of=answer_of)
    if isinstance(model, RunnableBinding) and isinstance(model.bound, BaseChatModel):
        inner = vote(model.bound, votes=votes, seed=seed, ordering=ordering, answer_of=answer_of)
        return model.model_copy(update={"bound": inner})
    return VotingRunnable(model, Requests(ordering, votes, seed), answer_of)


def _check_model(model: object) -> None:
    if not isinstance(model, Runnable):
        raise UnsupportedModel(
            f"expected a chat model or another runnable, got {type(model).__name__}",
            hint='Give the model itself, for a name that of init_chat_model("...").',
        )
