"""LLMs behind somebody else's API: their attention cannot be changed, but the order in which they read can."""

from __future__ import annotations

import asyncio
import json
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

from invariant_rag.api_models import comparable, content_ordering, most_voted
from invariant_rag.errors import InvalidChoice, UnsupportedModel
from llama_index.llms.invariant_rag.plain import Requests

R = TypeVar("R", ChatResponse, CompletionResponse)

_TAKEN_OVER = (
    "callback_manager", "completion_to_prompt", "messages_to_prompt", "output_parser", "pydantic_program_mode",
    "query_wrapper_prompt", "system_prompt",
)  # fmt: skip


class CanonicalLLM(LLM):
    """What `canonical` makes of an LLM. Its calls are the other LLM's: that one tells callbacks and events."""

    llm: SerializeAsAny[LLM] = Field(description="What answers.")
    ordering: str = Field(default="lexical", description="Which segment stands where, by content.")

    _query: str | None = PrivateAttr(default=None)

    @classmethod
    def class_name(cls) -> str:
        """Return the stable id of this class."""
        return "CanonicalLLM"

    def about(self, query: str) -> Self:
        """Return a copy whose relevance orderings compare segments with a query, where a call names no other."""
        copied = self.model_copy()
        copied._query = query
        return copied

    @property
    def metadata(self) -> LLMMetadata:
        """That of the other LLM."""
        return self.llm.metadata

    @property
    def _requests(self) -> Requests:
        return Requests(self.ordering)

    def _text(self, prompt: str, keywords: dict[str, Any]) -> str:
        return self._requests.of_text(prompt, keywords.pop("query", self._query))[0]

    def _messages(self, messages: Sequence[ChatMessage], keywords: dict[str, Any]) -> list[ChatMessage]:
        return self._requests.of_messages(messages, keywords.pop("query", self._query))[0]

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text. Segments marked in it are listed by content."""
        return self.llm.complete(self._text(prompt, kwargs), formatted, **kwargs)

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation. Segments in any turn are listed by content."""
        return self.llm.chat(self._messages(messages, kwargs), **kwargs)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Continue a text, piece by piece."""
        return self.llm.stream_complete(self._text(prompt, kwargs), formatted, **kwargs)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation, piece by piece."""
        return self.llm.stream_chat(self._messages(messages, kwargs), **kwargs)

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text."""
        return await self.llm.acomplete(self._text(prompt, kwargs), formatted, **kwargs)

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return await self.llm.achat(self._messages(messages, kwargs), **kwargs)

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Continue a text, piece by piece."""
        return await self.llm.astream_complete(self._text(prompt, kwargs), formatted, **kwargs)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a conversation, piece by piece."""
        return await self.llm.astream_chat(self._messages(messages, kwargs), **kwargs)


class VotingLLM(CanonicalLLM):
    """What `vote` makes of an LLM."""

    votes: int = Field(default=5, ge=1, description="How many orders to ask about.")
    seed: int = Field(default=0, description="What the orders are drawn with.")
    answer_of: Callable[[Any], Hashable] | None = Field(default=None, exclude=True, description="What is counted.")

    @classmethod
    def class_name(cls) -> str:
        """Return the stable id of this class."""
        return "VotingLLM"

    @property
    def _requests(self) -> Requests:
        return Requests(self.ordering, self.votes, self.seed)

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text as most orders of the segments would have it."""
        ballots = self._requests.of_text(prompt, kwargs.pop("query", self._query))
        return self._elected(_at_once([partial(self.llm.complete, each, formatted, **kwargs) for each in ballots]))

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation as most orders of the segments would have it."""
        ballots = self._requests.of_messages(messages, kwargs.pop("query", self._query))
        return self._elected(_at_once([partial(self.llm.chat, each, **kwargs) for each in ballots]))

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text as most orders of the segments would have it."""
        ballots = self._requests.of_text(prompt, kwargs.pop("query", self._query))
        return self._elected(await asyncio.gather(*(self.llm.acomplete(each, formatted, **kwargs) for each in ballots)))

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation as most orders of the segments would have it."""
        ballots = self._requests.of_messages(messages, kwargs.pop("query", self._query))
        return self._elected(await asyncio.gather(*(self.llm.achat(each, **kwargs) for each in ballots)))

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Yield what `complete` returns: nothing can be said before all votes are in."""
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
        answers = [(self.answer_of or self._answer)(response) for response in responses]
        place = most_voted(answers)
        winner = responses[place]
        vote = {"calls": len(responses), "agreed": answers.count(answers[place])}
        more = {**winner.additional_kwargs, **_total_tokens(responses), "vote": vote}
        return winner.model_copy(update={"additional_kwargs": more})

    def _answer(self, response: ChatResponse | CompletionResponse) -> Hashable:
        """Return what is counted of a response: its text, and the calls of tools."""
        if isinstance(response, CompletionResponse):
            return comparable(response.text)
        text, calls = comparable(response.message.content or ""), []
        if isinstance(self.llm, FunctionCallingLLM) and self.llm.metadata.is_function_calling_model:
            calls = self.llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        return text, json.dumps([[call.tool_name, call.tool_kwargs] for call in calls], sort_keys=True, default=repr)


