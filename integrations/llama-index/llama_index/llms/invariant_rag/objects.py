"""An LLM that answers with objects, as LlamaIndex asks for them: whole, as they grow, sync and async."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.program.utils import FlexibleModel
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import Model
from llama_index_instrumentation import get_dispatcher

from invariant_rag.generation.json_schema import parse_object
from llama_index.llms.invariant_rag.function_calling import ToolCaller
from llama_index.llms.invariant_rag.structured import GrowingObject, asked_for_object
from llama_index.llms.invariant_rag.templates import bind_variables

dispatcher = get_dispatcher(__name__)


class ObjectWriter(ToolCaller):
    """An LLM whose chats take `output_cls`: what they then write is JSON of that class."""

    def formatted(self, template: BasePromptTemplate, variables: Mapping[str, Any]) -> list[ChatMessage]:
        """Return the messages of a prompt template, after this LLM's `system_prompt`; variables may have any name."""
        bound, others = bind_variables(template, variables)
        return self._get_messages(bound, **others)

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
            UnsupportedCombination: No object is known to fit into `max_tokens`.
        """
        dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        messages = asked_for_object(self.formatted(prompt, prompt_args), output_cls)
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
        """Answer with an object; the event loop goes on.

        Raises:
            IncompleteObject: Something else than its end ended the answer.
            InvalidObject: A validator of the class rejects the answer.
            UnsupportedCombination: No object is known to fit into `max_tokens`.
        """
        dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        messages = asked_for_object(self.formatted(prompt, prompt_args), output_cls)
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
        messages = asked_for_object(self.formatted(prompt, prompt_args), output_cls)
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
        messages = asked_for_object(self.formatted(prompt, prompt_args), output_cls)
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
