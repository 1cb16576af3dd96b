"""`canonical` and `vote`: LLMs behind an API, whose attention is fixed but whose prompt can be sorted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Self, TypeVar, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, SerializeAsAny
from llama_index.core.callbacks.token_counting import get_tokens_from_response
from llama_index.core.llms import LLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool

from invariant_rag.api_models import PlainRequests, answer_key, elect
from invariant_rag.errors import UnsupportedModel
from llama_index.llms.invariant_rag.plain import message_requests, text_requests

R = TypeVar("R", ChatResponse, CompletionResponse)

_TAKEN_OVER = (
    "callback_manager", "completion_to_prompt", "messages_to_prompt", "output_parser", "pydantic_program_mode",
    "query_wrapper_prompt", "system_prompt",
)  # fmt: skip


class CanonicalLLM(LLM):
    """An LLM that gets segments in canonical order; made by `canonical`. The wrapped LLM emits callbacks and events."""

    llm: SerializeAsAny[LLM] = Field(description="The wrapped LLM.")
    ordering: str = Field(default="lexical", description="The content ordering of the segments.")

    _query: str | None = PrivateAttr(default=None)

    @classmethod
    def class_name(cls) -> str:
        """Return the stable id of this class."""
        return "CanonicalLLM"

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a callback manager is that of the wrapped LLM too, which emits the callbacks."""
        super().__setattr__(name, value)
        if name == "callback_manager":
            self.llm.callback_manager = value

    def about(self, query: str) -> Self:
        """Return a copy with a default query: what relevance orderings compare segments with."""
        copied = self.model_copy()
        copied._query = query
        return copied

    @property
    def metadata(self) -> LLMMetadata:
        """Metadata of the wrapped LLM."""
        return self.llm.metadata

    @property
    def _requests(self) -> PlainRequests:
        return PlainRequests(self.ordering)

    def _text(self, prompt: str, keywords: dict[str, Any]) -> str:
        return text_requests(self._requests, prompt, keywords.pop("query", self._query))[0]

    def _messages(self, messages: Sequence[ChatMessage], keywords: dict[str, Any]) -> list[ChatMessage]:
        return message_requests(self._requests, messages, keywords.pop("query", self._query))[0]

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text, with its marked segments in canonical order."""
        return self.llm.complete(self._text(prompt, kwargs), formatted, **kwargs)

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation, with the segments of every turn in canonical order."""
        return self.llm.chat(self._messages(messages, kwargs), **kwargs)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Stream the completion of a text."""
        return self.llm.stream_complete(self._text(prompt, kwargs), formatted, **kwargs)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Stream the answer to a conversation."""
        return self.llm.stream_chat(self._messages(messages, kwargs), **kwargs)

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text."""
        return await self.llm.acomplete(self._text(prompt, kwargs), formatted, **kwargs)

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return await self.llm.achat(self._messages(messages, kwargs), **kwargs)

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Stream the completion of a text."""
        return await self.llm.astream_complete(self._text(prompt, kwargs), formatted, **kwargs)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Stream the answer to a conversation."""
        return await self.llm.astream_chat(self._messages(messages, kwargs), **kwargs)


class VotingLLM(CanonicalLLM):
    """An LLM that asks about several orders of the segments; made by `vote`."""

    votes: int = Field(default=5, ge=1, description="How many orders to ask about.")
    seed: int = Field(default=0, description="Seed of the orders.")
    answer_of: Callable[[Any], Hashable] | None = Field(default=None, exclude=True, description="Value that counts.")

    @classmethod
    def class_name(cls) -> str:
        """Return the stable id of this class."""
        return "VotingLLM"

    @property
    def _requests(self) -> PlainRequests:
        return PlainRequests(self.ordering, self.votes, self.seed)

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text with the most frequent answer over several orders of the segments."""
        ballots = text_requests(self._requests, prompt, kwargs.pop("query", self._query))
        return self._elected(_at_once([partial(self.llm.complete, each, formatted, **kwargs) for each in ballots]))

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation with the most frequent answer over several orders of the segments."""
        ballots = message_requests(self._requests, messages, kwargs.pop("query", self._query))
        return self._elected(_at_once([partial(self.llm.chat, each, **kwargs) for each in ballots]))

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text with the most frequent answer over several orders of the segments."""
        ballots = text_requests(self._requests, prompt, kwargs.pop("query", self._query))
        return self._elected(await asyncio.gather(*(self.llm.acomplete(each, formatted, **kwargs) for each in ballots)))

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation with the most frequent answer over several orders of the segments."""
        ballots = message_requests(self._requests, messages, kwargs.pop("query", self._query))
        return self._elected(await asyncio.gather(*(self.llm.achat(each, **kwargs) for each in ballots)))

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Yield what `complete` returns, once all votes are in."""
        response = self.complete(prompt, formatted, **kwargs)
        yield response.model_copy(update={"delta": response.text})

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Yield what `chat` returns."""
        response = self.chat(messages, **kwargs)
        yield response.model_copy(update={"delta": response.message.content or ""})

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Yield what `acomplete` returns."""

        async def pieces() -> CompletionResponseAsyncGen:
            response = await self.acomplete(prompt, formatted, **kwargs)
            yield response.model_copy(update={"delta": response.text})

        return pieces()

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Yield what `achat` returns."""

        async def pieces() -> ChatResponseAsyncGen:
            response = await self.achat(messages, **kwargs)
            yield response.model_copy(update={"delta": response.message.content or ""})

        return pieces()

    def _elected(self, responses: Sequence[R]) -> R:
        vote = elect([(self.answer_of or self._answer)(response) for response in responses])
        winner = responses[vote.winner]
        more = {**winner.additional_kwargs, **_total_tokens(responses), "vote": vote.as_dict()}
        return winner.model_copy(update={"additional_kwargs": more})

    def _answer(self, response: ChatResponse | CompletionResponse) -> Hashable:
        """Return what responses share if they agree: the text, and tool calls."""
        if isinstance(response, CompletionResponse):
            return answer_key(response.text)
        calls: list[ToolSelection] = []
        if isinstance(self.llm, FunctionCallingLLM) and self.llm.metadata.is_function_calling_model:
            calls = self.llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        return answer_key(response.message.content or "", [(call.tool_name, call.tool_kwargs) for call in calls])


class _Tools(FunctionCallingLLM):
    """The tool-calling part of an LLM, delegated to the wrapped LLM."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        return self._wrapped._prepare_chat_with_tools_compat(
            tools, user_msg, chat_history, verbose, allow_parallel_tool_calls, tool_required, **kwargs
        )

    def _validate_chat_with_tools_response(
        self, response: ChatResponse, tools: Sequence[BaseTool], allow_parallel_tool_calls: bool = False, **kwargs: Any
    ) -> ChatResponse:
        return self._wrapped._validate_chat_with_tools_response(response, tools, allow_parallel_tool_calls, **kwargs)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tool calls in a response, as the wrapped LLM parses them."""
        return self._wrapped.get_tool_calls_from_response(response, error_on_no_tool_call, **kwargs)

    @property
    def _wrapped(self) -> FunctionCallingLLM:
        return cast(FunctionCallingLLM, cast(CanonicalLLM, self).llm)


class CanonicalToolLLM(CanonicalLLM, _Tools):
    """A `CanonicalLLM` around an LLM that calls tools."""


class VotingToolLLM(VotingLLM, _Tools):
    """A `VotingLLM` around an LLM that calls tools."""


def canonical(llm: LLM, *, ordering: str = "lexical") -> CanonicalLLM:
    """Wrap an LLM, so that it gets segments in an order that depends on their contents only.

    Segments come as `InvariantSynthesizer` or `SegmentMarkerPostprocessor` write them, or as citable blocks. The
    wrapped LLM gets them as plain text, one `Document: ...` each.

    Guaranteed: the request does not depend on the order of the segments, and neither does the answer of a deterministic
    LLM (temperature 0 is not quite that, with most providers). Not guaranteed: equal accuracy wherever a segment
    stands. The LLM still sees a sequence, and may overlook what the ordering puts in the middle. `vote` evens that out;
    `InvariantLLM` does not have the problem.

    Args:
        llm: Any LLM. The result streams, calls tools and writes objects if the wrapped one does.
        ordering: The content ordering of the segments: a name from `invariant-rag orderings`. Rank 0 stands last,
            nearest to the question. `lexical` compares bytes.

    Raises:
        UnknownName: There is no such ordering.
        UnsupportedCombination: The ordering keeps the order given.
        UnsupportedModel: It is no LLM.
    """
    PlainRequests(ordering)  # checks it
    _check_llm(llm)
    kind = CanonicalToolLLM if isinstance(llm, FunctionCallingLLM) else CanonicalLLM
    return kind(llm=llm, ordering=ordering, **_taken_over(llm))


def vote(
    llm: LLM,
    *,
    votes: int = 5,
    seed: int = 0,
    ordering: str = "lexical",
    answer_of: Callable[[Any], Hashable] | None = None,
) -> VotingLLM:
    """Wrap an LLM, so that it is asked about several orders of the segments, and the most frequent answer is returned.

    This is permutation self-consistency (arXiv 2310.07712). The first order is the canonical one; the others are drawn
    from it. Of equally frequent answers, the one whose order was drawn first wins.

    Guaranteed: what `canonical` guarantees. Answers that depend on where a segment stands tend to be outvoted, but
    they may win. The cost is `votes` concurrent calls, or as many as there are different orders. Free text hardly ever
    agrees word for word, and then the vote is the first answer: ask for short answers, or give `answer_of`.
    A stream is one piece, once all votes are in. The response's `additional_kwargs` report the tokens of all calls, and
    in `vote` the `calls` made and how many `agreed`; `raw` is that of the winner.

    Args:
        llm: Any LLM.
        votes: How many orders to ask about.
        seed: Seed of the orders.
        ordering: As for `canonical`.
        answer_of: Maps a response to the value that is counted; equal values agree. None: the text without regard to
            case and white space, and the tool calls.

    Raises:
        InvalidChoice: Fewer than one vote.
        UnknownName: There is no such ordering.
        UnsupportedCombination: The ordering keeps the order given.
        UnsupportedModel: It is no LLM.
    """
    PlainRequests(ordering, votes, seed)  # checks them
    _check_llm(llm)
    kind = VotingToolLLM if isinstance(llm, FunctionCallingLLM) else VotingLLM
    return kind(llm=llm, votes=votes, seed=seed, ordering=ordering, answer_of=answer_of, **_taken_over(llm))


def _check_llm(llm: object) -> None:
    if not isinstance(llm, LLM):
        raise UnsupportedModel(
            f"expected an LLM of LlamaIndex, got {type(llm).__name__}",
            hint='Give the LLM itself, such as OpenAI("...") of llama-index-llms-openai for a name.',
        )


def _taken_over(llm: LLM) -> dict[str, Any]:
    """Return the fields that LlamaIndex reads before it calls an LLM."""
    return {name: getattr(llm, name) for name in _TAKEN_OVER}


def _at_once(calls: Sequence[Callable[[], R]]) -> list[R]:
    """Run calls in threads with the context variables (spans) of this one, and return their results."""
    with ThreadPoolExecutor(len(calls), thread_name_prefix="invariant-rag-vote") as pool:
        return list(pool.map(lambda pair: pair[0].run(pair[1]), [(copy_context(), call) for call in calls]))


def _total_tokens(responses: Sequence[ChatResponse | CompletionResponse]) -> dict[str, int]:
    """Return the tokens of all responses together; nothing where they report none."""
    counts = [get_tokens_from_response(response) for response in responses]
    read, written = (sum(each) for each in zip(*counts, strict=True))
    if not read + written:
        return {}
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
