"""`canonical` and `vote`: LLMs behind an API, whose attention is fixed but whose prompt can be sorted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, ClassVar, Self, TypeVar, cast

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
from invariant_rag.prompts import Recognition, Turn
from llama_index.llms.invariant_rag.messages import to_turns
from llama_index.llms.invariant_rag.plain import Ballot, answered, message_ballots, text_ballots
from llama_index.llms.invariant_rag.recognition import FIND_DOCUMENTS, REQUIRE_SEGMENTS, STRICT, Recognizer
from llama_index.llms.invariant_rag.responses import note_report
from llama_index.llms.invariant_rag.tracking import track_spans

R = TypeVar("R", ChatResponse, CompletionResponse)

_TAKEN_OVER = (
    "callback_manager", "completion_to_prompt", "messages_to_prompt", "output_parser", "pydantic_program_mode",
    "query_wrapper_prompt", "system_prompt",
)  # fmt: skip


class CanonicalLLM(LLM):
    """An LLM that gets segments in canonical order; made by `canonical`. The wrapped LLM emits callbacks and events."""

    llm: SerializeAsAny[LLM] = Field(description="The wrapped LLM.")
    ordering: str = Field(default="lexical", description="The content ordering of the segments.")
    find_documents: bool = Field(default=True, description=FIND_DOCUMENTS)
    strict: bool = Field(default=False, description=STRICT)
    require_segments: bool = Field(default=False, description=REQUIRE_SEGMENTS)

    parses_marks: ClassVar[bool] = True
    _query: str | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Begin to note what is retrieved."""
        super().model_post_init(context)
        if self.find_documents:
            track_spans()

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

    @property
    def _strategy(self) -> str:
        """Name of the strategy, for the ledger."""
        return "canonical"

    def _recognize(self, turns: Sequence[Turn]) -> Recognition:
        recognizer = Recognizer(self.find_documents, self.strict, self.require_segments)
        return recognizer.recognize(turns)

    def _text(self, prompt: str, keywords: dict[str, Any]) -> list[Ballot]:
        query = keywords.pop("query", self._query)
        return text_ballots(self._requests, self._recognize([Turn("user", (prompt,))]), query)

    def _messages(self, messages: Sequence[ChatMessage], keywords: dict[str, Any]) -> list[Ballot]:
        query = keywords.pop("query", self._query)
        return message_ballots(self._requests, messages, self._recognize(to_turns(messages)), query)

    def _answered(self, response: R, ballot: Ballot) -> R:
        note_report(ballot.ledger(self._strategy))
        return answered(response, ballot, self._strategy)

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text, with its segments in canonical order."""
        (ballot,) = self._text(prompt, kwargs)
        return self._answered(self.llm.complete(ballot.input, formatted, **kwargs), ballot)

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation, with the segments of every turn in canonical order."""
        (ballot,) = self._messages(messages, kwargs)
        return self._answered(self.llm.chat(ballot.input, **kwargs), ballot)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Stream the completion of a text; in one piece if numbers in the answer have to be translated."""
        (ballot,) = self._text(prompt, kwargs)
        note_report(ballot.ledger(self._strategy))
        if ballot.request.labels:
            return _one_piece(lambda: self._answered(self.llm.complete(ballot.input, formatted, **kwargs), ballot))
        pieces = self.llm.stream_complete(ballot.input, formatted, **kwargs)
        return (self._answered(piece, ballot) for piece in pieces)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Stream the answer to a conversation; in one piece if numbers in the answer have to be translated."""
        (ballot,) = self._messages(messages, kwargs)
        note_report(ballot.ledger(self._strategy))
        if ballot.request.labels:
            return _one_piece(lambda: self._answered(self.llm.chat(ballot.input, **kwargs), ballot))
        return (self._answered(piece, ballot) for piece in self.llm.stream_chat(ballot.input, **kwargs))

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text."""
        (ballot,) = self._text(prompt, kwargs)
        return self._answered(await self.llm.acomplete(ballot.input, formatted, **kwargs), ballot)

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        (ballot,) = self._messages(messages, kwargs)
        return self._answered(await self.llm.achat(ballot.input, **kwargs), ballot)

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Stream the completion of a text."""
        (ballot,) = self._text(prompt, kwargs)
        note_report(ballot.ledger(self._strategy))
        if ballot.request.labels:
            response = await self.llm.acomplete(ballot.input, formatted, **kwargs)
            return _in_one_piece(self._answered(response, ballot))
        pieces = await self.llm.astream_complete(ballot.input, formatted, **kwargs)
        return (self._answered(piece, ballot) async for piece in pieces)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Stream the answer to a conversation."""
        (ballot,) = self._messages(messages, kwargs)
        note_report(ballot.ledger(self._strategy))
        if ballot.request.labels:
            return _in_one_piece(self._answered(await self.llm.achat(ballot.input, **kwargs), ballot))
        pieces = await self.llm.astream_chat(ballot.input, **kwargs)
        return (self._answered(piece, ballot) async for piece in pieces)


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

    @property
    def _strategy(self) -> str:
        return "vote"

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text with the most frequent answer over several orders of the segments."""
        ballots = self._text(prompt, kwargs)
        calls = [partial(self.llm.complete, each.input, formatted, **kwargs) for each in ballots]
        return self._elected(_at_once(calls), ballots)

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation with the most frequent answer over several orders of the segments."""
        ballots = self._messages(messages, kwargs)
        return self._elected(_at_once([partial(self.llm.chat, each.input, **kwargs) for each in ballots]), ballots)

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text with the most frequent answer over several orders of the segments."""
        ballots = self._text(prompt, kwargs)
        calls = (self.llm.acomplete(each.input, formatted, **kwargs) for each in ballots)
        return self._elected(await asyncio.gather(*calls), ballots)

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation with the most frequent answer over several orders of the segments."""
        ballots = self._messages(messages, kwargs)
        return self._elected(await asyncio.gather(*(self.llm.achat(each.input, **kwargs) for each in ballots)), ballots)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Yield what `complete` returns, once all votes are in."""
        ballots = self._text(prompt, kwargs)
        calls = [partial(self.llm.complete, each.input, formatted, **kwargs) for each in ballots]
        return _one_piece(lambda: self._elected(_at_once(calls), ballots))

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Yield what `chat` returns."""
        ballots = self._messages(messages, kwargs)
        calls = [partial(self.llm.chat, each.input, **kwargs) for each in ballots]
        return _one_piece(lambda: self._elected(_at_once(calls), ballots))

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Yield what `acomplete` returns."""
        return _in_one_piece(await self.acomplete(prompt, formatted, **kwargs))

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Yield what `achat` returns."""
        return _in_one_piece(await self.achat(messages, **kwargs))

    def _elected(self, responses: Sequence[R], ballots: Sequence[Ballot]) -> R:
        translated = [answered(*each, self._strategy) for each in zip(responses, ballots, strict=True)]
        vote = elect([(self.answer_of or self._answer)(response) for response in translated])
        winner = translated[vote.winner]
        note_report(ballots[vote.winner].ledger(self._strategy))
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


def canonical(
    llm: LLM,
    *,
    ordering: str = "lexical",
    find_documents: bool = True,
    strict: bool = False,
    require_segments: bool = False,
) -> CanonicalLLM:
    """Wrap an LLM, so that it gets segments in an order that depends on their contents only.

    Segments are nodes that were retrieved in the same trace, what `InvariantSynthesizer` and
    `SegmentMarkerPostprocessor` write, and citable blocks. The wrapped LLM gets them as plain text: with the text
    around each that was there, or as one `Document: ...` each.

    Guaranteed: the request does not depend on the order of the segments, and neither does the answer of a deterministic
    LLM (temperature 0 is not quite that, with most providers). Not guaranteed: equal accuracy wherever a segment
    stands. The LLM still sees a sequence, and may overlook what the ordering puts in the middle. `vote` evens that out;
    `InvariantLLM` does not have the problem.

    Args:
        llm: Any LLM. The result streams, calls tools and writes objects if the wrapped one does.
        ordering: The content ordering of the segments: a name from `invariant-rag orderings`. Rank 0 stands last,
            nearest to the question. `lexical` compares bytes.
        find_documents: Whether nodes that were retrieved in the same trace are segments wherever their text appears in
            a prompt.
        strict: Whether to raise an `OrderWarning`, and not only to warn, where the order of nodes may change an answer.
        require_segments: Whether to raise an `OrderWarning` for a prompt without any segment.

    Raises:
        UnknownName: There is no such ordering.
        UnsupportedCombination: The ordering keeps the order given.
        UnsupportedModel: It is no LLM.
    """
    PlainRequests(ordering)  # checks it
    _check_llm(llm)
    kind = CanonicalToolLLM if isinstance(llm, FunctionCallingLLM) else CanonicalLLM
    options = {"find_documents": find_documents, "strict": strict, "require_segments": require_segments}
    return kind(llm=llm, ordering=ordering, **{**_taken_over(llm), **options})


def vote(
    llm: LLM,
    *,
    votes: int = 5,
    seed: int = 0,
    ordering: str = "lexical",
    answer_of: Callable[[Any], Hashable] | None = None,
    find_documents: bool = True,
    strict: bool = False,
    require_segments: bool = False,
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
        find_documents: As for `canonical`, as are the next two.
        strict: Whether to raise where the order of nodes may change an answer.
        require_segments: Whether to raise for a prompt without any segment.

    Raises:
        InvalidChoice: Fewer than one vote.
        UnknownName: There is no such ordering.
        UnsupportedCombination: The ordering keeps the order given.
        UnsupportedModel: It is no LLM.
    """
    PlainRequests(ordering, votes, seed)  # checks them
    _check_llm(llm)
    kind = VotingToolLLM if isinstance(llm, FunctionCallingLLM) else VotingLLM
    options = {"find_documents": find_documents, "strict": strict, "require_segments": require_segments}
    ballots = {"votes": votes, "seed": seed, "ordering": ordering, "answer_of": answer_of}
    return kind(llm=llm, **{**_taken_over(llm), **ballots, **options})


def _check_llm(llm: object) -> None:
    if not isinstance(llm, LLM):
        raise UnsupportedModel(
            f"expected an LLM of LlamaIndex, got {type(llm).__name__}",
            hint='Give the LLM itself, such as OpenAI("...") of llama-index-llms-openai for a name.',
        )


def _taken_over(llm: LLM) -> dict[str, Any]:
    """Return the fields that LlamaIndex reads before it calls an LLM."""
    return {name: getattr(llm, name) for name in _TAKEN_OVER}


def _one_piece(ask: Callable[[], R]) -> Generator[R, None, None]:
    """Return a stream whose only piece is a whole answer, asked for when it is read, in the spans of now."""
    context = copy_context()
    return (_whole(context.run(each)) for each in (ask,))


async def _in_one_piece(response: R) -> AsyncGenerator[R, None]:
    yield _whole(response)


def _whole(response: R) -> R:
    text = response.text if isinstance(response, CompletionResponse) else response.message.content or ""
    return response.model_copy(update={"delta": text})


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
