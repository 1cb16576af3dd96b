"""Tools that an LLM of this package calls, and objects that it writes, as LlamaIndex asks for them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock, ToolCallBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.program.utils import FlexibleModel, create_flexible_model
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools import BaseTool
from llama_index.core.types import Model
from llama_index_instrumentation import get_dispatcher
from pydantic_core import from_json

from invariant_rag.checks import check_tools
from invariant_rag.errors import InvariantRAGError, UnsupportedCombination
from invariant_rag.generation.json_schema import parse_object
from invariant_rag.prompts.tools import choice_of
from llama_index.llms.invariant_rag.responses import iterate_in_thread
from llama_index.llms.invariant_rag.slots import SegmentReader

dispatcher = get_dispatcher(__name__)

CHAT_KEYWORDS = ("tools", "tool_choice", "allow_parallel_tool_calls", "template_kwargs")
"""Keywords of a chat, which a completion does not take."""


class NoToolCall(InvariantRAGError, RuntimeError):
    """A call of a tool was expected, and the answer holds none."""

    hint = "Set tool_required=True or tool_choice: then every answer is a call. Or error_on_no_tool_call=False."


def chat_options(keywords: Mapping[str, Any], template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a chat asks for, beyond decoding, as fields of an `AnswerRequest`; tools or an object."""
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


class ToolCaller(SegmentReader, FunctionCallingLLM):
    """An LLM whose chats take tools and answer with `ToolCallBlock`s, or take `output_cls` and write JSON of it."""

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
        asked = {"messages": messages, "tools": list(tools), "allow_parallel_tool_calls": allow_parallel_tool_calls}
        choice = kwargs.pop("tool_choice", None)
        default = "required" if tool_required else "auto"
        return {**kwargs, **asked, "tool_choice": default if choice is None else choice}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls in a response. While it is being streamed, the last one has the arguments written so far."""
        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            raise NoToolCall(f"expected a call of a tool, got the text {response.message.content!r}")
        return [
            ToolSelection(tool_id=each.tool_call_id or "", tool_name=each.tool_name, tool_kwargs=_arguments(each))
            for each in blocks
        ]

    @dispatcher.span
    def structured_predict(self, output_cls: type[Model], prompt: Any, llm_kwargs: Any = None, **values: Any) -> Model:
        """Answer with an object: decoding writes JSON of its schema. One that ended early is an `IncompleteObject`."""
        dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=values))
        asked = self._asked_for_object(output_cls, prompt, values)
        return _object(self.chat(asked, output_cls=output_cls, **(llm_kwargs or {})), output_cls)

    @dispatcher.span
    async def astructured_predict(
        self, output_cls: type[Model], prompt: Any, llm_kwargs: Any = None, **values: Any
    ) -> Model:
        """Answer with an object as `structured_predict` does; the event loop goes on."""
        dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=values))
        asked = self._asked_for_object(output_cls, prompt, values)
        return _object(await self.achat(asked, output_cls=output_cls, **(llm_kwargs or {})), output_cls)

    def _structured_stream_call(
        self, output_cls: type[Model], prompt: Any, llm_kwargs: Any = None, **values: Any
    ) -> Generator[Model | FlexibleModel, None, None]:
        """Yield the object as it grows, for `stream_structured_predict`: with what is there so far, and then whole."""
        asked = self._asked_for_object(output_cls, prompt, values)
        partial_cls, before = create_flexible_model(output_cls), None
        for response in self.stream_chat(asked, output_cls=output_cls, **(llm_kwargs or {})):
            text = response.message.content or ""
            if response.raw is not None:
                yield parse_object(text, output_cls)
                continue
            found = from_json(text, allow_partial="trailing-strings") if text.strip() else None
            if isinstance(found, dict) and found != before:
                before = found
                yield partial_cls.model_validate(found)

    async def _structured_astream_call(
        self, output_cls: type[Model], prompt: Any, llm_kwargs: Any = None, **values: Any
    ) -> AsyncGenerator[Model | FlexibleModel, None]:
        return iterate_in_thread(self._structured_stream_call(output_cls, prompt, llm_kwargs, **values))

    def _asked_for_object(
        self, output_cls: type[BaseModel], prompt: BasePromptTemplate, values: Mapping[str, Any]
    ) -> list[ChatMessage]:
        """Return the messages of a template, with the schema of the object that is wanted behind the last one."""
        *before, last = self._get_messages(prompt, **values)
        schema = PydanticOutputParser(output_cls).get_format_string(escape_json=False)
        return [*before, ChatMessage(role=last.role, blocks=[*last.blocks, TextBlock(text=schema)])]


def _arguments(call: ToolCallBlock) -> dict[str, Any]:
    """Return the arguments of a call from what is written of them so far."""
    written = call.tool_kwargs
    if isinstance(written, Mapping):
        return dict(written)
    found = from_json(written, allow_partial="trailing-strings") if written.strip() else {}
    return found if isinstance(found, dict) else {}


def _object(response: ChatResponse, output_cls: type[Model]) -> Model:
    read: Model = parse_object(response.message.content or "", output_cls)
    dispatcher.event(LLMStructuredPredictEndEvent(output=read))
    return read
