"""`canonical` and `vote`: chat models behind an API, whose attention is fixed but whose prompt can be sorted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from uuid import UUID

from invariant_rag.api_models import PlainRequest, PlainRequests, ask_all, content_ordering
from invariant_rag.errors import UnsupportedModel
from invariant_rag.generation.digest import describe
from invariant_rag.orderings import Ordering
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_messages
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool
from pydantic import BaseModel, Field, model_validator

from langchain_invariant_rag.recognition import RecognizesMessages, recognized_turns, was_recognized
from langchain_invariant_rag.tracking import run_of
from langchain_invariant_rag.turns import to_block_of
from langchain_invariant_rag.voting import AnswerOf, elected

_TAKEN_OVER = (
    "cache", "callbacks", "custom_get_token_ids", "disable_streaming", "metadata", "output_version", "profile",
    "rate_limiter", "tags", "verbose",
)  # fmt: skip


@dataclass(frozen=True)
class _Ballot:
    """One request to a model.

    Attributes:
        messages: What it is asked.
        request: What they were made from.
        recognized: Whether every document is known to be a segment.
    """

    messages: list[BaseMessage]
    request: PlainRequest
    recognized: bool

    def ledger(self, strategy: str) -> dict[str, Any]:
        return self.request.ledger(strategy, recognized=self.recognized)


def _ballots(requests: PlainRequests, messages: Sequence[BaseMessage]) -> list[_Ballot]:
    """Return requests as recognised messages with plain text; messages without segments stay as they are."""
    turns, recognized = recognized_turns(messages), was_recognized(messages) is not False
    ballots = []
    for request in requests.of_turns(turns):
        written = [
            message.model_copy(update={"content": _content(after.parts)}) if before.has_segments else message
            for message, before, after in zip(messages, turns, request.turns, strict=True)
        ]
        ballots.append(_Ballot(written, request, recognized))
    return ballots


def _content(parts: Sequence[Any]) -> Any:
    """Return parts as the content of a message: a string where there is only text, else content blocks."""
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(map(to_block_of, parts))


class CanonicalChatModel(RecognizesMessages, BaseChatModel):
    """A chat model that gets segments in canonical order; made by `canonical`."""

    model: BaseChatModel
    """The wrapped model."""
    ordering: str | Ordering = "lexical"
    """The content ordering of the segments."""
    streaming: bool = False
    """Whether `invoke` streams, so that callbacks see every token."""

    @model_validator(mode="before")
    @classmethod
    def _take_over(cls, values: Any) -> Any:
        """Take rate limiter, callbacks, cache... from the wrapped model where they are not given."""
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
        ordering = describe(content_ordering(self.ordering))
        return {"model": self.model._get_llm_string(), "ordering": ordering}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self.model._get_ls_params(stop, **kwargs)

    def _resolve_model_profile(self) -> Any:
        return self.model.profile

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        return self.model._combine_llm_outputs(llm_outputs)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, from the wrapped model."""
        return self.model.get_token_ids(text)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> int:
        """Return the number of tokens of one request, as the wrapped model counts."""
        return self.model.get_num_tokens_from_messages(self._ballots(messages, {})[0].messages, tools, **kwargs)

    @property
    def _strategy(self) -> str:
        """Name of the strategy, for the ledger."""
        return "canonical"

    @property
    def _requests(self) -> PlainRequests:
        return PlainRequests(self.ordering)

    def _ballots(
        self, messages: Sequence[BaseMessage], keywords: dict[str, Any], run: UUID | None = None
    ) -> list[_Ballot]:
        return _ballots(self._requests, self._recognized(messages, run, keywords.pop("documents", None)))

    def _answered(self, result: ChatResult, ballot: _Ballot) -> ChatResult:
        """Return a result with the ledger."""
        generations = []
        for each in result.generations:
            metadata = {**each.message.response_metadata, **ballot.ledger(self._strategy)}
            message = each.message.model_copy(update={"response_metadata": metadata})
            generations.append(ChatGeneration(message=message, generation_info=each.generation_info))
        return ChatResult(generations=generations, llm_output=result.llm_output)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        ballots = self._ballots(messages, kwargs)
        manager = run_manager if len(ballots) == 1 else None  # callbacks see one call

        def ask(ballot: _Ballot) -> ChatResult:
            if ballot is not ballots[0] and self.rate_limiter:  # LangChain has waited for the first call
                self.rate_limiter.acquire(blocking=True)
            return self._answered(self.model._generate(ballot.messages, stop, manager, **kwargs), ballot)

        return self._elected(ask_all([partial(ask, each) for each in ballots]))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        ballots = self._ballots(messages, kwargs)
        manager = run_manager if len(ballots) == 1 else None

        async def ask(ballot: _Ballot) -> ChatResult:
            if ballot is not ballots[0] and self.rate_limiter:
                await self.rate_limiter.aacquire(blocking=True)
            return self._answered(await self.model._agenerate(ballot.messages, stop, manager, **kwargs), ballot)

        return self._elected(await asyncio.gather(*map(ask, ballots)))

    def _elected(self, results: Sequence[ChatResult]) -> ChatResult:
        """Return the result that counts."""
        return results[0]

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        if self._model_streams(asynchronous=False):
            (ballot,) = self._ballots(messages, kwargs)
            yield from self.model._stream(ballot.messages, stop, run_manager, **kwargs)
            yield self._last_chunk(ballot)
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
            (ballot,) = self._ballots(messages, kwargs)
            async for chunk in self.model._astream(ballot.messages, stop, run_manager, **kwargs):
                yield chunk
            yield self._last_chunk(ballot)
        else:
            yield _one_chunk(await self._agenerate(messages, stop, run_manager, **kwargs))

    def _last_chunk(self, ballot: _Ballot) -> ChatGenerationChunk:
        """Return the ledger as the last chunk of a stream."""
        return ChatGenerationChunk(message=AIMessageChunk(content="", response_metadata=ballot.ledger(self._strategy)))

    def _model_streams(self, *, asynchronous: bool) -> bool:
        """Return whether the answer comes in pieces."""
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
        """Return the wrapped model with tools, wrapped in the same way."""
        choice = {} if tool_choice is None else {"tool_choice": tool_choice}
        return self._around(self.model.bind_tools(tools, **choice, **kwargs))

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Return the wrapped model with structured output, wrapped in the same way."""
        return self._around(self.model.with_structured_output(schema, include_raw=include_raw, **kwargs))

    def _around(self, other: Runnable[Any, Any]) -> Runnable[Any, Any]:
        """Wrap a runnable that the wrapped model returned."""
        if isinstance(other, RunnableBinding) and isinstance(other.bound, BaseChatModel):
            return other.model_copy(update={"bound": self.model_copy(update={"model": other.bound})})
        return self.wrapped(other)

    def wrapped(self, runnable: Runnable[Any, Any]) -> Runnable[Any, Any]:
        """Return a runnable that is no chat model, in front of which documents are put in order."""

        def ask(value: Any, config: RunnableConfig, **keywords: Any) -> Any:
            return _of_kind(value, self._ballots_of(value, config, keywords)[0])

        return WrappedRunnable(bound=RunnableLambda(ask, name="canonical") | runnable)

    def _ballots_of(self, value: Any, config: RunnableConfig, keywords: dict[str, Any]) -> list[_Ballot]:
        messages = value.to_messages() if isinstance(value, PromptValue) else convert_to_messages(_listed(value))
        return self._ballots(messages, keywords, run_of(config.get("callbacks")))


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _of_kind(value: Any, ballot: _Ballot) -> Any:
    """Return what is asked: a text for a text, and messages for anything else."""
    is_text = isinstance(value, str) or (isinstance(value, PromptValue) and hasattr(value, "text"))
    return ballot.messages[0].content if is_text else ballot.messages


class VotingChatModel(CanonicalChatModel):
    """A chat model that asks about several orders of the segments; made by `vote`."""

    votes: int = Field(default=5, ge=1)
    """How many orders to ask about."""
    seed: int = 0
    """Seed of the orders."""
    answer_of: AnswerOf | None = None
    """Maps a message to the value that is counted."""

    @property
    def _llm_type(self) -> str:
        return f"voting-{self.model._llm_type}"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        more = {"votes": self.votes, "seed": self.seed, "answer_of": describe(self.answer_of)}
        return {**super()._identifying_params, **more}

    @property
    def _strategy(self) -> str:
        return "vote"

    @property
    def _requests(self) -> PlainRequests:
        return PlainRequests(self.ordering, self.votes, self.seed)

    def _elected(self, results: Sequence[ChatResult]) -> ChatResult:
        generations = [result.generations[0] for result in results]
        place, message = elected([each.message for each in generations], self.answer_of)
        combined = self.model._combine_llm_outputs([result.llm_output for result in results])
        # Providers combine tokens, and leave out the name of the model.
        output = {**(results[place].llm_output or {}), **(combined or {})}
        return ChatResult(
            generations=[ChatGeneration(message=message, generation_info=generations[place].generation_info)],
            llm_output=output or None,
        )

    def _model_streams(self, *, asynchronous: bool) -> bool:
        """No: the answer is known when all votes are in."""
        return False

    def wrapped(self, runnable: Runnable[Any, Any]) -> Runnable[Any, Any]:
        """Return a runnable that asks one that is no chat model about several orders."""

        def ask(value: Any, config: RunnableConfig, **keywords: Any) -> Any:
            ballots = self._ballots_of(value, config, keywords)
            return elected(runnable.batch([_of_kind(value, each) for each in ballots], config), self.answer_of)[1]

        async def aask(value: Any, config: RunnableConfig, **keywords: Any) -> Any:
            ballots = self._ballots_of(value, config, keywords)
            outputs = await runnable.abatch([_of_kind(value, each) for each in ballots], config)
            return elected(outputs, self.answer_of)[1]

        return WrappedRunnable(bound=RunnableLambda(ask, aask, name="vote"))


class WrappedRunnable(RunnableBinding[Any, Any]):
    """A runnable that is no chat model, and gets documents in canonical order, or is asked about several orders."""


class _NoModel(BaseChatModel):
    """Stands for the model where a runnable is wrapped that is none."""

    @property
    def _llm_type(self) -> str:
        return "none"

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        raise UnsupportedModel("expected a chat model")


def _one_chunk(result: ChatResult) -> ChatGenerationChunk:
    """Return a whole answer as the only chunk of a stream, with everything that `invoke` reports of it."""
    generation = result.generations[0]
    said = generation.message.model_dump(exclude={"type"})
    said["response_metadata"] = {**(result.llm_output or {}), **said["response_metadata"]}
    message = AIMessageChunk(**{**said, "chunk_position": "last"})
    return ChatGenerationChunk(message=message, generation_info=generation.generation_info)


def canonical(
    model: Runnable[Any, Any],
    *,
    ordering: str | Ordering = "lexical",
    find_documents: bool = True,
    strict: bool = False,
    require_segments: bool = False,
) -> Any:
    """Wrap a model, so that it gets segments in an order that depends on their contents only.

    The wrapped model gets segments as plain text, one `Document: ...` each, whatever carries them. So
    `llm.with_fallbacks([canonical(other)])` works too.

    Guaranteed: the request does not depend on the order of the segments, and neither does the answer of a deterministic
    model (temperature 0 is not quite that, with most providers). Not guaranteed: equal accuracy wherever a segment
    stands. The model still sees a sequence, and may overlook what the ordering puts in the middle. `vote` evens that
    out; `ChatInvariant` does not have the problem.

    Args:
        model: A chat model, for which a chat model is returned: it streams, calls tools and writes structured output
            if the wrapped one does. Or any other runnable that takes the input of language models, such as a completion
            model.
        ordering: The content ordering of the segments: a name from `invariant-rag orderings`, or an `Ordering`. Rank 0
            stands last, nearest to the question. `lexical` compares bytes.
        find_documents: As for `ChatInvariant`, as are the next two.
        strict: Whether to raise where the order of documents may change an answer.
        require_segments: Whether to raise for a prompt without any segment.

    Raises:
        UnsupportedCombination: The ordering keeps the order given.
        UnsupportedModel: The model is no runnable.
    """
    PlainRequests(ordering)
    options: dict[str, Any] = {"find_documents": find_documents, "strict": strict, "require_segments": require_segments}
    return _wrap(model, lambda chat: CanonicalChatModel(model=chat, ordering=ordering, **options))


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
    """Wrap a model, so that it is asked about several orders of the segments, and the most frequent answer is returned.

    This is permutation self-consistency (arXiv 2310.07712). The first order is the canonical one; the others are drawn
    from it. Of equally frequent answers, the one whose order was drawn first wins.

    Guaranteed: what `canonical` guarantees. Answers that depend on where a segment stands tend to be outvoted, but
    they may win. The cost is `votes` concurrent calls, or as many as there are different orders. Free text hardly ever
    agrees word for word, and then the vote is the first answer: ask for short answers, or give `answer_of`.
    A stream is one chunk, once all votes are in. The message reports the tokens of all calls in `usage_metadata`, and
    the `calls` made and how many `agreed` in `response_metadata["vote"]`. Callbacks of a chat model see one call.

    Args:
        model: As for `canonical`.
        votes: How many orders to ask about.
        seed: Seed of the orders.
        ordering: As for `canonical`.
        answer_of: Maps an output to the value that is counted; equal values agree. None: the text without regard to
            case and white space, with the tool calls; or the object, for structured output.
        find_documents: As for `canonical`, as are the next two.
        strict: Whether to raise where the order of documents may change an answer.
        require_segments: Whether to raise for a prompt without any segment.

    Raises:
        InvalidChoice: Fewer than one vote.
        UnsupportedCombination: The ordering keeps the order given.
        UnsupportedModel: The model is no runnable.
    """
    PlainRequests(ordering, votes, seed)
    options: dict[str, Any] = {"find_documents": find_documents, "strict": strict, "require_segments": require_segments}
    options |= {"votes": votes, "seed": seed, "ordering": ordering, "answer_of": answer_of}
    return _wrap(model, lambda chat: VotingChatModel(model=chat, **options))


def _wrap(model: object, around: Callable[[BaseChatModel], CanonicalChatModel]) -> Any:
    """Wrap a chat model, one with bound keywords, or another runnable."""
    if isinstance(model, BaseChatModel):
        return around(model)
    if isinstance(model, RunnableBinding) and isinstance(model.bound, BaseChatModel):
        return model.model_copy(update={"bound": around(model.bound)})
    if isinstance(model, Runnable):
        return around(_NoModel()).wrapped(model)
    raise UnsupportedModel(
        f"expected a chat model or another runnable, got {type(model).__name__}",
        hint='Give the model itself, for a name that of init_chat_model("...").',
    )
