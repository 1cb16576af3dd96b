"""What LLMs around another LLM leave to it: tools, and the fields that LlamaIndex reads before it calls an LLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.llms import LLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool

_TAKEN_OVER = (
    "callback_manager", "completion_to_prompt", "messages_to_prompt", "output_parser", "pydantic_program_mode",
    "query_wrapper_prompt", "system_prompt",
)  # fmt: skip


class DelegatedTools(FunctionCallingLLM):
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
        return cast(FunctionCallingLLM, cast(Any, self).llm)


def taken_over(llm: LLM) -> dict[str, Any]:
    """Return the fields that LlamaIndex reads before it calls an LLM."""
    return {name: getattr(llm, name) for name in _TAKEN_OVER}
