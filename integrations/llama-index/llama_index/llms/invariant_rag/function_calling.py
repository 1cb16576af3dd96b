"""Tools that an LLM of this package calls, as LlamaIndex offers them and reads calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import BaseTool
from pydantic_core import from_json

from invariant_rag.checks import check_tools
from invariant_rag.errors import InvalidPrompt, InvariantRAGError, UnsupportedCombination
from invariant_rag.prompts.tools import choice_of

ASSISTANT = (MessageRole.ASSISTANT, MessageRole.CHATBOT, MessageRole.MODEL)

CHAT_KEYWORDS = ("tools", "tool_choice", "allow_parallel_tool_calls", "template_kwargs")
"""Keywords of a chat, which a completion does not take."""


class NoToolCall(InvariantRAGError, RuntimeError):
    """A call of a tool was expected, and the answer holds none."""

    hint = "Set tool_required=True or tool_choice: then every answer is a call. Or error_on_no_tool_call=False."


def chat_options(keywords: Mapping[str, Any], template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a chat asks for, beyond decoding, as fields of an `AnswerRequest`.

    Raises:
        InvalidTool: A tool or the choice of one has no known shape.
        UnsupportedCombination: There are tools, and an object is asked for.
    """
    tools = [
        tool.metadata.to_openai_tool(skip_length_check=True) if isinstance(tool, BaseTool) else tool
        for tool in check_tools(keywords.get("tools"))
    ]
    if tools and keywords.get("output_cls") is not None:
        raise UnsupportedCombination(
            "expected either tools or an output class, got both",
            hint="Call the tools first, and ask for the object then.",
        )
    return {
        "tools": tools,
        "tool_choice": choice_of(keywords.get("tool_choice")),
        "parallel": bool(keywords.get("allow_parallel_tool_calls", True)),
        "template_kwargs": {**template_kwargs, **(keywords.get("template_kwargs") or {})},
    }


def tool_fields(message: ChatMessage) -> dict[str, Any]:
    """Return what a message says of tools, as `render_chat` takes it.

    An assistant's calls are its `ToolCallBlock`s, or else in `additional_kwargs["tool_calls"]`. The message of a result
    has a `tool_call_id` or a `name` in `additional_kwargs`.
    """
    said = message.additional_kwargs
    if message.role.value in ("tool", "function"):
        return {name: said[name] for name in ("tool_call_id", "name") if said.get(name) is not None}
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if message.role not in ASSISTANT:
        if blocks:
            raise InvalidPrompt(
                f"expected calls of tools in the assistant's messages, got one in a message of {message.role.value!r}",
                hint="Set the role of the message to assistant.",
            )
        return {}
    calls: list[Mapping[str, Any]] = [
        {"id": block.tool_call_id, "name": block.tool_name, "arguments": block.tool_kwargs} for block in blocks
    ] or [each if isinstance(each, Mapping) else each.model_dump() for each in said.get("tool_calls") or ()]
    return {"tool_calls": calls} if calls else {}


class ToolCaller(FunctionCallingLLM):
    """An LLM whose chats take tools, and answer with `ToolCallBlock`s."""

    def __init__(self, **kwargs: Any) -> None:  # type checkers would derive another one from the fields
        super().__init__(**kwargs)

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
        """Return the keywords of `chat`. A `tool_choice` among them has precedence over `tool_required`."""
        messages = list(chat_history or ())
        if user_msg is not None:
            messages.append(ChatMessage(user_msg, role="user") if isinstance(user_msg, str) else user_msg)
        choice = kwargs.pop("tool_choice", None)
        if choice is None:
            choice = "required" if tool_required else "auto"
        asked = {"messages": messages, "tools": list(tools), "tool_choice": choice}
        return {**kwargs, **asked, "allow_parallel_tool_calls": allow_parallel_tool_calls}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls in a response. While it is being streamed, the last one has the arguments written so far.

        Raises:
            NoToolCall: There is none, and `error_on_no_tool_call` is set.
        """
        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            raise NoToolCall(f"expected a call of a tool, got the text {response.message.content!r}")
        return [
            ToolSelection(
                tool_id=block.tool_call_id or "", tool_name=block.tool_name, tool_kwargs=_arguments(block.tool_kwargs)
            )
            for block in blocks
        ]


def _arguments(written: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return the arguments of a call from what is written of them so far."""
    if isinstance(written, Mapping):
        return dict(written)
    found = from_json(written, allow_partial="trailing-strings") if written.strip() else {}
    return found if isinstance(found, dict) else {}
