"""ChatInvariant: messages in, a message out, and the same message for every order of the segments."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, Self, get_args

from invariant_rag.errors import UnknownName
from invariant_rag.generation.outputs import Generation as LMGeneration
from invariant_rag.prompts import render_chat
from invariant_rag.segments import Prompt
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from pydantic import BaseModel

from langchain_invariant_rag.calls import Call, iterate_off_the_loop, off_the_loop, report_of, usage_of
from langchain_invariant_rag.errors import ToolsNotCalled, langchain_errors
from langchain_invariant_rag.messages import chat_messages, last_user_text
from langchain_invariant_rag.parameters import InvariantParameters
from langchain_invariant_rag.parsing import object_parser
from langchain_invariant_rag.recognition import RecognizesMessages, was_recognized
from langchain_invariant_rag.tracking import current_run
from langchain_invariant_rag.turns import to_turns

StructuredMethod = Literal["json_schema", "function_calling", "json_mode"]


class ChatInvariant(InvariantParameters, RecognizesMessages, BaseChatModel):
    """A chat model whose answer does not depend on the order in which segments are listed.

    Segments are content blocks of type `text-plain`, in any message: `SegmentsPlaceholder`,
    `create_invariant_documents_chain` and `InvariantRAGMiddleware` write them. Text with marks, text blocks whose
    `extras` say `"segment": True`, a `documents=` keyword and a tool's artifact are understood as well. Neighbouring
    segments form one set. Tools are not called.

    Example:
        ```python
        chat = ChatInvariant(model="Qwen/Qwen2.5-7B-Instruct", method="rotor", max_tokens=64)
        prompt = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])
        chain = {"context": retriever, "question": RunnablePassthrough()} | prompt | chat
        ```
    """

    streaming: bool = False
    """Whether `invoke` streams, so that callbacks see tokens as they come."""

    @property
    def _llm_type(self) -> str:
        return "invariant-rag-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._ls_params("chat", stop, kwargs)

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(
            name=self.model_name,
            open_weights=True,
            max_output_tokens=self.max_tokens,
            text_inputs=True,
            image_inputs=False,
            pdf_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            tool_calling=False,
            structured_output=True,
        )
        if self.context_window is not None:
            profile["max_input_tokens"] = self.context_window
        return profile

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy; see `InvariantParameters.model_copy`. Its profile is its own, unless one was given."""
        copied = super().model_copy(update=update, deep=deep)
        if "profile" not in (update or {}) and self.profile == self._resolve_model_profile():
            copied.profile = copied._resolve_model_profile()
        return copied

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> int:
        """Return how many tokens the model reads for these messages, chat template and segments included."""
        with langchain_errors():
            return len(self.lm.prepare(self._prompt(self._recognized(messages, None, None))).input_ids)

    def _prompt(self, messages: Sequence[BaseMessage]) -> Prompt:
        """Return the prompt of recognised messages."""
        converted = chat_messages(to_turns(messages))
        return render_chat(converted, self.lm.tokenizer, last_user_text(converted))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        messages = self._recognized(messages, current_run(run_manager), kwargs.pop("documents", None))
        prompt = self._prompt(messages)
        call = self._call(stop, kwargs)
        (generation,) = self._generate_all([prompt], call)
        message = AIMessage(
            content=call.text(generation),
            usage_metadata=usage_of(generation),
            response_metadata=self._report(messages, prompt, generation, call),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await off_the_loop(
            lambda abandoned: self._generate(messages, stop, **{**kwargs, "abandoned": abandoned})
        )

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        messages = self._recognized(messages, current_run(run_manager), kwargs.pop("documents", None))
        prompt = self._prompt(messages)
        call = self._call(stop, kwargs)
        for piece in call.stream(self.lm, prompt):
            if isinstance(piece, str):
                message = AIMessageChunk(content=piece)
            else:
                message = AIMessageChunk(
                    content="",
                    usage_metadata=usage_of(piece),
                    response_metadata=self._report(messages, prompt, piece, call),
                    chunk_position="last",
                )
            chunk = ChatGenerationChunk(message=message)
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async for chunk in iterate_off_the_loop(
            lambda abandoned: self._stream(messages, stop, **{**kwargs, "abandoned": abandoned})
        ):
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def _report(
        self, messages: Sequence[BaseMessage], prompt: Prompt, generation: LMGeneration, call: Call
    ) -> dict[str, Any]:
        recognized = was_recognized(messages) is not False
        return report_of(generation, prompt, call, self.model_name, recognized=recognized)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return this model without tools, as `create_agent` asks for one that answers with what a schema describes.

        Args:
            tools: No tools: they are not called.
            tool_choice: Without effect.
            response_format: The schema, as LangChain's `ProviderStrategy` writes it. None: any text.
            **kwargs: As for `bind`.

        Raises:
            ToolsNotCalled: There are tools.
        """
        if tools:
            raise ToolsNotCalled
        if response_format is not None:
            kwargs["json_schema"] = json.dumps(response_format["json_schema"]["schema"])
        bound: Runnable[LanguageModelInput, AIMessage] = self.bind(**kwargs)
        return bound

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: StructuredMethod = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Return this model, answering with what a schema describes.

        Only tokens are chosen that continue a text of that schema, and after which it can be finished within
        `max_tokens`: see `invariant_rag.generation.structured.constrain`. The text is validated. Stop sequences do not
        apply to it. Needs the extra `structured`.

        Args:
            schema: A Pydantic class, a TypedDict, or a JSON schema of an object, with a `title`.
            include_raw: Return a dict of the raw message, what was parsed, and the error of parsing, if any.
            method: All three are the same here.
            strict: Always so.
            **kwargs: As for `bind`.

        Raises:
            UnknownName: There is no such method.
        """
        if method not in get_args(StructuredMethod):
            raise UnknownName("method of structured output", method, get_args(StructuredMethod))
        parser = object_parser(schema)
        model: Runnable[LanguageModelInput, AIMessage] = self.bind(
            json_schema=json.dumps(parser.get_json_schema()),
            ls_structured_output_format={"kwargs": {"method": method, "strict": strict}, "schema": schema},
            **kwargs,
        )
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        # The model is the first step of the sequence: no other step gets the keywords of a call, such as `documents`.
        raw = model | RunnableMap(raw=RunnablePassthrough())
        return raw | parsed.with_fallbacks([failed], exception_key="parsing_error")
