"""`vote`: an LLM behind an API, asked about several orders of the segments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.callbacks.token_counting import get_tokens_from_response
from llama_index.core.llms import LLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection

from invariant_rag.api_models import PlainRequests, answer_key, elect
from llama_index.llms.invariant_rag.canonical import CanonicalLLM
from llama_index.llms.invariant_rag.delegation import DelegatedTools, check_llm, in_one_piece, one_piece, taken_over
from llama_index.llms.invariant_rag.plain import Ballot, answered
from llama_index.llms.invariant_rag.reports import Reports
from llama_index.llms.invariant_rag.tracking import current_reports, note_answer

R = TypeVar("R", ChatResponse, CompletionResponse)


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
        reports = current_reports()
        return one_piece(lambda: self._elected(_at_once(calls), ballots, reports))

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Yield what `chat` returns."""
        ballots = self._messages(messages, kwargs)
        calls = [partial(self.llm.chat, each.input, **kwargs) for each in ballots]
        reports = current_reports()
        return one_piece(lambda: self._elected(_at_once(calls), ballots, reports))

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Yield what `acomplete` returns."""
        return in_one_piece(await self.acomplete(prompt, formatted, **kwargs))

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Yield what `achat` returns."""
        return in_one_piece(await self.achat(messages, **kwargs))

    def _elected(
        self, responses: Sequence[R], ballots: Sequence[Ballot], reports: Sequence[Reports] | None = None
    ) -> R:
        translated = [answered(*each, self._strategy) for each in zip(responses, ballots, strict=True)]
        vote = elect([(self.answer_of or self._answer)(response) for response in translated])
        winner = translated[vote.winner]
        chosen = ballots[vote.winner]
        note_answer(chosen.ledger(self._strategy), recognized=chosen.recognized, reports=reports)
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


class VotingToolLLM(VotingLLM, DelegatedTools):
    """A `VotingLLM` around an LLM that calls tools."""


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
    check_llm(llm)
    kind = VotingToolLLM if isinstance(llm, FunctionCallingLLM) else VotingLLM
    options = {"find_documents": find_documents, "strict": strict, "require_segments": require_segments}
    ballots = {"votes": votes, "seed": seed, "ordering": ordering, "answer_of": answer_of}
    return kind(llm=llm, **{**taken_over(llm), **ballots, **options})


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
