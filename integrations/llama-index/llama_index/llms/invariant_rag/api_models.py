"""`canonical` and `vote`: LLMs behind an API, whose attention is fixed but whose prompt can be sorted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from llama_index.core.base.llms import types
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata, TextBlock
from llama_index.core.bridge.pydantic import Field, SerializeAsAny
from llama_index.core.callbacks.token_counting import get_tokens_from_response
from llama_index.core.llms import LLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate
from llama_index.core.types import Model

from invariant_rag.api_models import PlainRequest, PlainRequests, answer_key, ask_all, elect, object_key
from invariant_rag.errors import UnsupportedCombination, UnsupportedModel
from invariant_rag.prompts import Turn
from llama_index.llms.invariant_rag.responses import ASSISTANT, to_turns
from llama_index.llms.invariant_rag.slots import Part, RecognizedTurns, SegmentReader, SlotText

R = TypeVar("R", ChatResponse, CompletionResponse)
T = TypeVar("T")

_TAKEN_OVER = (
    "callback_manager", "completion_to_prompt", "messages_to_prompt", "output_parser", "pydantic_program_mode",
    "query_wrapper_prompt", "system_prompt",
)  # fmt: skip


@dataclass(frozen=True)
class _Ballots:
    """What to ask an LLM: messages or a text, once per order of the segments; and what they were made from."""

    inputs: Sequence[Any]
    requests: Sequence[PlainRequest]
    conversation: RecognizedTurns

    def calls(self, ask: Callable[..., T], **kwargs: Any) -> list[Callable[[], T]]:
        return [partial(ask, each, **kwargs) for each in self.inputs]

    async def acalls(self, ask: Callable[..., Awaitable[T]], **kwargs: Any) -> list[T]:
        return await asyncio.gather(*(call() for call in self.calls(ask, **kwargs)))


class CanonicalLLM(SegmentReader, FunctionCallingLLM):
    """An LLM that gets segments in canonical order, or in several; the wrapped LLM emits events and parses calls."""

    llm: SerializeAsAny[LLM] = Field(description="The wrapped LLM.")
    ordering: str = Field(default="lexical", description="The content ordering of the segments.")
    votes: int | None = Field(default=None, description="How many orders to ask about; None: the canonical one.")
    seed: int = Field(default=0, description="Seed of the other orders.")
    answer_of: Callable[[Any], Hashable] | None = Field(default=None, exclude=True, description="Value that counts.")

    def __init__(self, llm: LLM, **kwargs: Any) -> None:
        PlainRequests(**{name: kwargs[name] for name in ("ordering", "votes", "seed") if name in kwargs})  # checks them
        if not isinstance(llm, LLM):
            raise UnsupportedModel(
                f"expected an LLM of LlamaIndex, got {type(llm).__name__}",
                hint='Give the LLM itself, such as OpenAI("...") of llama-index-llms-openai for a name.',
            )
        taken = {name: getattr(llm, name) for name in _TAKEN_OVER}
        super().__init__(**{**taken, "llm": llm, **kwargs})

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a callback manager is that of the wrapped LLM too, which emits the callbacks."""
        super().__setattr__(name, value)
        if name == "callback_manager":
            self.llm.callback_manager = value

    @property
    def metadata(self) -> LLMMetadata:
        """Metadata of the wrapped LLM."""
        return self.llm.metadata

    @property
    def _caller(self) -> FunctionCallingLLM:
        if not isinstance(self.llm, FunctionCallingLLM):
            raise UnsupportedCombination(
                f"expected an LLM that calls tools, got {type(self.llm).__name__}",
                hint="Wrap one that does, or use a ReActAgent, which offers tools as text.",
            )
        return self.llm

    def _prepare_chat_with_tools_compat(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._caller._prepare_chat_with_tools_compat(*args, **kwargs)

    _prepare_chat_with_tools = _prepare_chat_with_tools_compat

    def _validate_chat_with_tools_response(self, *args: Any, **kwargs: Any) -> ChatResponse:
        return self._caller._validate_chat_with_tools_response(*args, **kwargs)

    def get_tool_calls_from_response(self, *args: Any, **kwargs: Any) -> list[ToolSelection]:
        """Return the tool calls in a response, as the wrapped LLM parses them."""
        return self._caller.get_tool_calls_from_response(*args, **kwargs)

    def _ballots(
        self, turns: Sequence[Turn], keywords: dict[str, Any], messages: Sequence[ChatMessage] | None = None
    ) -> _Ballots:
        recognized = self._recognize(turns)
        query = keywords.pop("query", None) or recognized.query
        requests = PlainRequests(self.ordering, self.votes, self.seed).of_turns(recognized.turns, query)
        if messages is None:
            return _Ballots([each.text for each in requests], requests, recognized)
        return _Ballots([_written(messages, recognized.turns, each.turns) for each in requests], requests, recognized)

    def _text(self, prompt: str, keywords: dict[str, Any]) -> _Ballots:
        parts = prompt.parts if isinstance(prompt, SlotText) else (Part(prompt, "finished"),)
        return self._ballots([Turn("user", parts)], keywords)

    def _messages(self, messages: Sequence[ChatMessage], keywords: dict[str, Any]) -> _Ballots:
        return self._ballots(to_turns(messages), keywords, messages)

    def _of_template(self, prompt: BasePromptTemplate, values: Mapping[str, Any]) -> _Ballots:
        ballots = self._messages(self._get_messages(prompt, **values), {})
        return replace(ballots, inputs=list(map(ChatPromptTemplate, ballots.inputs)))

    def _ledger(self, ballots: _Ballots, winner: int = 0) -> dict[str, Any]:
        """Return the ledger of an answer, and report it to the engines around."""
        method = "canonical" if self.votes is None else "vote"
        ledger = ballots.requests[winner].ledger(method, recognized=ballots.conversation.recognized)
        for sink in ballots.conversation.sinks:
            sink.note(ledger)
        return ledger

    def _answered(self, responses: Sequence[R], ballots: _Ballots) -> R:
        """Return the response, with the ledger in `additional_kwargs`, and in `raw` unless that is an object."""
        if self.votes is None:
            return _with_ledger(responses[0], self._ledger(ballots))
        vote = elect(list(map(self._key, responses)))
        read, written = (sum(each) for each in zip(*map(get_tokens_from_response, responses), strict=True))
        tokens = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        more = {**(tokens if read + written else {}), "vote": vote.as_dict()}
        return _with_ledger(responses[vote.winner], self._ledger(ballots, vote.winner), more)

    def _key(self, response: Any) -> Hashable:
        """Return what responses share if they agree: the text, and tool calls."""
        if self.answer_of is not None:
            return self.answer_of(response)
        calls: Sequence[Any] = ()
        if isinstance(self.llm, FunctionCallingLLM) and isinstance(response, ChatResponse):
            calls = self.llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        return answer_key(_text_of(response), [(call.tool_name, call.tool_kwargs) for call in calls])

    def _ask(self, ask: Callable[..., R], ballots: _Ballots, **kwargs: Any) -> R:
        return self._answered(ask_all(ballots.calls(ask, **kwargs)), ballots)

    async def _aask(self, ask: Callable[..., Awaitable[R]], ballots: _Ballots, **kwargs: Any) -> R:
        return self._answered(await ballots.acalls(ask, **kwargs), ballots)

    def _stream(self, method: str, ballots: _Ballots, **kwargs: Any) -> Generator[Any, None, None]:
        if len(ballots.inputs) > 1:
            return (_whole(each) for each in [self._ask(getattr(self.llm, method), ballots, **kwargs)])
        ledger, stream = self._ledger(ballots), getattr(self.llm, f"stream_{method}")
        return (_with_ledger(piece, ledger) for piece in stream(ballots.inputs[0], **kwargs))

    async def _astream(self, method: str, ballots: _Ballots, **kwargs: Any) -> AsyncGenerator[Any, None]:
        if len(ballots.inputs) > 1:
            return _one_piece(_whole(await self._aask(getattr(self.llm, f"a{method}"), ballots, **kwargs)))
        ledger, stream = self._ledger(ballots), getattr(self.llm, f"astream_{method}")
        return (_with_ledger(piece, ledger) async for piece in await stream(ballots.inputs[0], **kwargs))

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text, with its segments in canonical order."""
        return self._ask(self.llm.complete, self._text(prompt, kwargs), formatted=formatted, **kwargs)

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation, with the segments of every turn in canonical order."""
        return self._ask(self.llm.chat, self._messages(messages, kwargs), **kwargs)

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text."""
        return await self._aask(self.llm.acomplete, self._text(prompt, kwargs), formatted=formatted, **kwargs)

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return await self._aask(self.llm.achat, self._messages(messages, kwargs), **kwargs)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> types.CompletionResponseGen:
        """Stream the completion of a text; in one piece, once all votes are in, if there are several."""
        return self._stream("complete", self._text(prompt, kwargs), formatted=formatted, **kwargs)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> types.ChatResponseGen:
        """Stream the answer to a conversation; in one piece, once all votes are in, if there are several."""
        return self._stream("chat", self._messages(messages, kwargs), **kwargs)

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> types.CompletionResponseAsyncGen:
        """Stream the completion of a text."""
        return await self._astream("complete", self._text(prompt, kwargs), formatted=formatted, **kwargs)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> types.ChatResponseAsyncGen:
        """Stream the answer to a conversation."""
        return await self._astream("chat", self._messages(messages, kwargs), **kwargs)

    def structured_predict(self, output_cls: type[Model], prompt: Any, llm_kwargs: Any = None, **values: Any) -> Model:
        """Answer with an object, as the wrapped LLM does."""
        ballots, ask = self._of_template(prompt, values), partial(self.llm.structured_predict, output_cls)
        made: list[Model] = ask_all(ballots.calls(ask, llm_kwargs=llm_kwargs))
        return self._object(made, ballots)

    async def astructured_predict(
        self, output_cls: type[Model], prompt: Any, llm_kwargs: Any = None, **values: Any
    ) -> Model:
        """Answer with an object, as the wrapped LLM does."""
        ballots, ask = self._of_template(prompt, values), partial(self.llm.astructured_predict, output_cls)
        made: list[Model] = await ballots.acalls(ask, llm_kwargs=llm_kwargs)
        return self._object(made, ballots)

    def _object(self, found: Sequence[Model], ballots: _Ballots) -> Model:
        winner = elect(list(map(object_key, found))).winner
        self._ledger(ballots, winner)
        return found[winner]


def canonical(
    llm: LLM,
    *,
    ordering: str = "lexical",
    find_documents: bool = True,
    strict: bool = False,
    require_segments: bool = False,
) -> CanonicalLLM:
    """Wrap an LLM, so that it gets segments in an order that depends on their contents only.

    Segments are those that an `InvariantLLM` would know, as a template wrote them, or as one `Document: ...` each. The
    request does not depend on their order, and neither does the answer of a deterministic LLM (few providers are that,
    even at temperature 0). What is in the middle may still be overlooked; `vote` evens it out.

    Args:
        llm: Any LLM. The result streams, calls tools and writes objects if this one does.
        ordering: A name from `invariant-rag orderings`. Rank 0 is last, nearest to the question.
        find_documents: Whether slots of the prompt that are nothing but what was retrieved at once are segments.
        strict: Whether to raise an `OrderWarning`, and not only to warn, where the order of nodes may change an answer.
        require_segments: Whether to raise an `OrderWarning` for a prompt without any segment.
    """
    switches = {"find_documents": find_documents, "strict": strict, "require_segments": require_segments}
    return CanonicalLLM(llm, ordering=ordering, **switches)


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
) -> CanonicalLLM:
    """Wrap an LLM, so that it is asked about several orders of the segments, and the most frequent answer is returned.

    This is permutation self-consistency (arXiv 2310.07712), and what `canonical` guarantees holds. The first order is
    the canonical one; of a tie, the answer whose order was drawn first wins. It costs `votes` concurrent calls, or as
    many as there are orders. Ask for short answers: free text hardly ever agrees. A stream is one piece.
    `additional_kwargs` of a response report the tokens of all calls, and in `vote` the `calls` and how many `agreed`.

    Args:
        llm: Any LLM.
        votes: How many orders to ask about.
        seed: Seed of the orders.
        ordering: As for `canonical`, as are the switches below.
        answer_of: Maps a response to the value that is counted; equal values agree. None: the text without regard to
            case and white space, and the tool calls.
        find_documents: As for `canonical`.
        strict: As for `canonical`.
        require_segments: As for `canonical`.
    """
    switches = {"find_documents": find_documents, "strict": strict, "require_segments": require_segments}
    return CanonicalLLM(llm, votes=votes, seed=seed, ordering=ordering, answer_of=answer_of, **switches)


def _written(messages: Sequence[ChatMessage], turns: Sequence[Turn], written: Sequence[Turn]) -> list[ChatMessage]:
    """Return messages with the content of a request. Those without segments stay as they are."""
    found = []
    for message, turn, request in zip(messages, turns, written, strict=True):
        text = "\n".join(block.text for block in message.blocks if isinstance(block, TextBlock))
        if message.role not in ASSISTANT and (turn.has_segments or turn.text.strip() != text.strip()):
            blocks = [TextBlock(text=part) if isinstance(part, str) else part for part in request.parts]
            message = message.model_copy(update={"blocks": blocks})  # noqa: PLW2901
        if request.parts or not message.blocks:  # else its segments went to the set of its neighbour
            found.append(message)
    return found


def _with_ledger(response: R, ledger: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> R:
    extra = {**response.additional_kwargs, "invariant_rag": dict(ledger), **(more or {})}
    changed: dict[str, Any] = {"additional_kwargs": extra}
    if response.raw is None or isinstance(response.raw, Mapping):
        changed["raw"] = {**(response.raw or {}), **ledger}
    return response.model_copy(update=changed)


async def _one_piece(response: R) -> AsyncGenerator[R, None]:
    yield response


def _whole(response: R) -> R:
    return response.model_copy(update={"delta": _text_of(response)})


def _text_of(response: ChatResponse | CompletionResponse) -> str:
    return response.text if isinstance(response, CompletionResponse) else response.message.content or ""
