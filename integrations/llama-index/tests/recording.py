"""An LLM behind an API that keeps what it is asked, and says what it is told to."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from invariant_rag.errors import OrderWarning
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole, ToolCallBlock
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.llms.mock import MockFunctionCallingLLM


class Recorder(MockFunctionCallingLLM):
    """It calls the first tool that it is offered, and then says one thing; a ReAct agent is told to act first."""

    asked: list[str] = Field(default_factory=list)
    says: str = "Noon."
    calls: dict[str, Any] = Field(default_factory=lambda: {"input": "ferry"})
    is_chat_model: bool | None = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(is_chat_model=True, response_generator=self._answer, **kwargs)

    def _answer(self, messages: Sequence[ChatMessage], tools: Any = (), **kwargs: Any) -> ChatMessage:
        self.asked.append("\0".join("".join(getattr(each, "text", "") for each in one.blocks) for one in messages))
        if tools and messages[-1].role != MessageRole.TOOL:
            call = ToolCallBlock(tool_call_id="1", tool_name=tools[0].metadata.name, tool_kwargs=self.calls)
            return ChatMessage(role="assistant", blocks=[call])
        if "Action Input:" not in (messages[0].content or ""):
            return ChatMessage(self.says, role="assistant")
        acted = "Observation:" in (messages[-1].content or "")
        action = 'Thought: I search.\nAction: records\nAction Input: {"input": "ferry"}'
        return ChatMessage(f"Thought: I know.\nAnswer: {self.says}" if acted else action, role="assistant")

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=self._answer([ChatMessage(prompt)]).content or "")


def caught(ask: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what a call returns, and its warnings about order."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = ask()
    return result, [str(each.message) for each in found if issubclass(each.category, OrderWarning)]


async def consumed(asked: Any) -> tuple[str, Any]:
    """Return the text of a response, and the response, or the last piece of a stream of an LLM, once all is read."""
    is_async = inspect.isawaitable(asked)
    response = await asked if is_async else asked
    is_stream = "Streaming" in type(response).__name__  # of an engine
    pieces = response
    if is_stream:
        pieces = response.async_response_gen() if is_async else response.response_gen
    if inspect.isasyncgen(pieces):
        found = [each async for each in pieces]
    elif inspect.isgenerator(pieces):
        found = list(pieces)
    else:
        return str(response.message.content if isinstance(response, ChatResponse) else response), response
    text = "".join(each if isinstance(each, str) else each.delta or "" for each in found)
    return text, response if is_stream else found[-1]
