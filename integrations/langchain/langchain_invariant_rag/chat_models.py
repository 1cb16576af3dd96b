"""ChatInvariant: messages in, a message out, and the same message for every order of the segments."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from invariant_rag.errors import UnknownName
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field

from langchain_invariant_rag.calls import iterate_off_the_loop, off_the_loop
from langchain_invariant_rag.chat_options import ChatOptions, choice_of, response_schema
from langchain_invariant_rag.errors import langchain_errors
from langchain_invariant_rag.parameters import InvariantParameters
from langchain_invariant_rag.parsing import object_parser
from langchain_invariant_rag.recognition import RecognizesMessages, was_recognized
from langchain_invariant_rag.remote import RemoteChat
from langchain_invariant_rag.tracking import current_run

if TYPE_CHECKING:
    from langchain_invariant_rag.answers import ChatRequest

StructuredMethod = Literal["json_schema", "function_calling", "json_mode"]


class ChatInvariant(InvariantParameters, RecognizesMessages, BaseChatModel):
    """A chat model whose answer does not depend on the order in which segments are listed.

    Segments are content blocks of type `text-plain`, in any message: `SegmentsPlaceholder`,
    `create_invariant_documents_chain` and `InvariantRAGMiddleware` write them. Text with marks, text blocks whose
    `extras` say `"segment": True`, a `documents=` keyword and a tool's artifact are understood as well. Neighbouring
    segments form one set. Results of tools keep their role.

    Example:
        ```python
        chat = ChatInvariant(model="Qwen/Qwen2.5-7B-Instruct", method="rotor", max_tokens=64)
        prompt = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])
        chain = {"context": retriever, "question": RunnablePassthrough()} | prompt | chat
        ```
    """

    streaming: bool = False
    """Whether `invoke` streams, so that callbacks see tokens as they come."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`. Those of a call are added. What the model writes
    between its markers of reasoning is in `additional_kwargs["reasoning_content"]`, and a block of `content_blocks`."""
    logprobs: bool = False
    """Whether `response_metadata["logprobs"]` tells the log-probability of every token, in OpenAI's shape."""
    citations: bool = False
    """Whether the content of an answer is a text block with `annotations`, LangChain's `Citation`s: for every sentence
    that a segment contains word for word, and for every number of one, such as `[2]`. Objects of a schema have none."""

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
            tool_calling=True,
            structured_output=True,
        )
        if self.context_window is not None:
            profile["max_input_tokens"] = self.context_window
        return profile

    @property
    def _identifying_params(self) -> dict[str, Any]:
        if self.remote is not None:
            return {**super()._identifying_params, "template_kwargs": self.template_kwargs, "logprobs": self.logprobs}
        from invariant_rag.generation.identity import describe_data

        own = {"template_kwargs": describe_data(self.template_kwargs)}
        own |= {name: getattr(self, name) for name in ("logprobs", "citations")}
        return {**super()._identifying_params, **own}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy; see `InvariantParameters.model_copy`. Its profile is its own, unless one was given."""
        copied = super().model_copy(update=update, deep=deep)
        if "profile" not in (update or {}) and self.profile == self._resolve_model_profile():
            copied.profile = copied._resolve_model_profile()
        return copied

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> int:
        """Return how many tokens the model reads for these messages: chat template, segments and tools included."""
        offered = {"tools": [convert_to_openai_tool(tool) for tool in tools]} if tools else {}
        with langchain_errors():
            request = self._request(self._recognized(messages, None, None), None, {**kwargs, **offered})
            return len(self.lm.prepare(request.prompt).input_ids)

    def _request(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, keywords: Mapping[str, Any]
    ) -> ChatRequest:
        """Return the request of recognised messages."""
        from langchain_invariant_rag.answers import ChatRequest

        rest = dict(keywords)
        options = ChatOptions.take(self.__dict__, rest)
        return ChatRequest(
            self.lm,
            messages,
            self._call(stop, rest),
            options,
            model_name=self.model_name,
            recognized=was_recognized(messages) is not False,
        )

    def _remote_chat(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, keywords: Mapping[str, Any]
    ) -> RemoteChat:
        """Return the request of recognised messages to a server."""
        rest = dict(keywords)
        options = ChatOptions.take(self.__dict__, rest)
        call, recognized = self._call(stop, rest), was_recognized(messages) is not False
        return RemoteChat(messages, call, options, self._remote_choices, recognized=recognized)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        messages = self._recognized(messages, current_run(run_manager), kwargs.pop("documents", None))
        if self.remote is not None:
            with langchain_errors():
                message = self._remote_chat(messages, stop, kwargs).message(self.remote)
            return ChatResult(generations=[ChatGeneration(message=message)])
        request = self._request(messages, stop, kwargs)
        (generation,) = self._generate_all([request.prompt], request.call)
        return ChatResult(generations=[ChatGeneration(message=request.message(generation))])

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
        with langchain_errors():
            if self.remote is None:
                pieces = self._request(messages, stop, kwargs).stream()
            else:
                pieces = self._remote_chat(messages, stop, kwargs).stream(self.remote)
            for message in pieces:
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

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: dict[str, Any] | type | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return this model with tools that it may call.

        Calls always parse, and their arguments follow the schemas of the tools; see
        `invariant_rag.generation.tools.ToolCalling`. Needs the extra `structured`.

        Args:
            tools: Functions, classes, `BaseTool`s, or dicts in OpenAI's shape.
            tool_choice: `auto` (or None): the model calls tools or not; `any`, `required` or True: it calls at least
                one; the name of a tool, also as `{"type": "function", "function": {"name": ...}}`: it calls that one;
                `none` or False: none.
            parallel_tool_calls: Whether an answer may hold several calls; None: yes.
            response_format: A schema: an answer without calls is an object that follows it, and then a call stands
                alone. As for `with_structured_output`, or as LangChain's `ProviderStrategy` writes it. None: any text.
            strict: Always so.
            **kwargs: As for `bind`.

        Raises:
            InvalidTool: The choice is of no known shape.
        """
        if tools:
            kwargs["tools"] = [convert_to_openai_tool(tool) for tool in tools]
            kwargs["parallel_tool_calls"] = parallel_tool_calls is not False
        choice = choice_of(tool_choice)
        if tools or choice != "auto":
            kwargs["tool_choice"] = choice
        if response_format is not None:
            kwargs["json_schema"] = response_schema(response_format)
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