class _Tools(FunctionCallingLLM):
    """What an LLM has that calls tools: the other LLM says how."""

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
        return self._other._prepare_chat_with_tools_compat(
            tools, user_msg, chat_history, verbose, allow_parallel_tool_calls, tool_required, **kwargs
        )

    def _validate_chat_with_tools_response(
        self, response: ChatResponse, tools: Sequence[BaseTool], allow_parallel_tool_calls: bool = False, **kwargs: Any
    ) -> ChatResponse:
        return self._other._validate_chat_with_tools_response(response, tools, allow_parallel_tool_calls, **kwargs)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls of tools in a response, as the other LLM finds them."""
        return self._other.get_tool_calls_from_response(response, error_on_no_tool_call, **kwargs)

    @property
    def _other(self) -> FunctionCallingLLM:
        return cast(FunctionCallingLLM, cast(CanonicalLLM, self).llm)


class CanonicalToolLLM(CanonicalLLM, _Tools):
    """What `canonical` makes of an LLM that calls tools."""


class VotingToolLLM(VotingLLM, _Tools):
    """What `vote` makes of an LLM that calls tools."""


def canonical(llm: LLM, *, ordering: str = "lexical") -> CanonicalLLM:
    """Return an LLM that lists the segments it is given by content, and then asks another one.

    Segments come as `InvariantSynthesizer` or `SegmentMarkerPostprocessor` write them, or as citable blocks. They reach
    the other LLM as plain text that any provider takes, one `Document: ...` each.

    Guaranteed: the request does not depend on the order of the segments, and so neither does the answer, as long as
    the LLM is deterministic (temperature 0 is not quite that, with most providers). Not guaranteed: that it answers as
    well wherever a segment stands. The LLM still reads a sequence: what the ordering puts in the middle may be lost
    there. `vote` evens that out; `InvariantLLM` does not have the problem.

    Args:
        llm: Any LLM. It streams, calls tools and writes objects afterwards, if it did before.
        ordering: Which segment stands where: a name from `invariant-rag orderings`. Rank 0 is listed last, nearest to
            the question. `lexical` compares bytes.

    Raises:
        UnknownName: There is no such ordering.
        UnsupportedCombination: The ordering keeps the order given.
        UnsupportedModel: It is no LLM.
    """
    content_ordering(ordering)
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
    """Return an LLM that asks another one about several orders of the segments, and gives the most frequent answer.

    This is permutation self-consistency (arXiv 2310.07712). The orders are drawn from the canonical one, which is the
    first of them. Of answers that are equally frequent, the one whose order was drawn first is given.

    Guaranteed: what `canonical` guarantees. Answers that depend on where a segment stands tend to be outvoted, but
    they may win. The cost is `votes` calls at the same time, or as many as there are different orders. Free text hardly
    ever agrees word for word: then the vote is the first answer, so ask for short answers, or say what counts.
    A stream waits for the vote and is one piece. The response's `additional_kwargs` tell the tokens of all calls
    together, and in `vote` how many `calls` there were and how many `agreed`; `raw` is that of the winner.

    Args:
        llm: Any LLM.
        votes: How many orders to ask about.
        seed: What the orders are drawn with.
        ordering: As for `canonical`.
        answer_of: What is counted of a response; equal values agree. None: its text but for case and white space, and
            the calls of tools.

    Raises:
        InvalidChoice: Fewer than one vote.
        UnknownName: There is no such ordering.
        UnsupportedCombination: The ordering keeps the order given.
        UnsupportedModel: It is no LLM.
    """
    content_ordering(ordering)
    _check_llm(llm)
    if votes < 1:
        raise InvalidChoice(f"votes: expected at least 1, got {votes}")
    kind = VotingToolLLM if isinstance(llm, FunctionCallingLLM) else VotingLLM
    return kind(llm=llm, votes=votes, seed=seed, ordering=ordering, answer_of=answer_of, **_taken_over(llm))


def _check_llm(llm: object) -> None:
    if not isinstance(llm, LLM):
        raise UnsupportedModel(
            f"expected an LLM of LlamaIndex, got {type(llm).__name__}",
            hint='Give the LLM itself, such as OpenAI("...") of llama-index-llms-openai for a name.',
        )


def _taken_over(llm: LLM) -> dict[str, Any]:
    """What LlamaIndex asks an LLM for before it calls it."""
    return {name: getattr(llm, name) for name in _TAKEN_OVER}


def _at_once(calls: Sequence[Callable[[], R]]) -> list[R]:
    """Return what the calls return, each run in a thread that knows the spans of this one."""
    with ThreadPoolExecutor(len(calls), thread_name_prefix="invariant-rag-vote") as pool:
        return list(pool.map(lambda pair: pair[0].run(pair[1]), [(copy_context(), call) for call in calls]))


def _total_tokens(responses: Sequence[ChatResponse | CompletionResponse]) -> dict[str, int]:
    """Return the tokens of all responses together, where they tell them."""
    counts = [get_tokens_from_response(response) for response in responses]
    read, written = (sum(each) for each in zip(*counts, strict=True))
    if not read + written:
        return {}
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
