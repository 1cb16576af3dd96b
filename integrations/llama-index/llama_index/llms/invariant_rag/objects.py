"""An LLM that answers with objects, as LlamaIndex asks for them: whole, as they grow, sync and async."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from typing import Any, Generic, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.program.utils import FlexibleModel, create_flexible_model
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import Model
from llama_index_instrumentation import get_dispatcher
from pydantic_core import from_json

from invariant_rag.generation.json_schema import parse_object
from llama_index.llms.invariant_rag.function_calling import ToolCaller
from llama_index.llms.invariant_rag.slots import SlotReader

dispatcher = get_dispatcher(__name__)
T = TypeVar("T", bound=BaseModel)


class SlotStructuredLLM(SlotReader, StructuredLLM):
    """What `as_structured_llm` returns: a `StructuredLLM` to which variables of templates are known."""


class ObjectWriter(SlotReader, ToolCaller):
    """An LLM whose chats take `output_cls`: what they then write is JSON of that class."""

    def as_structured_llm(self, output_cls: type[BaseModel], **kwargs: Any) -> StructuredLLM:
        """Return an LLM that answers with objects of a class."""
        return SlotStructuredLLM(llm=self, output_cls=output_cls, **kwargs)

    @dispatcher.span
    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Answer with an object: decoding can write nothing but JSON of its schema, and finishes it in `max_tokens`.

        Raises:
            IncompleteObject: Something else than its end ended the answer.
            InvalidObject: A validator of the class rejects the answer.
        """
        dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        messages = asked_for_object(self._get_messages(prompt, **prompt_args), output_cls)
        response = self.chat(messages, output_cls=output_cls, **(llm_kwargs or {}))
        return _object(response, output_cls)

    @dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Answer with an object as `structured_predict` does; the event loop goes on."""
        dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        messages = asked_for_object(self._get_messages(prompt, **prompt_args), output_cls)
        response = await self.achat(messages, output_cls=output_cls, **(llm_kwargs or {}))
        return _object(response, output_cls)

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Model | FlexibleModel, None, None]:
        """Yield the object as it grows, for `stream_structured_predict`: with what is there so far, and then whole."""
        messages = asked_for_object(self._get_messages(prompt, **prompt_args), output_cls)
        growing = GrowingObject(output_cls)
        for response in self.stream_chat(messages, output_cls=output_cls, **(llm_kwargs or {})):
            yield from growing.read(response.message.content or "", whole=response.raw is not None)

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Model | FlexibleModel, None]:
        """Return the same, without blocking the event loop, for `astream_structured_predict`."""
        messages = asked_for_object(self._get_messages(prompt, **prompt_args), output_cls)
        responses = await self.astream_chat(messages, output_cls=output_cls, **(llm_kwargs or {}))

        async def read() -> AsyncGenerator[Model | FlexibleModel, None]:
            growing = GrowingObject(output_cls)
            async for response in responses:
                for each in growing.read(response.message.content or "", whole=response.raw is not None):
                    yield each

        return read()


def _object(response: ChatResponse, output_cls: type[Model]) -> Model:
    read: Model = parse_object(response.message.content or "", output_cls)
    dispatcher.event(LLMStructuredPredictEndEvent(output=read))
    return read


def asked_for_object(messages: Sequence[ChatMessage], output_cls: type[BaseModel]) -> list[ChatMessage]:
    """Return messages that end with the schema of the object that is wanted. The ones given stay as they are."""
    schema = PydanticOutputParser(output_cls).get_format_string(escape_json=False)
    last = ChatMessage(role=messages[-1].role, blocks=[*messages[-1].blocks, TextBlock(text=schema)])
    return [*messages[:-1], last]


class GrowingObject(Generic[T]):
    """Parses an object from JSON that is still being written.

    Args:
        output_cls: The class of the object.
    """

    def __init__(self, output_cls: type[T]) -> None:
        self._output_cls = output_cls
        self._partial_cls = create_flexible_model(output_cls)
        self._before: Any = None

    def read(self, text: str, *, whole: bool) -> Iterator[T | FlexibleModel]:
        """Yield what the text says, if that is more than before: an object without checks, or the whole one at last.

        Args:
            text: All that was written so far.
            whole: Whether nothing follows.

        Raises:
            InvalidObject: The class rejects the whole object.
        """
        if whole:
            yield parse_object(text, self._output_cls)
            return
        found = from_json(text, allow_partial="trailing-strings") if text.strip() else None
        if isinstance(found, dict) and found != self._before:
            self._before = found
            yield self._partial_cls.model_validate(found)
