"""ChatInvariant: messages in, a message out, and the same message for every order of the segments."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, Self, get_args

from invariant_rag.errors import ContextOverflow, InvalidSchema, UnknownName
from invariant_rag.generation.answers import AnswerRequest
from invariant_rag.generation.json_schema import check_complete, json_schema, parse_object
from invariant_rag.prompts.tools import choice_of
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel, Field
from pydantic.v1 import BaseModel as OldModel

from langchain_invariant_rag.answering import PER_CHAT, request_of, to_chunks, to_message, to_tools
from langchain_invariant_rag.documents import chat_messages
from langchain_invariant_rag.parameters import InvariantContextOverflowError, InvariantParameters
from langchain_invariant_rag.recognition import Recognized, RecognizesMessages

_OWN = ("template_kwargs", *PER_CHAT)
StructuredMethod = Literal["json_schema", "function_calling", "json_mode"]


class ObjectParser(JsonOutputParser):
    """Parses instances of a pydantic class, also of `pydantic.v1`, or dicts that a TypedDict or JSON schema describes.

    A stream is parsed as far as it goes, and raises where it ends too early.
    """

    target: Any
    """The class or the schema."""

    def get_json_schema(self) -> dict[str, Any]:
        """Return what decoding follows, or raise `InvalidSchema`."""
        try:
            modern = _is_class(self.target, BaseModel)
            return json_schema(self.target) if modern else convert_to_json_schema(self.target)
        except ValueError as error:
            raise InvalidSchema(str(error)) from error

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Return an answer's object. Of a partial answer: a dict as far as it goes, or an instance if it is enough."""
        modern, old = (_is_class(self.target, kind) for kind in (BaseModel, OldModel))
        if not partial:
            parsed = parse_object(result[0].text, self.target if modern else self.get_json_schema())
            return self.target.parse_obj(parsed) if old else parsed
        parsed = super().parse_result(result, partial=True)
        try:
            return self.target.model_validate(parsed) if modern else self.target.parse_obj(parsed) if old else parsed
        except ValueError:  # as far as it goes, it is no instance
            return None

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[Any]:  # noqa: A002
        received: list[str] = []
        yield from super()._transform(_collect(each, received) for each in input)
        check_complete("".join(received))

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[Any]:  # noqa: A002
        received: list[str] = []
        async for parsed in super()._atransform(_collect(each, received) async for each in input):
            yield parsed
        check_complete("".join(received))


def _is_class(target: Any, kind: type) -> bool:
    return isinstance(target, type) and issubclass(target, kind)


def _collect(chunk: str | BaseMessage, received: list[str]) -> str | BaseMessage:
    received.append(chunk.text if isinstance(chunk, BaseMessage) else chunk)
    return chunk


def response_schema(response_format: Mapping[str, Any] | type) -> str:
    """Return the JSON schema of a response format: a class, a schema, or what LangChain's `ProviderStrategy` writes."""
    if isinstance(response_format, Mapping) and "json_schema" in response_format:
        described = response_format["json_schema"]
        return json.dumps({"title": described.get("name", ""), **described["schema"]})
    return json.dumps(ObjectParser(target=response_format).get_json_schema())


