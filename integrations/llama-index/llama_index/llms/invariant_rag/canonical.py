"""`canonical`: an LLM behind an API, whose attention is fixed but whose prompt can be sorted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar

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
from llama_index.core.llms import LLM
from llama_index.core.llms.function_calling import FunctionCallingLLM

from invariant_rag.api_models import PlainRequests
from invariant_rag.prompts import Recognition, Turn
from llama_index.llms.invariant_rag.delegation import DelegatedTools, check_llm, in_one_piece, one_piece, taken_over
from llama_index.llms.invariant_rag.messages import to_turns
from llama_index.llms.invariant_rag.plain import Ballot, answered, message_ballots, text_ballots
from llama_index.llms.invariant_rag.recognition import FIND_DOCUMENTS, REQUIRE_SEGMENTS, STRICT, Recognizer
from llama_index.llms.invariant_rag.tracking import note_answer, track_spans

R = TypeVar("R", ChatResponse, CompletionResponse)


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
        """Begin to note what is retrieved, and to report."""
        super().model_post_init(context)
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

    def _asked(self, ballots: Sequence[Ballot]) -> Ballot:
        """Return the only request, and report what is asked."""
        (ballot,) = ballots
        note_answer(ballot.ledger(self._strategy), recognized=ballot.recognized)
        return ballot

    def _answered(self, response: R, ballot: Ballot) -> R:
        return answered(response, ballot, self._strategy)

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text, with its segments in canonical order."""
        ballot = self._asked(self._text(prompt, kwargs))
        return self._answered(self.llm.complete(ballot.input, formatted, **kwargs), ballot)

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation, with the segments of every turn in canonical order."""
        ballot = self._asked(self._messages(messages, kwargs))
        return self._answered(self.llm.chat(ballot.input, **kwargs), ballot)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Stream the completion of a text; in one piece if numbers in the answer have to be translated."""
        ballot = self._asked(self._text(prompt, kwargs))
        if ballot.request.labels:
            return one_piece(lambda: self._answered(self.llm.complete(ballot.input, formatted, **kwargs), ballot))
        pieces = self.llm.stream_complete(ballot.input, formatted, **kwargs)
        return (self._answered(piece, ballot) for piece in pieces)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Stream the answer to a conversation; in one piece if numbers in the answer have to be translated."""
        ballot = self._asked(self._messages(messages, kwargs))
        if ballot.request.labels:
            return one_piece(lambda: self._answered(self.llm.chat(ballot.input, **kwargs), ballot))
        return (self._answered(piece, ballot) for piece in self.llm.stream_chat(ballot.input, **kwargs))

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text."""
        ballot = self._asked(self._text(prompt, kwargs))
        return self._answered(await self.llm.acomplete(ballot.input, formatted, **kwargs), ballot)

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        ballot = self._asked(self._messages(messages, kwargs))
        return self._answered(await self.llm.achat(ballot.input, **kwargs), ballot)

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Stream the completion of a text."""
        ballot = self._asked(self._text(prompt, kwargs))
        if ballot.request.labels:
            response = await self.llm.acomplete(ballot.input, formatted, **kwargs)
            return in_one_piece(self._answered(response, ballot))
        pieces = await self.llm.astream_complete(ballot.input, formatted, **kwargs)
        return (self._answered(piece, ballot) async for piece in pieces)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Stream the answer to a conversation."""
        ballot = self._asked(self._messages(messages, kwargs))
        if ballot.request.labels:
            return in_one_piece(self._answered(await self.llm.achat(ballot.input, **kwargs), ballot))
        pieces = await self.llm.astream_chat(ballot.input, **kwargs)
        return (self._answered(piece, ballot) async for piece in pieces)


class CanonicalToolLLM(CanonicalLLM, DelegatedTools):
    """A `CanonicalLLM` around an LLM that calls tools."""


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
    check_llm(llm)
    kind = CanonicalToolLLM if isinstance(llm, FunctionCallingLLM) else CanonicalLLM
    options = {"find_documents": find_documents, "strict": strict, "require_segments": require_segments}
    return kind(llm=llm, ordering=ordering, **{**taken_over(llm), **options})
