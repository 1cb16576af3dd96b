"""An LLM that answers with objects, as LlamaIndex asks for them: whole, as they grow, sync and async."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.program.utils import FlexibleModel, create_flexible_model
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import Model
from llama_index_instrumentation import get_dispatcher
from pydantic_core import from_json

from invariant_rag.generation.json_schema import parse_object
from llama_index.llms.invariant_rag.function_calling import ToolCaller
from llama_index.llms.invariant_rag.responses import iterate_in_thread
from llama_index.llms.invariant_rag.slots import SegmentReader

dispatcher = get_dispatcher(__name__)


class ObjectWriter(SegmentReader, ToolCaller):
    """An LLM whose chats take `output_cls`: what they then write is JSON of that class."""

    @dispatcher.span
    def structured_predict(self, output_cls: type[Model], prompt: Any, llm_kwargs: Any = None, **values: Any) -> Model:
        """Answer with an object: decoding can write nothing but JSON of its schema.

        Raises:
            IncompleteObject: The answer ended early, such as by `max_tokens`.
            InvalidObject: A validator of the class rejects the answer.
        """
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
        """Return the same, without blocking the event loop, for `astream_structured_predict`."""
        return iterate_in_thread(self._structured_stream_call(output_cls, prompt, llm_kwargs, **values))

    def _asked_for_object(
        self, output_cls: type[BaseModel], prompt: BasePromptTemplate, values: Mapping[str, Any]
    ) -> list[ChatMessage]:
        """Return the messages of a template, with the schema of the object that is wanted behind the last one."""
        *before, last = self._get_messages(prompt, **values)
        schema = PydanticOutputParser(output_cls).get_format_string(escape_json=False)
        return [*before, ChatMessage(role=last.role, blocks=[*last.blocks, TextBlock(text=schema)])]


def _object(response: ChatResponse, output_cls: type[Model]) -> Model:
    read: Model = parse_object(response.message.content or "", output_cls)
    dispatcher.event(LLMStructuredPredictEndEvent(output=read))
    return read