class ChatInvariant(InvariantParameters, RecognizesMessages, BaseChatModel):  # type: ignore[misc]  # as `api_models`
    """A chat model whose answer does not depend on the order in which segments are listed.

    Segments are content blocks, as `SegmentsPlaceholder` writes them; text with marks, a `documents=` keyword and a
    tool's artifact are understood as well.

    Example:
        ```python
        chat = ChatInvariant(model="Qwen/Qwen2.5-7B-Instruct", method="rotor", max_tokens=64)
        prompt = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])
        chain = {"context": retriever, "question": RunnablePassthrough()} | prompt | chat
        ```
    """

    streaming: bool = False
    """Whether `invoke` streams, so that callbacks get tokens as they are decoded."""
    stream_usage: bool = True
    """Whether the last chunk of a stream has `usage_metadata`."""
    n: int = Field(default=1, ge=1)
    """Number of answers that `generate` returns for each conversation; a stream is the first one."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`. Those of a call are added."""
    logprobs: bool = False
    """Whether `response_metadata["logprobs"]` holds the log-probability of every token, in OpenAI's shape."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """How many of the most likely tokens it holds for each token, too."""
    citations: bool = False
    """Whether an answer is a text block with a `Citation` for every sentence that a segment contains word for word."""

    @property
    def _llm_type(self) -> str:
        return "invariant-rag-chat"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return that `load(dumpd(model))` restores the model, unless it holds one in memory."""
        return True

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Environment variables in place of secrets."""
        return {"api_key": "INVARIANT_RAG_API_KEY"}

    def _resolve_model_profile(self) -> ModelProfile | None:
        able = dict.fromkeys(("open_weights", "text_inputs", "text_outputs", "tool_calling", "structured_output"), True)
        unable = dict.fromkeys(("image_inputs", "pdf_inputs", "audio_inputs", "video_inputs"), False)
        known = {} if self.context_window is None else {"max_input_tokens": self.context_window}
        return ModelProfile(name=self.model_name, max_output_tokens=self.max_tokens, **able, **unable, **known)  # type: ignore[typeddict-item, no-any-return]

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, **dict(zip(_OWN, map(self.__dict__.get, _OWN), strict=True))}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        return f"{super()._get_llm_string(stop, **kwargs)}{self._other(dict(kwargs))._cache_key}"

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy. Its profile is its own, unless one was set."""
        copied = super().model_copy(update=update, deep=deep)
        if "profile" not in (update or {}) and self.profile == self._resolve_model_profile():
            copied.profile = copied._resolve_model_profile()
        return copied

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> int:
        """Return how many tokens these messages are: chat template, segments and tools included."""
        from invariant_rag.generation.answering import Answering

        request = self._request_of(messages, None, {**kwargs, "tools": tools})
        try:
            return len(self.lm.prepare(Answering(self.lm, request).prompt).input_ids)
        except ContextOverflow as error:
            raise InvariantContextOverflowError(str(error), hint=error.hint) from error

    def _request_of(self, messages: Any, stop: Any, keywords: dict[str, Any]) -> AnswerRequest:
        """Return the request of messages, which are recognised if they were not yet."""
        documents, noted = keywords.pop("documents", None), Recognized.of(messages)
        if noted is None:
            messages = self._recognized(messages, None, documents)
            noted = Recognized.of(messages)
        converted, question = chat_messages(messages, noted.turns if noted else ())
        recognized = noted is None or noted["recognized"]
        return request_of(self.__dict__, stop, keywords, messages=converted, question=question, recognized=recognized)

    def _other(self, keywords: dict[str, Any]) -> Self:
        """Return the model of a call, which may name another one than this."""
        name = keywords.pop("model", None)
        return self if name in (None, self.model) else self.model_copy(update={"model": name})

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        abandoned, other = kwargs.pop("abandoned", None), self._other(kwargs)
        (reply,) = other._replies([other._request_of(messages, stop, kwargs)], abandoned)
        name = other.model_name
        return ChatResult(generations=[ChatGeneration(message=to_message(each, reply, name)) for each in reply.answers])

    def _stream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        abandoned, other = kwargs.pop("abandoned", None), self._other(kwargs)
        with_usage = kwargs.pop("stream_usage", self.stream_usage)
        request = other._request_of(messages, stop, {**kwargs, "n": 1})
        cites, deltas = request.citations and request.schema is None, other._deltas(request, abandoned)
        for message in to_chunks(deltas, other.model_name, cites=cites, with_usage=with_usage):
            chunk = ChatGenerationChunk(message=message)
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
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
        """Return this model with tools that it may call, whose schemas all calls follow. Needs the extra `structured`.

        Args:
            tools: Functions, classes, `BaseTool`s, or dicts in OpenAI's shape.
            tool_choice: `auto` (or None), `any` (`required`, True): at least one call, the name of a tool, `none`.
            parallel_tool_calls: Whether an answer may hold several calls; None: yes.
            response_format: A schema, or what `ProviderStrategy` writes: an answer is one call, or an object of it.
            strict: Always so.
            **kwargs: As for `bind`.
        """
        if tools:
            kwargs["tools"] = to_tools(tools)
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
        """Return this model, answering with what a schema describes. Needs the extra `structured`.

        Args:
            schema: A Pydantic class, a TypedDict, or a JSON schema of an object, with a `title`.
            include_raw: Return a dict of the raw message, what was parsed, and the error of parsing, if any.
            method: All three are the same here.
            strict: Always so.
            **kwargs: As for `bind`.
        """
        if method not in get_args(StructuredMethod):
            raise UnknownName("method of structured output", method, get_args(StructuredMethod))
        parser = ObjectParser(target=schema)
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
